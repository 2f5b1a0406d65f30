"""A request and the sequence it becomes. Knows token ids and limits; not who schedules them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from rvllm.errors import BadRequest
from rvllm.program.program import Int32
from rvllm.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked for: continue `prompt_ids`. The id is the caller's; `seed` is settled at birth."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


def check_request(prompt_ids: Items[int], params: SamplingParams, *, vocab_limit: int, max_logprobs: int) -> None:
    """Raise BadRequest for what no engine of these limits can run, but for length, which is `Engine.add`'s question."""
    if not prompt_ids:
        raise BadRequest("the prompt is empty", param="prompt", hint="give at least one token")
    for token in prompt_ids:
        if type(token) is not int or not 0 <= token < vocab_limit:
            raise BadRequest(f"prompt has token id {token!r}, ids are 0 to {vocab_limit - 1:,}", param="prompt")
    params.check_vocabulary(vocab_limit)
    if (params.logprobs or 0) > max_logprobs:
        raise BadRequest(f"logprobs is {params.logprobs}, the limit is {max_logprobs}", param="logprobs")


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of a request. `finish_reason`: None while it goes on, else "stop" | "length".

    `stop_id` is the token id that ended it, where one did. Log-probabilities are natural logs, when asked for.
    """

    request_id: str
    token_id: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    finish_reason: str | None
    stop_id: int | None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine. `token_ids` grows; the first `computed` of them are in the cache.

    `limit` is the length at which it ends; `blocks` holds each cache group's block numbers (i32), enough for the limit.
    """

    request: Request
    limit: int
    blocks: tuple[Int32, ...]
    token_ids: list[int]
    computed: int = 0
    ended: bool = False
    output_counts: Counter[int] = field(default_factory=Counter)  # of the drawn tokens, for penalties

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_ids) :]

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache: 1 while it decodes, more while its prompt is read."""
        return len(self.token_ids) - self.computed

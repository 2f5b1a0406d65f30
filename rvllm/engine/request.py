"""A request and the sequence it becomes. Knows token ids and limits; not who schedules them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rvllm.program.program import Int32
from rvllm.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked for: continue `prompt_ids`. The id is the caller's; `seed` is settled at birth."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


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
    `slot` is the sequence's place among those that run, 0 to one below the most.
    """

    request: Request
    limit: int
    blocks: tuple[Int32, ...]
    token_ids: list[int]
    computed: int = 0
    ended: bool = False
    output_counts: Counter[int] = field(default_factory=Counter)  # of the drawn tokens, for penalties
    slot: int = 0

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_ids) :]

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache: 1 while it decodes, more while its prompt is read."""
        return len(self.token_ids) - self.computed

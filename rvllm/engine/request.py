"""A request and the sequence it becomes. Knows token ids and limits; not who schedules them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from operator import attrgetter
from time import monotonic

import msgspec

from rvllm.engine.grammar import Matcher
from rvllm.errors import BadRequest
from rvllm.sampling.lookup import Past
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import Sampled, SamplingRow

RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked for: continue `prompt_ids`. The id is the caller's; `seed` is settled at birth.

    priority     the lower, the sooner, where the scheduling policy is "priority"
    cache_salt   prompts share cached blocks only with prompts of the same salt
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    priority: int = 0
    cache_salt: str | None = None


def check_request(prompt_ids: Items[int], params: SamplingParams, *, vocab_limit: int, max_logprobs: int) -> None:
    """Raise BadRequest for what no engine of these limits can run, but for length, which is `Engine.add`'s question."""
    if not prompt_ids:
        raise BadRequest("the prompt is empty", param="prompt", hint="give at least one token")
    for token in prompt_ids:
        if type(token) is not int or not 0 <= token < vocab_limit:
            raise BadRequest(f"prompt has token id {token!r}, ids are 0 to {vocab_limit - 1:,}", param="prompt")
    params.check_vocabulary(vocab_limit)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > max_logprobs:
            raise BadRequest(f"{name} is {getattr(params, name)}, the limit is {max_logprobs}", param=name)


# One is made for every token and crosses the link: a dataclass takes three times as long for each of these.
class TokenEvent(msgspec.Struct, array_like=True, gc=False):
    """One new token of a request. `finish_reason`: None while it goes on, else "stop" | "length" | "error".

    `stop_id` is the token id that ended it, where one did; `error` says why it cannot go on: the token is then none.
    Log-probabilities are natural logs, when asked for. With the first token alone: `cached_tokens`, how many of the
    prompt's were in the cache, and, when asked for, `prompt_logprobs` of the prompt's tokens but the first; `waited_s`,
    from its arrival to the step in which it began.
    """

    request_id: str
    token_id: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    finish_reason: str | None
    stop_id: int | None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[Sampled, ...] | None = None
    waited_s: float | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine. `token_ids` grows; the first `computed` of them are in the cache, or soon will be.

    limit           the length at which it ends
    blocks          the cache's blocks that it holds, from its first token on; the same in every cache group
    slot            its number among those that run, for what a device keeps of each; None while it waits
    rank            the lower, the more important: (priority, order of arrival)
    turn            the number of the step that last computed something of it, or of its arrival
    keys            of its first full blocks; `registered`: how many of its blocks the pool knows by them
    cached_tokens   of its prompt, found in the cache when it first began
    leader          the sequence that is reading the same prompt and will share it; `siblings`: who waits for this one
    scored          whether its prompt's log-probabilities are wanted; `scores`: those there are
    told            whether its first token has gone out
    row             how its next token is drawn; the position in it is counted on
    counted         whether its drawn tokens are counted, in `output_counts`: where there are penalties
    past            what its next tokens are guessed from, once they are
    born_s          on the monotonic clock; `waited_s`: from there to the step in which it first began
    matcher         how far it has come in its grammar, where it has one
    """

    request: Request
    limit: int
    blocks: list[int]
    token_ids: list[int]
    computed: int = 0
    slot: int | None = None
    rank: tuple[int, int] = (0, 0)
    turn: int = 0
    ended: bool = False
    keys: list[bytes] = field(default_factory=list)
    registered: int = 0
    cached_tokens: int | None = None
    leader: Sequence | None = None
    siblings: list[Sequence] = field(default_factory=list)
    scored: bool = False
    scores: list[Sampled] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()
    row: SamplingRow | None = None
    counted: bool = False
    told: bool = False
    output_counts: Counter[int] = field(default_factory=Counter)
    past: Past | None = None
    matcher: Matcher | None = None
    born_s: float = field(default_factory=monotonic)
    waited_s: float | None = None

    def begin(self) -> None:
        """It is about to run, perhaps not for the first time."""
        if self.waited_s is None:
            self.waited_s = monotonic() - self.born_s

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_ids) :]

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache: 1 while it decodes, more while its prompt is read."""
        return len(self.token_ids) - self.computed

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to come."""
        return self.scored and len(self.scores) < len(self.request.prompt_ids) - 1


def leave_family(sequence: Sequence) -> None:
    """One that others wait for is gone, or one of those: who waits goes on with another leader."""
    if sequence.leader is not None:
        sequence.leader.siblings.remove(sequence)
        sequence.leader = None
    elif sequence.siblings:
        leader, *others = sequence.siblings
        leader.leader, leader.siblings, leader.scored = None, others, sequence.scored
        for sibling in others:
            sibling.leader = leader
        sequence.siblings = []


def event_of(sequence: Sequence, sampled: Sampled) -> TokenEvent:
    """What is told of a sequence's new token, of which its grammar is told, too: the first, the last, or any."""
    token, name, matcher = sampled.token_id, sequence.request.id, sequence.matcher
    stop_id = token if token in sequence.stop_ids else None
    ends = stop_id is not None
    if matcher is not None and not ends:
        matcher.accept(token)
        if matcher.error is not None:
            return TokenEvent(name, token, None, (), "error", None, error=matcher.error)
        ends = matcher.complete
    finish = "stop" if ends else "length" if len(sequence.token_ids) >= sequence.limit else None
    if sequence.told:
        return TokenEvent(name, token, sampled.logprob, sampled.top_logprobs, finish, stop_id)
    sequence.told = True
    scores = tuple(sequence.scores) if sequence.scored else None
    cached, waited_s = sequence.cached_tokens, sequence.waited_s
    return TokenEvent(name, token, sampled.logprob, sampled.top_logprobs, finish, stop_id, cached, scores, waited_s)


def take_out(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a list in order of rank."""
    place = bisect_left(queue, sequence.rank, key=RANK)
    assert queue[place] is sequence, sequence
    del queue[place]

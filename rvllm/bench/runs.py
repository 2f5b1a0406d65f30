"""Random requests, and what an engine makes of them and when. Knows the clock; not what a figure means."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rvllm.engine.request import Request, TokenEvent
from rvllm.errors import WrongOutput
from rvllm.sampling.params import SamplingParams

Ids = tuple[int, ...]
Prompts = tuple[Ids, ...]


class Stepping(Protocol):
    """What a benchmark needs of an engine."""

    @property
    def busy(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def step(self) -> list[TokenEvent]: ...


class Workload:
    """Makes requests no two of which begin alike, so that nothing can be reused from an earlier one."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab = vocab
        self._random = np.random.default_rng(seed)
        self._made = 0

    def prompts(self, lengths: Iterable[int], shared: Ids = ()) -> Prompts:
        """Prompts of random tokens, each of its length after the `shared` ones that all begin with."""
        return tuple(shared + tuple(self._random.integers(0, self._vocab, length).tolist()) for length in lengths)

    def single_tokens(self, count: int) -> Prompts:
        """`count` prompts of one token, all different as long as the vocabulary lasts."""
        return tuple((int(token),) for token in np.resize(self._random.permutation(self._vocab), count))

    def requests(self, prompts: Sequence[Ids], output_tokens: int | Sequence[int], **params: Any) -> list[Request]:
        """A request for each prompt that draws exactly so many tokens, greedily unless `params` say otherwise."""
        counts = [output_tokens] * len(prompts) if isinstance(output_tokens, int) else output_tokens
        assert len(counts) == len(prompts), (len(counts), len(prompts))
        asked = {count: SamplingParams(**_EXACTLY | params, max_tokens=count) for count in set(counts)}
        first = self._made
        self._made += len(prompts)
        return [
            Request(f"benchmark-{first + place}", ids, asked[count], first + place)
            for place, (ids, count) in enumerate(zip(prompts, counts))
        ]


_EXACTLY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


@dataclass(frozen=True, slots=True)
class Run:
    """A run's steps: when each returned, in seconds since the first request was added, and the tokens it brought."""

    ended_s: tuple[float, ...]
    events: tuple[tuple[TokenEvent, ...], ...]

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return self.ended_s[-1]

    @property
    def most_at_once(self) -> int:
        """The most tokens that one step brought."""
        return max(map(len, self.events))

    def step_seconds(self, tokens: int | None = None) -> list[float]:
        """Wall time of each step, or of those alone that brought `tokens` tokens and follow another that did.

        An engine that runs ahead returns from a step when the next one is on its way: what passes between two returns
        is what a step takes.
        """
        counts = [len(events) for events in self.events]
        if tokens is None:
            return [end - begin for begin, end in zip((0.0, *self.ended_s), self.ended_s)]
        pairs = zip(counts, counts[1:], self.ended_s, self.ended_s[1:])
        return [end - begin for before, count, begin, end in pairs if before == count == tokens]

    def reading_steps(self) -> int:
        """Steps between the first token of the first request to have one, and that of the last."""
        first: dict[str, int] = {}
        for place, events in enumerate(self.events):
            for event in events:
                first.setdefault(event.request_id, place)
        return max(first.values()) - min(first.values())

    def drawn(self, requests: Iterable[Request]) -> list[Ids]:
        """The tokens of each request, in order."""
        by_id: dict[str, list[int]] = {request.id: [] for request in requests}
        for events in self.events:
            for event in events:
                by_id[event.request_id].append(event.token_id)
        return [tuple(tokens) for tokens in by_id.values()]


def run(engine: Stepping, requests: Sequence[Request]) -> Run:
    """Give the engine all requests at once and step until it is through.

    Raises what the engine raises, and WrongOutput where there are not as many tokens as were asked for.
    """
    assert requests and not engine.busy
    ended_s: list[float] = []
    events: list[tuple[TokenEvent, ...]] = []
    begun = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.busy:
        events.append(tuple(engine.step()))
        ended_s.append(time.perf_counter() - begun)
    drawn, asked = sum(map(len, events)), sum(request.params.max_tokens or 0 for request in requests)
    if drawn != asked:
        raise WrongOutput(f"{len(requests):,} requests got {drawn:,} tokens, asked were {asked:,}")
    return Run(tuple(ended_s), tuple(events))

"""What an engine is busy with and has done: for those who watch it. Counts; decides nothing."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from rvllm.engine.block_pool import BlockPool
from rvllm.engine.speculation import Drafted
from rvllm.program.program import Step


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is busy with now, and has done since it began. Kept blocks hold prefixes and are free to take.

    drafts: times a sequence had tokens guessed; draft_tokens: so many; accepted_tokens: of them, those that were right;
    accepted_at: the same by their place among the guesses.
    steps: started; computed_tokens: that went through the model in them; read_tokens: whose keys and values they read.
    """

    running: int
    waiting: int
    blocks: int
    used_blocks: int
    kept_blocks: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    steps: int = 0
    computed_tokens: int = 0
    read_tokens: int = 0


@dataclass(slots=True)
class Counts:
    """Since the engine began."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    arrivals: int = 0
    started: int = 0
    computed_tokens: int = 0
    read_tokens: int = 0

    def start(self, step: Step) -> Step:
        """Count a step that is about to be started, and give it back."""
        self.started += 1
        self.computed_tokens += len(step.ids)
        self.read_tokens += int(step.kv_lengths.sum())
        return step

    def load(self, running: int, waiting: int, pool: BlockPool, drafted: Drafted) -> Load:
        """These counts beside what there is now."""
        return Load(
            running=running,
            waiting=waiting,
            blocks=pool.blocks,
            used_blocks=pool.blocks - pool.available,
            kept_blocks=pool.kept,
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            drafts=drafted.drafts,
            draft_tokens=drafted.tokens,
            accepted_tokens=drafted.accepted,
            accepted_at=tuple(drafted.accepted_at),
            steps=self.started,
            computed_tokens=self.computed_tokens,
            read_tokens=self.read_tokens,
        )


@dataclass(slots=True)
class Histogram:
    """How many values were not above each of `bounds`, which rise, and above the one before; the last count: above all.

    total: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

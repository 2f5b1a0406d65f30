"""Batches of equal requests: decode speed by the slope between two output lengths, or the wall time of all of it.

Knows protocols and grids; not how a figure is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rvllm.bench.figures import Speed, StepTimes, rate, slope, step_times
from rvllm.bench.limit import Limits, Work
from rvllm.bench.runs import Run, Stepping, Workload, run
from rvllm.bench.trust import check_speed
from rvllm.errors import StartError

Progress = Callable[[str, int, int], None]

_TRIES = 6  # each is later by what the one before has shown


@dataclass(frozen=True, slots=True)
class Cell:
    """A place of the grid: `sequences` requests of `prompt` tokens. `outputs`: two lengths for a slope, one for wall.

    `settled`: the lengths are the user's, and not to be raised.
    """

    sequences: int
    prompt: int
    outputs: tuple[int, ...]
    settled: bool = True

    @property
    def tokens(self) -> int:
        """The longest prompt and output together."""
        return self.prompt + max(self.outputs)

    def later(self, tokens: int) -> Cell:
        """The cell with so many more tokens of output."""
        return replace(self, outputs=tuple(length + tokens for length in self.outputs))

    def __str__(self) -> str:
        output = " and ".join(f"{length:,}" for length in self.outputs)
        return f"{self.sequences:,} requests of {self.prompt:,} tokens in, {output} out"


@dataclass(frozen=True, slots=True)
class Figure:
    """What a cell gave. `limit_tokens_per_s`: the device's, None for one whose limits are unknown.

    `wall_s`: of each repeat, for each output length.

    Steps are those in which every sequence drew a token for a slope, all for wall.
    """

    cell: Cell
    speed: Speed
    wall_s: tuple[tuple[float, ...], ...]
    steps: StepTimes
    limit_tokens_per_s: float | None

    @property
    def share(self) -> float | None:
        """Of the limit."""
        return None if self.limit_tokens_per_s is None else self.speed.tokens_per_s / self.limit_tokens_per_s

    def facts(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "sequences": self.cell.sequences,
            "prompt_tokens": self.cell.prompt,
            "output_tokens": list(self.cell.outputs),
            "tokens_per_s": self.speed.tokens_per_s,
            "spread": self.speed.spread,
            "wall_s": self.wall_s,
            "step_ms": asdict(self.steps),
            "limit_tokens_per_s": self.limit_tokens_per_s,
            "share_of_limit": self.share,
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """What measures: an engine, where its requests come from, its device's limits, and who is told how far it is.

    `max_tokens`: the longest prompt and output together that the engine takes.
    """

    engine: Stepping
    workload: Workload
    limits: Limits | None
    max_tokens: int
    progress: Progress

    def run(self, sequences: int, prompt: int, output: int) -> Run:
        """One batch of fresh prompts."""
        prompts = self.workload.prompts([prompt] * sequences)
        return run(self.engine, self.workload.requests(prompts, output))


def measure(bench: Bench, cells: Iterable[Cell], repeats: int) -> list[Figure]:
    """Every cell `repeats` times, one cell after the other in each round, so that what drifts meets all of them.

    Raises StartError where the sequences of a slope never decode all at once, WrongOutput for speeds that cannot be.
    """
    cells = list(cells)
    rounds = (len(cells), len(cells) * (repeats + 1))
    ready = []
    for place, cell in enumerate(cells):
        ready.append(warmed(bench, cell))
        bench.progress("measuring", place + 1, rounds[1])
    runs: dict[int, list[tuple[Run, ...]]] = {place: [] for place in range(len(ready))}
    for turn in range(repeats):
        for place, cell in enumerate(ready):
            runs[place].append(tuple(bench.run(cell.sequences, cell.prompt, output) for output in cell.outputs))
            bench.progress("measuring", rounds[0] * (turn + 1) + place + 1, rounds[1])
    return [figure(bench, cell, runs[place]) for place, cell in enumerate(ready)]


def warmed(bench: Bench, cell: Cell) -> Cell:
    """The cell, run once; for a slope, with output lengths at which all its sequences decode together.

    While prompts are still being read, the first sequences draw tokens for little: where the shorter output ended
    then, the longer one would have more of them, and the slope would flatter.
    """
    output = min(cell.outputs)
    for _ in range(_TRIES):
        done = bench.run(cell.sequences, cell.prompt, output)
        if len(cell.outputs) == 1 or done.most_at_once >= cell.sequences:
            return cell.later(output - min(cell.outputs))
        output = max(output + 1, done.reading_steps() * 5 // 4 + 1)
        if cell.settled or cell.later(output - min(cell.outputs)).tokens > bench.max_tokens:
            break
    raise StartError(
        f"no slope for {cell}: at most {done.most_at_once:,} sequences draw a token in one step, since the first are "
        "through before the last have been read",
        hint="raise both of --output-len, lower --n or --context, or give the cache more memory "
        "(--kv-cache-memory-bytes)",
    )


def figure(bench: Bench, cell: Cell, runs: list[tuple[Run, ...]]) -> Figure:
    """The figure of a cell from its repeated runs. Raises WrongOutput for one that cannot be."""
    wall_s = tuple(tuple(done.seconds for done in of_length) for of_length in zip(*runs))
    tokens = [cell.sequences * output for output in cell.outputs]
    if len(cell.outputs) == 2:
        speed = slope((tokens[0], tokens[1]), *wall_s)
        steps = [seconds for _, long in runs for seconds in long.step_seconds(cell.sequences)]
        if not steps:  # tokens were guessed: hardly a step brings one for each sequence
            steps = [seconds for _, long in runs for seconds in long.step_seconds()]
    else:
        speed = rate(tokens[0], wall_s[0])
        steps = [seconds for (done,) in runs for seconds in done.step_seconds()]
    limit = limit_of(bench.limits, cell) if bench.limits else None
    check_speed(speed.tokens_per_s, limit, str(cell))
    return Figure(cell, speed, wall_s, step_times(steps), limit)


def limit_of(limits: Limits, cell: Cell) -> float:
    """The most tokens/s that the device allows: of the steps between a slope's lengths, or of all of it."""
    if len(cell.outputs) == 2:
        contexts = (cell.prompt + cell.outputs[0], cell.prompt + cell.outputs[1] - 1)
        return limits.decode_tokens_per_s(cell.sequences, contexts)
    count, (output,) = cell.sequences, cell.outputs
    work = Work([cell.prompt] * count, [output] * count, at_once=count, prompts=count)
    return count * output / limits.run_seconds(work)

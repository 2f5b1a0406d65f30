"""`vllm bench throughput` by its own definitions: many random requests at once, all tokens over the time they take.

Knows vLLM's names and how it draws lengths; not its options' spelling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rvllm.bench.decode import Bench
from rvllm.bench.figures import StepTimes, step_times
from rvllm.bench.limit import Work
from rvllm.bench.runs import Ids, Run, run
from rvllm.bench.trust import check_speed

SAMPLING: dict[str, Any] = {"temperature": 1.0}
"""vLLM's benchmarks draw by chance, and from all tokens."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What is asked for. Lengths in tokens; a range ratio r means lengths from (1 - r) to (1 + r) times the mean.

    `shared`: tokens that every prompt begins with, on top of its length. `copies`: completions of each prompt.
    """

    prompts: int
    input_tokens: int
    output_tokens: int
    input_ratio: float = 0.0
    output_ratio: float = 0.0
    shared: int = 0
    copies: int = 1

    @property
    def most_tokens(self) -> int:
        """The longest prompt and output together."""
        longest = _bounds(self.input_tokens, self.input_ratio)[1], _bounds(self.output_tokens, self.output_ratio)[1]
        return self.shared + sum(longest)

    def lengths(self, random: np.random.Generator) -> tuple[list[int], list[int]]:
        """(of the prompts without what they share, of the outputs)."""
        inputs, outputs = (
            random.integers(*_bounds(mean, ratio), self.prompts, endpoint=True).tolist()
            for mean, ratio in ((self.input_tokens, self.input_ratio), (self.output_tokens, self.output_ratio))
        )
        return inputs, outputs


def _bounds(mean: int, ratio: float) -> tuple[int, int]:
    return max(1, math.floor(mean * (1 - ratio))), max(1, math.ceil(mean * (1 + ratio)))


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a run gave. Tokens of prompts count once, whatever the copies."""

    run: Run
    requests: int
    prompt_tokens: int
    output_tokens: int
    limit_seconds: float | None

    @property
    def share(self) -> float | None:
        """Of the device's limit."""
        return None if self.limit_seconds is None else self.limit_seconds / self.run.seconds

    @property
    def steps(self) -> StepTimes:
        return step_times(self.run.step_seconds())

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.run.seconds

    def vllm(self, model: str) -> dict[str, Any]:
        """The fields of vLLM's --output-json."""
        total = self.prompt_tokens + self.output_tokens
        return {
            "model_id": model,
            "elapsed_time": self.run.seconds,
            "num_requests": self.requests,
            "total_num_tokens": total,
            "requests_per_second": self.requests / self.run.seconds,
            "tokens_per_second": total / self.run.seconds,
        }


def throughput(bench: Bench, asked: Requests, *, warmups: int, seed: int, at_once: int, reuses: bool) -> Throughput:
    """Run all requests at once. Raises WrongOutput for a speed that cannot be.

    `warmups`: requests that are run before, on prompts of their own. `at_once`: sequences the engine runs together.
    `reuses`: whether it may go on from what another prompt left in the cache.
    """
    inputs, outputs = asked.lengths(np.random.default_rng(seed))
    (shared,) = bench.workload.prompts([asked.shared]) if asked.shared else ((),)
    if warmups:
        _run(bench, inputs[:warmups], outputs[:warmups], shared, 1)
    bench.progress("measuring", 0, 1)
    done = _run(bench, inputs, outputs, shared, asked.copies)
    bench.progress("measuring", 1, 1)
    prompts = [length + asked.shared for length in inputs]
    work = _work(asked, prompts, outputs, at_once, reuses)
    limit = bench.limits.run_seconds(work) if bench.limits else None
    result = Throughput(done, asked.prompts, sum(prompts), asked.copies * sum(outputs), limit)
    check_speed(result.output_tokens_per_s, limit and result.output_tokens / limit, f"{asked.prompts:,} requests")
    return result


def _run(bench: Bench, inputs: list[int], outputs: list[int], shared: Ids, copies: int) -> Run:
    prompts = bench.workload.prompts(inputs, shared)
    every = [ids for ids in prompts for _ in range(copies)]
    counts = [count for count in outputs for _ in range(copies)]
    return run(bench.engine, bench.workload.requests(every, counts, **SAMPLING))


def _work(asked: Requests, prompts: list[int], outputs: list[int], at_once: int, reuses: bool) -> Work:
    return Work(
        prompts * asked.copies,
        outputs * asked.copies,
        at_once,
        prompts=asked.prompts * (1 if reuses else asked.copies),
        reused=asked.shared if reuses else 0,
    )

"""`vllm bench latency` by its own definitions: one batch of equal requests, again and again, and how long each took."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from rvllm.bench.decode import Bench
from rvllm.bench.figures import StepTimes, percentiles, step_times
from rvllm.bench.limit import Work
from rvllm.bench.runs import Run, run
from rvllm.bench.throughput import SAMPLING
from rvllm.bench.trust import check_speed

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class Batch:
    """`prompts` prompts of `input_tokens`, `copies` completions of `output_tokens` each."""

    prompts: int
    input_tokens: int
    output_tokens: int
    copies: int = 1

    @property
    def sequences(self) -> int:
        return self.prompts * self.copies


@dataclass(frozen=True, slots=True)
class Latency:
    """How long each iteration took, from its first request to its last token."""

    runs: tuple[Run, ...]
    limit_seconds: float | None

    @property
    def seconds(self) -> list[float]:
        return [done.seconds for done in self.runs]

    @property
    def steps(self) -> StepTimes:
        return step_times([seconds for done in self.runs for seconds in done.step_seconds()])

    @property
    def share(self) -> float | None:
        """Of the device's limit, at the median."""
        return None if self.limit_seconds is None else self.limit_seconds / statistics.median(self.seconds)

    def vllm(self, model: str) -> dict[str, Any]:
        """The fields of vLLM's --output-json, and the model."""
        return {
            "avg_latency": statistics.fmean(self.seconds),
            "latencies": self.seconds,
            "percentiles": {str(percent): value for percent, value in percentiles(self.seconds, PERCENTILES).items()},
            "model_id": model,
        }


def latency(bench: Bench, batch: Batch, *, warmups: int, iterations: int) -> Latency:
    """Run the batch `warmups` and then `iterations` times, always on fresh prompts. Raises WrongOutput."""
    runs = []
    for place in range(warmups + iterations):
        runs.append(_run(bench, batch))
        bench.progress("measuring", place + 1, warmups + iterations)
    limit = bench.limits.run_seconds(_work(batch)) if bench.limits else None
    result = Latency(tuple(runs[warmups:]), limit)
    tokens = batch.sequences * batch.output_tokens
    check_speed(tokens / min(result.seconds), limit and tokens / limit, f"a batch of {batch.sequences:,}")
    return result


def _run(bench: Bench, batch: Batch) -> Run:
    prompts = bench.workload.prompts([batch.input_tokens] * batch.prompts)
    every = [ids for ids in prompts for _ in range(batch.copies)]
    return run(bench.engine, bench.workload.requests(every, batch.output_tokens, **SAMPLING))


def _work(batch: Batch) -> Work:
    count = batch.sequences
    return Work([batch.input_tokens] * count, [batch.output_tokens] * count, at_once=count, prompts=count)

"""Numbers made of measured numbers: percentiles, medians, slopes. Knows no engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rvllm.errors import WrongOutput


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Percentiles of the wall time of steps, in milliseconds."""

    p50: float
    p95: float
    p99: float


def percentiles(seconds: Sequence[float], wanted: Sequence[int]) -> dict[int, float]:
    """Percentiles by linear interpolation between the two nearest, as numpy's default and vLLM's benchmarks have it."""
    return {percent: float(np.percentile(seconds, percent)) for percent in wanted}


def step_times(seconds: Sequence[float]) -> StepTimes:
    """Of steps in seconds, in milliseconds."""
    found = percentiles(seconds, (50, 95, 99))
    return StepTimes(*(1e3 * found[percent] for percent in (50, 95, 99)))


@dataclass(frozen=True, slots=True)
class Speed:
    """A rate of the median time of several runs. `spread`: from their fastest to their slowest, over the median."""

    tokens_per_s: float
    spread: float


def rate(tokens: int, seconds: Sequence[float]) -> Speed:
    """The speed of runs that each drew so many tokens."""
    median = statistics.median(seconds)
    return Speed(tokens / median, (max(seconds) - min(seconds)) / median)


def slope(tokens: tuple[int, int], short: Sequence[float], long: Sequence[float]) -> Speed:
    """The speed from pairs of runs that differ in `tokens` alone: what both have in common cancels.

    Raises WrongOutput where the longer runs were not slower: then the difference is noise.
    """
    assert tokens[0] < tokens[1] and len(short) == len(long), (tokens, short, long)
    longer = statistics.median(long) - statistics.median(short)
    if longer <= 0:
        raise WrongOutput(
            f"{tokens[1]:,} tokens took {statistics.median(long):.4f} s and {tokens[0]:,} tokens "
            f"{statistics.median(short):.4f} s: there is no slope",
            hint="set the two of --output-len further apart, or leave the machine to the benchmark",
        )
    differences = [second - first for first, second in zip(short, long)]
    return Speed((tokens[1] - tokens[0]) / longer, (max(differences) - min(differences)) / longer)

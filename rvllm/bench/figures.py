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
class Repeated:
    """A rate measured several times, in tokens/s. The figure is the median; the spread is the rest."""

    each: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.each)

    @property
    def spread(self) -> float:
        """From the lowest to the highest, as a share of the median."""
        return (max(self.each) - min(self.each)) / self.median


def slope(tokens: tuple[int, int], seconds: tuple[float, float]) -> float:
    """Tokens/s from two runs that differ in `tokens` alone: what both have in common cancels.

    Raises WrongOutput where the longer run was not slower: then the difference is noise.
    """
    more, longer = tokens[1] - tokens[0], seconds[1] - seconds[0]
    assert more > 0, tokens
    if longer <= 0:
        raise WrongOutput(
            f"{tokens[1]:,} tokens took {seconds[1]:.4f} s and {tokens[0]:,} tokens {seconds[0]:.4f} s: no slope",
            hint="set the two of --output-len further apart, or leave the machine to the benchmark",
        )
    return more / longer

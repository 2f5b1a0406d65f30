"""When requests are sent. Knows rates; no clock and no server."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests a second; inf: all at once.

    burstiness      the shape of the gamma distribution of the gaps: 1 is a Poisson process, less comes in bursts
    ramp_up         "linear" or "exponential" from start to end requests a second, in place of per_s; or None
    """

    per_s: float = math.inf
    burstiness: float = 1.0
    ramp_up: str | None = None
    start: float = 0.0
    end: float = 0.0

    def at(self, place: int, count: int) -> float:
        """Requests a second when request `place` of `count` is due."""
        share = place / max(count - 1, 1)
        if self.ramp_up == "linear":
            return self.start + (self.end - self.start) * share
        if self.ramp_up == "exponential":
            return self.start * float((self.end / self.start) ** share)
        return self.per_s


def arrivals(rate: Rate, count: int, seed: int) -> list[float]:
    """Seconds from the start at which each request is due.

    As vLLM has it: gaps are gamma distributed with mean 1 / rate, and without a ramp they are stretched so that the
    last request is due at count / rate exactly.
    """
    random = np.random.default_rng(seed)
    gaps = np.zeros(count)
    for place in range(count):
        now = rate.at(place, count)
        if not math.isinf(now):
            gaps[place] = random.gamma(rate.burstiness, 1 / (max(now, 1e-6) * rate.burstiness))
    due = np.cumsum(gaps)
    if rate.ramp_up is None and count and due[-1] > 0:
        due *= count / rate.per_s / due[-1]
    return [float(second) for second in due]

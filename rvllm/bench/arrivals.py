"""When requests are sent. Knows rates; no clock and no server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class RateChanges:
    """Where a ramp came to a further whole number of requests a second: vLLM's `rps_change_events`.

    now: the time in ISO 8601. events: the first is where the ramp begins, once a request was sent.
    """

    rate: Rate
    count: int
    now: Callable[[], str]
    events: list[dict[str, int | str]] = field(default_factory=list)
    _last: int = 0

    def sent(self, place: int) -> None:
        """Request `place` was sent."""
        if self.rate.ramp_up is None:
            return
        if not self.events:
            self._last = int(self.rate.start)
            self.events.append({"rps": self._last, "timestamp": self.now()})
        reached = int(self.rate.at(place, self.count))
        if reached > self._last:
            now = self.now()
            self.events += [{"rps": each, "timestamp": now} for each in range(self._last + 1, reached + 1)]
            self._last = reached

"""Figures that grow with every token or at any moment, counted first and handed on later.

Knows prometheus-client; not what is counted.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable

import prometheus_client
from prometheus_client import Counter

from rvllm.engine.tally import Histogram


class ManyAtOnce(prometheus_client.Histogram):
    """A histogram that takes many values at once."""

    def observe_many(self, amount: float, times: int) -> None:
        """As `observe`, so many times."""
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)

    def observe_all(self, values: Histogram) -> None:
        """As `observe` of each value; the bounds must be the same."""
        self._sum.inc(values.total)
        for bucket, times in zip(self._buckets, values.counts, strict=True):
            bucket.inc(times)


class TokenTally:
    """Tokens, and the time from one to the next, which is the same for all that a step makes.

    They are kept back until another step's come, or until `tell`: prometheus-client takes microseconds for each.
    fail: is told of a fault in that, which harms nobody but the figures.
    """

    def __init__(self, tokens: Counter, gaps_s: ManyAtOnce, fail: Callable[[Exception], None]) -> None:
        self._tokens, self._gaps_s, self._fail = tokens, gaps_s, fail
        self._drawn = self._times = 0
        self._gap_s = 0.0

    def token(self) -> None:
        """One, of which no time is told."""
        self._drawn += 1

    def next_token(self, gap_s: float) -> None:
        """One, so long after the one before."""
        if gap_s != self._gap_s:
            self.tell()
            self._gap_s = gap_s
        self._drawn += 1
        self._times += 1

    def tell(self) -> None:
        """Hand on what was kept back."""
        drawn, times = self._drawn, self._times
        self._drawn = self._times = 0  # first: a fault in counting must not count them again
        try:
            if times:
                self._gaps_s.observe_many(self._gap_s, times)
            if drawn:
                self._tokens.inc(drawn)
        except Exception as error:
            self._fail(error)


class PauseTally:
    """Pauses of Python's collector, kept back until `tell`.

    A collection may begin anywhere, so also where prometheus-client holds its lock, which in a process that shares its
    figures is one for all of them: a callback that asked for it then would wait for ever.
    """

    def __init__(self, pauses_s: ManyAtOnce, bounds_s: tuple[float, ...]) -> None:
        self._pauses_s, self._bounds_s = pauses_s, bounds_s
        self._kept = Histogram.empty(bounds_s)
        self._begin_s = 0.0

    def watch(self) -> None:
        """Count from now on."""
        gc.callbacks.append(self._collecting)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begin_s = time.perf_counter()
        else:
            self._kept.add(time.perf_counter() - self._begin_s)

    def tell(self) -> None:
        """Hand on what was kept back. A collection meanwhile is counted among those or the next."""
        kept, self._kept = self._kept, Histogram.empty(self._bounds_s)
        if any(kept.counts):
            self._pauses_s.observe_all(kept)

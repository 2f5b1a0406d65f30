"""Figures that grow with every token, counted cheaply. Knows prometheus-client; not what is counted."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Counter, Histogram


class ManyAlike(Histogram):
    """A histogram that takes a value many times at once."""

    def observe_many(self, amount: float, times: int) -> None:
        """As `observe`, so many times."""
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


class TokenTally:
    """Tokens, and the time from one to the next, which is the same for all that a step makes.

    They are kept back until another step's come, or until `tell`: prometheus-client takes microseconds for each.
    """

    def __init__(self, tokens: Counter, gaps_s: ManyAlike) -> None:
        self._tokens, self._gaps_s = tokens, gaps_s
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
        if times:
            self._gaps_s.observe_many(self._gap_s, times)
        if drawn:
            self._tokens.inc(drawn)

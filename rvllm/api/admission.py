"""Who is let in: how many requests, how many tokens that wait to be read, how many of one key. Knows numbers only.

Several fronts count in memory that they share, each in a row of its own, so that limits are the server's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rvllm.api.errors import HttpError

RETRY_S = 1
CELL_BYTES = 8
_REQUESTS, _TOKENS, _KEYS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Bars:
    """None: no limit. `requests`: completions that are answered or wait, n of a request that wants n; `tokens`: of
    prompts that are not read yet; `per_key`: requests of one key.
    """

    requests: int | None = None
    tokens: int | None = None
    per_key: int | None = None


class Admission:
    """One front's part of what is counted. keys: how many there are; rejected: is told which limit it was."""

    def __init__(self, bars: Bars = Bars(), *, keys: int = 0, cells: memoryview | None = None, place: int = 0) -> None:
        """cells: (fronts * cells_each(keys),) i64, shared; place: this front's number. None: there is one front."""
        self._bars, self._width = bars, cells_each(keys)
        self._cells = memoryview(array("q", [0] * self._width)) if cells is None else cells
        self._own = place * self._width
        self.rejected: Callable[[str], None] = lambda reason: None

    @contextmanager
    def admitted(
        self, choices: int, prompts: Sequence[tuple[int, int]], key: int | None
    ) -> Iterator[Callable[[int], None]]:
        """While a request is answered. prompts: (number of its first completion, tokens).

        What it gives is to be told the number of every completion of which the first token came. Raises HttpError, 429.
        """
        self._check(choices, key)
        unread = dict(prompts)

        def began(number: int) -> None:
            if tokens := unread.pop(number, 0):
                self._add(_TOKENS, -tokens)

        self._add(_REQUESTS, choices)
        self._add(_TOKENS, sum(unread.values()))
        if key is not None:
            self._add(_KEYS + key, 1)
        try:
            yield began
        finally:
            self._add(_REQUESTS, -choices)
            for number in list(unread):
                began(number)
            if key is not None:
                self._add(_KEYS + key, -1)

    def _add(self, what: int, count: int) -> None:
        self._cells[self._own + what] += count

    def _of_all(self, what: int) -> int:
        return sum(self._cells[what :: self._width])

    def _check(self, choices: int, key: int | None) -> None:
        bars = self._bars
        if bars.requests is not None and (there := self._of_all(_REQUESTS)) + choices > bars.requests:
            raise self._full("requests", f"there are {there:,} requests, the limit is {bars.requests:,}")
        if bars.tokens is not None and (there := self._of_all(_TOKENS)) >= bars.tokens:
            raise self._full("tokens", f"{there:,} tokens wait to be read, the limit is {bars.tokens:,}")
        if bars.per_key is not None and key is not None and (there := self._of_all(_KEYS + key)) >= bars.per_key:
            raise self._full("key", f"this key has {there:,} requests, the limit is {bars.per_key:,}")

    def _full(self, reason: str, message: str) -> HttpError:
        self.rejected(reason)
        return HttpError(
            429,
            f"{message}. hint: try again later",
            kind="rate_limit_error",
            code="too_many_requests",
            headers={"retry-after": str(RETRY_S)},
        )


def cells_each(keys: int) -> int:
    """Cells of one front."""
    return _KEYS + keys

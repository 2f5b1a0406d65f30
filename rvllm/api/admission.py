"""Who is let in: how many requests, how many tokens that wait to be read, how many of one key. Knows numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rvllm.api.errors import HttpError

RETRY_S = 1


@dataclass(slots=True)
class Unread:
    """Tokens of prompts of which nothing has come yet, by their number in the request."""

    tokens: dict[int, int]
    total: list[int]

    def read(self, number: int) -> None:
        """The first token of a completion came: its prompt is read."""
        self.total[0] -= self.tokens.pop(number, 0)


@dataclass(slots=True)
class Admission:
    """None: no limit. `requests`: completions that are answered or wait, n of a request that wants n; `tokens`: of
    prompts that are not read yet; `per_key`: requests of one key. `rejected` is told which limit it was.
    """

    requests: int | None = None
    tokens: int | None = None
    per_key: int | None = None
    rejected: Callable[[str], None] = lambda reason: None
    _requests: int = 0
    _tokens: list[int] = field(default_factory=lambda: [0])
    _keys: Counter[int] = field(default_factory=Counter)

    @contextmanager
    def admitted(self, choices: int, prompts: Sequence[tuple[int, int]], key: int | None) -> Iterator[Unread]:
        """While a request is answered. prompts: (number of its first completion, tokens). Raises HttpError, 429."""
        self._check(choices, key)
        unread = Unread(dict(prompts), self._tokens)
        self._requests += choices
        self._tokens[0] += sum(unread.tokens.values())
        if key is not None:
            self._keys[key] += 1
        try:
            yield unread
        finally:
            self._requests -= choices
            for number in list(unread.tokens):
                unread.read(number)
            if key is not None:
                self._keys[key] -= 1

    def _check(self, choices: int, key: int | None) -> None:
        if self.requests is not None and self._requests + choices > self.requests:
            raise self._full("requests", f"there are {self._requests:,} requests, the limit is {self.requests:,}")
        if self.tokens is not None and self._tokens[0] >= self.tokens:
            raise self._full("tokens", f"{self._tokens[0]:,} tokens wait to be read, the limit is {self.tokens:,}")
        if self.per_key is not None and key is not None and self._keys[key] >= self.per_key:
            raise self._full("key", f"this key has {self._keys[key]:,} requests, the limit is {self.per_key:,}")

    def _full(self, reason: str, message: str) -> HttpError:
        self.rejected(reason)
        return HttpError(
            429,
            f"{message}. hint: try again later",
            kind="rate_limit_error",
            code="too_many_requests",
            headers={"retry-after": str(RETRY_S)},
        )

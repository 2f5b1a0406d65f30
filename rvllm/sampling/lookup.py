"""Prompt lookup: a sequence's next tokens guessed from where its last ones stood before. Knows ids; draws nothing.

The definition, in numpy; a device kernel is held to it. A guess is accepted where it equals the token that is drawn in
its place: a draw is a function of logits, parameters, seed and position, so what is accepted is what would have been
drawn without guessing, at any temperature, and the output is the same token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rvllm.program.program import Int32

NONE = np.zeros(0, dtype=np.int32)
MOST_ROWS = 64
"""Of a step that verifies guesses: up to here a row's bits do not depend on the rows beside it, and one more costs
little."""
LONGEST_REST = 6
"""Of guessing: 2**6 tokens."""


def lookup(tokens: Int32, count: int, shortest: int, longest: int) -> Int32:
    """`count` tokens that may come after `tokens` (n,), or none: (count,) or (0,).

    Of the last tokens, the most that are found again, from `shortest` to `longest` of them; of several places where
    they stand, the last; then what stands behind it. Where that reaches the end, it goes on with the guesses
    themselves: what came at a distance before is taken to come again at that distance.
    """
    end = len(tokens)
    places = np.flatnonzero(tokens[: end - 1] == tokens[-1]) + 1  # behind what equals the last token
    size = 1
    while size < longest:
        longer = places[places > size]
        longer = longer[tokens[longer - size - 1] == tokens[end - size - 1]]
        if not len(longer):
            break
        places, size = longer, size + 1
    if not len(places) or size < shortest:
        return NONE
    place = places[-1]
    return tokens[place + np.arange(count) % (end - place)]


def accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of the first drafts are what was drawn in their places."""
    for count, (draft, token) in enumerate(zip(drafts, drawn)):
        if draft != token:
            return count
    return min(len(drafts), len(drawn))


@dataclass(slots=True)
class Past:
    """A sequence's tokens as an array, the first `length` of `room` (most tokens,) i32, and how its guesses fared.

    misses       guesses in a row, of several tokens each, of which nothing was right
    rests_until  no guesses before it has so many tokens
    hoped        whether guesses are expected behind the token that is being drawn
    seen         hashes of its runs of so many tokens as a guess takes, the first `runs` of them
    """

    room: Int32
    length: int = 0
    misses: int = 0
    rests_until: int = 0
    hoped: bool = False
    seen: set[int] = field(default_factory=set)
    runs: int = 0

    @property
    def tokens(self) -> Int32:
        return self.room[: self.length]

    @property
    def rested(self) -> bool:
        return self.length >= self.rests_until

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take over what is new of the sequence's tokens."""
        length = len(token_ids)
        if length > self.length:
            self.room[self.length : length] = token_ids[self.length :]
            self.length = length

    def recurs(self, shortest: int) -> bool:
        """Whether `lookup` finds anything, `shortest` always being the same: mostly not, which is known at once.

        True, one time in very many, also where it does not.
        """
        before = self.length - shortest  # runs that end before the last token
        if before > self.runs:
            ids = self.room[self.runs : self.length - 1].tolist()
            self.seen.update(map(hash, zip(*(ids[place:] for place in range(shortest)))))
            self.runs = before
        return hash(tuple(self.tokens[-shortest:].tolist())) in self.seen

    def learn(self, accepted: int) -> None:
        """After guesses: rest for the longer, the more in a row were wrong."""
        if accepted:
            self.misses = 0
            return
        self.misses += 1
        self.rests_until = self.length + (1 << min(self.misses, LONGEST_REST))


@dataclass(frozen=True, slots=True)
class Guessing:
    """What a device needs to go on from a step that verifies guesses with its own: of each sequence, in order.

    rooms     its rows behind the one of its last token: what the device fills with guesses; 0: it gets none
    counts    how many of them are guesses now, the first ones
    pasts     its tokens; of one with no room nothing is read
    shortest, longest   as in `lookup`
    """

    rooms: tuple[int, ...]
    counts: tuple[int, ...]
    pasts: tuple[Past, ...]
    shortest: int
    longest: int

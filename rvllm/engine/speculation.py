"""Guesses for sequences that decode: who gets them, how many, and when to leave off. Knows tokens; runs nothing.

A guess costs a row in its step, and the step before has to be read first. So guessing rests for a while after guesses
that were all wrong, twice as long each time: text that does not repeat is hardly slower for it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import numpy as np

from rvllm.config import Speculation
from rvllm.engine.request import Sequence
from rvllm.program.program import Int32
from rvllm.sampling.lookup import MOST_ROWS, NONE, Guessing, Past, lookup
from rvllm.sampling.sampler import changes_logits, needs_last_token

WORTH_WHILE = 4  # one in so many of the sequences has to have guesses: all of them wait for the step before to be read

CHEAP_ROWS = 8  # a step of so many costs hardly more than one of a single row
PATIENCE = 3  # steps in a row without guesses after which it is time for plain ones again, where they are cheap
MOST_MISSES = 1  # in a row, so that the device goes on guessing: where a text was edited, one is wrong

Drafts = list[list[int]]
"""Of each sequence of a step."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What a step verifies, of each sequence in order: its guesses, and the rows behind its last token's, no fewer.

    guessing: where the model is to go on with its own; the drafts of a step that follows are known when the one before
    has been read. idle: the steps before in which there were none.
    """

    drafts: Drafts
    rooms: tuple[int, ...]
    guessing: Guessing | None = None
    idle: int = 0

    def filled(self, sequences: Items[Sequence]) -> Drafts:
        """A token for every row behind a sequence's last token: its guesses, then anything, here that token."""
        pairs = zip(sequences, self.drafts, self.rooms)
        return [guesses + [one.token_ids[-1]] * (room - len(guesses)) for one, guesses, room in pairs]

    def next(self) -> Verification:
        """The one that follows, its drafts not yet known."""
        return replace(self, drafts=[], idle=0 if any(self.drafts) else self.idle + 1)


@dataclass(slots=True)
class Drafted:
    """What has been guessed since the engine began: times a sequence had guesses, tokens, those that were right.

    accepted_at: those that were right, by their place among their guesses.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)


class Speculator:
    """Guesses by one setting, for steps of at most `rows` rows; None: there are no guesses."""

    def __init__(self, settings: Speculation | None, rows: int) -> None:
        self._settings = settings
        self._rows = min(rows, MOST_ROWS)
        self.drafted = Drafted()

    def room(self, sequences: int) -> int:
        """Guesses that each of so many sequences may have."""
        if self._settings is None:
            return 0
        return min(self._settings.num_speculative_tokens, self._rows // sequences - 1)

    def promises(self, sequences: Items[Sequence]) -> bool:
        """Whether there would be guesses now, though one more token is being drawn, which nobody knows yet.

        Then the next step had better wait for it. A sequence for which there are none then rests.
        """
        if self.room(len(sequences)) < 1:
            return False
        found = [past for past in map(self._hopeful, sequences) if past is not None]
        if not found or len(found) * WORTH_WHILE < len(sequences):
            return False
        for past in found:
            past.hoped = True
        return True

    def drafts(self, sequences: Items[Sequence]) -> Drafts | None:
        """Guesses for each of the sequences, all of which decode; None where they are not worth a step of their own."""
        room = self.room(len(sequences))
        if room < 1:
            return None
        found: Drafts = []
        for sequence in sequences:
            # What it draws last is never computed.
            guesses = self._guess(sequence, min(room, sequence.limit - len(sequence.token_ids) - 1)).tolist()
            past = sequence.past
            if past is not None and past.hoped:
                past.hoped = False
                if not guesses:
                    past.learn(0)
            found.append(guesses)
        guessed = sum(map(bool, found))
        return found if guessed and guessed * WORTH_WHILE >= len(found) else None

    def verification(self, sequences: Items[Sequence], drafts: Drafts, goes_on: bool) -> Verification:
        """The step for these drafts. goes_on: the model may go on by itself, unless a sequence is about to end."""
        room, settings = self.room(len(sequences)), self._settings
        rooms = tuple(room if may_have_guesses(sequence) else 0 for sequence in sequences)
        left = min((one.limit - len(one.token_ids) for one, room in zip(sequences, rooms) if room), default=0)
        if not goes_on or left < most_ahead(room) or any(needs_last_token(one.row) for one in sequences if one.row):
            return Verification(drafts, tuple(map(len, drafts)))
        assert settings is not None
        pasts, counts = tuple(map(past_of, sequences)), tuple(map(len, drafts))
        ends = settings.prompt_lookup_min, settings.prompt_lookup_max
        return Verification(drafts, rooms, Guessing(rooms, counts, pasts, *ends))

    def goes_on(self, sequences: Items[Sequence], verification: Verification) -> bool:
        """Whether the step after one that verifies these guesses had better bring some, too, before that one is read.

        Not where most were none for a while, or those before were all wrong; nor so near a length that it could go
        beyond.
        """
        guessed, rows = 0, len(sequences) + sum(verification.rooms)
        waits = rows <= CHEAP_ROWS and verification.idle < PATIENCE
        for sequence, guesses, room in zip(sequences, verification.drafts, verification.rooms):
            if sequence.limit - len(sequence.token_ids) < most_ahead(room):
                return False
            good = sequence.past is not None and sequence.past.misses <= MOST_MISSES
            guessed += good and (waits or bool(guesses))
        return guessed * WORTH_WHILE >= len(sequences)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Count what became of a sequence's guesses."""
        if not drafted:
            return
        self.drafted.drafts += 1
        self.drafted.tokens += drafted
        self.drafted.accepted += accepted
        at = self.drafted.accepted_at
        at += [0] * (accepted - len(at))
        for place in range(accepted):
            at[place] += 1
        past_of(sequence).learn(accepted)

    def _hopeful(self, sequence: Sequence) -> Past | None:
        """The past of a sequence for which there are guesses now."""
        settings = self._settings
        if settings is None or not may_have_guesses(sequence):
            return None
        past = past_of(sequence)
        return past if past.rested and past.recurs(settings.prompt_lookup_min) else None

    def _guess(self, sequence: Sequence, most: int) -> Int32:
        past, settings = self._hopeful(sequence), self._settings
        if most < 1 or past is None or settings is None:
            return NONE
        return lookup(past.tokens, most, settings.prompt_lookup_min, settings.prompt_lookup_max)


def most_ahead(room: int) -> int:
    """Tokens by which a sequence may be longer after a step that is under way and one that follows it."""
    return 2 * (1 + room)


def may_have_guesses(sequence: Sequence) -> bool:
    """Whether the sequence decodes, wants guesses, and its logits are drawn from as they are.

    Penalties, biases, masks and what is forbidden are kept for one row of a sequence at a time: with any of them it has
    no guesses, before min_tokens neither.
    """
    assert sequence.row is not None
    return sequence.request.params.speculate and not changes_logits(sequence.row)


def past_of(sequence: Sequence) -> Past:
    """The sequence's tokens for looking up, all that are known."""
    if sequence.past is None:
        sequence.past = Past(np.empty(sequence.limit, dtype=np.int32))
    sequence.past.extend(sequence.token_ids)
    return sequence.past

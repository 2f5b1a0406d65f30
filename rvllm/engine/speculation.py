"""Guesses for sequences that decode: who gets them, how many, and when to leave off. Knows tokens; runs nothing.

A guess costs a row in its step, and the step before has to be read first. So guessing rests for a while after guesses
that were all wrong, twice as long each time: text that does not repeat is hardly slower for it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from rvllm.config import Speculation
from rvllm.engine.request import Sequence
from rvllm.program.program import Int32
from rvllm.sampling.lookup import NONE, Past, lookup
from rvllm.sampling.sampler import changes_logits

MOST_ROWS = 64  # up to here a row's bits do not depend on the rows beside it, and another one costs little
WORTH_WHILE = 4  # one in so many of the sequences has to have guesses: all of them wait for the step before to be read

Drafts = list[list[int]]
"""Of each sequence of a step."""


@dataclass(slots=True)
class Drafted:
    """What has been guessed since the engine began: times a sequence had guesses, tokens, those that were right."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0


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
        found = 0
        for sequence in sequences:
            hoped = len(self._guess(sequence, 1)) > 0
            if hoped:
                past_of(sequence).hoped = True
                found += 1
        return found > 0 and found * WORTH_WHILE >= len(sequences)

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

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Count what became of a sequence's guesses."""
        if not drafted:
            return
        self.drafted.drafts += 1
        self.drafted.tokens += drafted
        self.drafted.accepted += accepted
        past_of(sequence).learn(accepted)

    def _guess(self, sequence: Sequence, most: int) -> Int32:
        if most < 1 or not may_have_guesses(sequence):
            return NONE
        past, settings = past_of(sequence), self._settings
        assert settings is not None
        if not past.rested:
            return NONE
        return lookup(past.tokens, most, settings.prompt_lookup_min, settings.prompt_lookup_max)


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

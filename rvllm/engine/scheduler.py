"""Decide which sequences run next, and how much of each. A pure function of tokens; never touches a device."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from rvllm.engine.request import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `tokens` tokens of a sequence that are not yet in the cache."""

    sequence: Sequence
    tokens: int

    @property
    def finishes(self) -> bool:
        """Whether the sequence is wholly in the cache afterwards, so that its next token can be drawn."""
        return self.tokens >= self.sequence.pending


def schedule(running: Items[Sequence], *, prefill_chunk: int, max_tokens: int) -> list[Chunk]:
    """The step's chunks, one-token chunks first.

    Every decoding sequence gets its token. Prompts are read in order of arrival, cut at multiples of `prefill_chunk`
    from their own beginning (so that a prompt's bits do not depend on its neighbours), as long as the step stays within
    `max_tokens`; the first prompt always gets a chunk.
    """
    decodes = [Chunk(sequence, 1) for sequence in running if sequence.pending == 1]
    prefills: list[Chunk] = []
    left = max_tokens - len(decodes)
    for sequence in running:
        if sequence.pending == 1:
            continue
        to_edge = prefill_chunk - sequence.computed % prefill_chunk
        tokens = min(sequence.pending, to_edge)
        if prefills and tokens > left:
            break
        prefills.append(Chunk(sequence, tokens))
        left -= tokens
    prefills.sort(key=lambda chunk: chunk.tokens > 1)
    return decodes + prefills

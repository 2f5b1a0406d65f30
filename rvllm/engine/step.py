"""From chunks of sequences to the arrays of a step. Integers only; never touches a device."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from rvllm.engine.block_pool import blocks_for
from rvllm.engine.request import Sequence
from rvllm.engine.scheduler import Chunk
from rvllm.program.program import Int32, Step


def build_step(chunks: Items[Chunk], block_size: int, groups: int, tables: Int32 | None = None) -> Step:
    """The arrays of a step that computes `chunks`, in their order; one row of logits for each that finishes.

    groups: cache groups, which all have the same block table. tables: (slots, blocks) block numbers by sequences'
    slots; None: taken from the sequences.
    """
    sequences = [chunk.sequence for chunk in chunks]
    begins = np.array([sequence.computed for sequence in sequences], dtype=np.int32)
    counts = np.array([chunk.tokens for chunk in chunks], dtype=np.int32)
    prompts = np.array([len(sequence.request.prompt_ids) for sequence in sequences], dtype=np.int32)
    starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    owners = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(starts[-1], dtype=np.int32) + (begins - starts[:-1])[owners]
    kv_lengths = begins + counts
    if tables is None:
        table = _block_table([sequence.blocks for sequence in sequences])
    else:
        table = tables[slots_of(sequences), : blocks_for(int(kv_lengths.max()), block_size)]
    pages, places = np.divmod(positions, np.int32(block_size))
    return Step(
        ids=_pending_ids(chunks),
        positions=positions,
        # Rope scaling goes by the whole prompt's length for its tokens, by its own place for a drawn token: what one
        # forward pass over the prompt and then one a token see in transformers, however we cut the prompt.
        lengths=np.maximum(positions + np.int32(1), prompts[owners]),
        query_starts=starts,
        kv_lengths=kv_lengths,
        slots=(table[owners, pages] * np.int32(block_size) + places,) * groups,
        block_tables=(table,) * groups,
        rows=starts[1:][[chunk.finishes for chunk in chunks]] - 1,
        decode_tokens=int(np.count_nonzero(counts == 1)),
    )


def build_verification(
    sequences: Items[Sequence], drafts: Items[Items[int]], block_size: int, groups: int, tables: Int32
) -> Step:
    """The arrays of a step that computes each sequence's last token and its drafts, with a row of logits for each.

    Every token counts as a sequence of its own that decodes, over the same blocks and with its own length: it sees the
    tokens before it, whose keys are written before any is read, and has the bits that it has when it is decoded alone.
    """
    counts = [1 + len(guesses) for guesses in drafts]
    owners = np.repeat(np.arange(len(counts)), counts)
    firsts = np.array([sequence.computed for sequence in sequences], dtype=np.int32)
    prompts = np.array([len(sequence.request.prompt_ids) for sequence in sequences], dtype=np.int32)
    total = len(owners)
    starts = np.arange(total + 1, dtype=np.int32)
    positions = firsts[owners] + starts[:total] - (np.cumsum(counts) - counts).astype(np.int32)[owners]
    kv_lengths = positions + np.int32(1)
    table = tables[slots_of(sequences)[owners], : blocks_for(int(kv_lengths.max()), block_size)]
    pages, places = np.divmod(positions, np.int32(block_size))
    ids = [token for one, guesses in zip(sequences, drafts) for token in (one.token_ids[one.computed], *guesses)]
    return Step(
        ids=np.array(ids, dtype=np.int32),
        positions=positions,
        lengths=np.maximum(kv_lengths, prompts[owners]),
        query_starts=starts,
        kv_lengths=kv_lengths,
        slots=(table[starts[:total], pages] * np.int32(block_size) + places,) * groups,
        block_tables=(table,) * groups,
        rows=starts[:total].copy(),
        decode_tokens=total,
    )


def advance(step: Step, slots: Int32, tables: Int32, block_size: int) -> Step:
    """The step after one in which the sequences of `slots` decode: its own arrays, each counted on in place.

    Only the block table is another array where it has changed, so that whoever has sent it can tell; `tables` has the
    blocks that the sequences enter. The ids are those that the step before draws.
    """
    entering = np.flatnonzero(step.kv_lengths % block_size == 0)
    for array in (step.positions, step.lengths, step.kv_lengths, step.slots[0]):
        array += 1
    if len(entering):
        pages = step.positions[entering] // block_size
        width = max(step.block_tables[0].shape[1], int(pages.max()) + 1)
        step = replace(step, block_tables=(tables[slots, :width],) * len(step.block_tables))
        step.slots[0][entering] = tables[slots[entering], pages] * np.int32(block_size)
    return step


def slots_of(sequences: Items[Sequence]) -> Int32:
    """The slots of running sequences."""
    return np.array([sequence.slot for sequence in sequences], dtype=np.int32)


def _pending_ids(chunks: Items[Chunk]) -> Int32:
    ids: list[int] = []
    for chunk in chunks:
        known, begin = chunk.sequence.token_ids, chunk.sequence.computed
        if chunk.tokens == 1:
            ids.append(known[begin])
        else:
            ids += known[begin : begin + chunk.tokens]
    return np.array(ids, dtype=np.int32)


def _block_table(blocks: list[list[int]]) -> Int32:
    """(sequences, longest) block numbers; what a sequence does not have is 0 and never read."""
    table = np.zeros((len(blocks), max(map(len, blocks))), dtype=np.int32)
    for row, held in enumerate(blocks):
        table[row, : len(held)] = held
    return table

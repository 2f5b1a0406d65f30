"""From chunks of sequences to the arrays of a step. Integers only; never touches a device."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from rvllm.engine.scheduler import Chunk
from rvllm.program.program import Int32, Step


def build_step(chunks: Items[Chunk], block_size: int) -> Step:
    """The arrays of a step that computes `chunks`, in their order; one row of logits for each that finishes."""
    begins = np.array([chunk.sequence.computed for chunk in chunks], dtype=np.int32)
    counts = np.array([chunk.tokens for chunk in chunks], dtype=np.int32)
    prompts = np.array([len(chunk.sequence.request.prompt_ids) for chunk in chunks], dtype=np.int32)
    starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    owners = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(starts[-1], dtype=np.int32) + (begins - starts[:-1])[owners]
    groups = range(len(chunks[0].sequence.blocks))
    tables = tuple(_block_table([chunk.sequence.blocks[group] for chunk in chunks]) for group in groups)
    pages, places = np.divmod(positions, np.int32(block_size))
    return Step(
        ids=_pending_ids(chunks),
        positions=positions,
        # Rope scaling goes by the whole prompt's length for its tokens, by its own place for a drawn token: what one
        # forward pass over the prompt and then one a token see in transformers, however we cut the prompt.
        lengths=np.maximum(positions + np.int32(1), prompts[owners]),
        query_starts=starts,
        kv_lengths=begins + counts,
        slots=tuple(table[owners, pages] * np.int32(block_size) + places for table in tables),
        block_tables=tables,
        rows=starts[1:][[chunk.finishes for chunk in chunks]] - 1,
        decode_tokens=int(np.count_nonzero(counts == 1)),
    )


def _pending_ids(chunks: Items[Chunk]) -> Int32:
    ids: list[int] = []
    for chunk in chunks:
        begin = chunk.sequence.computed
        known = chunk.sequence.token_ids[begin : begin + chunk.tokens]
        ids += known or [0]  # of a step that runs ahead: the device has the id
    return np.array(ids, dtype=np.int32)


def _block_table(blocks: list[Int32]) -> Int32:
    """(sequences, longest) block numbers; what a sequence does not have is 0 and never read."""
    table = np.zeros((len(blocks), max(map(len, blocks))), dtype=np.int32)
    for row, held in enumerate(blocks):
        table[row, : len(held)] = held
    return table

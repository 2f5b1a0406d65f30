"""From chunks of sequences to the arrays of a step. Integers only; never touches a device."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from rvllm.engine.scheduler import Chunk
from rvllm.program.program import Int32, Step


def build_step(chunks: Items[Chunk], block_size: int) -> Step:
    """The arrays of a step that computes `chunks`, in their order; one row of logits for each that finishes."""
    spans = [range(c.sequence.computed, c.sequence.computed + c.tokens) for c in chunks]
    positions = np.concatenate([np.arange(span.start, span.stop, dtype=np.int32) for span in spans])
    counts = np.array([chunk.tokens for chunk in chunks])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    groups = range(len(chunks[0].sequence.blocks))
    tables = tuple(_block_table([chunk.sequence.blocks[group] for chunk in chunks]) for group in groups)
    owners = np.repeat(np.arange(len(chunks)), counts)
    return Step(
        ids=np.array([i for c, s in zip(chunks, spans) for i in c.sequence.token_ids[s.start : s.stop]], np.int32),
        positions=positions,
        lengths=np.concatenate([_rope_lengths(chunk, span) for chunk, span in zip(chunks, spans)]),
        query_starts=starts,
        kv_lengths=np.array([span.stop for span in spans], dtype=np.int32),
        slots=tuple(
            table[owners, positions // block_size] * np.int32(block_size) + positions % block_size for table in tables
        ),
        block_tables=tables,
        rows=starts[1:][[chunk.finishes for chunk in chunks]] - 1,
        decode_tokens=sum(chunk.tokens == 1 for chunk in chunks),
    )


def _block_table(blocks: list[list[int]]) -> Int32:
    """(sequences, longest) block numbers; what a sequence does not have is 0 and never read."""
    table = np.zeros((len(blocks), max(map(len, blocks))), dtype=np.int32)
    for row, held in zip(table, blocks):
        row[: len(held)] = held
    return table


def _rope_lengths(chunk: Chunk, span: range) -> Int32:
    """The length that rope scaling goes by: the whole prompt's for its tokens, its own place for a drawn token.

    That is what one forward pass over the prompt and then one a token see in transformers, however we cut the prompt.
    """
    prompt = len(chunk.sequence.request.prompt_ids)
    return np.maximum(np.arange(span.start + 1, span.stop + 1, dtype=np.int32), np.int32(prompt))

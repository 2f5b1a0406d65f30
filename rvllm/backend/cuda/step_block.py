"""A step on its way to the device: what the host sends of it, where its arrays lie there, what makes the one the other.

Knows begin_step's head block, and to which sizes steps are padded. The host sends a step's sequences and ids in one
copy; the device finds every token's position and slot, and attention's work. A step that follows another needs no copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rvllm.backend.cuda.launch import Launch, Target
from rvllm.backend.cuda.lower import decode_pieces
from rvllm.program.ops import Attention, parts
from rvllm.program.program import Int32, Program, Step

ALIGNMENT_BYTES = 256
HEAD_WORDS = 8
SPARE_COLUMNS = 8  # of a block table, beyond what a step needs of it
QUERY_TILE = 64  # new tokens of one item of attention_prefill at most

BlockTables = tuple[Int32, ...]
"""Of each cache group (sequences, blocks)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets of a step's arrays on the device, by the name of the tensor or of begin_step's argument.

    sequences, prefill_room: what there is room for, the latter in items; 0: tokens of prompts are in decode_work.
    """

    offsets: Mapping[str, int]
    nbytes: int
    message_words: int
    sequences: int
    prefill_room: int


def layout(
    program: Program, tokens: int, sequences: int, max_blocks: int, multiprocessors: int, batch_invariant: bool = False
) -> Layout:
    """Room for steps of up to these sizes."""
    groups = len(program.cache_groups)
    message = HEAD_WORDS + 4 * sequences + 1 + tokens + groups * sequences * max_blocks
    prefill_room = 0 if batch_invariant else -(-tokens // QUERY_TILE) + min(sequences, tokens // 2)
    queries = tokens if batch_invariant else sequences  # in decode_work
    words = {"message": message, "ids": tokens, "positions": tokens, "lengths": tokens, "rows": sequences}
    words |= {"kv_lengths": sequences, "floors": sequences, "query_starts": sequences + 1}
    words["prefill_work"] = 4 * (1 + 2 * prefill_room)
    for group, attention in enumerate(attentions(program)):
        words[f"slots.{group}"] = tokens
        words[f"block_tables.{group}"] = sequences * max_blocks
        words[f"decode_work.{group}"] = 4 * (1 + queries + decode_pieces(attention, multiprocessors))
    offsets, offset = {}, 0
    for name, count in words.items():
        offsets[name] = offset
        offset += math.ceil(4 * count / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Layout(offsets, offset, message, sequences, prefill_room)


def attentions(program: Program) -> list[Attention]:
    """An attention of each cache group."""
    found: dict[int, Attention] = {}
    for op in program.ops:
        for part in parts(op):
            if isinstance(part, Attention):
                found.setdefault(int(part.block_tables.name.rsplit(".", 1)[1]), part)
    return [found[group] for group in range(len(program.cache_groups))]


def padded_sequences(count: int, most: int) -> int:
    """The sequences, or rows of logits, of the graph that a step with so many is run by."""
    if count <= 8:
        return min(1 << (count - 1).bit_length(), most)
    step = 8 if count <= 32 else 16 if count <= 64 else 32 if count <= 256 else 64
    return min(-(-count // step) * step, most)


def padded_tokens(count: int, most: int) -> int:
    """The tokens of the graph that a step with prompts is run by: beyond 64 the products compute whole tiles anyway."""
    if count <= 128:
        return min(max(16, 1 << (count - 1).bit_length()), most)
    step = 64 if count <= 512 else 128 if count <= 1024 else 256
    return min(-(-count // step) * step, most)


def pack(step: Step, columns: int, to: Int32) -> int:
    """Write the message of a step that follows none, with so many columns of its block tables; its words."""
    head = (1, len(step.kv_lengths), step.decode_tokens, len(step.ids), len(step.rows))
    to[: len(head)] = head
    at = HEAD_WORDS
    # A sequence's tokens have its prompt's length or their own place's, whichever is more: the first one tells which.
    floors = step.lengths[step.query_starts[:-1]]
    for values in (step.kv_lengths, floors, step.query_starts, step.rows, step.ids):
        to[at : at + len(values)] = values
        at += len(values)
    return _pack_tables(step.block_tables, columns, to, at)


def pack_tables(tables: BlockTables, columns: int, to: Int32) -> int:
    """Write the message of a step that follows, where the device lacks some of the block tables; its words."""
    to[:HEAD_WORDS] = 0
    to[1] = len(tables[0])
    return _pack_tables(tables, columns, to, HEAD_WORDS)


def _pack_tables(tables: BlockTables, columns: int, to: Int32, at: int) -> int:
    to[5] = columns
    for table in tables:
        room = to[at : at + len(table) * columns].reshape(len(table), columns)
        held = table[:, :columns]
        room[:, : held.shape[1]] = held  # what is behind a sequence's blocks is never read
        at += room.size
    return at


def columns_for(tables: BlockTables, length: int, block_size: int) -> int:
    """The columns to send where the longest sequence has `length` tokens: some more, so that steps may follow."""
    return min(max(table.shape[1] for table in tables), -(-length // block_size) + SPARE_COLUMNS)


def begin(program: Program, target: Target, where: Layout) -> list[Launch]:
    """The launches of begin_step, one a cache group."""
    names = ("message", "ids", "positions", "lengths", "kv_lengths", "floors", "query_starts", "rows", "prefill_work")
    shared = [target.address(name) for name in names]
    bucket = target.bucket
    launches = []
    for group, attention in enumerate(attentions(program)):
        own = [target.address(f"{name}.{group}") for name in ("slots", "block_tables", "decode_work")]
        pieces = decode_pieces(attention, target.multiprocessors)
        numbers = (group, len(program.cache_groups), attention.window or 0, bucket.tokens)
        sizes = (where.sequences, target.max_blocks, target.block_size, pieces, where.prefill_room)
        block = 128 if bucket.tokens <= 128 else 1024
        launches.append(Launch("begin_step", "begin_step_i32", (1,), block, 0, (*shared, *own, *numbers, *sizes)))
    return launches

"""From ops to launches: kernel, geometry and arguments of each. Knows the kernels' head blocks; launches nothing.

A program is lowered once for a bucket. The addresses in a launch are those of the arena, the weights, the caches and
the step block, and stay what they are for the life of the model.
"""

from __future__ import annotations

from functools import singledispatch

from rvllm.backend.cuda.launch import Launch, Target, covering, rows_of, suffix, width_of
from rvllm.backend.cuda.products import ACTIVATIONS, product_workspace, products
from rvllm.program.dtype import E4M3
from rvllm.program.ops import (
    ActMul,
    Add,
    Attention,
    Embedding,
    Fused,
    Linear,
    Norm,
    Op,
    RopeAngles,
    RopeKV,
    SelectRows,
    Tensor,
    parts,
)
from rvllm.program.program import Program

MOST_SPLITS = 32  # into which decoding cuts the keys of a sequence
SHORT_PROMPTS = (
    16  # sequences of a step whose last tile of queries gets a block of its own, if they bring more than one token
)
WIDTH_A_BLOCK = 2048  # elements of a row that one block of the element-wise kernels does
FUSIONS = frozenset({"linear_add", "linear_act_mul"})
"""The fused kernels there are."""


def lower(op: Op, target: Target) -> list[Launch]:
    """The launches that compute `op` for the target's bucket."""
    if not isinstance(op, Fused):
        return _plain(op, target)
    first, last = op.parts
    assert op.kernel in FUSIONS and isinstance(first, Linear), op
    return products(first, last, target)


@singledispatch
def _plain(op: object, target: Target) -> list[Launch]:
    raise AssertionError(f"no lowering for {op}")


@_plain.register
def _(op: Embedding, target: Target) -> list[Launch]:
    hidden = width_of(op.out)
    values = (target.address(op.ids.name), target.address(op.table.name), target.address(op.out.name), hidden)
    return [_rowwise("embedding", op.out, target.bucket.tokens, hidden, values)]


@_plain.register
def _(op: SelectRows, target: Target) -> list[Launch]:
    hidden = width_of(op.out)
    values = (target.address(op.x.name), target.address(op.rows.name), target.address(op.out.name), hidden)
    return [_rowwise("select_rows", op.out, target.bucket.rows, hidden, values)]


@_plain.register
def _(op: ActMul, target: Target) -> list[Launch]:
    width = width_of(op.out)
    values = (target.address(op.x.name), target.address(op.out.name), width, ACTIVATIONS[op.activation])
    return [_rowwise("act_mul", op.out, target.bucket.tokens, width, values)]


@_plain.register
def _(op: RopeAngles, target: Target) -> list[Launch]:
    variants, half = op.inv_freq.sizes({})
    addresses = [target.address(t.name) for t in (op.positions, op.lengths, op.inv_freq, op.out)]
    values = (*addresses, target.bucket.tokens, half, variants, op.threshold, op.scale)
    return [Launch("rope_angles", "rope_angles_f32", (covering(target.bucket.tokens * half, 256),), 256, 0, values)]


@_plain.register
def _(op: Norm, target: Target) -> list[Launch]:
    hidden = width_of(op.out)
    rows = rows_of(op.out, target.bucket)
    values = (
        target.address(op.x.name),
        target.address(op.weight.name),
        op.epsilon,
        target.address(op.out.name),
        hidden,
    )
    # The block's size is part of the result's bits, so it follows from hidden alone.
    block = min(1024, 32 * covering(hidden, 256))
    return [Launch("norm", f"norm_{suffix(op.out.dtype)}", (rows,), block, 0, values)]


@_plain.register
def _(op: Add, target: Target) -> list[Launch]:
    count = target.bucket.tokens * width_of(op.out)
    values = (target.address(op.x.name), target.address(op.y.name), target.address(op.out.name), count)
    return [Launch("add", f"add_{suffix(op.out.dtype)}", (covering(count, WIDTH_A_BLOCK),), 256, 0, values)]


@_plain.register
def _(op: RopeKV, target: Target) -> list[Launch]:
    addresses = [target.address(t.name) for t in (op.qkv, op.angles, op.slots, op.cache, op.scales, op.out) if t]
    half = op.angles.sizes({"tokens": 1})[2]
    shape = (op.heads, op.kv_heads, op.head_dim, half, target.blocks[_group(op.slots)], target.block_size)
    entry = f"{_over('rope_kv', op.cache)}_{suffix(op.out.dtype)}"
    return [Launch("rope_kv", entry, (target.bucket.tokens,), 256, 0, (*addresses, *shape))]


@_plain.register
def _(op: Linear, target: Target) -> list[Launch]:
    return products(op, None, target)


@_plain.register
def _(op: Attention, target: Target) -> list[Launch]:
    """One launch for all sequences that bring one token, one for all that bring more: each has its list of work.

    Where bits must not depend on which of both a token is in, the first is for all.
    """
    bucket, group = target.bucket, _group(op.block_tables)
    kv_heads, head_dim = op.cache.sizes({f"blocks.{group}": 1, "block": 1})[2::2]
    blocks, address = target.blocks[group], target.address
    shape = (op.heads, kv_heads, head_dim, blocks, target.block_size, target.max_blocks, op.scale, op.window or 0)
    cached = tuple(address(t.name) for t in (op.q, op.cache, op.scales, op.block_tables) if t)
    out = address(op.out.name)
    pieces = decode_pieces(op, target.multiprocessors)
    queries = bucket.tokens if target.batch_invariant else bucket.sequences
    grid = (min(MOST_SPLITS * queries, pieces + queries), _packs(op))
    stem = _over("attention_decode", op.cache)
    entry = f"{stem}_{_build_for(head_dim, (64, 128, 256))}_{suffix(op.out.dtype)}"
    values = (*cached, address(f"decode_work.{group}"), out, target.workspace, target.counters, *shape)
    decode = Launch(stem, entry, grid, 128, _ring_bytes(op, target), values)
    if target.batch_invariant or not bucket.prefills:
        return [decode]
    # Every sequence may leave a part of a tile. Blocks for more than a few of them would mostly find nothing to do.
    grid = (op.heads, covering(bucket.tokens, 64) + min(bucket.sequences, bucket.tokens // 2, SHORT_PROMPTS))
    build = _build_for(head_dim, (64, 96, 128, 256))
    shared = 384 * (int(build[1:]) + 8) if target.tensor_cores and build != "any" else 0
    stem = _over("attention_prefill", op.cache)
    entry = f"{stem}_{build}_{suffix(op.out.dtype)}"
    values = (*cached, address("prefill_work"), out, *shape)
    return [decode, Launch(stem, entry, grid, 128, shared, values)]


def decode_pieces(op: Attention, multiprocessors: int) -> int:
    """Items of decoding that fill the GPU once. Its list has no more than these and one more for each sequence (or,
    where tokens of prompts are in it, for each token)."""
    return covering(2 * multiprocessors, _packs(op))


def _ring_bytes(op: Attention, target: Target) -> int:
    """What the rings of attention_decode's four warps take (attention_decode_ring.cuh)."""
    head_dim = op.cache.shape[4]
    assert isinstance(head_dim, int), op
    if target.tier < "t90" or head_dim % 8 or head_dim > 128:
        return 0
    width = 64 if head_dim <= 64 else 128
    tile = 16 * width + 64 if op.cache.dtype is E4M3 else 32 * width
    return 4 * 2 * (256 // width) * tile


def _packs(op: Attention) -> int:
    """The packs of up to eight heads that share keys."""
    kv_heads = op.cache.shape[2]
    assert isinstance(kv_heads, int), op
    return kv_heads * covering(op.heads // kv_heads, 8)


def _over(stem: str, cache: Tensor) -> str:
    """The kernel for that kind of cache: one of codes, or one in the activations' own format."""
    return f"{stem}_e4m3" if cache.dtype is E4M3 else stem


def _build_for(head_dim: int, sizes: tuple[int, ...]) -> str:
    """Which build of an attention kernel takes heads of this size; "any" is slow and right."""
    assert head_dim <= 256, f"head_dim {head_dim} is more than the attention kernels take"
    return "any" if head_dim % 8 else next(f"d{size}" for size in sizes if head_dim <= size)


def workspace(program: Program, sequences: int, tier: str) -> tuple[int, int]:
    """(bytes of float partials, bytes of counters) that the largest launch of any op needs on a GPU of that tier."""
    partial, counters = product_workspace(
        (part for op in program.ops for part in parts(op) if isinstance(part, Linear)), tier
    )
    for op in program.ops:
        for part in parts(op):
            if isinstance(part, Attention):
                head_dim = part.cache.sizes({f"blocks.{_group(part.block_tables)}": 1, "block": 1})[4]
                partial = max(partial, 4 * sequences * part.heads * MOST_SPLITS * (head_dim + 2))
                counters = max(counters, 4 * sequences * _packs(part))
    return partial, counters


def _rowwise(stem: str, out: Tensor, rows: int, width: int, values: tuple[int | float, ...]) -> Launch:
    return Launch(stem, f"{stem}_{suffix(out.dtype)}", (rows, covering(width, WIDTH_A_BLOCK)), 256, 0, values)


def _group(slots: Tensor) -> int:
    """The cache group of a step input named NAME.GROUP."""
    return int(slots.name.rsplit(".", 1)[1])

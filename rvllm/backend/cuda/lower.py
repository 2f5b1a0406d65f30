"""From ops to launches: kernel, geometry and arguments of each. Knows the kernels' head blocks; launches nothing.

A program is lowered once for a bucket. The addresses in a launch are those of the arena, the weights, the caches and
the step block, and stay what they are for the life of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch

from rvllm.program.dtype import BF16, E4M3, F32, DType
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
from rvllm.program.program import Program, joined_name

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
MOST_SPLITS = 32  # into which decoding cuts the keys of a sequence
SHORT_PROMPTS = (
    16  # sequences of a step whose last tile of queries gets a block of its own, if they bring more than one token
)
LINEAR_TOKENS = 64  # up to here weights are streamed past the tokens, beyond they meet in tiles
WIDE_TOKENS = 32  # beyond, warpgroups multiply where there are any
WIDE_SHARED_BYTES = {64: 99328, 128: 197632, 192: 230400}  # of a tile of gemm_t90a, with 64 tokens or by its slots
WIDE_MULTIPROCESSORS = 144  # no GPU of tier t90a has more
ALONE_SHARED_BYTES = 116 << 10  # more than half of what a multiprocessor of tier t90a has
WIDTH_A_BLOCK = 2048  # elements of a row that one block of the element-wise kernels does
FUSIONS = frozenset({"linear_add", "linear_act_mul"})
"""The fused kernels there are."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. `values` are in the order of the kernel's arguments."""

    stem: str
    entry: str
    grid: tuple[int, ...]
    block: int
    shared_bytes: int
    values: tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes that a step is padded to. prefills: whether any sequence may bring more than one token."""

    tokens: int
    rows: int
    sequences: int
    prefills: bool


@dataclass(frozen=True, slots=True)
class Target:
    """Where things are, and what the caches look like. `address` knows every tensor, joined weights by joined name."""

    address: Callable[[str], int]
    bucket: Bucket
    max_blocks: int
    blocks: tuple[int, ...]
    block_size: int
    workspace: int
    counters: int
    multiprocessors: int
    tier: str
    matrix_map: Callable[[int, int, int, int], int]
    """A matrix's address, rows, columns, and the rows of a box: the address of its map (t90a)."""
    batch_invariant: bool = False
    """Whether a token has the bits that it has alone in every step: products keep `linear`'s order of sums, and tokens
    of prompts attend as decoding does."""

    @property
    def tensor_cores(self) -> bool:
        """Whether the products' builds for tensor cores (t80) are used."""
        return self.tier >= "t80"


def lower(op: Op, target: Target) -> list[Launch]:
    """The launches that compute `op` for the target's bucket."""
    if not isinstance(op, Fused):
        return _plain(op, target)
    first, last = op.parts
    assert op.kernel in FUSIONS and isinstance(first, Linear), op
    return _linear(first, last, target)


def suffix(dtype: DType) -> str:
    """How a kernel's name ends for activations of `dtype`."""
    return "bf16" if dtype is BF16 else "f16"


@singledispatch
def _plain(op: object, target: Target) -> list[Launch]:
    raise AssertionError(f"no lowering for {op}")


@_plain.register
def _(op: Embedding, target: Target) -> list[Launch]:
    hidden = _width(op.out)
    values = (target.address(op.ids.name), target.address(op.table.name), target.address(op.out.name), hidden)
    return [_rowwise("embedding", op.out, target.bucket.tokens, hidden, values)]


@_plain.register
def _(op: SelectRows, target: Target) -> list[Launch]:
    hidden = _width(op.out)
    values = (target.address(op.x.name), target.address(op.rows.name), target.address(op.out.name), hidden)
    return [_rowwise("select_rows", op.out, target.bucket.rows, hidden, values)]


@_plain.register
def _(op: ActMul, target: Target) -> list[Launch]:
    width = _width(op.out)
    values = (target.address(op.x.name), target.address(op.out.name), width, ACTIVATIONS[op.activation])
    return [_rowwise("act_mul", op.out, target.bucket.tokens, width, values)]


@_plain.register
def _(op: RopeAngles, target: Target) -> list[Launch]:
    variants, half = op.inv_freq.sizes({})
    addresses = [target.address(t.name) for t in (op.positions, op.lengths, op.inv_freq, op.out)]
    values = (*addresses, target.bucket.tokens, half, variants, op.threshold, op.scale)
    return [Launch("rope_angles", "rope_angles_f32", (_covering(target.bucket.tokens * half, 256),), 256, 0, values)]


@_plain.register
def _(op: Norm, target: Target) -> list[Launch]:
    hidden = _width(op.out)
    rows = _rows(op.out, target.bucket)
    values = (
        target.address(op.x.name),
        target.address(op.weight.name),
        op.epsilon,
        target.address(op.out.name),
        hidden,
    )
    # The block's size is part of the result's bits, so it follows from hidden alone.
    block = min(1024, 32 * _covering(hidden, 256))
    return [Launch("norm", f"norm_{suffix(op.out.dtype)}", (rows,), block, 0, values)]


@_plain.register
def _(op: Add, target: Target) -> list[Launch]:
    count = target.bucket.tokens * _width(op.out)
    values = (target.address(op.x.name), target.address(op.y.name), target.address(op.out.name), count)
    return [Launch("add", f"add_{suffix(op.out.dtype)}", (_covering(count, WIDTH_A_BLOCK),), 256, 0, values)]


@_plain.register
def _(op: RopeKV, target: Target) -> list[Launch]:
    addresses = [target.address(t.name) for t in (op.qkv, op.angles, op.slots, op.cache, op.scales, op.out) if t]
    half = op.angles.sizes({"tokens": 1})[2]
    shape = (op.heads, op.kv_heads, op.head_dim, half, target.blocks[_group(op.slots)], target.block_size)
    entry = f"{_over('rope_kv', op.cache)}_{suffix(op.out.dtype)}"
    return [Launch("rope_kv", entry, (target.bucket.tokens,), 256, 0, (*addresses, *shape))]


@_plain.register
def _(op: Linear, target: Target) -> list[Launch]:
    return _linear(op, None, target)


def _linear(op: Linear, after: object, target: Target) -> list[Launch]:
    """A product with what follows it in the same kernel: nothing, ActMul, or Add (then the other addend is read)."""
    tokens, depth = _rows(op.out, target.bucket), _width(op.x)
    wide = target.tier == "t90a" and depth % 8 == 0 and tokens > WIDE_TOKENS
    at_once = tokens
    if target.batch_invariant and tokens > LINEAR_TOKENS:
        at_once = _wide_tokens(op, after, target) if wide else LINEAR_TOKENS
    return [
        _product(op, after, target, first, min(at_once, tokens - first), wide) for first in range(0, tokens, at_once)
    ]


def _product(op: Linear, after: object, target: Target, begin: int, tokens: int, wide: bool) -> Launch:
    """The product of tokens [begin, begin + tokens)."""
    rows, depth = sum(weight.sizes({})[0] for weight in op.weights), _width(op.x)
    few = tokens <= LINEAR_TOKENS
    bias = target.address(joined_name(op.biases)) if op.biases else 0

    def address(tensor: Tensor) -> int:
        return target.address(tensor.name) + begin * tensor.dtype.nbytes(_width(tensor))

    x, weight = address(op.x), target.address(joined_name(op.weights))
    if wide:
        most = _tile_tokens(tokens, target)
        x = target.matrix_map(x, tokens, depth, most)
        weight = target.matrix_map(weight, rows, depth, _wide_slots(after, most) // 2)
    inputs = [x, weight, bias]
    if isinstance(after, ActMul):
        name, out, tiles = "act_mul", after.out, 16 * _covering(rows // 2, 8)
        values: tuple[int | float, ...] = (tokens, rows // 2, depth, ACTIVATIONS[after.activation])
    elif isinstance(after, Add):
        name, out, tiles = "add", after.out, rows
        inputs.append(address(after.y if after.x == op.out else after.x))
        values = (tokens, rows, depth)
    else:
        name, out, tiles = ("f32" if op.out.dtype is F32 else ""), op.out, rows
        values = (tokens, rows, depth)
    stem = "_".join(filter(None, ("linear" if few and not wide else "gemm", name)))
    entry = f"{stem}_{suffix(op.x.dtype)}"
    arguments = (*inputs, address(out), *values)
    if wide:
        return _wide(stem, suffix(op.x.dtype), tokens, tiles, rows, depth, after, arguments, target)
    if few:
        return _streaming(stem, entry, tokens, tiles, depth, arguments, target)
    return _tiled(stem, entry, tokens, rows, arguments, target)


def _streaming(
    stem: str, entry: str, tokens: int, rows: int, depth: int, arguments: tuple[int | float, ...], target: Target
) -> Launch:
    """linear.cu's launch: 16-row tiles of the weights, and parts of the depth where tiles are few."""
    most = next(size for size in (8, 16, 32, 64) if size >= tokens)
    split = _depth_parts(rows, depth)
    # Two tiles a block read x half as often, as long as there are blocks for three quarters of the GPU; few tokens of a
    # short depth are read fast enough (benchmarks/LOG.md).
    wide = _covering(rows, 32) * split * 4 >= 3 * target.multiprocessors
    tall = 2 if wide and (tokens > 8 or depth >= 2048) else 1
    pieces = 2 * tall + most // 8
    shared = 4096 * pieces * min(6, 24 // pieces) if target.tensor_cores else 64 * tall * most
    grid = (_covering(rows, 16 * tall), split)
    if target.tier == "t90a" and grid[0] * split <= target.multiprocessors:
        # No two on one multiprocessor: while the grid before ends, the first that are free would get all of them.
        shared = max(shared, ALONE_SHARED_BYTES)
    return Launch(stem, f"{entry}_m{most}", grid, 256, shared, (*arguments, target.workspace, target.counters))


def _depth_parts(rows: int, depth: int) -> int:
    """How many blocks share a tile's depth. Part of the result's bits: a function of the weight's shape alone."""
    return max(1, min(8, _covering(96, _covering(rows, 16)), depth // 2048))


def _tiled(stem: str, entry: str, tokens: int, rows: int, arguments: tuple[int | float, ...], target: Target) -> Launch:
    """gemm.cu's launch; the tile's size changes no bits."""
    tile = 128 if _covering(tokens, 128) * _covering(rows, 128) >= target.multiprocessors else 64
    grid = (_covering(tokens, tile), _covering(rows, tile))
    return Launch(stem, f"{entry}_tile{tile}", grid, 128, 49152 if target.tensor_cores else 0, arguments)


def _wide(
    stem: str,
    element: str,
    tokens: int,
    slots: int,
    rows: int,
    depth: int,
    after: object,
    arguments: tuple[int | float, ...],
    target: Target,
) -> Launch:
    """gemm_t90a.cu's launch: tiles that would leave most of the GPU idle in the last wave are cut along the depth.

    Tiles of 64 tokens have the bits of linear, two of their blocks fit on a multiprocessor.
    """
    most = _tile_tokens(tokens, target)
    at_once = target.multiprocessors * (2 if most == 64 else 1)
    tiles = _covering(tokens, most) * _wide_tiles(rows, after, most)
    splits = _depth_parts(slots, depth) if most == 64 else 1
    whole = 0 if splits > 1 else tiles - tiles % at_once
    room = at_once // max(tiles - whole, 1)  # blocks for a tile
    if most == 64:
        parts = next(count for count in (8, 4, 2, 1) if count <= max(room, min(splits, 2)))
        arguments = (*arguments, splits)
    else:
        parts = max(1, min(room, most // 16, _covering(depth, 128 if most == 256 else 256)))
    grid = (whole + (tiles - whole) * parts,)
    where = (whole, parts, target.workspace, target.counters)
    entry = f"{stem}_t90a_{element}_n{most}"
    width = _wide_slots(after, most)
    shared = WIDE_SHARED_BYTES[64 if most == 64 else width]
    return Launch(f"{stem}_t90a", entry, grid, 2 * width, shared, (*arguments, *where))


def _tile_tokens(tokens: int, target: Target) -> int:
    """Tokens of a tile of gemm_t90a.cu."""
    return 64 if target.batch_invariant else next((size for size in (64, 128) if tokens <= size), 256)


def _wide_slots(after: object, most: int) -> int:
    """Slots of a tile of gemm_t90a.cu. Gate and up have rows enough for tiles that read less and leave in one wave."""
    return 192 if isinstance(after, ActMul) and most > 64 else 128


def _wide_tiles(rows: int, after: object, most: int) -> int:
    """Tiles that cover a weight's rows: act_mul has as many gate rows and their up rows in a tile."""
    slots = _wide_slots(after, most)
    return _covering(rows // 2, slots // 2) if isinstance(after, ActMul) else _covering(rows, slots)


def _wide_tokens(op: Linear, after: object, target: Target) -> int:
    """How many tokens gemm_t90a.cu takes at a time in tiles of 64: where all are cut, their parts need workspace."""
    rows, depth = sum(weight.sizes({})[0] for weight in op.weights), _width(op.x)
    splits = _depth_parts(16 * _covering(rows // 2, 8) if isinstance(after, ActMul) else rows, depth)
    if splits == 1:
        return _rows(op.out, target.bucket)
    return LINEAR_TOKENS * max(1, WIDE_MULTIPROCESSORS // (splits * _wide_tiles(rows, after, LINEAR_TOKENS)))


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
    grid = (op.heads, _covering(bucket.tokens, 64) + min(bucket.sequences, bucket.tokens // 2, SHORT_PROMPTS))
    build = _build_for(head_dim, (64, 96, 128, 256))
    shared = 384 * (int(build[1:]) + 8) if target.tensor_cores and build != "any" else 0
    stem = _over("attention_prefill", op.cache)
    entry = f"{stem}_{build}_{suffix(op.out.dtype)}"
    values = (*cached, address("prefill_work"), out, *shape)
    return [decode, Launch(stem, entry, grid, 128, shared, values)]


def decode_pieces(op: Attention, multiprocessors: int) -> int:
    """Items of decoding that fill the GPU once. Its list has no more than these and one more for each sequence (or,
    where tokens of prompts are in it, for each token)."""
    return _covering(2 * multiprocessors, _packs(op))


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
    return kv_heads * _covering(op.heads // kv_heads, 8)


def _over(stem: str, cache: Tensor) -> str:
    """The kernel for that kind of cache: one of codes, or one in the activations' own format."""
    return f"{stem}_e4m3" if cache.dtype is E4M3 else stem


def _build_for(head_dim: int, sizes: tuple[int, ...]) -> str:
    """Which build of an attention kernel takes heads of this size; "any" is slow and right."""
    assert head_dim <= 256, f"head_dim {head_dim} is more than the attention kernels take"
    return "any" if head_dim % 8 else next(f"d{size}" for size in sizes if head_dim <= size)


def workspace(program: Program, sequences: int, tier: str) -> tuple[int, int]:
    """(bytes of float partials, bytes of counters) that the largest launch of any op needs on a GPU of that tier."""
    partial, counters = 4, 4
    if tier == "t90a":  # _wide, tiles of 64 tokens
        partial, counters = WIDE_MULTIPROCESSORS * 262144, 8 * WIDE_MULTIPROCESSORS
    for op in program.ops:
        for part in parts(op):
            if isinstance(part, Linear):
                rows, depth = sum(weight.sizes({})[0] for weight in part.weights), _width(part.x)
                rows = 16 * _covering(rows, 8)  # act_mul pairs rows in tiles of eight
                split = _depth_parts(rows, depth)
                partial = max(partial, 64 * LINEAR_TOKENS * split * (_covering(rows, 16) + 1))
                if split > 1 and tier == "t90a":
                    partial = max(partial, 262144 * split * _covering(rows, 128))
                counters = max(counters, 4 * _covering(rows, 16))
            elif isinstance(part, Attention):
                head_dim = part.cache.sizes({f"blocks.{_group(part.block_tables)}": 1, "block": 1})[4]
                partial = max(partial, 4 * sequences * part.heads * MOST_SPLITS * (head_dim + 2))
                counters = max(counters, 4 * sequences * _packs(part))
    return partial, counters


def _rowwise(stem: str, out: Tensor, rows: int, width: int, values: tuple[int | float, ...]) -> Launch:
    return Launch(stem, f"{stem}_{suffix(out.dtype)}", (rows, _covering(width, WIDTH_A_BLOCK)), 256, 0, values)


def _covering(count: int, size: int) -> int:
    """Pieces of `size` that cover `count`."""
    return -(-count // size)


def _width(tensor: Tensor) -> int:
    width = tensor.shape[-1]
    assert isinstance(width, int), tensor
    return width


def _rows(tensor: Tensor, bucket: Bucket) -> int:
    return bucket.rows if tensor.shape[0] == "rows" else bucket.tokens


def _group(slots: Tensor) -> int:
    """The cache group of a step input named NAME.GROUP."""
    return int(slots.name.rsplit(".", 1)[1])

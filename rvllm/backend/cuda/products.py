"""Products with a weight to launches: which kernel, how its tiles are cut, and what it needs of the workspace.

Up to LINEAR_TOKENS a token's bits follow from the weight's shape alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from rvllm.backend.cuda.launch import Launch, Target, covering, rows_of, suffix, width_of
from rvllm.program.dtype import F32
from rvllm.program.ops import ActMul, Add, Linear, Tensor
from rvllm.program.program import joined_name

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
LINEAR_TOKENS = 64  # up to here weights are streamed past the tokens, beyond they meet in tiles
# Of gemm_t90a with 32 or 64 tokens, or by slots.
WIDE_SHARED_BYTES = {32: 103424, 64: 99328, 128: 197632, 144: 209920, 192: 230400}
SLOT_ROWS, TOKEN_ROWS = 192, 144  # slots of gemm_t90a's tiles for weights of many rows
WIDE_MULTIPROCESSORS = 144  # no GPU of tier t90a has more
# linear_t90a's rings: the fewest stages that are worth while, and the bytes of one; what a block may ask for, so that
# one of decode attention has room beside it; what it takes beside rings and tokens.
RING_STAGES, STAGE_BYTES, RING_SHARED_BYTES, RING_SUMS_BYTES = 4, 16 << 10, 160 << 10, 9 << 10
ALONE_SHARED_BYTES = 116 << 10  # more than half of what a multiprocessor of tier t90a has


def products(op: Linear, after: object, target: Target) -> list[Launch]:
    """A product with what follows it in the same kernel: nothing, ActMul, or Add (then the other addend is read)."""
    tokens, depth = rows_of(op.out, target.bucket), width_of(op.x)
    tuning = target.tuning
    large = 2 * _rows(op) * depth >= tuning.large_bytes
    wide_from = tuning.wide_tokens_large if large else tuning.wide_tokens
    wide = target.tier == "t90a" and depth % 8 == 0 and tokens > wide_from
    at_once = tokens
    if target.batch_invariant and tokens > LINEAR_TOKENS:
        at_once = _wide_tokens(op, after, target) if wide else LINEAR_TOKENS
    return [
        _product(op, after, target, first, min(at_once, tokens - first), wide) for first in range(0, tokens, at_once)
    ]


def _product(op: Linear, after: object, target: Target, begin: int, tokens: int, wide: bool) -> Launch:
    """The product of tokens [begin, begin + tokens)."""
    rows, depth = _rows(op), width_of(op.x)
    few = tokens <= LINEAR_TOKENS
    stages = _ring_stages(op, after, tokens, target)
    low = tokens <= target.tuning.low_tile_tokens and not isinstance(after, ActMul)
    tall = _ring_rows(rows, target) if low else 16
    bias = target.address(joined_name(op.biases)) if op.biases else 0

    def address(tensor: Tensor) -> int:
        return target.address(tensor.name) + begin * tensor.dtype.nbytes(width_of(tensor))

    x, weight = address(op.x), target.address(joined_name(op.weights))
    if wide:
        most = _tile_tokens(op, after, tokens, target)
        x = target.matrix_map(x, tokens, depth, most)
        weight = target.matrix_map(weight, rows, depth, _wide_slots(op, after, tokens, most, target) // 2)
    elif stages:
        weight = target.matrix_map(weight, rows, depth, 8 if isinstance(after, ActMul) else tall)
    inputs = [x, weight, bias]
    if isinstance(after, ActMul):
        name, out, tiles = "act_mul", after.out, 16 * covering(rows // 2, 8)
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
        return _wide(stem, op, after, tokens, tiles, arguments, target)
    if stages:
        # A block a multiprocessor, which stays for its share of the tiles. No two on one: while the grid before ends,
        # the first that are free would get two, and others none.
        grid = (min(covering(tiles, tall), target.multiprocessors),)
        shared = max(stages * STAGE_BYTES + _ring_room(tokens, depth), ALONE_SHARED_BYTES)
        arguments = (*arguments, stages) if isinstance(after, ActMul) else (*arguments, tall, stages)
        return Launch(f"{stem}_t90a", f"{stem}_t90a_{suffix(op.x.dtype)}", grid, 256, shared, arguments)
    if few:
        return _streaming(stem, entry, tokens, tiles, depth, arguments, target)
    return _tiled(stem, entry, tokens, rows, arguments, target)


def _ring_stages(op: Linear, after: object, tokens: int, target: Target) -> int:
    """Stages of the rings of linear_t90a.cu; 0: it takes no such product, or its tokens leave no room for enough."""
    depth = width_of(op.x)
    slots = 16 * covering(_rows(op) // 2, 8) if isinstance(after, ActMul) else _rows(op)
    tuning = target.tuning
    if target.tier != "t90a" or depth % 8 or _depth_parts(slots, depth) > 1:
        return 0
    if tokens > tuning.ring_tokens or 2 * tokens * depth > tuning.ring_bytes:
        return 0
    stages = min(tuning.ring_stages, (RING_SHARED_BYTES - _ring_room(tokens, depth)) // STAGE_BYTES)
    return stages if stages >= RING_STAGES else 0


def _ring_rows(rows: int, target: Target) -> int:
    """Rows of a tile of linear_t90a.cu: up to 16, as few as let no multiprocessor have more tiles than of 16."""
    rounds = covering(covering(rows, 16), target.multiprocessors)
    return min(16, covering(rows, rounds * target.multiprocessors))


def _ring_room(tokens: int, depth: int) -> int:
    """Shared memory of a block of linear_t90a.cu beside its rings."""
    return RING_SUMS_BYTES + tokens * (128 * covering(depth, 64) + 16)


def _streaming(
    stem: str, entry: str, tokens: int, rows: int, depth: int, arguments: tuple[int | float, ...], target: Target
) -> Launch:
    """linear.cu's launch: 16-row tiles of the weights, and parts of the depth where tiles are few."""
    most = next(size for size in (8, 16, 32, 64) if size >= tokens)
    split = _depth_parts(rows, depth)
    # Two tiles a block read x half as often, as long as there are blocks for three quarters of the GPU; few tokens of a
    # short depth are read fast enough (benchmarks/LOG.md).
    wide = covering(rows, 32) * split * 4 >= 3 * target.multiprocessors
    tall = 2 if wide and (tokens > 8 or depth >= 2048) else 1
    pieces = 2 * tall + most // 8
    shared = 4096 * pieces * min(6, 24 // pieces) if target.tensor_cores else 64 * tall * most
    grid = (covering(rows, 16 * tall), split)
    if target.tier == "t90a" and grid[0] * split <= target.multiprocessors:
        # No two on one multiprocessor: while the grid before ends, the first that are free would get all of them.
        shared = max(shared, ALONE_SHARED_BYTES)
    return Launch(stem, f"{entry}_m{most}", grid, 256, shared, (*arguments, target.workspace, target.counters))


def _depth_parts(rows: int, depth: int) -> int:
    """How many blocks share a tile's depth. Part of the result's bits: a function of the weight's shape alone."""
    return max(1, min(8, covering(96, covering(rows, 16)), depth // 2048))


def _tiled(stem: str, entry: str, tokens: int, rows: int, arguments: tuple[int | float, ...], target: Target) -> Launch:
    """gemm.cu's launch; the tile's size changes no bits."""
    tile = 128 if covering(tokens, 128) * covering(rows, 128) >= target.multiprocessors else 64
    grid = (covering(tokens, tile), covering(rows, tile))
    return Launch(stem, f"{entry}_tile{tile}", grid, 128, 49152 if target.tensor_cores else 0, arguments)


def _wide(
    stem: str, op: Linear, after: object, tokens: int, slots: int, arguments: tuple[int | float, ...], target: Target
) -> Launch:
    """gemm_t90a.cu's launch: tiles that would leave most of the GPU idle in the last wave are cut along the depth.

    Tiles of 32 and 64 tokens have the bits of linear, two of their blocks fit on a multiprocessor.
    """
    depth = width_of(op.x)
    most = _tile_tokens(op, after, tokens, target)
    width = _wide_slots(op, after, tokens, most, target)
    at_once = target.multiprocessors * (2 if most <= 64 else 1)
    tiles = covering(tokens, most) * _wide_tiles(op, after, width)
    splits = _depth_parts(slots, depth) if most <= 64 else 1
    whole = 0 if splits > 1 else tiles - tiles % at_once
    room = at_once // max(tiles - whole, 1)  # blocks for a tile
    if most <= 64:
        parts = next(count for count in (8, 4, 2, 1) if count <= max(room, min(splits, 2)))
        arguments = (*arguments, splits)
    else:
        shares = width // 16 if width == TOKEN_ROWS else most // 16
        parts = max(1, min(room, shares, covering(depth, 128 if most == 256 else 256)))
    grid = (whole + (tiles - whole) * parts,)
    where = (whole, parts, target.workspace, target.counters)
    rows_are = "t" if width == TOKEN_ROWS else "n"
    entry = f"{stem}_t90a_{suffix(op.x.dtype)}_{rows_are}{most}"
    block = 2 * (most if rows_are == "t" else width)
    shared = WIDE_SHARED_BYTES[most if most <= 64 else width]
    return Launch(f"{stem}_t90a", entry, grid, block, shared, (*arguments, *where))


def _rows(op: Linear) -> int:
    return sum(weight.sizes({})[0] for weight in op.weights)


def _tile_tokens(op: Linear, after: object, tokens: int, target: Target) -> int:
    """Tokens of a tile of gemm_t90a.cu.

    Where larger ones would be cut into many parts, their sums take longer than what smaller ones read more.
    """
    if target.batch_invariant or tokens <= 64:
        return 32 if tokens <= 32 else 64
    if tokens <= 128:
        return 128
    cut_in = target.multiprocessors // (covering(tokens, 256) * _wide_tiles(op, after, 128))
    return 128 if cut_in > target.tuning.most_parts_of_256 else 256


def _wide_slots(op: Linear, after: object, tokens: int, most: int, target: Target) -> int:
    """Slots of a tile of gemm_t90a.cu."""
    if most <= 64 or not (isinstance(after, ActMul) or op.out.dtype is F32):
        return 128

    more = {SLOT_ROWS: target.tuning.slot_tile_depth, TOKEN_ROWS: target.tuning.token_tile_depth}

    def cost(slots: int) -> int:
        tiles = covering(tokens, most) * _wide_tiles(op, after, slots)
        return covering(tiles, target.multiprocessors) * (width_of(op.x) + more[slots])

    return min(TOKEN_ROWS, SLOT_ROWS, key=cost)


def _wide_tiles(op: Linear, after: object, slots: int) -> int:
    """Tiles that cover a weight's rows: act_mul has as many gate rows and their up rows in a tile."""
    rows = _rows(op)
    return covering(rows // 2, slots // 2) if isinstance(after, ActMul) else covering(rows, slots)


def _wide_tokens(op: Linear, after: object, target: Target) -> int:
    """How many tokens gemm_t90a.cu takes at a time in tiles of 64: where all are cut, their parts need workspace."""
    rows, depth = _rows(op), width_of(op.x)
    splits = _depth_parts(16 * covering(rows // 2, 8) if isinstance(after, ActMul) else rows, depth)
    if splits == 1:
        return rows_of(op.out, target.bucket)
    return LINEAR_TOKENS * max(1, WIDE_MULTIPROCESSORS // (splits * _wide_tiles(op, after, 128)))


def product_workspace(ops: Iterable[Linear], tier: str) -> tuple[int, int]:
    """(bytes of float partials, bytes of counters) that the largest product of these needs on a GPU of that tier."""
    partial, counters = 4, 4
    if tier == "t90a":  # _wide, tiles of 64 tokens
        partial, counters = WIDE_MULTIPROCESSORS * 262144, 8 * WIDE_MULTIPROCESSORS
    for op in ops:
        rows, depth = _rows(op), width_of(op.x)
        rows = 16 * covering(rows, 8)  # act_mul pairs rows in tiles of eight
        split = _depth_parts(rows, depth)
        partial = max(partial, 64 * LINEAR_TOKENS * split * (covering(rows, 16) + 1))
        if split > 1 and tier == "t90a":
            partial = max(partial, 262144 * split * covering(rows, 128))
        counters = max(counters, 4 * covering(rows, 16))
    return partial, counters

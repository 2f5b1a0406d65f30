"""What the attention tests share: a paged cache full of NaN but for what may be read, attention over it in float64, and
lists of work as begin_step makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.backend.definitions import encode
from rvllm.program.dtype import BF16, Float32, load
from tests.kernels.device import Array
from tests.kernels.elements import Element, poison

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]

NO_BLOCK = 1 << 29  # far outside any cache: who reads it as a block crashes
QUERY_TILE = 64  # new tokens of an item of attention_prefill at most


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention heads and the cache that they read."""

    heads: int
    kv_heads: int
    head_dim: int
    block: int = 16

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}b{self.block}"


@dataclass(frozen=True, slots=True)
class Paged:
    """Sequences in a cache. keys, values: of each sequence (kv_heads, length, head_dim). scales: of a cache of codes."""

    shape: Shape
    lengths: Int32
    cache: Array
    tables: Int32
    keys: list[Float64]
    values: list[Float64]
    scales: Float32 | None = None

    @property
    def cached(self) -> list[Array]:
        """The cache as kernels are given it."""
        return [self.cache] if self.scales is None else [self.cache, self.scales]

    def over(self, stem: str) -> str:
        """The stem of the kernel for this kind of cache."""
        return stem if self.scales is None else f"{stem}_e4m3"

    @property
    def arguments(self) -> list[int]:
        """heads, kv_heads, head_dim, blocks, block_size, max_blocks: how every attention kernel is told the shape."""
        shape = self.shape
        return [
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            self.cache.shape[1],
            shape.block,
            self.tables.shape[1],
        ]

    def attend(
        self, sequence: int, q: Float32, positions: npt.NDArray[np.int64], window: int
    ) -> tuple[Float64, Float64]:
        """softmax(scale q k^T) v and, as a measure of rounding errors, the same with |v|. q: (queries, heads, head_dim)."""
        group = self.shape.heads // self.shape.kv_heads
        keys, values = (
            np.repeat(part[sequence], group, axis=0).astype(np.float64) for part in (self.keys, self.values)
        )
        scores = np.einsum("qhd,hkd->hqk", q.astype(np.float64), keys) * self.shape.scale
        age = positions[:, None] - np.arange(keys.shape[1])[None, :]
        scores[:, (age < 0) | (age >= window if window else False)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,hkd->qhd", weights, values), np.einsum("hqk,hkd->qhd", weights, np.abs(values))


def paged(
    rng: np.random.Generator,
    element: Element,
    shape: Shape,
    lengths: Sequence[int],
    first_read: Sequence[int] | None = None,
    *,
    codes: bool = False,
) -> Paged:
    """Sequences of those lengths in shuffled blocks. Positions before `first_read` are NaN, and their blocks are none.

    codes: the cache holds E4M3 codes; rows are of very different sizes, so that a wrong scale shows.
    """
    counts = [-(-length // shape.block) for length in lengths]
    blocks = rng.permutation(sum(counts) + 2)
    cache: Array = poison(2, len(blocks), shape.kv_heads, shape.block, shape.head_dim)
    scales = None
    if codes:
        cache = np.full(cache.shape, 0x7F, dtype=np.uint8)
        scales = np.full(cache.shape[:-1], np.nan, dtype=np.float32)
    tables = np.full((len(lengths), max(counts) + 1), NO_BLOCK, dtype=np.int32)
    keys, values, used = [], [], 0
    for sequence, length in enumerate(lengths):
        bits: Array = element.normal(rng, 2, shape.kv_heads, length, shape.head_dim)
        rows = element.decode(bits).astype(np.float64)
        first = first_read[sequence] if first_read else 0
        tables[sequence, : counts[sequence]] = blocks[used : used + counts[sequence]]
        used += counts[sequence]
        places = np.arange(first, length)
        where = (slice(None), tables[sequence, places // shape.block], slice(None), places % shape.block)
        if scales is not None:
            bits, units = encode((rows * 2.0 ** rng.integers(-6, 2, (2, *rows.shape[1:3], 1))).astype(np.float32))
            rows = load(bits) * units[..., None].astype(np.float64)
            scales[where] = units[:, :, first:].transpose(2, 0, 1)
        cache[where] = bits[:, :, first:].transpose(2, 0, 1, 3)
        tables[sequence, : first // shape.block] = NO_BLOCK
        keys.append(rows[0])
        values.append(rows[1])
    return Paged(shape, np.array(lengths, dtype=np.int32), cache, tables, keys, values, scales)


def bound(element: Element, truth: Float64, mass: Float64, *, codes: bool = False) -> Float64:
    """How far a result may be off: its own rounding, that of every weight, and float sums. mass: as `attend` gives it.

    Over codes weights are rounded to bf16.
    """
    half_place = 2.0**-8 if element.dtype is BF16 else 2.0**-11
    weights = 2.0**-8 if codes else half_place
    return half_place * np.abs(truth) + (weights + 2.0**-15) * mass + 2.0**-25  # the last: subnormal halves


SMALLEST = 128  # keys of a split of a step of few sequences


def splits_of(length: int, window: int = 0, smallest: int = SMALLEST) -> int:
    """Into how many parts decoding cuts the keys of a sequence: at multiples of `smallest`, of more if they are too many."""
    first = max(0, length - window) if window else 0
    chunk = smallest
    while (length - first - 1) // chunk >= 31:
        chunk *= 2
    return (length - 1) // chunk - first // chunk + 1


def ring_bytes(shape: Shape, tier: str, *, codes: bool = False) -> int:
    """Shared memory of the rings of attention_decode_ring.cuh: 4 warps, 256 / width stages, keys and values of 16 rows."""
    if tier < "t90" or shape.head_dim % 8 or shape.head_dim > 128:
        return 0
    width = 64 if shape.head_dim <= 64 else 128
    return 4 * (256 // width) * 2 * 16 * (width + 4 if codes else 2 * width)


def work_list(items: Sequence[tuple[int, int, int, int]], room: int, smallest: int = SMALLEST) -> Int32:
    """A list of attention_work.cuh with room for `room` items at least; what is not there would be far outside."""
    words = np.full((1 + max(room, len(items)), 4), NO_BLOCK, dtype=np.int32)
    words[0, :2] = len(items), smallest
    words[1 : 1 + len(items)] = np.array(items, dtype=np.int32).reshape(-1, 4)
    return words


def decode_item(
    row: int, sequence: int, length: int, first: int, end: int, fresh: int = 32
) -> tuple[int, int, int, int]:
    """The words of splits [first, end) for the query of a row, the last of its sequence's first `length` tokens.

    fresh: of these tokens' keys this step writes the last so many, at the most.
    """
    return row, sequence, length, first | end << 6 | fresh << 12


def decode_items(
    lengths: Sequence[int], window: int = 0, most: int = 1, smallest: int = SMALLEST
) -> list[tuple[int, int, int, int]]:
    """Of sequences that bring one token, `most` splits an item; none of length 0."""
    return [
        decode_item(sequence, sequence, length, first, min(first + most, splits))
        for sequence, length in enumerate(lengths)
        if length
        for splits in [splits_of(length, window, smallest)]
        for first in range(0, splits, most)
    ]


def token_items(lengths: Sequence[int], counts: Sequence[int], window: int = 0) -> list[tuple[int, int, int, int]]:
    """One item for each of the last `counts` tokens of sequences that bring more than one, with all its splits."""
    starts = np.cumsum([0, *counts]).tolist()
    return [
        decode_item(starts[sequence] + place, sequence, seen, 0, splits_of(seen, window), place + 1)
        for sequence, (length, count) in enumerate(zip(lengths, counts))
        if count > 1
        for place, seen in enumerate(range(length - count + 1, length + 1))
    ]


def prefill_items(lengths: Sequence[int], counts: Sequence[int], skip: int = 0) -> list[tuple[int, int, int, int]]:
    """(row, rows, position, sequence) of the last `counts` tokens of each sequence but for the first `skip`."""
    starts = np.cumsum([0, *counts]).tolist()
    return [
        (starts[sequence] + first, min(QUERY_TILE, count - first), lengths[sequence] - count + first, sequence)
        for sequence, count in enumerate(counts)
        if sequence >= skip
        for first in range(0, count, QUERY_TILE)
    ]

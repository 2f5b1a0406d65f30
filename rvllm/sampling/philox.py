"""Philox4x32-10, the counter-based random numbers of the sampler. Knows seeds and counters; keeps no state.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), section 3.3. A number is a
pure function of (seed, position, token id), so a CUDA kernel, in any order and any launch shape, draws the
same bits as this file.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import Float32

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]
Words = tuple[UInt64, UInt64, UInt64, UInt64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_PIECE = 1 << 13  # blocks made at once: arrays of 64 KB stay in the cache over the ten rounds

UNIT_MIN = 2.0**-33
UNIT_MAX = 1.0 - 2.0**-24


def philox4x32(counter: Words, key: tuple[UInt64, UInt64]) -> Words:
    """Ten rounds over arrays of 32-bit words, each held in a uint64. Counters share a shape; keys broadcast to it."""
    c0, c1, c2, c3 = (word.copy() for word in counter)
    k0, k1 = key
    spare0, spare1 = np.empty_like(c0), np.empty_like(c0)
    for _ in range(_ROUNDS):
        # Six buffers change places: without them, allocating costs as much as the arithmetic.
        product0 = np.multiply(c0, _MULTIPLIERS[0], out=spare0)
        product1 = np.multiply(c2, _MULTIPLIERS[1], out=spare1)
        next0 = np.right_shift(product1, _HALF, out=c0)
        next0 ^= c1
        next0 ^= k0
        next2 = np.right_shift(product0, _HALF, out=c2)
        next2 ^= c3
        next2 ^= k1
        spare0, spare1 = c1, c3
        product0 &= _LOW
        product1 &= _LOW
        c0, c1, c2, c3 = next0, product1, next2, product0
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def unit_float(bits: npt.NDArray[np.uint32]) -> Float32:
    """32 random bits as float32 in [2**-33, 1 - 2**-24], strictly between 0 and 1.

    min(float32(bits) * 2**-32 + 2**-33, 1 - 2**-24), each operation rounded to nearest even. In CUDA:
    fminf(__fmaf_rn(__uint2float_rn(bits), 0x1p-32f, 0x1p-33f), 0x1.fffffep-1f): the product is exact, so
    fused and unfused agree. All 32 bits are used because Gumbel-max reads its rarest outcomes from the
    smallest values: with a step of 2**-24 a tail of tokens of probability 1e-8 would almost never be drawn.
    """
    spread = bits.astype(np.float32) * np.float32(2.0**-32) + np.float32(UNIT_MIN)
    return np.minimum(spread, np.float32(UNIT_MAX))


def uniform(seed: int | Int64, position: int | Int64, ids: Int64) -> Float32:
    """One number in (0, 1) a token: float32, the shape of `ids` (n,).

    `seed` (int64, any value) and `position` (0 to 2**32 - 1) are single or one a token. The key is the seed's
    low and high half, the counter (id // 4, position, 0, 0), the word number id % 4 of the four.
    """
    assert ids.ndim == 1, ids.shape
    words = _block_words(_int64s(seed), _int64s(position), ids >> 2)
    return unit_float(words[np.arange(ids.size), ids & 3])


def uniform_row(seed: int, position: int, size: int) -> Float32:
    """What `uniform` gives for ids 0 to size - 1, (size,), with each block of four made once."""
    blocks = np.arange((size + 3) // 4)
    return unit_float(_block_words(_int64s(seed), _int64s(position), blocks).reshape(-1)[:size])


def _int64s(values: int | Int64) -> Int64:
    return np.atleast_1d(np.asarray(values, np.int64))


def _block_words(seeds: Int64, positions: Int64, blocks: Int64) -> npt.NDArray[np.uint32]:
    """(n, 4) uint32: the four words of each block (n,); seeds and positions (n,) or (1,)."""
    words = np.empty((blocks.size, 4), np.uint32)
    for start in range(0, blocks.size, _PIECE):
        part = slice(start, start + _PIECE)
        # To uint64 a negative seed wraps, as two's complement.
        key, place, block = (_piece(array, part).astype(np.uint64) for array in (seeds, positions, blocks))
        zero = np.zeros_like(block)
        counter = (block, np.broadcast_to(place, block.shape), zero, zero)
        for lane, word in enumerate(philox4x32(counter, (key & _LOW, key >> _HALF))):
            words[part, lane] = word
    return words


def _piece(array: Int64, part: slice) -> Int64:
    return array if array.size == 1 else array[part]


def fresh_seed() -> int:
    """A seed from the system's entropy, for a request that gave none: any int64."""
    return secrets.randbits(64) - 2**63


def offset_seed(seed: int, offset: int) -> int:
    """seed + offset, wrapping within int64: the seed of a batch's row, or of a request's nth choice."""
    return (seed + offset + 2**63) % 2**64 - 2**63

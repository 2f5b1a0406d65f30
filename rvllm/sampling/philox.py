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
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF

UNIT_MIN = 2.0**-33
UNIT_MAX = 1.0 - 2.0**-24


def philox4x32(counter: Words, key: tuple[UInt64, UInt64]) -> Words:
    """Ten rounds over arrays of 32-bit words, each word held in a uint64; the arrays broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
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
    seeds, positions, ids = np.broadcast_arrays(np.asarray(seed, np.int64), np.asarray(position, np.int64), ids)
    blocks = ids >> 2
    # Neighbouring ids share a block of four words: compute each run of equal (seed, position, block) once.
    first = np.ones(ids.size, np.bool_)
    first[1:] = blocks[1:] != blocks[:-1]
    if np.ndim(seed) or np.ndim(position):
        first[1:] |= (seeds[1:] != seeds[:-1]) | (positions[1:] != positions[:-1])
    words = _block_words(seeds[first], positions[first], blocks[first])
    return unit_float(words[ids & 3, np.cumsum(first) - 1])


def _block_words(seeds: Int64, positions: Int64, blocks: Int64) -> npt.NDArray[np.uint32]:
    """(4, n) uint32: the four words of each (seed, position, block)."""
    bits = seeds.astype(np.uint64)  # wraps: two's complement
    zero = np.zeros_like(bits)
    words = np.empty((4, bits.size), np.uint32)
    step = 1 << 13  # arrays of 64 KB stay in the cache over the ten rounds
    for start in range(0, bits.size, step):
        part = slice(start, start + step)
        counter = (blocks[part].astype(np.uint64), positions[part].astype(np.uint64), zero[part], zero[part])
        words[:, part] = philox4x32(counter, (bits[part] & _LOW, bits[part] >> 32))
    return words


def fresh_seed() -> int:
    """A seed from the system's entropy, for a request that gave none: any int64."""
    return secrets.randbits(64) - 2**63


def offset_seed(seed: int, offset: int) -> int:
    """seed + offset, wrapping within int64: the seed of a batch's row, or of a request's nth choice."""
    return (seed + offset + 2**63) % 2**64 - 2**63

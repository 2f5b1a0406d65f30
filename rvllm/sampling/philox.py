"""Philox4x64-10, the counter-based random numbers of the sampler. Knows seeds and counters; keeps no state.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), section 3.3. A number is a
pure function of (seed, position, token id), so a CUDA kernel, in any order and any launch shape, draws the
same bits as this file. It is numpy's own generator of that name, which makes the numbers of a whole row.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import Float32

UInt64 = npt.NDArray[np.uint64]
UInt16 = npt.NDArray[np.uint16]
UInt32 = npt.NDArray[np.uint32]
Int64 = npt.NDArray[np.int64]
Words = tuple[UInt64, UInt64, UInt64, UInt64]

BLOCK_IDS = 16  # token ids that share a counter
_HIGH, _LOW_PART = 0, 1
_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
_KEY_STEPS = np.array([[0xBB67AE8584CAA73B], [0x9E3779B97F4A7C15]], np.uint64)
_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)

UNIT_MIN = 2.0**-33
UNIT_MAX = 1.0 - 2.0**-24


def philox4x64(counter: Words, key: tuple[UInt64, UInt64]) -> Words:
    """Ten rounds over arrays of 64-bit words. Counters share a shape (n,); keys have it too, or (1,)."""
    even, odd = np.stack([counter[0], counter[2]]), np.stack([counter[3], counter[1]])
    keys = np.stack([key[1], key[0]])
    for _ in range(_ROUNDS):
        high, low = _product(even)
        # The products change places: what words 0 and 1 become comes from word 2, and the other way round.
        high ^= odd
        high ^= keys
        even, odd = high[::-1], low
        keys = keys + _KEY_STEPS
    return even[0], odd[1], even[1], odd[0]


def _product(words: UInt64) -> tuple[UInt64, UInt64]:
    """The upper and the lower 64 bits of words times the multipliers, (2, n)."""
    wide_low, wide_high = words & _LOW, words >> _HALF
    low, high = _MULTIPLIERS & _LOW, _MULTIPLIERS >> _HALF
    middle = wide_low * low
    middle >>= _HALF
    middle += wide_high * low
    rest = middle & _LOW
    rest += wide_low * high
    rest >>= _HALF
    middle >>= _HALF
    wide_high *= high
    wide_high += middle
    wide_high += rest
    return wide_high, words * _MULTIPLIERS


def unit_float(bits: UInt32) -> Float32:
    """32 random bits as float32 in [2**-33, 1 - 2**-24], strictly between 0 and 1.

    min(float32(bits) * 2**-32 + 2**-33, 1 - 2**-24), each operation rounded to nearest even. In CUDA:
    fminf(__fmaf_rn(__uint2float_rn(bits), 0x1p-32f, 0x1p-33f), 0x1.fffffep-1f): the product is exact, so
    fused and unfused agree. All 32 bits are used because Gumbel-max reads its rarest outcomes from the
    smallest values: with a step of 2**-24 a tail of tokens of probability 1e-8 would almost never be drawn.
    """
    spread: Float32 = bits.astype(np.float32)
    spread *= np.float32(2.0**-32)
    spread += np.float32(UNIT_MIN)
    return np.minimum(spread, np.float32(UNIT_MAX), out=spread)


def uniform(seed: int | Int64, position: int | Int64, ids: Int64) -> Float32:
    """One number in (0, 1) a token: float32, the shape of `ids` (n,); see `uniform_bits`."""
    return unit_float(uniform_bits(seed, position, ids))


def uniform_bits(seed: int | Int64, position: int | Int64, ids: Int64) -> UInt32:
    """32 random bits a token, the shape of `ids` (n,).

    `seed` (int64, any value) and `position` (0 to 2**32 - 1) are single or one a token. The upper half is number
    id % 16 of the sixteen quarters of the words, the lowest of each first, of the counter (id // 16 + 1, position, 0,
    0) under the key (seed, 0); the lower half is the same of (id // 16 + 1, position, 1, 0). In two parts, because
    where many tokens are drawn from the upper halves leave few that can win. The counter starts at 1 because numpy's
    generator counts before it draws.
    """
    assert ids.ndim == 1, ids.shape
    if ids.size == 0:
        return np.zeros(0, np.uint32)
    # To uint64 a negative seed wraps, as two's complement.
    pair = [np.broadcast_to(np.asarray(value, np.int64), ids.shape) for value in (seed, position)]
    key, place, block = (np.tile(one, 2).astype(np.uint64) for one in (*pair, ids // BLOCK_IDS + 1))
    part = np.repeat(np.array([_HIGH, _LOW_PART], np.uint64), ids.size)
    words = philox4x64((block, place, part, np.zeros_like(block)), (key, np.zeros_like(key)))
    quarters = np.stack(words, axis=1).view(np.uint16)
    high, low = quarters[np.arange(2 * ids.size), np.tile(ids % BLOCK_IDS, 2)].astype(np.uint32).reshape(2, -1)
    return high << np.uint32(16) | low


class RowBits:
    """The bits of whole rows, by numpy's generator: one object is moved from row to row, since a new one is dear."""

    def __init__(self) -> None:
        self._generator = np.random.Philox(0)
        self._state = self._generator.state

    def high(self, seed: int, position: int, size: int) -> UInt16:
        """The upper halves of what `uniform_bits` gives for ids 0 to size - 1, (size,)."""
        return self._quarters(seed, position, _HIGH, 0, -(-size // BLOCK_IDS))[:size]

    def both(self, seed: int, position: int, size: int) -> UInt32:
        """All of the bits of ids 0 to size - 1, (size,)."""
        low = self._quarters(seed, position, _LOW_PART, 0, -(-size // BLOCK_IDS))[:size]
        return self.high(seed, position, size).astype(np.uint32) << np.uint32(16) | low

    def low(self, seed: int, position: int, token: int) -> int:
        """The lower half of one id."""
        return int(self._quarters(seed, position, _LOW_PART, token // BLOCK_IDS, 1)[token % BLOCK_IDS])

    def _quarters(self, seed: int, position: int, part: int, block: int, blocks: int) -> UInt16:
        counter, key = np.array([block, position, part, 0], np.uint64), np.array([seed % 2**64, 0], np.uint64)
        self._state["state"] = {"counter": counter, "key": key}
        self._generator.state = self._state
        words: UInt64 = self._generator.random_raw(4 * blocks)
        return words.view(np.uint16)


def fresh_seed() -> int:
    """A seed from the system's entropy, for a request that gave none: any int64."""
    return secrets.randbits(64) - 2**63


def offset_seed(seed: int, offset: int) -> int:
    """seed + offset, wrapping within int64: the seed of a batch's row, or of a request's nth choice."""
    return (seed + offset + 2**63) % 2**64 - 2**63

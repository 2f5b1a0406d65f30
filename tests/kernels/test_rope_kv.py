"""rope_kv against its definition, bit for bit: two products and a sum of floats, each rounded, then one rounding to X."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from rvllm.backend import definitions as define
from tests.kernels.device import Argument, Device
from tests.kernels.elements import Bits, Element, poison

STEM = "rope_kv"
RNG = np.random.default_rng(8)


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    half: int
    block: int = 16

    def __str__(self) -> str:
        return f"{self.heads}+{self.kv_heads}x{self.head_dim}/{self.half}"


SHAPES = [
    Shape(14, 2, 64, 32),
    Shape(28, 4, 128, 64, block=32),
    Shape(3, 1, 10, 5, block=4),
    Shape(4, 4, 80, 40),
    Shape(2, 1, 96, 16, block=64),  # partial, in packs
    Shape(2, 2, 64, 12),  # partial, one by one
    Shape(2, 1, 6, 3),
    Shape(2, 1, 16, 0),  # nothing is rotated
]
BLOCKS = 5


def inputs(element: Element, shape: Shape, tokens: int) -> tuple[Bits, np.ndarray]:
    qkv = element.normal(RNG, tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    turns = RNG.uniform(-np.pi, np.pi, (tokens, shape.half))
    return qkv, np.stack([np.cos(turns), np.sin(turns)], axis=1).astype(np.float32)


def run(
    device: Device,
    element: Element,
    shape: Shape,
    qkv: Bits,
    angles: np.ndarray,
    slots: np.ndarray,
    tier: str | None = None,
) -> tuple[Bits, Bits]:
    """What is handed on, and the cache, in which what was not written is poison."""
    cache = poison(2, BLOCKS, shape.kv_heads, shape.block, shape.head_dim)
    out = poison(len(qkv), shape.heads * shape.head_dim)
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.half, BLOCKS, shape.block)
    args: list[Argument] = [qkv, angles, slots, cache, out, *sizes]
    device.run(STEM, f"rope_kv_{element.name}", (len(qkv),), 256, args, tier=tier)
    return out, cache


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_q_k_and_v_are_those_of_the_definition(
    device: Device, element: Element, tier: str, shape: Shape, tokens: int
) -> None:
    qkv, angles = inputs(element, shape, tokens)
    slots = RNG.permutation(BLOCKS * shape.block)[:tokens].astype(np.int32)
    out, cache = run(device, element, shape, qkv, angles, slots, tier)
    expected_cache = np.full(cache.shape, np.nan, dtype=np.float32)
    expected = define.rope_kv(
        element.decode(qkv), angles, slots, expected_cache, shape.heads, element.dtype, element.dtype
    )
    assert np.array_equal(out, element.encode(expected))
    written = ~np.isnan(expected_cache)
    assert written.sum() == 2 * tokens * shape.kv_heads * shape.head_dim
    assert np.array_equal(cache[written], element.encode(expected_cache)[written])
    assert np.all(cache[~written] == 0xFFFF)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
def test_a_negative_slot_writes_nothing_but_q(device: Device, element: Element, shape: Shape) -> None:
    qkv, angles = inputs(element, shape, 4)
    out, cache = run(device, element, shape, qkv, angles, np.array([-1, 7, -1, -64], dtype=np.int32))
    block, place = divmod(7, shape.block)
    assert not np.any(out == 0xFFFF)
    assert not np.any(cache[:, block, :, place] == 0xFFFF)
    cache[:, block, :, place] = 0xFFFF
    assert np.all(cache == 0xFFFF)


def test_a_token_alone_has_the_bits_that_it_has_in_a_batch(device: Device, element: Element) -> None:
    shape = SHAPES[0]
    qkv, angles = inputs(element, shape, 9)
    slots = np.arange(9, dtype=np.int32) * 5
    together, cache = run(device, element, shape, qkv, angles, slots)
    for row in (0, 8):
        alone, other = run(device, element, shape, qkv[row : row + 1], angles[row : row + 1], slots[row : row + 1])
        block, place = divmod(int(slots[row]), shape.block)
        assert np.array_equal(alone[0], together[row])
        assert np.array_equal(other[:, block, :, place], cache[:, block, :, place])

"""rope_kv against its definition, bit for bit: two products and a sum of floats, each rounded, then one rounding to X."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from rvllm.backend import definitions as define
from rvllm.program.dtype import BF16, STORED
from tests.kernels.device import Argument, Array, Device
from tests.kernels.elements import ELEMENTS, Bits, Element, poison

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
    bits = poison(*cache.shape)
    kept = bits.view(STORED[element.dtype])
    expected = define.rope_kv(element.decode(qkv), angles, slots, kept, shape.heads, element.dtype)
    assert np.array_equal(out, element.encode(expected))
    assert (bits != 0xFFFF).sum() == 2 * tokens * shape.kv_heads * shape.head_dim
    assert np.array_equal(cache, bits)


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


# ---- Into a cache of codes


def run_codes(
    device: Device, element: Element, shape: Shape, qkv: Bits, angles: Array, slots: Array, tier: str | None = None
) -> tuple[Bits, Array, Array]:
    """What is handed on, codes, and scales; what was not written is 0xAA, and -1."""
    codes, scales = blank_codes(shape)
    out = poison(len(qkv), shape.heads * shape.head_dim)
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.half, BLOCKS, shape.block)
    args: list[Argument] = [qkv, angles, slots, codes, scales, out, *sizes]
    device.run(STEM, f"rope_kv_e4m3_{element.name}", (len(qkv),), 256, args, tier=tier)
    return out, codes, scales


def blank_codes(shape: Shape) -> tuple[Array, Array]:
    sizes = (2, BLOCKS, shape.kv_heads, shape.block)
    return np.full((*sizes, shape.head_dim), 0xAA, dtype=np.uint8), np.full(sizes, -1, dtype=np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_codes_and_scales_are_those_of_the_definition_bit_for_bit(
    device: Device, element: Element, tier: str, shape: Shape, tokens: int
) -> None:
    qkv, angles = inputs(element, shape, tokens)
    values = element.decode(qkv).reshape(tokens, -1, shape.head_dim)
    values *= 2.0 ** RNG.integers(-12, 12, (*values.shape[:2], 1))
    values[-1, -1] = 0
    if tokens > 1:
        values[0, shape.heads, 1], values[1, -1, 0] = np.nan, -np.inf
        values[2, -1] = 2.0**-24 if element.name == "f16" else 2.0**-133  # bf16: a scale of next to nothing
    qkv = element.encode(values.reshape(qkv.shape).astype(np.float32))
    slots = RNG.permutation(BLOCKS * shape.block)[:tokens].astype(np.int32)
    out, codes, scales = run_codes(device, element, shape, qkv, angles, slots, tier)
    expected_codes, expected_scales = blank_codes(shape)
    with np.errstate(invalid="ignore"):
        expected = define.rope_kv(
            element.decode(qkv), angles, slots, expected_codes, shape.heads, element.dtype, expected_scales
        )
    assert np.array_equal(out, element.encode(expected))
    assert np.array_equal(codes, expected_codes)
    assert np.array_equal(scales.view(np.uint32), expected_scales.view(np.uint32))
    assert (scales != -1).sum() == 2 * tokens * shape.kv_heads


def test_a_negative_slot_writes_neither_codes_nor_scales(device: Device, element: Element, tier: str) -> None:
    shape = SHAPES[0]
    qkv, angles = inputs(element, shape, 4)
    out, codes, scales = run_codes(device, element, shape, qkv, angles, np.array([-1, 7, -1, -64], np.int32), tier)
    assert not np.any(out == 0xFFFF)
    written = np.zeros((BLOCKS, shape.block), dtype=bool)
    written[divmod(7, shape.block)] = True
    assert np.all((scales != -1) == written[:, None]) and np.all((codes != 0xAA).any(axis=-1) == written[:, None])


def test_every_quotient_has_the_code_of_the_definition(device: Device, tier: str) -> None:
    """Rows of all bf16 numbers below 448, whose scale is 1 because of one 448 among them."""
    shape = Shape(1, 64, 128, 0)
    values = np.arange(0x43E0, dtype=np.uint16)
    values = np.concatenate([values, values | 0x8000])
    rows = np.full((-(-len(values) // 127), 128), 0x43E0, dtype=np.uint16)
    rows[:, 1:].flat[: len(values)] = values
    tokens = -(-len(rows) // 128)
    qkv = np.zeros((tokens, 129, 128), dtype=np.uint16)
    flat = np.zeros((tokens * 128, 128), dtype=np.uint16)
    flat[: len(rows)] = rows
    qkv[:, 1:] = flat.reshape(tokens, 128, 128)
    qkv = qkv.reshape(tokens, -1)
    angles, slots = np.zeros((tokens, 2, 0), dtype=np.float32), np.arange(tokens, dtype=np.int32)
    _, codes, scales = run_codes(device, ELEMENTS[1], shape, qkv, angles, slots, tier)
    expected_codes, expected_scales = blank_codes(shape)
    define.rope_kv(ELEMENTS[1].decode(qkv), angles, slots, expected_codes, 1, BF16, expected_scales)
    assert (scales == 1).sum() == len(rows) and np.array_equal(scales, expected_scales)
    assert np.array_equal(codes, expected_codes)

"""expand against rvllm.model.quants, bit for bit: a few floats a value, in one order, then one rounding."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.model.checkpoint import rotary_row_order
from rvllm.model.quants import Blocks, dequantise
from rvllm.program.dtype import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    DType,
    f32_to_bf16,
)
from tests.kernels.device import Device
from tests.kernels.elements import Bits, Element, poison

STEM = "expand"
RNG = np.random.default_rng(12)
PLAIN = (F32, F16, BF16)
QUANTS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)
HALVES = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}  # where scales lie, else 0


def stored(dtype: DType, rows: int, columns: int) -> Blocks:
    """Random bytes of a file: every bit pattern of a quant, scales that are no NaN, floats of all sizes."""
    count = rows * columns
    if dtype in PLAIN:
        values = (RNG.standard_normal(count) * 2.0 ** RNG.integers(-30, 12, count)).astype(np.float32)
        values[:4] = np.array([0.0, -0.0, 6e-8, 65519.0])[:count]
        encoded = (values, values.astype(np.float16), f32_to_bf16(values))[PLAIN.index(dtype)]
        return encoded.view(np.uint8)
    blocks = RNG.integers(0, 256, (count // dtype.block, dtype.block_bytes), dtype=np.uint8)
    for place in HALVES.get(dtype.name, (0,)):
        scales = (RNG.standard_normal(len(blocks)) * 2.0 ** RNG.integers(-14, 2, len(blocks))).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def expected(element: Element, dtype: DType, raw: Blocks, rows: int, heads: int = 0) -> Bits:
    values = dequantise(raw, dtype).reshape(rows, -1)
    with np.errstate(over="ignore"):
        return element.encode(values[rotary_row_order(rows, heads)] if heads else values)


def run(device: Device, element: Element, dtype: DType, raw: Blocks, rows: int, columns: int, heads: int = 0) -> Bits:
    out = poison(rows, columns)
    grid = (rows, -(-columns // 2048))
    device.run(STEM, f"expand_{dtype.name}_{element.name}", grid, 256, [raw, out, rows, columns, heads])
    return out


@pytest.mark.parametrize("dtype", QUANTS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (5, 768), (2, 4352)])
def test_blocks_are_those_of_the_definition(
    device: Device, element: Element, dtype: DType, rows: int, columns: int
) -> None:
    raw = stored(dtype, rows, columns)
    got = run(device, element, dtype, raw, rows, columns)
    assert np.array_equal(got, expected(element, dtype, raw, rows))


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (7, 24), (2, 4360), (1, 2049)])
def test_plain_elements_are_rounded_once(
    device: Device, element: Element, dtype: DType, rows: int, columns: int
) -> None:
    raw = stored(dtype, rows, columns)
    got = run(device, element, dtype, raw, rows, columns)
    assert np.array_equal(got, expected(element, dtype, raw, rows))


def test_every_half_and_every_kind_of_float_is_rounded_as_numpy_does(device: Device, element: Element) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    floats = RNG.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    floats[: 1 << 15] = (np.arange(1 << 15, dtype=np.uint32) << 12) + np.uint32(0x33000000)  # ties of both formats
    for dtype, raw in ((F16, halves), (BF16, halves), (F32, floats)):
        number = ~np.isnan(dequantise(raw.view(np.uint8), dtype)).reshape(32, -1)
        got = run(device, element, dtype, raw.view(np.uint8), 32, raw.size // 32)
        assert np.array_equal(got[number], expected(element, dtype, raw.view(np.uint8), 32)[number])
        assert np.all(np.isnan(element.decode(got[~number])))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, Q4_0, Q6_K], ids=str)
@pytest.mark.parametrize(("rows", "heads"), [(24, 2), (24, 12), (64, 1)])
def test_rotary_rows_are_put_back_into_order(
    device: Device, element: Element, dtype: DType, rows: int, heads: int
) -> None:
    columns = 256 if dtype in QUANTS else 3
    raw = stored(dtype, rows, columns)
    got = run(device, element, dtype, raw, rows, columns, heads)
    assert np.array_equal(got, expected(element, dtype, raw, rows, heads))


def test_a_rotary_bias_is_a_column(device: Device, element: Element) -> None:
    raw = stored(F32, 32, 1)
    got = run(device, element, F32, raw, 32, 1, 4)
    assert np.array_equal(got, expected(element, F32, raw, 32, 4))


@pytest.mark.parametrize("dtype", [*PLAIN, *QUANTS], ids=str)
@pytest.mark.parametrize(("raw_skip", "out_skip"), [(2, 0), (4, 0), (8, 0), (0, 2), (6, 8)])
def test_raw_and_out_may_start_at_any_even_address(
    device: Device, element: Element, dtype: DType, raw_skip: int, out_skip: int
) -> None:
    rows, columns, memory = 2, 256, device.memory
    raw, blank = stored(dtype, rows, columns), poison(out_skip // 2 + rows * columns + 9)
    for way in memory.runs:
        source, target = memory.allocate(raw_skip + raw.nbytes), memory.allocate(blank.nbytes)
        memory.write(source, bytes(raw_skip) + raw.tobytes())
        memory.write(target, blank.tobytes())
        args = [source + raw_skip, target + out_skip, rows, columns, 0]
        memory.launch(way, STEM, f"expand_{dtype.name}_{element.name}", (rows, 1), 256, args, 0, None)
        got = np.frombuffer(memory.read(target, blank.nbytes), dtype=np.uint16)
        memory.free(source)
        memory.free(target)
        place = np.arange(rows * columns) + out_skip // 2
        assert np.array_equal(got[place].reshape(rows, columns), expected(element, dtype, raw, rows))
        assert np.all(np.delete(got, place) == 0xFFFF)

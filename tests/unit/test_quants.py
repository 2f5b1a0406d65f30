"""Block formats, bit for bit against the gguf package on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from rvllm.model.quants import dequantise
from rvllm.program import dtype as formats
from rvllm.program.dtype import DType

BLOCK_FORMATS = [
    formats.Q4_0,
    formats.Q4_1,
    formats.Q5_0,
    formats.Q5_1,
    formats.Q8_0,
    formats.Q4_K,
    formats.Q5_K,
    formats.Q6_K,
]
# Where each format keeps its float16 scales: random bytes there would be infinities and NaN now and then.
SCALE_BYTES = {"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2)}


def random_blocks(dtype: DType, count: int) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (count, dtype.block_bytes), dtype=np.uint8)
    for offset in SCALE_BYTES.get(dtype.name, (208,)):
        scales = rng.standard_normal((count, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks


@pytest.mark.parametrize("dtype", BLOCK_FORMATS, ids=str)
def test_every_bit_equals_the_gguf_package(dtype: DType) -> None:
    blocks = random_blocks(dtype, 500)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[dtype.name.upper()])
    found = dequantise(blocks.reshape(-1), dtype)
    assert found.dtype == np.float32 and found.shape == (500 * dtype.block,)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found.view(np.uint32), expected.reshape(-1).view(np.uint32))


@pytest.mark.parametrize("dtype", [formats.Q4_0, formats.Q6_K], ids=str)
def test_blocks_beyond_one_chunk_are_expanded_in_order(dtype: DType) -> None:
    blocks = random_blocks(dtype, (1 << 18) // dtype.block + 3)
    whole = dequantise(blocks.reshape(-1), dtype)
    np.testing.assert_array_equal(whole[-3 * dtype.block :], dequantise(blocks[-3:].reshape(-1), dtype))
    np.testing.assert_array_equal(whole[: 2 * dtype.block], dequantise(blocks[:2].reshape(-1), dtype))


@pytest.mark.parametrize("dtype", [formats.F16, formats.BF16], ids=str)
def test_every_sixteen_bit_pattern_equals_the_gguf_package(dtype: DType) -> None:
    raw = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[dtype.name.upper()])
    np.testing.assert_array_equal(dequantise(raw, dtype), expected)


def test_float32_is_copied_and_keeps_its_bits() -> None:
    values = np.array([0.0, -0.0, 1e-45, np.inf, np.nan, 3.5], np.float32)
    found = dequantise(values.view(np.uint8), formats.F32)
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))
    assert found.flags.writeable and not np.shares_memory(found, values)


def test_bytes_at_an_odd_offset_are_expanded_too() -> None:
    raw = np.zeros(9, np.uint8)
    raw[1:] = np.array([1.5, -2.0], np.float32).view(np.uint8)
    assert dequantise(raw[1:], formats.F32).tolist() == [1.5, -2.0]

"""Element formats, plain and block-quantised, and their rounding. Knows sizes; never touches a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DType:
    """An element format: `block` consecutive elements of a row are stored in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` elements, a whole number of blocks."""
        assert elements % self.block == 0, f"{elements} elements are not whole {self.name} blocks"
        return elements // self.block * self.block_bytes

    @property
    def quantised(self) -> bool:
        return self.block > 1

    def __str__(self) -> str:
        return self.name


F32 = DType("f32", 1, 4)
F16 = DType("f16", 1, 2)
BF16 = DType("bf16", 1, 2)
F64 = DType("f64", 1, 8)
I32 = DType("i32", 1, 4)
I64 = DType("i64", 1, 8)
# GGUF block formats (ggml's block layouts); a row's length is a multiple of the block.
Q4_0 = DType("q4_0", 32, 18)
Q4_1 = DType("q4_1", 32, 20)
Q5_0 = DType("q5_0", 32, 22)
Q5_1 = DType("q5_1", 32, 24)
Q8_0 = DType("q8_0", 32, 34)
Q4_K = DType("q4_k", 256, 144)
Q5_K = DType("q5_k", 256, 176)
Q6_K = DType("q6_k", 256, 210)

FLOATS = (F32, F16, BF16)


def bf16_to_f32(raw: npt.NDArray[np.uint16]) -> Float32:
    """Expand bfloat16 bits (the upper half of a float32) exactly."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: Float32) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def round_to(values: Float32, dtype: DType) -> Float32:
    """`values` rounded to what `dtype` can hold, still as float32: the rounding point of one op's output."""
    if dtype is F32:
        return values
    if dtype is BF16:
        return bf16_to_f32(f32_to_bf16(values))
    assert dtype is F16, dtype
    return values.astype(np.float16).astype(np.float32)

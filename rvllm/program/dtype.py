"""Element formats, plain and block-quantised, and their rounding. Knows sizes; never touches a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Stored = npt.NDArray[Any]  # elements as they lie in memory: see `STORED`


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
E4M3 = DType("e4m3", 1, 1)  # codes of a key/value cache, whose rows have scales
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
STORED: dict[DType, np.dtype[Any]] = {
    F32: np.dtype(np.float32),
    F16: np.dtype(np.float16),
    BF16: np.dtype(np.uint16),
    E4M3: np.dtype(np.uint8),
}
"""The numpy dtype whose bytes are the format's own; bits, where numpy does not know the format."""

E4M3_LARGEST = np.float32(448)


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


def f32_to_e4m3(values: Float32) -> npt.NDArray[np.uint8]:
    """Round float32 to E4M3 codes, to nearest even and at most 448 in size; NaN becomes 0x7f.

    E4M3 (Micikevicius et al. 2022): sign, 4 bits of exponent with bias 7, 3 of fraction; 0x7f and 0xff are NaN, and the
    other codes of the highest exponent are numbers.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    size = np.minimum(bits & 0x7FFFFFFF, E4M3_LARGEST.view(np.uint32))
    places = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - np.uint32(120 << 3)
    multiples = np.rint(size.view(np.float32) * np.float32(512)).astype(np.uint32)  # of 2^-9, below 2^-6
    code = ((bits >> 24) & 0x80) | np.where(size < np.float32(2.0**-6).view(np.uint32), multiples, places)
    return np.where(np.isnan(values), np.uint32(0x7F), code).astype(np.uint8)


def _e4m3_values() -> Float32:
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    return np.where(codes & 127 == 127, np.nan, np.where(codes & 128, -size, size)).astype(np.float32)


E4M3_VALUES = _e4m3_values()
"""What each code stands for."""


def store(values: Float32, into: np.dtype[Any]) -> Stored:
    """`values` rounded to a plain format, as elements of the numpy dtype that `STORED` has for it."""
    return f32_to_bf16(values) if into == STORED[BF16] else values.astype(into)


def load(elements: Stored) -> Float32:
    """What stored elements stand for, exactly; of codes without their scales."""
    if elements.dtype == STORED[E4M3]:
        return E4M3_VALUES[elements]
    return bf16_to_f32(elements) if elements.dtype == STORED[BF16] else elements.astype(np.float32, copy=False)

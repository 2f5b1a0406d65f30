"""16-bit elements for the kernel tests: arrays of raw bits, as kernels see them, and their float32 values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import BF16, F16, DType, Float32, bf16_to_f32, f32_to_bf16

Bits = npt.NDArray[np.uint16]

POISON = 0xFFFF  # NaN in both formats, and not the NaN that a kernel computes


@dataclass(frozen=True, slots=True)
class Element:
    """An activation format; `name` ends the names of its kernels."""

    name: str
    dtype: DType

    def encode(self, values: Float32) -> Bits:
        """Round to nearest even."""
        return f32_to_bf16(values) if self.dtype is BF16 else values.astype(np.float16).view(np.uint16)

    def decode(self, bits: Bits) -> Float32:
        return bf16_to_f32(bits) if self.dtype is BF16 else bits.view(np.float16).astype(np.float32)

    def normal(self, rng: np.random.Generator, *shape: int, spread: float = 1.0) -> Bits:
        """Normally distributed values that the format holds exactly."""
        return self.encode((rng.standard_normal(shape) * spread).astype(np.float32))


def poison(*shape: int) -> Bits:
    """What nobody has written yet."""
    return np.full(shape, POISON, dtype=np.uint16)


def ulps(left: Bits, right: Bits) -> npt.NDArray[np.int64]:
    """How many representable values apart; both zeros are one value."""
    return np.abs(_places(left) - _places(right))


def _places(bits: Bits) -> npt.NDArray[np.int64]:
    size = (bits & 0x7FFF).astype(np.int64)
    return np.where(bits & 0x8000, -size, size)


ELEMENTS = (Element("f16", F16), Element("bf16", BF16))

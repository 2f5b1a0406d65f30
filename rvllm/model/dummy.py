"""Random weights that need no file, the same on every machine. Knows names and shapes; not which model they make.

Element i of tensor `name` (i counts in row-major order) is, in unsigned 32-bit arithmetic unless said otherwise:

    key   = mix(crc32(name) + (i >> 32))
    h     = mix(key ^ (i & 0xffffffff))
    value = centre + (2 * (h >> (32 - bits)) - (2**bits - 1)) * unit        (signed; exact in float32)
    mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16     (lowbias32, C. Wellons)

so a kernel that computes this makes the same bits. `Recipe` gives centre, bits and unit by the tensor's name:
matrices are odd multiples of a power of two with standard deviation within sqrt(2) of 1 / sqrt(last dimension),
which keeps a normalised activation's size through a layer; norm weights lie within 0.12 of 1; biases within 0.04
of 0. Every value is exact in bfloat16 and float16: weights are the same in all three formats.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.model.checkpoint import Bytes, Shape, TensorInfo, find, no_reasons
from rvllm.program.dtype import BF16, F16, F32, FLOATS, DType, Float32, f32_to_bf16

_CHUNK = 1 << 18  # elements made at a time: the temporaries stay in the processor's cache
_DEVIATION = math.sqrt((128**2 - 1) / 3)  # of the odd numbers from -127 to 127


@dataclass(frozen=True, slots=True)
class Recipe:
    """The constants of the module's formula for one tensor. `unit` is a power of two."""

    seed: int
    centre: float
    bits: int
    unit: float


class DummyCheckpoint:
    """A Checkpoint of `shapes` by Hugging Face name, all stored as `dtype` (float32, float16 or bfloat16)."""

    origin = "dummy weights"

    def __init__(self, shapes: Mapping[str, Shape], dtype: DType) -> None:
        assert dtype in FLOATS, dtype
        self._dtype = dtype
        self.refused = no_reasons()
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, shape, dtype, None, 0, dtype.nbytes(math.prod(shape)))
            for name, shape in shapes.items()
        }

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes as `dtype` stores them, made now: (nbytes,) uint8, read-only."""
        info = find(self, name)
        out = np.empty(info.nbytes, np.uint8)
        size = self._dtype.block_bytes
        for start, values in _chunks(recipe(name, info.shape), math.prod(info.shape)):
            out[start * size : (start + len(values)) * size] = _stored(values, self._dtype)
        out.flags.writeable = False
        return out

    def read(self, name: str) -> Float32:
        """The tensor's values as float32, in its shape."""
        info = find(self, name)
        out = np.empty(math.prod(info.shape), np.float32)
        for start, values in _chunks(recipe(name, info.shape), out.size):
            out[start : start + len(values)] = values
        return out.reshape(info.shape)


def recipe(name: str, shape: Shape) -> Recipe:
    """The constants for tensor `name` of `shape`; see the module's formula."""
    seed = zlib.crc32(name.encode())
    if name.endswith("norm.weight"):
        return Recipe(seed, centre=1.0, bits=4, unit=2.0**-7)
    if name.endswith("bias"):
        return Recipe(seed, centre=0.0, bits=7, unit=2.0**-12)
    exponent = round(math.log2(_DEVIATION * math.sqrt(shape[-1])))
    assert exponent <= 24, f"{name} {shape}: its values would not be exact in float16"
    return Recipe(seed, centre=0.0, bits=7, unit=2.0**-exponent)


def values_at(recipe: Recipe, index: npt.NDArray[np.uint64]) -> Float32:
    """The values of the elements `index` (any shape, uint64), float32 of the same shape."""
    high = (index >> np.uint64(32)).astype(np.uint32)
    key = _mix(high + np.uint32(recipe.seed))
    hashed = _mix(key ^ index.astype(np.uint32))
    odd = ((hashed >> np.uint32(32 - recipe.bits)) * np.uint32(2)).astype(np.float32) - np.float32(2**recipe.bits - 1)
    values: Float32 = np.float32(recipe.centre) + odd * np.float32(recipe.unit)
    return values


def _mix(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _chunks(recipe: Recipe, elements: int) -> Iterator[tuple[int, Float32]]:
    for start in range(0, elements, _CHUNK):
        yield start, values_at(recipe, np.arange(start, min(start + _CHUNK, elements), dtype=np.uint64))


def _stored(values: Float32, dtype: DType) -> Bytes:
    if dtype is F32:
        return values.view(np.uint8)
    if dtype is BF16:
        return f32_to_bf16(values).view(np.uint8)
    assert dtype is F16, dtype
    return values.astype(np.float16).view(np.uint8)

"""Expand stored elements, plain and GGUF blocks, to float32. Knows byte layouts; not tensors, files, devices.

Every function of a format takes `blocks`, (blocks, block bytes) uint8, and gives (blocks, elements) float32.
Layouts are ggml's (the GGUF file format): little-endian; `d` (scale) and `m` (minimum) are float16; nibbles hold
element i of a group low and element i + half high. The order of the float32 operations decides the last bit:
it is ggml's too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

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
    Float32,
    bf16_to_f32,
)

Blocks = npt.NDArray[np.uint8]
_CHUNK_ELEMENTS = 1 << 18  # temporaries of one chunk stay in the processor's cache


def dequantise(raw: Blocks, dtype: DType) -> Float32:
    """The elements stored in `raw` ((nbytes,) uint8, whole blocks) as a new float32 array, (elements,)."""
    assert raw.ndim == 1 and raw.size % dtype.block_bytes == 0, (raw.shape, dtype)
    expand = _EXPAND[dtype.name]
    blocks = raw.reshape(-1, dtype.block_bytes)
    out = np.empty((len(blocks), dtype.block), np.float32)
    step = max(1, _CHUNK_ELEMENTS // dtype.block)
    for start in range(0, len(blocks), step):
        out[start : start + step] = expand(blocks[start : start + step])
    return out.reshape(-1)


def _f32(blocks: Blocks) -> Float32:
    return np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: Blocks) -> Float32:
    """float16 columns; (blocks, 2n) bytes -> (blocks, n)."""
    halves: npt.NDArray[np.float16] = np.ascontiguousarray(blocks).view(np.float16)
    return halves.astype(np.float32)


def _bf16(blocks: Blocks) -> Float32:
    return bf16_to_f32(np.ascontiguousarray(blocks).view(np.uint16))


def _nibbles(packed: Blocks) -> Blocks:
    """Low nibbles, then high ones: (..., n) -> (..., 2n)."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1)


def _q4_0(blocks: Blocks) -> Float32:
    """d, 16 bytes of nibbles: x = (q - 8) * d."""
    return (_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8)) * _f16(blocks[:, :2])


def _q4_1(blocks: Blocks) -> Float32:
    """d, m, 16 bytes of nibbles: x = q * d + m."""
    out = _nibbles(blocks[:, 4:]) * _f16(blocks[:, :2])
    out += _f16(blocks[:, 2:4])
    return out


def _five_bits(high: Blocks, packed: Blocks) -> Blocks:
    """Bit i of the 4 bytes `high` is bit 4 of element i; `packed` holds the lower four."""
    fifth = np.unpackbits(high, axis=-1, bitorder="little")
    return _nibbles(packed) | (fifth << np.uint8(4))


def _q5_0(blocks: Blocks) -> Float32:
    """d, 4 bytes of fifth bits, 16 bytes of nibbles: x = (q - 16) * d."""
    return (_five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8) - np.int8(16)) * _f16(blocks[:, :2])


def _q5_1(blocks: Blocks) -> Float32:
    """d, m, 4 bytes of fifth bits, 16 bytes of nibbles: x = q * d + m."""
    out = _five_bits(blocks[:, 4:8], blocks[:, 8:]) * _f16(blocks[:, :2])
    out += _f16(blocks[:, 2:4])
    return out


def _q8_0(blocks: Blocks) -> Float32:
    """d, 32 int8: x = q * d."""
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8) * _f16(blocks[:, :2])


def _k_scales(blocks: Blocks) -> tuple[Float32, Float32]:
    """The scale d * sc and the minimum m * mn of the 8 sub-blocks of 32: each (blocks, 8, 1).

    The head is d, m and 12 bytes s of 6-bit numbers. sc[0..3] and mn[0..3] are the low six bits of s[0..3] and
    s[4..7]; sc[4..7] and mn[4..7] are the low and high nibbles of s[8..11], with their upper two bits at the top
    of s[0..3] and s[4..7].
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, (third & 0x0F) | ((first >> 6) << 4)), axis=-1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=-1)
    return (
        (_f16(blocks[:, :2]) * scales)[..., None],
        (_f16(blocks[:, 2:4]) * minima)[..., None],
    )


def _q4_k(blocks: Blocks) -> Float32:
    """d, m, 12 bytes of scales, 128 bytes of nibbles (each 32 bytes: two sub-blocks): x = d*sc*q - m*mn."""
    scale, minimum = _k_scales(blocks)
    out = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32) * scale
    out -= minimum
    return out.reshape(-1, 256)


def _q5_k(blocks: Blocks) -> Float32:
    """As q4_k, with 32 bytes of fifth bits before the nibbles: bit j of byte i is for element i of sub-block j."""
    scale, minimum = _k_scales(blocks)
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    out = (_nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (fifth << 4)) * scale
    out -= minimum
    return out.reshape(-1, 256)


def _q6_k(blocks: Blocks) -> Float32:
    """128 bytes of nibbles, 64 of upper bit pairs, 16 int8 scales, d: x = (q - 32) * (d * scale).

    A scale serves 16 elements. Each half of 128 elements has 64 bytes of nibbles, low ones first, and 32 bytes of
    pairs: pair j of byte i is for element 32 j + i.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    pairs = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)) & 3
    q = (low | (pairs << 4)).view(np.int8) - np.int8(32)
    scale = _f16(blocks[:, 208:]) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return (q.reshape(-1, 16, 16) * scale[..., None]).reshape(-1, 256)


_EXPAND: dict[str, Callable[[Blocks], Float32]] = {
    F32.name: _f32,
    F16.name: _f16,
    BF16.name: _bf16,
    Q4_0.name: _q4_0,
    Q4_1.name: _q4_1,
    Q5_0.name: _q5_0,
    Q5_1.name: _q5_1,
    Q8_0.name: _q8_0,
    Q4_K.name: _q4_k,
    Q5_K.name: _q5_k,
    Q6_K.name: _q6_k,
}

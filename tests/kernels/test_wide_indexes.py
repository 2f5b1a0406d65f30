"""Arrays of more than 2^31 elements, on the host: almost all of their pages are never touched."""

from __future__ import annotations

import mmap

import numpy as np

from tests.kernels import shim
from tests.kernels.elements import ELEMENTS

RNG = np.random.default_rng(9)
NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python 3.10 does not name
HALF = ELEMENTS[0]


def sparse(elements: int) -> np.ndarray:
    """Zeros of 16 bits, which take memory only where they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return np.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=np.uint16)


def test_a_row_beyond_two_to_the_31_is_found() -> None:
    hidden, row = 4096, 600_000
    table, out = sparse(hidden * (row + 1)), np.zeros(hidden, dtype=np.uint16)
    table[-hidden:] = HALF.normal(RNG, hidden)
    ids = np.array([row], dtype=np.int32)
    shim.launch(
        "embedding", "embedding_f16", (1, 2), 256, [ids.ctypes.data, table.ctypes.data, out.ctypes.data, hidden]
    )
    assert np.array_equal(out, table[-hidden:])


def test_a_slot_beyond_two_to_the_31_is_written() -> None:
    heads, kv_heads, head_dim, half, blocks, block = 1, 8, 128, 64, 70_000, 32
    cache = sparse(2 * blocks * kv_heads * block * head_dim)
    qkv, out = HALF.normal(RNG, (heads + 2 * kv_heads) * head_dim), np.zeros(head_dim, dtype=np.uint16)
    angles = np.stack([np.ones(half), np.zeros(half)]).astype(np.float32)  # no rotation
    slots = np.array([blocks * block - 1], dtype=np.int32)
    pointers = [array.ctypes.data for array in (qkv, angles, slots, cache, out)]
    shim.launch("rope_kv", "rope_kv_f16", (1,), 256, [*pointers, heads, kv_heads, head_dim, half, blocks, block])
    k, v = qkv[head_dim:].reshape(2, kv_heads, head_dim)
    kept = cache.reshape(2, blocks, kv_heads, block, head_dim)
    assert np.array_equal(kept[0, -1, :, -1], k)
    assert np.array_equal(kept[1, -1, :, -1], v)

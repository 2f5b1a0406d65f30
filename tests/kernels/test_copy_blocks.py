"""copy_blocks: a copy, so every byte counts, and no other byte may change."""

from __future__ import annotations

import numpy as np
import pytest

from rvllm.backend.cuda.copy_blocks import BlockCopier
from tests.kernels.device import Device
from tests.kernels.host_device import HostDevice

RNG = np.random.default_rng(3)
BLOCKS = 7


@pytest.mark.parametrize("block_bytes", [16, 48, 4096, 16 * 1000])
@pytest.mark.parametrize("pairs", [[(2, 5)], [(0, 6), (3, 1), (0, 2)]])
def test_blocks_are_copied_in_every_plane_and_nothing_else_changes(
    device: Device, block_bytes: int, pairs: list[tuple[int, int]]
) -> None:
    """The planes' addresses have to be known before the launch: they are those of a buffer of our own."""
    memory = device.memory
    planes = RNG.integers(0, 256, (4, BLOCKS, block_bytes), dtype=np.uint8)
    address = memory.allocate(planes.nbytes)
    try:
        expected = planes.copy()
        for source, target in pairs:
            expected[:, target] = planes[:, source]
        memory.write(address, planes.tobytes())
        addresses = address + np.arange(4, dtype=np.uint64) * np.uint64(planes[0].nbytes)
        words = np.full(4, block_bytes // 16, dtype=np.int32)
        given = np.array(pairs, dtype=np.int32)
        device.run("copy_blocks", "copy_blocks", (len(pairs), 4), 256, [addresses, words, given])
        found = np.frombuffer(memory.read(address, planes.nbytes), dtype=np.uint8).reshape(planes.shape)
        assert np.array_equal(found, expected)
    finally:
        memory.free(address)


def test_caches_of_several_shapes_are_copied_by_one_launch() -> None:
    device = HostDevice("t80")
    caches = [RNG.integers(0, 256, (2, BLOCKS, nbytes), dtype=np.uint8) for nbytes in (32, 512, 512)]
    places = [device.allocate(cache.nbytes) for cache in caches]
    for place, cache in zip(places, caches):
        device.write(place, cache)
    copier = BlockCopier(device, zip(places, (32, 512, 512)), blocks=BLOCKS, most=3)
    device.launched.clear()
    copier.start([(1, 4), (6, 0)])
    copier.start([(4, 3)])
    assert device.launched == ["copy_blocks"] * 2
    for place, cache in zip(places, caches):
        found = np.empty_like(cache)
        device.read(place, found)
        expected = cache.copy()
        expected[:, [4, 0]] = cache[:, [1, 6]]
        expected[:, 3] = cache[:, 1]
        assert np.array_equal(found, expected)

"""Copy cache blocks on the device, in all layers by one launch. Knows planes and numbers; not whose blocks they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rvllm.backend.cuda.kernels import Device
from rvllm.backend.cuda.launch import Launch

WORD_BYTES = 16


class BlockCopier:
    """For caches of which each is two planes, keys and values, of `blocks` blocks that lie one after another.

    caches: (address, bytes of one block in one plane). most: copies at a time.
    """

    def __init__(self, device: Device, caches: Iterable[tuple[int, int]], *, blocks: int, most: int) -> None:
        self._device = device
        planes = [(address + plane * blocks * nbytes, nbytes) for address, nbytes in caches for plane in range(2)]
        assert all(not nbytes % WORD_BYTES for _, nbytes in planes), planes
        self._addresses = device.allocate(8 * len(planes))
        self._words = device.allocate(4 * len(planes))
        device.write(self._addresses, np.array([address for address, _ in planes], dtype=np.uint64))
        device.write(self._words, np.array([nbytes // WORD_BYTES for _, nbytes in planes], dtype=np.int32))
        self._planes = len(planes)
        self._most = most
        self._pairs = device.allocate(8 * most)
        self._host = device.pinned(8 * most).view(np.int32).reshape(most, 2)

    def start(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (from, to) in stream order. The copies that were started before must be through."""
        assert 0 < len(pairs) <= self._most, (len(pairs), self._most)
        self._host[: len(pairs)] = pairs
        self._device.copy_in(self._pairs, self._host.ctypes.data, 8 * len(pairs))
        values = (self._addresses, self._words, self._pairs)
        self._device.launch(Launch("copy_blocks", "copy_blocks_words", (len(pairs), self._planes), 256, 0, values))

"""A stand-in for a GPU: the host's memory, and the kernels' own sources run there as fibers. Same seam, no driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rvllm.backend.cuda.context import Graph
from rvllm.backend.cuda.kernels import read_manifest
from rvllm.backend.cuda.launch import Launch
from tests.kernels import shim
from tests.kernels.device import ShimMemory


class HostDevice:
    """rvllm.backend.cuda.kernels.Device on the host. `tier` picks the sources' builds, as RVLLM_TIER does on a GPU."""

    multiprocessors = 4

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.launched: list[str] = []
        self.captured = 0
        self.copied_bytes = 0  # by `copy_in`
        self.allocated_bytes = 0
        self._locked: list[tuple[int, int]] = []
        self.break_entry: str | None = None  # a kernel whose first output is to be wrong
        self._memory = ShimMemory()

    def allocate(self, nbytes: int) -> int:
        self.allocated_bytes += nbytes
        address = self._memory.allocate(max(nbytes, 1))
        self.fill(address, 0xFF, nbytes)  # NaN, and no valid index: what is not written shows
        return address

    def free(self, address: int) -> None:
        self._memory.free(address)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        ctypes.memset(address, byte, nbytes)

    def write(self, address: int, array: npt.NDArray[Any]) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def read(self, address: int, array: npt.NDArray[Any]) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.zeros(nbytes, dtype=np.uint8)

    def unpin(self, buffer: npt.NDArray[np.uint8]) -> None:
        """The array's own."""

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        self.copied_bytes += nbytes
        for begin, size in self._locked:  # the driver refuses a copy that is locked in part
            inside = begin <= source and source + nbytes <= begin + size
            assert inside or source + nbytes <= begin or source >= begin + size, "a copy crosses locked pages"
        ctypes.memmove(address, source, nbytes)

    def matrix_map(self, address: int, rows: int, columns: int, box_rows: int) -> npt.NDArray[np.uint8]:
        return self._memory.matrix_map(address, rows, columns, box_rows)

    def lock_pages(self, pages: tuple[int, int]) -> tuple[int, int] | None:
        assert pages[0] % 4096 == 0 and pages[1] % 4096 == 0, pages
        for begin, size in self._locked:
            assert pages[0] + pages[1] <= begin or pages[0] >= begin + size, "a page is locked twice"
        self._locked.append(pages)
        return pages

    def unlock_pages(self, pages: tuple[int, int] | None) -> None:
        if pages is not None:
            self._locked.remove(pages)

    def launch(self, launch: Launch) -> None:
        self.launched.append(launch.entry)
        tiers = [tier for tier in shim.tiers_of(launch.stem) if tier <= self.tier]
        shim.launch(
            launch.stem,
            launch.entry,
            launch.grid,
            launch.block,
            launch.values,
            launch.shared_bytes,
            schedule="random",
            seed=len(self.launched),
            tier=tiers[-1],
        )

        if launch.entry == self.break_entry:
            self._spoil(launch)

    def _spoil(self, launch: Launch) -> None:
        """Put bfloat16's 100 where the kernel wrote its first value."""
        facts = next(build for build in read_manifest() if launch.entry in build.arguments)
        address = int(launch.values[facts.arguments[launch.entry].index("out")])
        ctypes.c_uint16.from_address(address).value = 0x42C8

    def capture(self, launches: Sequence[Launch]) -> Graph:
        self.captured += 1
        return Graph(tuple(launches))

    def forget(self, graph: Graph) -> None:
        """A recorded graph takes nothing."""

    def replay(self, graph: Graph) -> None:
        for launch in graph.handle:
            self.launch(launch)

    def mark(self) -> None:
        """Launches have ended when they return."""

    def wait(self, mark: None) -> None:
        """Launches have ended when they return."""

    def synchronize(self) -> None:
        """Launches have ended when they return."""

"""Bring parts of a file that are not in memory yet to the device: threads read into a ring of page-locked buffers.

Locking pages of a mapping would read them one after the other. Knows files and addresses; not what the bytes are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rvllm.backend.cuda.kernels import Device
from rvllm.errors import CheckpointError

BUFFERS, BUFFER_BYTES = 16, 16 << 20
RESIDENT_SHARE = 0.9  # of the pages: from there on, locking them is faster


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + nbytes) of a file, which go to `address` on the device."""

    offset: int
    nbytes: int
    address: int


def is_resident(begin: int, nbytes: int) -> bool:
    """Whether a mapping's pages from the page address `begin` on are in memory, nearly all of them (mincore)."""
    pages = -(-nbytes // mmap.PAGESIZE)
    flags = np.zeros(pages, dtype=np.uint8)
    if (
        ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), ctypes.c_void_p(flags.ctypes.data))
        != 0
    ):
        return True  # unknown: the other way is right too
    return int(np.count_nonzero(flags & 1)) >= RESIDENT_SHARE * pages


def copy_cold(device: Device, path: Path, extents: Iterable[Extent], report: Callable[[int], None]) -> None:
    """Read and copy, many reads at once; `report` hears of bytes sent. Raises CheckpointError: unreadable, short."""
    ring = [device.pinned(BUFFER_BYTES) for _ in range(BUFFERS)]
    marks: list[Any] = [None] * BUFFERS
    reading: deque[tuple[int, Extent, Future[None]]] = deque()

    def send(turn: int, extent: Extent, done: Future[None]) -> None:
        done.result()
        device.copy_in(extent.address, ring[turn].ctypes.data, extent.nbytes)
        marks[turn] = device.mark()
        report(extent.nbytes)

    def reuse(turn: int) -> None:
        if marks[turn] is not None:
            device.wait(marks[turn])
            marks[turn] = None

    with path.open("rb") as file, ThreadPoolExecutor(BUFFERS // 2) as pool:
        for number, extent in enumerate(_cut(extents)):
            if len(reading) == BUFFERS:
                send(*reading.popleft())
            turn = number % BUFFERS
            reuse(turn)
            reading.append((turn, extent, pool.submit(_read, file.fileno(), path, extent, ring[turn])))
        while reading:
            send(*reading.popleft())
    for turn, buffer in enumerate(ring):
        reuse(turn)
        device.unpin(buffer)


def _cut(extents: Iterable[Extent]) -> Iterator[Extent]:
    """The same bytes in extents that fit a buffer."""
    for extent in extents:
        for start in range(0, extent.nbytes, BUFFER_BYTES):
            nbytes = min(BUFFER_BYTES, extent.nbytes - start)
            yield Extent(extent.offset + start, nbytes, extent.address + start)


def _read(descriptor: int, path: Path, extent: Extent, buffer: npt.NDArray[np.uint8]) -> None:
    done = 0
    while done < extent.nbytes:
        try:
            count = os.preadv(descriptor, [buffer[done : extent.nbytes].data], extent.offset + done)
        except OSError as cause:
            raise CheckpointError(f"{path} cannot be read: {cause.strerror}") from None
        if count == 0:
            raise CheckpointError(f"{path} became shorter while it was read: it ends at {extent.offset + done:,}")
        done += count

"""Bring a program's weights to the device in its activation dtype. Knows files and formats; not what a weight is for.

What is stored in the wanted dtype goes as it lies: the file's mapping is page-locked window by window and the device
copies from it, with no copy by the CPU; what is not in memory yet is read by threads (cold.py). Everything else
(quantised blocks, other floats, GGUF's row order) goes through a staging buffer and an `expand` kernel; dummy weights
are made by a kernel from their recipe.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rvllm.backend.cuda.cold import Extent, copy_cold, is_resident
from rvllm.backend.cuda.kernels import Device
from rvllm.backend.cuda.launch import Launch, suffix
from rvllm.model.checkpoint import Checkpoint, FileCheckpoint
from rvllm.model.dummy import DummyCheckpoint, recipe
from rvllm.program.dtype import DType
from rvllm.program.ops import Tensor
from rvllm.program.program import Program, matrices

Progress = Callable[[str, int, int], None]
ALIGNMENT_BYTES = 256
WINDOW_BYTES = 256 << 20  # page-locked at a time: the next window is locked while this one is copied


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of host memory that go to `address` on the device."""

    begin: int
    end: int
    address: int


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor and where its elements go, in the activation dtype."""

    tensor: Tensor
    address: int


def sizes(program: Program, dtype: DType) -> dict[str, int]:
    """Bytes of every matrix on the device, by joined name."""
    return {
        name: sum(dtype.nbytes(math.prod(tensor.sizes({}))) for tensor in segments)
        for name, segments in matrices(program).items()
    }


def place(nbytes: Mapping[str, int], start: int) -> dict[str, int]:
    """An address for every matrix from `start` on, in order."""
    addresses = {}
    for name, size in nbytes.items():
        addresses[name] = start
        start += aligned(size)
    return addresses


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def load_weights(
    device: Device,
    checkpoint: Checkpoint,
    program: Program,
    addresses: Mapping[str, int],
    dtype: DType,
    progress: Progress | None,
) -> None:
    """Fill every matrix of the program at its address."""
    todo = []
    for name, segments in matrices(program).items():
        address = addresses[name]
        for tensor in segments:
            todo.append(Part(tensor, address))
            address += dtype.nbytes(math.prod(tensor.sizes({})))
    if isinstance(checkpoint, DummyCheckpoint):
        _make_dummies(device, todo, dtype)
        return
    assert isinstance(checkpoint, FileCheckpoint), checkpoint
    _Loader(device, checkpoint, dtype, progress).load(todo)


def _make_dummies(device: Device, todo: list[Part], dtype: DType) -> None:
    for part in todo:
        shape = part.tensor.sizes({})
        made, count = recipe(part.tensor.name, shape), math.prod(shape)
        values = (part.address, count, 0, made.seed, made.centre, made.bits, made.unit)
        blocks = min(65535, -(-count // 2048))
        device.launch(Launch("dummy", f"dummy_{suffix(dtype)}", (blocks,), 256, 0, values))
    device.synchronize()


class _Loader:
    """Sends a checkpoint's tensors in the order in which they lie in their files."""

    def __init__(self, device: Device, checkpoint: FileCheckpoint, dtype: DType, progress: Progress | None) -> None:
        self._device = device
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._progress = progress
        self._staging = 0
        self._staging_bytes = 0
        self._done = 0
        self._total = 0

    def load(self, todo: list[Part]) -> None:
        infos = self._checkpoint.tensors
        self._total = sum(infos[part.tensor.name].nbytes for part in todo)
        todo = sorted(todo, key=lambda part: (str(infos[part.tensor.name].file), infos[part.tensor.name].offset))
        direct = [part for part in todo if self._as_it_lies(part)]
        self._copy_direct(direct)
        for part in todo:
            if not self._as_it_lies(part):
                self._expand(part)
                self._report(infos[part.tensor.name].nbytes)
        self._device.synchronize()
        if self._staging:
            self._device.free(self._staging)

    def _as_it_lies(self, part: Part) -> bool:
        info = self._checkpoint.tensors[part.tensor.name]
        return info.dtype is self._dtype and not info.rotary_heads

    def _report(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress("loading weights", self._done, self._total)

    def _copy_direct(self, todo: list[Part]) -> None:
        """Page-lock a window of a file's mapping, start its copies, and lock the next while they run."""
        locked: list[tuple[tuple[int, int] | None, Any]] = []
        cold: dict[Path, list[Extent]] = {}
        for file, pieces in self._windows(todo):
            if not is_resident(*_pages_around(pieces)):
                start = self._checkpoint.mappings[file].ctypes.data
                extents = [Extent(p.begin - start, p.end - p.begin, p.address) for p in pieces]
                cold.setdefault(file, []).extend(extents)
                continue
            pages = self._device.lock_pages(_pages_around(pieces))
            for piece in pieces:
                self._device.copy_in(piece.address, piece.begin, piece.end - piece.begin)
            locked.append((pages, self._device.mark()))
            if len(locked) > 1:
                self._unlock(*locked.pop(0))
            self._report(sum(piece.end - piece.begin for piece in pieces))
        for pages, mark in locked:
            self._unlock(pages, mark)
        for file, extents in cold.items():
            copy_cold(self._device, file, extents, self._report)

    def _unlock(self, pages: tuple[int, int] | None, mark: Any) -> None:
        """Let a window's pages go once its copies are done."""
        self._device.wait(mark)
        self._device.unlock_pages(pages)

    def _windows(self, todo: list[Part]) -> list[tuple[Path, list[Piece]]]:
        """The tensors cut at every multiple of WINDOW_BYTES in memory, piece by piece, by file and window.

        A page can be locked only once; cut like that no two windows have one in common.
        """
        windows: dict[tuple[Path, int], list[Piece]] = {}
        for part in todo:
            view = self._checkpoint.raw(part.tensor.name)
            file = self._checkpoint.tensors[part.tensor.name].file
            assert file is not None, part
            begin, last = view.ctypes.data, view.ctypes.data + view.nbytes
            address = part.address
            while begin < last:
                window = begin // WINDOW_BYTES
                end = min(last, (window + 1) * WINDOW_BYTES)
                windows.setdefault((file, window), []).append(Piece(begin, end, address))
                address += end - begin
                begin = end
        return [(file, pieces) for (file, _), pieces in windows.items()]

    def _expand(self, part: Part) -> None:
        info = self._checkpoint.tensors[part.tensor.name]
        raw = self._checkpoint.raw(part.tensor.name)
        if raw.nbytes > self._staging_bytes:
            if self._staging:
                self._device.synchronize()
                self._device.free(self._staging)
            self._staging, self._staging_bytes = self._device.allocate(raw.nbytes), raw.nbytes
        self._device.synchronize()  # the kernel that reads the staging buffer before must be done
        self._device.write(self._staging, np.ascontiguousarray(raw))
        rows, columns = _rows_and_columns(info.shape, bool(info.rotary_heads))
        values = (self._staging, part.address, rows, columns, info.rotary_heads)
        entry = f"expand_{info.dtype.name}_{suffix(self._dtype)}"
        self._device.launch(Launch("expand", entry, expand_grid(rows, columns), 256, 0, values))


def _rows_and_columns(shape: tuple[int, ...], reordered: bool) -> tuple[int, int]:
    """A vector is one row, but where its elements are put in another order each is a row of its own."""
    if len(shape) == 1:
        return (shape[0], 1) if reordered else (1, shape[0])
    return shape[0], math.prod(shape[1:])


def expand_grid(rows: int, columns: int) -> tuple[int, ...]:
    return (rows, -(-columns // 2048))


def _pages_around(pieces: Sequence[Piece]) -> tuple[int, int]:
    """(address, bytes) of the whole pages that hold the pieces, all of one mapping."""
    begin = min(piece.begin for piece in pieces) // mmap.PAGESIZE * mmap.PAGESIZE
    end = max(piece.end for piece in pieces)
    return begin, -(-(end - begin) // mmap.PAGESIZE) * mmap.PAGESIZE

"""Launch kernels on numpy arrays, wherever they run: the host's fibers now, a GPU by another `Memory`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tests.kernels import shim

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The first `rows` rows of an array (rows or more, columns), which the copy engine brings by boxes of `box_rows`."""

    array: Array
    rows: int
    box_rows: int


Argument = Array | Boxes | int | float

GUARD = 0xA5


class Memory(Protocol):
    """A device: what `Device` needs of one.

    `runs` are the ways in which one launch is tried, by name; all must give the same bits. `guard_bytes`, a multiple
    of 256, are put around every allocation to see writes outside it.
    """

    runs: tuple[str, ...]
    guard_bytes: int

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` bytes, aligned to 256."""
        ...

    def free(self, address: int) -> None: ...

    def write(self, address: int, data: bytes) -> None: ...

    def read(self, address: int, nbytes: int) -> bytes: ...

    def matrix_map(self, address: int, rows: int, columns: int, box_rows: int) -> npt.NDArray[np.uint8]:
        """What kernels are told of a matrix that the copy engine reads (Device.matrix_map)."""
        ...

    def launch(
        self,
        run: str,
        stem: str,
        entry: str,
        grid: tuple[int, ...],
        block: int,
        arguments: Sequence[int | float],
        shared_bytes: int,
        tier: str | None,
    ) -> None:
        """Launch and wait; an address is an int among the arguments. Without a tier, the lowest that is built."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """Runs a kernel on arrays, several times, and wants the same bits from each."""

    memory: Memory

    def run(
        self,
        stem: str,
        entry: str,
        grid: tuple[int, ...],
        block: int,
        args: Sequence[Argument],
        shared_bytes: int = 0,
        *,
        tier: str | None = None,
    ) -> None:
        """Every array of `args` is copied to the device and back; one that is given twice is one buffer."""
        held = [argument.array if isinstance(argument, Boxes) else argument for argument in args]
        arrays = list({id(argument): argument for argument in held if isinstance(argument, np.ndarray)}.values())
        results = []
        for run in self.memory.runs:
            buffers = {id(array): _Buffer(self.memory, array) for array in arrays}
            values = [buffers[id(arg)].address if isinstance(arg, np.ndarray) else arg for arg in held]
            maps = {
                place: self._map(arg, int(values[place])) for place, arg in enumerate(args) if isinstance(arg, Boxes)
            }
            values = [maps.get(place, value) for place, value in enumerate(values)]
            self.memory.launch(run, stem, entry, grid, block, values, shared_bytes, tier)
            for address in maps.values():
                self.memory.free(address)
            results.append([buffers[id(array)].take_back() for array in arrays])
        for run, result in zip(self.memory.runs, results):
            for index, (first, again) in enumerate(zip(results[0], result)):
                assert first == again, f"{entry}: array {index} differs between {self.memory.runs[0]!r} and {run!r}"
        for array, data in zip(arrays, results[0]):
            array[...] = np.frombuffer(data, dtype=array.dtype).reshape(array.shape)

    def _map(self, boxes: Boxes, address: int) -> int:
        """Where the map of a matrix at `address` was put."""
        words = self.memory.matrix_map(address, boxes.rows, boxes.array.shape[1], boxes.box_rows)
        place = self.memory.allocate(words.nbytes)
        self.memory.write(place, words.tobytes())
        return place


class _Buffer:
    """An array's copy on the device, with guards around it."""

    def __init__(self, memory: Memory, array: Array) -> None:
        assert array.flags.c_contiguous
        self._memory, self._nbytes = memory, array.nbytes
        guard = bytes([GUARD]) * memory.guard_bytes
        self._start = memory.allocate(array.nbytes + 2 * len(guard))
        self.address = self._start + len(guard)
        memory.write(self._start, guard + array.tobytes() + guard)

    def take_back(self) -> bytes:
        """The bytes; the buffer is gone. Fails if a guard was written."""
        guard = self._memory.guard_bytes
        data = self._memory.read(self._start, self._nbytes + 2 * guard)
        self._memory.free(self._start)
        assert set(data[:guard] + data[guard + self._nbytes :]) <= {GUARD}, "memory beside an array was written"
        return data[guard : guard + self._nbytes]


class ShimMemory:
    """The host: kernels run as fibers, once in each schedule."""

    # Where memory is watched, two that differ the most: the order of threads, and products at once or late.
    runs: tuple[str, ...] = ("round robin", "one warp") if shim.SANITIZED else shim.SCHEDULES
    guard_bytes = 0 if shim.SANITIZED else 256  # the sanitizer wants to see the end of the allocation

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.free.argtypes = [ctypes.c_void_p]

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_void_p()
        status = self._libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(256), ctypes.c_size_t(nbytes))
        assert status == 0 and address.value is not None, status
        return address.value

    def free(self, address: int) -> None:
        self._libc.free(address)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def matrix_map(self, address: int, rows: int, columns: int, box_rows: int) -> npt.NDArray[np.uint8]:
        """HostMap of shim_intrinsics.h."""
        assert address % 16 == 0 and columns * 2 % 16 == 0 and box_rows <= 256  # as the driver asks
        return np.frombuffer(struct.pack("Qqqi", address, rows, columns, box_rows).ljust(128, b"\0"), dtype=np.uint8)

    def launch(
        self,
        run: str,
        stem: str,
        entry: str,
        grid: tuple[int, ...],
        block: int,
        arguments: Sequence[int | float],
        shared_bytes: int,
        tier: str | None,
    ) -> None:
        shim.launch(stem, entry, grid, block, arguments, shared_bytes, schedule=run, seed=len(entry), tier=tier)

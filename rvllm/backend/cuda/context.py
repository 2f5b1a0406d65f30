"""One GPU, opened: memory, copies, launches and graphs on one stream. Knows addresses and bytes, not what they mean.

The primary context is used, and is current only in the thread that made the `Context`: one thread drives one GPU.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rvllm.backend.cuda.driver import Gpu, binding, check, devices
from rvllm.errors import DeviceError

Bytes = npt.NDArray[np.uint8]
Dimensions = tuple[int, ...]

_PACKING = {"u64": "Q", "s64": "q", "u32": "I", "s32": "i", "f32": "f", "f64": "d"}
_LOG_BYTES = 8192
_LOAD_HINTS = {
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the kernels need a driver of R525 (CUDA 12.0) or newer: update the driver",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the GPU is older than compute capability 7.0, or RVLLM_TIER names a tier it lacks",
    "CUDA_ERROR_INVALID_PTX": "this is a fault of ours: please report it with the line above",
}


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A function of a loaded module. `types`: its arguments as PTX types; `handle` is the driver's."""

    entry: str
    types: tuple[str, ...]
    handle: Any


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A captured sequence of launches. A graph holds the addresses it was captured with."""

    handle: Any


class Context:
    """The GPU `index` as CUDA numbers it. Raises DeviceError: no driver, no such GPU, out of memory."""

    def __init__(self, index: int = 0) -> None:
        self._cuda = cuda = binding()
        gpus = devices(cuda)
        if index >= len(gpus):
            raise DeviceError(f"there is no GPU {index}, the driver shows {len(gpus)}", hint="see `nvidia-smi -L`")
        self.gpu: Gpu = gpus[index]
        self._device = check("cuDeviceGet", cuda.cuDeviceGet(index))
        context = check("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(self._device))
        check("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context))
        flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = check("cuStreamCreate", cuda.cuStreamCreate(flags))
        attribute = cuda.CUdevice_attribute
        self.shared_bytes = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.multiprocessors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self._packed: dict[tuple[str, ...], _Arguments] = {}

    def _attribute(self, which: Any) -> int:
        return int(check("cuDeviceGetAttribute", self._cuda.cuDeviceGetAttribute(which, self._device)))

    # Memory

    def free_bytes(self) -> int:
        """Device memory that is free now."""
        status, free, _ = self._cuda.cuMemGetInfo()
        check("cuMemGetInfo", (status,))
        return int(free)

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` bytes of device memory, aligned to 256."""
        status, address = self._cuda.cuMemAlloc(max(nbytes, 1))
        if int(status) == int(self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            raise DeviceError(
                f"{self.gpu.name} has no room for {nbytes:,} bytes: {self.free_bytes():,} of its "
                f"{self.gpu.total_bytes:,} are free",
                hint="use a smaller model or --max-model-len, or end what else uses the GPU (see `nvidia-smi`)",
            )
        return int(check("cuMemAlloc", (status, address)))

    def free(self, address: int) -> None:
        check("cuMemFree", self._cuda.cuMemFree(address))

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Set `nbytes` bytes, in stream order."""
        check("cuMemsetD8Async", self._cuda.cuMemsetD8Async(address, byte, nbytes, self._stream))

    def write(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copy a contiguous array to the device; it may change once this returns."""
        assert array.flags.c_contiguous
        if array.nbytes:
            check("cuMemcpyHtoD", self._cuda.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))

    def read(self, address: int, array: npt.NDArray[Any]) -> None:
        """Fill a contiguous array from the device, after everything launched so far."""
        assert array.flags.c_contiguous
        self.synchronize()
        if array.nbytes:
            check("cuMemcpyDtoH", self._cuda.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))

    def pinned(self, nbytes: int) -> Bytes:
        """Page-locked host memory, (nbytes,) uint8, for copies beside the CPU's work; it lives as the context does."""
        address = int(check("cuMemHostAlloc", self._cuda.cuMemHostAlloc(nbytes, 0)))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        """Copy from page-locked or registered host memory, in stream order."""
        check("cuMemcpyHtoDAsync", self._cuda.cuMemcpyHtoDAsync(address, source, nbytes, self._stream))

    def copy_out(self, target: int, address: int, nbytes: int) -> None:
        """Copy to page-locked host memory, in stream order."""
        check("cuMemcpyDtoHAsync", self._cuda.cuMemcpyDtoHAsync(target, address, nbytes, self._stream))

    def lock_pages(self, pages: tuple[int, int]) -> tuple[int, int] | None:
        """Page-lock (address, bytes), whole pages of a MAP_SHARED file mapping, so that the device copies from there.

        Never a MAP_PRIVATE mapping: there the driver did not return within 25 s a GiB. None where the driver will not
        (some file systems): copies then go through the driver's own buffer, which is right and slower.
        """
        status = self._cuda.cuMemHostRegister(*pages, self._cuda.CU_MEMHOSTREGISTER_READ_ONLY)
        return pages if int(status[0]) == 0 else None

    def unlock_pages(self, pages: tuple[int, int] | None) -> None:
        """Undo `lock_pages`; copies from there must be done."""
        if pages is not None:
            check("cuMemHostUnregister", self._cuda.cuMemHostUnregister(pages[0]))

    # Kernels

    def load_image(self, image: bytes) -> Any:
        """A module from PTX text (zero-terminated) or a cubin. Raises DeviceError with the JIT compiler's words."""
        cuda = self._cuda
        status, module = cuda.cuModuleLoadData(image)
        if int(status):
            raise self._refusal(image, status)
        return module

    def _refusal(self, image: bytes, status: Any) -> DeviceError:
        """Load again, this time with a buffer for what the compiler has to say."""
        cuda = self._cuda
        log = bytes(_LOG_BYTES)  # the binding hands its address to the driver, which writes into it
        option = cuda.CUjit_option
        options = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        cuda.cuModuleLoadDataEx(image, len(options), options, [log, _LOG_BYTES])
        name = getattr(status, "name", "an unknown CUresult")
        words = log.partition(b"\0")[0].decode("utf-8", "replace").strip()
        message = f"the driver refuses a kernel: {name} ({int(status)})" + (f": {words}" if words else "")
        return DeviceError(message, hint=_LOAD_HINTS.get(name))

    def kernel(self, module: Any, entry: str, types: tuple[str, ...]) -> Kernel:
        """A module's function, allowed all the shared memory that a block may have."""
        cuda = self._cuda
        handle = check(f"cuModuleGetFunction({entry})", cuda.cuModuleGetFunction(module, entry.encode()))
        attribute = cuda.CUfunction_attribute
        which = attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        fixed = check(f"cuFuncGetAttribute({entry})", cuda.cuFuncGetAttribute(which, handle))
        which = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(f"cuFuncSetAttribute({entry})", cuda.cuFuncSetAttribute(handle, which, self.shared_bytes - fixed))
        return Kernel(entry, types, handle)

    def launch_kernel(
        self, kernel: Kernel, grid: Dimensions, block: int, shared_bytes: int, values: Sequence[int | float]
    ) -> None:
        """Launch in stream order; `values` are packed as the kernel's types say."""
        arguments = self._packed.get(kernel.types)
        if arguments is None:
            arguments = self._packed[kernel.types] = _Arguments(kernel.types)
        x, y, z = (*grid, 1, 1)[:3]
        pointers = arguments.pack(values)
        status = self._cuda.cuLaunchKernel(kernel.handle, x, y, z, block, 1, 1, shared_bytes, self._stream, pointers, 0)
        if int(status[0]):
            check(f"cuLaunchKernel({kernel.entry}, grid {grid}, block {block}, {shared_bytes} bytes)", status)

    # Order and time

    def synchronize(self) -> None:
        """Wait for everything launched so far. Raises DeviceError where any of it failed."""
        check("cuStreamSynchronize", self._cuda.cuStreamSynchronize(self._stream))

    @contextmanager
    def capturing(self) -> Iterator[Callable[[], Graph]]:
        """Launches inside the block are recorded, not run; call what it gives, afterwards, for the graph."""
        cuda = self._cuda
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check("cuStreamBeginCapture", cuda.cuStreamBeginCapture(self._stream, mode))
        made: list[Any] = []

        def instantiate() -> Graph:
            handle = check("cuGraphInstantiate", cuda.cuGraphInstantiate(made[0], 0))
            check("cuGraphDestroy", cuda.cuGraphDestroy(made[0]))
            return Graph(handle)

        try:
            yield instantiate
        finally:
            made.append(check("cuStreamEndCapture", cuda.cuStreamEndCapture(self._stream)))

    def replay(self, graph: Graph) -> None:
        check("cuGraphLaunch", self._cuda.cuGraphLaunch(graph.handle, self._stream))

    def seconds(self, work: Callable[[], None]) -> float:
        """Device time that `work`'s launches take, by events around them."""
        cuda = self._cuda
        first, last = (check("cuEventCreate", cuda.cuEventCreate(0)) for _ in range(2))
        check("cuEventRecord", cuda.cuEventRecord(first, self._stream))
        work()
        check("cuEventRecord", cuda.cuEventRecord(last, self._stream))
        check("cuEventSynchronize", cuda.cuEventSynchronize(last))
        milliseconds = check("cuEventElapsedTime", cuda.cuEventElapsedTime(first, last))
        for event in (first, last):
            check("cuEventDestroy", cuda.cuEventDestroy(event))
        return float(milliseconds) / 1000


class _Arguments:
    """Storage for one signature's arguments, and the array of their addresses that the driver reads."""

    def __init__(self, types: tuple[str, ...]) -> None:
        self._format = "<" + "".join(f"{_PACKING[kind]}{8 - struct.calcsize(_PACKING[kind])}x" for kind in types)
        self._storage = np.zeros(max(len(types), 1), dtype=np.uint64)
        self._addresses = self._storage.ctypes.data + 8 * np.arange(max(len(types), 1), dtype=np.uint64)
        self._view = self._storage.data.cast("B")
        self._count = len(types)

    def pack(self, values: Sequence[int | float]) -> int:
        assert len(values) == self._count, (len(values), self._format)
        struct.pack_into(self._format, self._view, 0, *values)
        return int(self._addresses.ctypes.data)


def blocks_of(count: int, size: int) -> int:
    """Blocks of `size` that cover `count`, at least one: a grid may not be empty."""
    return max(1, math.ceil(count / size))

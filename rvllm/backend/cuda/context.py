"""One GPU, opened: memory, copies, launches and graphs on one stream. Knows addresses and bytes, not what they mean.

The primary context is used, and is current only in the thread that made the `Context`: one thread drives one GPU. What
fails while a step runs is an EngineError, everything else a DeviceError.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rvllm.backend.cuda.driver import Gpu, binding, check, devices, driver_version
from rvllm.errors import DeviceError, EngineError

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
    """A function of a loaded module. `types`: its arguments as PTX types; `handle` is the driver's.

    `overlaps`: its blocks may start before the launch before it has ended, since they wait for that themselves. Set for
    a kernel without that wait, it would be a race.
    """

    entry: str
    types: tuple[str, ...]
    handle: Any
    overlaps: bool


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A captured sequence of launches. A graph holds the addresses it was captured with."""

    handle: Any


class Context:
    """The GPU `index` as CUDA numbers it, so among those that CUDA_VISIBLE_DEVICES leaves. `cuda`: another binding.

    Raises DeviceError: no driver, no such GPU, out of memory.
    """

    def __init__(self, index: int = 0, cuda: Any = None) -> None:
        self._binding = cuda = cuda or binding()
        self._process = os.getpid()
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
        self._overlap = cuda.CUlaunchAttribute()
        self._overlap.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._overlap.value.programmaticStreamSerializationAllowed = 1
        self._packed: dict[tuple[str, ...], _Arguments] = {}

    @property
    def _cuda(self) -> Any:
        """The binding. A forked child has no use for it: its calls would fail, or never return."""
        if os.getpid() != self._process:
            raise DeviceError(
                f"process {os.getpid()} was forked from process {self._process}, which had opened {self.gpu.name}; "
                "CUDA does not survive a fork",
                hint="start processes with multiprocessing's spawn, or open the GPU only in the child",
            )
        return self._binding

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
        """Copy a contiguous array to the device, after everything launched so far; it may change once this returns.

        Not by cuMemcpyHtoD, which returns when pageable memory is in the driver's buffer: the rest of its way is in the
        order of another stream, and a kernel launched next would read what was there before.
        """
        assert array.flags.c_contiguous
        if array.nbytes:
            self.copy_in(address, array.ctypes.data, array.nbytes)
            self.synchronize()

    def read(self, address: int, array: npt.NDArray[Any]) -> None:
        """Fill a contiguous array from the device, after everything launched so far."""
        assert array.flags.c_contiguous
        self.synchronize()
        if array.nbytes:
            check("cuMemcpyDtoH", self._cuda.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes), EngineError)

    def pinned(self, nbytes: int) -> Bytes:
        """Page-locked host memory, (nbytes,) uint8, for copies beside the CPU's work; until `unpin`."""
        address = int(check("cuMemHostAlloc", self._cuda.cuMemHostAlloc(nbytes, 0)))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def unpin(self, buffer: Bytes) -> None:
        """Give back what `pinned` gave; nothing may be copied from or to it any more."""
        check("cuMemFreeHost", self._cuda.cuMemFreeHost(buffer.ctypes.data))

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        """Copy from host memory in stream order, beside the CPU's work where it is page-locked or registered."""
        check("cuMemcpyHtoDAsync", self._cuda.cuMemcpyHtoDAsync(address, source, nbytes, self._stream), EngineError)

    def matrix_map(self, address: int, rows: int, columns: int, box_rows: int) -> Bytes:
        """What `copy_box` (intrinsics.cuh) is told of a matrix (rows, columns) of 16-bit elements: (128,) uint8.

        A box is 64 columns of `box_rows` rows, at most 256. `address` and a row's bytes are multiples of 16; the map is
        for device memory, on 64 bytes. Raises DeviceError where the driver refuses.
        """
        cuda = self._cuda
        one = cuda.cuuint32_t(1)
        map_of = cuda.cuTensorMapEncodeTiled(
            cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
            2,
            address,
            [cuda.cuuint64_t(columns), cuda.cuuint64_t(rows)],
            [cuda.cuuint64_t(2 * columns)],
            [cuda.cuuint32_t(64), cuda.cuuint32_t(box_rows)],
            [one, one],
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        words = check(f"cuTensorMapEncodeTiled({rows} x {columns}, boxes of {box_rows} x 64)", map_of).opaque
        return np.array([int(word) for word in words], dtype=np.uint64).view(np.uint8)

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
            # Again, this time with a buffer for what the compiler has to say.
            log, options = self._compiler_log()
            cuda.cuModuleLoadDataEx(image, len(options), list(options), list(options.values()))
            raise self._refusal(image, status, log)
        return module

    def compile(self, ptx: bytes) -> bytes:
        """A cubin for this GPU from PTX text (zero-terminated). Raises DeviceError with the JIT compiler's words."""
        cuda = self._cuda
        log, options = self._compiler_log()
        created = cuda.cuLinkCreate(len(options), list(options), list(options.values()))
        linker = check("cuLinkCreate", created)
        try:
            kind = cuda.CUjitInputType.CU_JIT_INPUT_PTX
            (status,) = cuda.cuLinkAddData(linker, kind, ptx, len(ptx), b"kernel", 0, [], [])
            if not int(status):
                status, address, nbytes = cuda.cuLinkComplete(linker)
            if int(status):
                raise self._refusal(ptx, status, log)
            return ctypes.string_at(int(address), int(nbytes))  # the linker's own memory
        finally:
            check("cuLinkDestroy", cuda.cuLinkDestroy(linker))

    def _compiler_log(self) -> tuple[bytes, dict[Any, Any]]:
        """Room for the JIT compiler's words, and the options that name it."""
        log = bytes(_LOG_BYTES)  # the binding hands its address to the driver, which writes into it
        option = self._cuda.CUjit_option
        return log, {option.CU_JIT_ERROR_LOG_BUFFER: log, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: _LOG_BYTES}

    def _refusal(self, image: bytes, status: Any, log: bytes) -> DeviceError:
        name = getattr(status, "name", "an unknown CUresult")
        words = log.partition(b"\0")[0].decode("utf-8", "replace").strip()
        said = f"the driver refuses a kernel: {name} ({int(status)})"
        if needed := ptx_needs(image):
            has = "CUDA {}.{} and compute capability {}.{}".format(
                *driver_version(self._cuda), *self.gpu.compute_capability
            )
            said += f"; it needs {needed}, this machine has {has}"
        return DeviceError(said + (f": {words}" if words else ""), hint=_LOAD_HINTS.get(name))

    def kernel(self, module: Any, entry: str, types: tuple[str, ...], *, overlaps: bool = False) -> Kernel:
        """A module's function, allowed all the shared memory that a block may have."""
        cuda = self._cuda
        handle = check(f"cuModuleGetFunction({entry})", cuda.cuModuleGetFunction(module, entry.encode()))
        attribute = cuda.CUfunction_attribute
        which = attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        fixed = check(f"cuFuncGetAttribute({entry})", cuda.cuFuncGetAttribute(which, handle))
        which = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(f"cuFuncSetAttribute({entry})", cuda.cuFuncSetAttribute(handle, which, self.shared_bytes - fixed))
        return Kernel(entry, types, handle, overlaps)

    def launch_kernel(
        self, kernel: Kernel, grid: Dimensions, block: int, shared_bytes: int, values: Sequence[int | float]
    ) -> None:
        """Launch in stream order; `values` are packed as the kernel's types say."""
        arguments = self._packed.get(kernel.types)
        if arguments is None:
            arguments = self._packed[kernel.types] = _Arguments(kernel.types)
        x, y, z = (*grid, 1, 1)[:3]
        pointers = arguments.pack(values)
        cuda = self._cuda
        if kernel.overlaps:
            config = cuda.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
            config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
            config.sharedMemBytes, config.hStream = shared_bytes, self._stream
            config.attrs, config.numAttrs = [self._overlap], 1
            status = cuda.cuLaunchKernelEx(config, kernel.handle, pointers, 0)
        else:
            status = cuda.cuLaunchKernel(kernel.handle, x, y, z, block, 1, 1, shared_bytes, self._stream, pointers, 0)
        if int(status[0]):
            check(
                f"cuLaunchKernel({kernel.entry}, grid {grid}, block {block}, {shared_bytes} bytes)", status, EngineError
            )

    # Order and time

    def synchronize(self) -> None:
        """Wait for everything launched so far. Raises EngineError where any of it failed."""
        check("cuStreamSynchronize", self._cuda.cuStreamSynchronize(self._stream), EngineError)

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

    def mark(self) -> Any:
        """A mark behind everything launched so far, to wait for."""
        cuda = self._cuda
        flags = cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING
        event = check("cuEventCreate", cuda.cuEventCreate(flags), EngineError)
        check("cuEventRecord", cuda.cuEventRecord(event, self._stream), EngineError)
        return event

    def wait(self, mark: Any) -> None:
        """Wait until all before the mark is done; the mark is used up. Raises EngineError where any of it failed."""
        check("cuEventSynchronize", self._cuda.cuEventSynchronize(mark), EngineError)
        check("cuEventDestroy", self._cuda.cuEventDestroy(mark), EngineError)

    def forget(self, graph: Graph) -> None:
        """Give back what a graph takes; it must not be running."""
        check("cuGraphExecDestroy", self._cuda.cuGraphExecDestroy(graph.handle))

    def replay(self, graph: Graph) -> None:
        check("cuGraphLaunch", self._cuda.cuGraphLaunch(graph.handle, self._stream), EngineError)

    def moment(self) -> Any:
        """A point in the device's time, behind everything launched so far, for `elapsed`."""
        event = check("cuEventCreate", self._cuda.cuEventCreate(0))
        check("cuEventRecord", self._cuda.cuEventRecord(event, self._stream))
        return event

    def elapsed(self, first: Any, last: Any) -> float:
        """Seconds of device time between two moments, once the last has come."""
        check("cuEventSynchronize", self._cuda.cuEventSynchronize(last))
        return float(check("cuEventElapsedTime", self._cuda.cuEventElapsedTime(first, last))) / 1000

    def forget_moments(self, moments: Iterable[Any]) -> None:
        for event in moments:
            check("cuEventDestroy", self._cuda.cuEventDestroy(event))

    def seconds(self, work: Callable[[], None]) -> float:
        """Device time that `work`'s launches take, by events around them."""
        first = self.moment()
        work()
        last = self.moment()
        taken = self.elapsed(first, last)
        self.forget_moments((first, last))
        return taken


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


def ptx_needs(image: bytes) -> str | None:
    """What PTX text asks of a machine by its .version and .target; None for a cubin.

    PTX 7.0 to 8.5 came with CUDA 11.0 to 12.5, one minor version each (NVIDIA's PTX release notes).
    """
    head = re.search(rb"^\.version (\d+)\.(\d+)\s+\.target sm_(\d+)(\d)", image, re.MULTILINE)
    if head is None:
        return None
    major, minor, *capability = map(int, head.groups())
    return "CUDA {}.{} and compute capability {}.{}".format(major + 4, minor, *capability)


def blocks_of(count: int, size: int) -> int:
    """Blocks of `size` that cover `count`, at least one: a grid may not be empty."""
    return max(1, math.ceil(count / size))

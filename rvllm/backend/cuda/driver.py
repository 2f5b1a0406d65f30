"""What NVIDIA's driver says of itself and its GPUs. The only importer of cuda.bindings; creates no context.

Every function takes the binding as an argument so that a test can hand in another one; by default it is cuda.bindings,
imported when first needed: that works without a driver, and only the first call fails.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from rvllm.errors import DeviceError, EngineError, RvllmError

LIBRARY = "libcuda.so.1"
OLDEST_CUDA = (12, 0)
"""What cuda-bindings needs: cuGetProcAddress_v2 came with CUDA 12.0, driver R525."""

_NAME_BYTES = 256
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_HIDING = "CUDA_VISIBLE_DEVICES"
_LOST = "the GPU is lost to this process, start it again; `rvllm doctor --check MODEL` finds a kernel that is wrong"
_HINTS = {
    "CUDA_ERROR_NOT_INITIALIZED": "this process was forked from one that had used the GPU, and CUDA does not survive "
    "that: start it with multiprocessing's spawn, or use --device cpu in it",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory is faulty: see `nvidia-smi -q -d ECC`, and reset or replace it",
    "CUDA_ERROR_NO_DEVICE": "run `nvidia-smi`; in a container, start it with --gpus all",
    "CUDA_ERROR_STUB_LIBRARY": f"a toolkit's stub of {LIBRARY} was loaded: take its folder out of LD_LIBRARY_PATH",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the GPU for itself: see `nvidia-smi -q -d COMPUTE`",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, which GPUs joined by NVSwitch need",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": f"{LIBRARY} and the kernel's driver differ in version: reboot, "
    "or install the kernel's version in the container",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "a cuda-compat library was loaded that this GPU does not take: "
    "take its folder out of LD_LIBRARY_PATH",
    "CUDA_ERROR_UNKNOWN": "run `nvidia-smi`; often /dev/nvidia-uvm is missing (`nvidia-modprobe -u` makes it), "
    "or a suspended machine needs a reboot",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver numbers it. `total_bytes` of memory, free or not; `uuid` as nvidia-smi -L prints it."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    uuid: str


def devices(cuda: Any = None) -> list[Gpu]:
    """Every GPU that this process may use, at least one. Raises DeviceError: no driver, an old one, or no GPU."""
    cuda = cuda or binding()
    driver_version(cuda)
    (status,) = cuda.cuInit(0)
    count = 0
    if int(status) != _NO_DEVICE:
        check("cuInit", (status,))
        count = check("cuDeviceGetCount", cuda.cuDeviceGetCount())
    if count == 0:
        raise _no_gpu(os.environ.get(_HIDING))
    return [_gpu(cuda, index) for index in range(count)]


def driver_version(cuda: Any = None) -> tuple[int, int]:
    """The newest CUDA version that the driver supports, as (13, 0). Raises DeviceError: no driver, or an old one."""
    cuda = cuda or binding()
    try:
        number = check("cuDriverGetVersion", cuda.cuDriverGetVersion())
    except RuntimeError as cause:  # the binding resolves the library at its first call
        raise unusable_driver(cause, version_without_binding()) from None
    if _version(number) < OLDEST_CUDA:
        raise _too_old(_version(number))
    return _version(number)


def check(call: str, result: tuple[Any, ...], failure: type[RvllmError] = DeviceError) -> Any:
    """The value of a driver call's result, or None where it has none. Raises `failure` with the CUresult's name.

    EngineError is the failure of what a step does: launches, copies, waiting. Such an error comes back from every later
    call, too, so there the way out is a new process.
    """
    status, *values = result
    if int(status):
        name = getattr(status, "name", "an unknown CUresult")
        hint = _HINTS.get(name, _LOST if failure is EngineError else None)
        raise failure(f"{call} failed: {name} ({int(status)})", hint=hint)
    return values[0] if values else None


def version_without_binding() -> int | None:
    """cuDriverGetVersion's number by way of ctypes, which any driver answers; None where there is no library."""
    try:
        library = ctypes.CDLL(LIBRARY)
        number = ctypes.c_int(0)
        return number.value if library.cuDriverGetVersion(ctypes.byref(number)) == 0 else 0
    except (OSError, AttributeError):
        return None


def unusable_driver(cause: RuntimeError, number: int | None) -> DeviceError:
    """Why the binding could not call the driver; `number` is what `version_without_binding` gave."""
    if number is None:
        return DeviceError(
            f"there is no usable NVIDIA driver: its library {LIBRARY} was not found",
            hint="install the NVIDIA driver (a CUDA toolkit is not needed); in a container, start it with --gpus all",
        )
    if number > 0 and _version(number) < OLDEST_CUDA:
        return _too_old(_version(number))
    return DeviceError(f"the NVIDIA driver's library {LIBRARY} cannot be used: {cause}")


def ptx_tier(compute_capability: tuple[int, int], cuda_version: tuple[int, int]) -> str | None:
    """The highest tier of kernels for a GPU and driver: "t70" | "t75" | "t80" | "t89" | "t90a" | "t90"; None: too old.

    PTX runs on its target and all later ones, but for the "a" targets, which run on theirs alone. FP8 in the t89
    kernels needs PTX 8.4, so CUDA 12.4.
    """
    if compute_capability == (9, 0):
        return "t90a"
    for tier, needs, driver in (
        ("t90", (9, 0), OLDEST_CUDA),
        ("t89", (8, 9), (12, 4)),
        ("t80", (8, 0), OLDEST_CUDA),
        ("t75", (7, 5), OLDEST_CUDA),
        ("t70", (7, 0), OLDEST_CUDA),
    ):
        if compute_capability >= needs and cuda_version >= driver:
            return tier
    return None


def binding() -> Any:
    """cuda.bindings.driver, imported when first needed; without a driver its first call fails, not its import."""
    from cuda.bindings import driver

    return driver


def _gpu(cuda: Any, index: int) -> Gpu:
    device = check("cuDeviceGet", cuda.cuDeviceGet(index))
    attribute = cuda.CUdevice_attribute
    major, minor = (
        check("cuDeviceGetAttribute", cuda.cuDeviceGetAttribute(which, device))
        for which in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    raw = check("cuDeviceGetName", cuda.cuDeviceGetName(_NAME_BYTES, device))
    name = raw.partition(b"\0")[0].decode("ascii", "replace").strip()
    total = check("cuDeviceTotalMem", cuda.cuDeviceTotalMem(device))
    octets = check("cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid_v2(device)).bytes
    return Gpu(index, name, (major, minor), total, _uuid(octets, mig=" MIG " in name))


def _uuid(octets: bytes, *, mig: bool) -> str:
    text = octets.hex()
    parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
    return ("MIG-" if mig else "GPU-") + "-".join(parts)


def _version(number: int) -> tuple[int, int]:
    return number // 1000, number % 1000 // 10


def _too_old(found: tuple[int, int]) -> DeviceError:
    return DeviceError(
        f"the NVIDIA driver supports CUDA {found[0]}.{found[1]}, the oldest that works is "
        f"{OLDEST_CUDA[0]}.{OLDEST_CUDA[1]}",
        hint="install driver R525 or newer",
    )


def _no_gpu(visible: str | None) -> DeviceError:
    if visible is None:
        return DeviceError("the NVIDIA driver finds no GPU", hint=_HINTS["CUDA_ERROR_NO_DEVICE"])
    return DeviceError(
        f"{_HIDING}={visible!r} leaves no GPU to use",
        hint=f"unset {_HIDING}, or name a GPU that `nvidia-smi -L` lists",
    )

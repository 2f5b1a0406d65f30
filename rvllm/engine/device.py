"""Which device computes, from what was asked for and what there is. Knows the driver's answers; loads nothing."""

from __future__ import annotations

from collections.abc import Callable

from rvllm.backend.cuda.driver import Gpu, devices
from rvllm.errors import DeviceError


def choose_device(asked: str, warn: Callable[[str], None], find_gpus: Callable[[], list[Gpu]] = devices) -> str:
    """The device to use, "cpu" | "cuda", for `asked`, one of config.DEVICES.

    "auto" never fails: it tells `warn` in one line why the CPU is taken. "cuda" raises DeviceError where it cannot be.
    """
    if asked == "cpu":
        return "cpu"
    try:
        find_gpus()
    except DeviceError as cause:
        if asked == "cuda":
            raise
        warn(f"running on the CPU: {cause.message}")
        return "cpu"
    return "cuda"

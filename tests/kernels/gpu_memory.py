"""The GPU's side of the seam: the same kernel tests, on compiled PTX. Skips where no device opens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rvllm.backend.cuda.context import Context, Kernel
from rvllm.backend.cuda.driver import devices
from rvllm.errors import DeviceError
from tests.kernels import shim

ROOTS = (Path(__file__).parents[2] / "kernels_ptx", Path(__file__).parent / "probes")


class CudaMemory:
    """A GPU: every launch is tried twice, for the same bits."""

    runs: tuple[str, ...] = ("first", "second")
    guard_bytes = 256

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._modules: dict[str, Any] = {}

    def allocate(self, nbytes: int) -> int:
        return self._context.allocate(nbytes)

    def free(self, address: int) -> None:
        self._context.free(address)

    def write(self, address: int, data: bytes) -> None:
        self._context.write(address, np.frombuffer(data, dtype=np.uint8))

    def read(self, address: int, nbytes: int) -> bytes:
        data = np.empty(nbytes, dtype=np.uint8)
        self._context.read(address, data)
        return data.tobytes()

    def matrix_map(self, address: int, rows: int, columns: int, box_rows: int) -> npt.NDArray[np.uint8]:
        return self._context.matrix_map(address, rows, columns, box_rows)

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
        kernel = self._kernel(stem, entry, tier or shim.tiers_of(stem)[0])
        self._context.launch_kernel(kernel, grid, block, shared_bytes, arguments)
        self._context.synchronize()

    def _kernel(self, stem: str, entry: str, tier: str) -> Kernel:
        built = [name for name in shim.tiers_of(stem) if name <= tier]
        path = f"ptx/{built[-1]}/{stem}.ptx"
        if (path, entry) not in self._kernels:
            root = next(root for root in ROOTS if (root / path).exists())
            facts = json.loads((root / "manifest.json").read_text())["files"][path]["entries"][entry]
            types = tuple(argument.split()[0] for argument in facts["arguments"].split(", ") if argument)
            if path not in self._modules:
                self._modules[path] = self._context.load_image((root / path).read_bytes() + b"\0")
            self._kernels[path, entry] = self._context.kernel(self._modules[path], entry, types)
        return self._kernels[path, entry]


def open_memory() -> CudaMemory:
    """The first GPU. Skips the test where there is none."""
    try:
        devices()
    except DeviceError as reason:
        pytest.skip(str(reason))
    return CudaMemory(Context(0))

"""Find, choose and load our kernels. Knows the manifest and the tiers; not what a kernel computes.

A kernel's PTX exists for a base tier and some higher ones. The choice is made before loading, from the GPU, the driver
and the shared memory; should the driver refuse all the same, the next lower tier is tried, and that is said once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rvllm.backend.cuda.compiled import module_loader
from rvllm.backend.cuda.context import Context, Graph, Kernel
from rvllm.backend.cuda.driver import driver_version, ptx_tier
from rvllm.backend.cuda.launch import Launch
from rvllm.errors import DeviceError

TIERS = ("t70", "t75", "t80", "t89", "t90", "t90a")
FORCED_TIER = "RVLLM_TIER"
OVERLAP_CUDA = (12, 3)  # older drivers do not keep the order of overlapping launches in a graph


@dataclass(frozen=True, slots=True)
class Build:
    """One PTX file: `types` and `arguments` of each entry. `minimum_driver` is a branch number, 525 for R525.

    `waits`: its kernels wait for the grid before them, so that they may be launched while that runs.
    """

    stem: str
    tier: str
    path: str
    types: Mapping[str, tuple[str, ...]]
    arguments: Mapping[str, tuple[str, ...]]
    minimum_driver: int
    waits: bool


class Device(Protocol):
    """What a model needs of a GPU. A test's stand-in has the host's memory and runs the kernels' sources there."""

    @property
    def tier(self) -> str: ...

    @property
    def multiprocessors(self) -> int: ...

    def allocate(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def fill(self, address: int, byte: int, nbytes: int) -> None: ...

    def write(self, address: int, array: npt.NDArray[Any]) -> None: ...

    def read(self, address: int, array: npt.NDArray[Any]) -> None: ...

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]: ...

    def unpin(self, buffer: npt.NDArray[np.uint8]) -> None: ...

    def copy_in(self, address: int, source: int, nbytes: int) -> None: ...

    def matrix_map(self, address: int, rows: int, columns: int, box_rows: int) -> npt.NDArray[np.uint8]: ...

    def lock_pages(self, pages: tuple[int, int]) -> tuple[int, int] | None: ...

    def unlock_pages(self, pages: tuple[int, int] | None) -> None: ...

    def launch(self, launch: Launch) -> None: ...

    def capture(self, launches: Sequence[Launch]) -> Graph | None:
        """The launches as a graph; None where the device has no graphs and `launch` is all there is."""
        ...

    def forget(self, graph: Graph) -> None: ...

    def replay(self, graph: Graph) -> None: ...

    def mark(self) -> Any: ...

    def wait(self, mark: Any) -> None: ...

    def synchronize(self) -> None: ...


class Gpu(Context):
    """A GPU with our kernels, each loaded when it is first launched."""

    def __init__(self, index: int, warn: Callable[[str], None], cuda: Any = None) -> None:
        super().__init__(index, cuda)
        self._warn = warn
        self._builds = read_manifest()
        forced = os.environ.get(FORCED_TIER)
        capability, version = self.gpu.compute_capability, driver_version(self._cuda)
        self._version = version
        self.tier = chosen_tier(capability, version, forced)
        self._loader = module_loader(self, capability, version, warn)
        self._modules: dict[str, tuple[Build, Any]] = {}
        self._kernels: dict[str, Kernel] = {}

    def launch(self, launch: Launch) -> None:
        """Launch in stream order."""
        kernel = self._kernels.get(launch.entry)
        if kernel is None:
            kernel = self._kernels[launch.entry] = self._load(launch.stem, launch.entry)
        self.launch_kernel(kernel, launch.grid, launch.block, launch.shared_bytes, launch.values)

    def capture(self, launches: Sequence[Launch]) -> Graph:
        """The launches as a graph. Their kernels are loaded first: loading is not allowed while capturing."""
        for launch in launches:
            if launch.entry not in self._kernels:
                self._kernels[launch.entry] = self._load(launch.stem, launch.entry)
        with self.capturing() as finish:
            for launch in launches:
                self.launch(launch)
        return finish()

    def _load(self, stem: str, entry: str) -> Kernel:
        if stem not in self._modules:
            self._modules[stem] = self._load_module(stem)
        build, module = self._modules[stem]
        if entry not in build.types:
            raise DeviceError(f"{build.path} has no kernel {entry}", hint="rebuild it: python -m kernels_ptx.build")
        overlaps = build.waits and self._version >= OVERLAP_CUDA
        return self.kernel(module, entry, build.types[entry], overlaps=overlaps)

    def _load_module(self, stem: str) -> tuple[Build, Any]:
        builds = candidates(self._builds, stem, self.tier)
        for build in builds:
            try:
                return build, self._loader.load((_package() / build.path).read_bytes() + b"\0")
            except DeviceError as refusal:
                if build is builds[-1]:
                    raise
                self._warn(f"{build.path} was refused, a lower tier is used: {refusal.message}")
        raise DeviceError(f"there is no build of kernel {stem} for {self.tier}", hint=f"unset {FORCED_TIER}")


def candidates(builds: Sequence[Build], stem: str, tier: str) -> list[Build]:
    """Builds of `stem` that a GPU of `tier` can run, best first."""
    highest = TIERS.index(tier)
    fitting = [build for build in builds if build.stem == stem and TIERS.index(build.tier) <= highest]
    return sorted(fitting, key=lambda build: -TIERS.index(build.tier))


def chosen_tier(capability: tuple[int, int], cuda_version: tuple[int, int], forced: str | None) -> str:
    """The highest tier for a GPU and a driver, or the forced one if it is not higher. Raises DeviceError."""
    best = ptx_tier(capability, cuda_version)
    if best is None:
        raise DeviceError(
            f"the GPU has compute capability {capability[0]}.{capability[1]}, the oldest that works is 7.0"
        )
    if forced is None:
        return best
    if forced not in TIERS or TIERS.index(forced) > TIERS.index(best):
        raise DeviceError(
            f"{FORCED_TIER}={forced!r}, the tiers of this GPU are {', '.join(TIERS[: TIERS.index(best) + 1])}"
        )
    return forced


def read_manifest() -> list[Build]:
    """Every PTX file of the package. Raises DeviceError where the package came without them."""
    path = _package() / "manifest.json"
    if not path.is_file():
        raise DeviceError("the kernels are missing from this installation", hint="install rvllm again, or rebuild them")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    return [_build(name, entry) for name, entry in sorted(manifest["files"].items())]


def _build(path: str, entry: Mapping[str, Any]) -> Build:
    _, tier, file = path.split("/")
    signatures = {
        name: [argument.split() for argument in facts["arguments"].split(", ") if argument]
        for name, facts in entry["entries"].items()
    }
    types = {name: tuple(kind for kind, _ in signature) for name, signature in signatures.items()}
    arguments = {name: tuple(argument for _, argument in signature) for name, signature in signatures.items()}
    return Build(
        file.removesuffix(".ptx"), tier, path, types, arguments, entry["minimum_driver"], entry["griddepcontrol"]
    )


def _package() -> Any:
    return resources.files("kernels_ptx")

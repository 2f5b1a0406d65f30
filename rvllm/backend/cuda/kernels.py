"""Find, choose and load our kernels. Knows the manifest and the tiers; not what a kernel computes.

A kernel's PTX exists for a base tier and some higher ones. The choice is made before loading, from the GPU, the driver
and the shared memory; should the driver refuse all the same, the next lower tier is tried, and that is said once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any, Protocol

from rvllm.backend.cuda.context import Context, Kernel
from rvllm.backend.cuda.driver import driver_version
from rvllm.errors import DeviceError

TIERS = ("t70", "t75", "t80", "t89", "t90", "t90a")
FORCED_TIER = "RVLLM_TIER"


@dataclass(frozen=True, slots=True)
class Build:
    """One PTX file: `types` has each entry's argument types. `minimum_driver` is a branch number, 525 for R525."""

    stem: str
    tier: str
    path: str
    types: Mapping[str, tuple[str, ...]]
    minimum_driver: int


class Launcher(Protocol):
    """What lowering needs of a GPU: memory and launches by kernel name. A test's stand-in runs kernels on the host."""

    @property
    def tier(self) -> str: ...

    @property
    def multiprocessors(self) -> int: ...

    def allocate(self, nbytes: int) -> int: ...

    def launch(
        self,
        stem: str,
        entry: str,
        grid: tuple[int, ...],
        block: int,
        shared_bytes: int,
        values: tuple[int | float, ...],
    ) -> None: ...


class Kernels:
    """The kernels of one GPU, loaded when first launched."""

    def __init__(self, context: Context, warn: Callable[[str], None]) -> None:
        self._context = context
        self._warn = warn
        self._builds = read_manifest()
        self._driver = driver_version()
        self.tier = chosen_tier(context.gpu.compute_capability, self._driver, os.environ.get(FORCED_TIER))
        self._modules: dict[str, tuple[Build, Any]] = {}
        self._kernels: dict[str, Kernel] = {}

    @property
    def multiprocessors(self) -> int:
        return self._context.multiprocessors

    def allocate(self, nbytes: int) -> int:
        return self._context.allocate(nbytes)

    def launch(
        self,
        stem: str,
        entry: str,
        grid: tuple[int, ...],
        block: int,
        shared_bytes: int,
        values: tuple[int | float, ...],
    ) -> None:
        """Launch `entry` of `stem`'s PTX in stream order."""
        kernel = self._kernels.get(entry)
        if kernel is None:
            kernel = self._kernels[entry] = self._load(stem, entry)
        self._context.launch(kernel, grid, block, shared_bytes, values)

    def _load(self, stem: str, entry: str) -> Kernel:
        if stem not in self._modules:
            self._modules[stem] = self._load_module(stem)
        build, module = self._modules[stem]
        if entry not in build.types:
            raise DeviceError(f"{build.path} has no kernel {entry}", hint="rebuild it: python kernels_ptx/build.py")
        return self._context.kernel(module, entry, build.types[entry], self._context.shared_bytes)

    def _load_module(self, stem: str) -> tuple[Build, Any]:
        candidates = self.candidates(stem)
        for build in candidates:
            try:
                return build, self._context.load_image(self._image(build))
            except DeviceError as refusal:
                if build is candidates[-1]:
                    raise
                self._warn(f"{build.path} was refused, a lower tier is used: {refusal.message}")
        raise DeviceError(f"there is no build of kernel {stem} for {self.tier}", hint=f"unset {FORCED_TIER}")

    def candidates(self, stem: str) -> list[Build]:
        """Builds of `stem` that this GPU can run, best first."""
        highest = TIERS.index(self.tier)
        fitting = [b for b in self._builds if b.stem == stem and TIERS.index(b.tier) <= highest]
        return sorted(fitting, key=lambda build: -TIERS.index(build.tier))

    def _image(self, build: Build) -> bytes:
        return (_package() / build.path).read_bytes() + b"\0"

    @cached_property
    def fingerprint(self) -> str:
        """What decides the compiled kernels: their PTX, the GPU and the driver."""
        parts = [build.path for build in self._builds] + [str(self._context.gpu.compute_capability), str(self._driver)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def chosen_tier(capability: tuple[int, int], cuda_version: tuple[int, int], forced: str | None) -> str:
    """The highest tier for a GPU and a driver, or the forced one if it is not higher. Raises DeviceError."""
    if capability < (7, 0):
        raise DeviceError(
            f"the GPU has compute capability {capability[0]}.{capability[1]}, the oldest that works is 7.0"
        )
    if capability == (9, 0):
        best = "t90a"
    else:
        known = [tier for tier in TIERS[:-1] if int(tier[1:]) <= capability[0] * 10 + capability[1]]
        best = known[-1]
    if cuda_version < (12, 4) and TIERS.index(best) >= TIERS.index("t89") and best == "t89":
        best = "t80"
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
    types = {
        name: tuple(argument.split()[0] for argument in facts["arguments"].split(", ") if argument)
        for name, facts in entry["entries"].items()
    }
    return Build(file.removesuffix(".ptx"), tier, path, types, entry["minimum_driver"])


def _package() -> Any:
    return resources.files("kernels_ptx")

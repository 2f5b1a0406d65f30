"""Keep compiled kernels where the driver does not: cubins in our cache folder. Knows files and keys; not kernels.

The driver compiles PTX for its GPU when a module is loaded, and keeps the result under ~/.nv/ComputeCache. Where it
cannot (no home folder, a read-only one, CUDA_CACHE_DISABLE=1), that would be done at every start; then we do it, once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rvllm.cache import cache_folder
from rvllm.errors import DeviceError, StartError

PATIENCE_S = 5.0
"""Compiling that takes longer than this in all is worth a line."""

MOST_BYTES = 256 << 20
"""Of kept cubins; those used longest ago go first. One GPU's kernels are some 5 MB."""

_MAGIC = b"rvllm cubin 1\n"
_DIGEST_BYTES = 32


class Images(Protocol):
    """What a GPU does with images: `rvllm.backend.cuda.context.Context`."""

    def compile(self, ptx: bytes) -> bytes: ...

    def load_image(self, image: bytes) -> Any: ...


@dataclass(frozen=True, slots=True)
class CubinStore:
    """Cubins by key, one a file: a magic line, the SHA-256 of the cubin, the cubin."""

    folder: Path

    def read(self, key: str) -> bytes | None:
        """The cubin, or None where there is none or its file is damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, cubin = content[len(_MAGIC) :][:_DIGEST_BYTES], content[len(_MAGIC) + _DIGEST_BYTES :]
        if not content.startswith(_MAGIC) or hashlib.sha256(cubin).digest() != digest:
            return None
        with contextlib.suppress(OSError):  # a folder that can only be read serves, too
            os.utime(path)
        return cubin

    def write(self, key: str, cubin: bytes) -> bool:
        """Keep a cubin, whole or not at all; whether that was possible."""
        path = self._path(key)
        partial = path.with_suffix(f".{os.getpid()}.new")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
            partial.replace(path)
            self._prune(keep=path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.cubin"

    def _prune(self, keep: Path) -> None:
        """Remove what was used longest ago until the rest fits; what killed runs left counts like the rest."""
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process has just removed it
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= MOST_BYTES:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size


class ModuleLoader:
    """Loads PTX for one GPU. `store` None: the driver's own cache serves, so PTX goes to it as it is.

    `target` tells GPU and driver apart from others whose cubins would not do.
    """

    def __init__(
        self,
        images: Images,
        store: CubinStore | None,
        *,
        target: str,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._images = images
        self._store = store
        self._target = target
        self._warn = warn
        self._clock = clock
        self._compiling_s = 0.0

    def load(self, ptx: bytes) -> Any:
        """A module from PTX text, which ends in a zero byte. Raises DeviceError with the compiler's words."""
        if self._store is None:
            module, seconds = self._timed(self._images.load_image, ptx)
            self._say(seconds, "once: the driver keeps what it has compiled")
            return module
        key = f"{hashlib.sha256(ptx).hexdigest()}-{self._target}"
        cubin = self._store.read(key)
        if cubin is not None:
            with contextlib.suppress(DeviceError):  # whatever is wrong with it, a new one will do
                return self._images.load_image(cubin)
        cubin, seconds = self._timed(self._images.compile, ptx)
        module = self._images.load_image(cubin)
        folder = self._store.folder
        if self._store.write(key, cubin):
            self._say(seconds, f"once: they are kept in {folder}")
        else:
            where = f"neither the driver's cache nor {folder} can be written"
            self._say(seconds, f"at every start: {where} (set RVLLM_CACHE or CUDA_CACHE_PATH)")
        return module

    def _timed(self, work: Callable[[bytes], Any], ptx: bytes) -> tuple[Any, float]:
        begin_s = self._clock()
        result = work(ptx)
        return result, self._clock() - begin_s

    def _say(self, seconds: float, how_often: str) -> None:
        """One line when compiling has taken longer than PATIENCE_S in all, and none after it."""
        before_s, self._compiling_s = self._compiling_s, self._compiling_s + seconds
        if before_s <= PATIENCE_S < self._compiling_s:
            self._warn(f"compiling the kernels for this GPU takes a while, {how_often}")


def module_loader(
    images: Images,
    capability: tuple[int, int],
    cuda_version: tuple[int, int],
    warn: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
) -> ModuleLoader:
    """The loader for a GPU of `capability` under a driver of `cuda_version`: with cubins kept by us where it must."""
    target = "sm_{}{}-cuda_{}.{}".format(*capability, *cuda_version)
    store = None if driver_keeps(environment) else CubinStore(_folder())
    return ModuleLoader(images, store, target=target, warn=warn)


def driver_keeps(environment: Mapping[str, str]) -> bool:
    """Whether the driver certainly keeps what it compiles: its cache is on and its folder can be written.

    CUDA_CACHE_DISABLE, CUDA_CACHE_PATH and ~/.nv/ComputeCache as in NVIDIA's CUDA programming guide.
    """
    if environment.get("CUDA_CACHE_DISABLE", "").strip() not in ("", "0"):
        return False
    if path := environment.get("CUDA_CACHE_PATH"):
        return _can_be_written(Path(path))
    home = environment.get("HOME")
    if not home:
        return False
    folders = (Path(home, ".nv", "ComputeCache"), Path(home, ".nv"), Path(home))
    return _can_be_written(next((folder for folder in folders if folder.exists()), Path(home)))


def _folder() -> Path:
    try:
        return cache_folder() / "kernels"
    except StartError:  # no home folder: a place that cannot be written is what this then is
        return Path(os.devnull, "kernels")


def _can_be_written(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)

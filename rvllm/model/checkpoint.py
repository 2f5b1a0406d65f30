"""Named tensors in files, whatever the container. Knows names, shapes, bytes; not what a model does with them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rvllm.errors import CheckpointError
from rvllm.model.files import LFS_HINT, ModelFiles, is_lfs_pointer, unreadable_reason
from rvllm.model.quants import dequantise
from rvllm.program.dtype import DType, Float32

Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_SHOWN = 4  # problems named in one message; the rest are counted
_COMPARED_BYTES = 1 << 24  # heads are compared piece by piece, so that different ones cost one piece


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `name` and `shape` are Hugging Face's, whatever the file calls it.

    `offset` and `nbytes` are bytes in `file`, which is None where the bytes are made, not read (dummy weights).
    `rotary_heads` > 0: the rows are stored in GGUF's interleaved rotary order for this many heads, and
    `Checkpoint.read` puts them back into Hugging Face's order.
    """

    name: str
    shape: Shape
    dtype: DType
    file: Path | None
    offset: int
    nbytes: int
    rotary_heads: int = 0


class Checkpoint(Protocol):
    """Weights by Hugging Face name. No tensor data of a file is read before `raw` or `read` is called."""

    @property
    def origin(self) -> str:
        """The folder or file the weights come from, for messages."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def refused(self) -> Mapping[str, str]:
        """Tensors that are there but cannot be given out, and why: an error only if one is asked for."""
        ...

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes as stored, (nbytes,) uint8, read-only, without a copy where there is a file."""
        ...

    def read(self, name: str) -> Float32:
        """The tensor expanded to float32 in its logical shape and Hugging Face's row order."""
        ...


@dataclass(frozen=True, slots=True)
class FileCheckpoint:
    """A checkpoint over mapped files.

    `mappings` has each file whole, (file bytes,) uint8, read-only, so that a device may register a mapping and
    copy from it; a mapping lives as long as any array made from it.
    """

    origin: str
    tensors: Mapping[str, TensorInfo]
    refused: Mapping[str, str]
    mappings: Mapping[Path, Bytes]

    def raw(self, name: str) -> Bytes:
        info = find(self, name)
        assert info.file is not None, info
        return self.mappings[info.file][info.offset : info.offset + info.nbytes]

    def read(self, name: str) -> Float32:
        info = find(self, name)
        values = dequantise(self.raw(name), info.dtype).reshape(info.shape)
        return values[rotary_row_order(info.shape[0], info.rotary_heads)] if info.rotary_heads else values


def open_checkpoint(files: ModelFiles) -> FileCheckpoint:
    """Open the weights of `files`, checked whole before any tensor data is read. Raises CheckpointError."""
    # Each reader imports this module for the contract above.
    if files.is_gguf:
        from rvllm.model.gguf_model import open_gguf

        return open_gguf(files.root)
    from rvllm.model.safetensors import open_safetensors

    return open_safetensors(files.root)


def map_file(path: Path) -> Bytes:
    """All bytes of `path`, (file bytes,) uint8, read-only.

    Raises CheckpointError: missing, a broken link, unreadable, a Git-LFS pointer.
    The mapping is MAP_SHARED: the CUDA driver registers such pages in milliseconds, private ones in minutes.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:  # mmap refuses an empty file
                return np.empty(0, np.uint8)
            buffer = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as cause:
        raise CheckpointError(unreadable_reason(path, cause)) from None
    if is_lfs_pointer(path):
        raise CheckpointError(f"{path} is a Git-LFS pointer, not the weights", hint=LFS_HINT)
    return np.frombuffer(buffer, dtype=np.uint8)


def find(checkpoint: Checkpoint, name: str) -> TensorInfo:
    """The info of tensor `name`. Raises CheckpointError when it is missing or refused, saying why."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(f"{checkpoint.origin}: {_absence(checkpoint, name)}")
    return info


def check(checkpoint: Checkpoint, wanted: Mapping[str, Shape]) -> None:
    """Make sure that every tensor of `wanted` is there, readable, with that shape. Raises CheckpointError."""
    problems = [text for name, shape in wanted.items() if (text := _problem(checkpoint, name, shape))]
    if not problems:
        return
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise CheckpointError(
        f"{checkpoint.origin}: {len(problems)} of {len(wanted)} tensors do not fit the model: "
        + "; ".join(problems[:_SHOWN])
        + more,
        hint="the weights and config.json must be of the same model, and the download complete",
    )


def head_is_tied(checkpoint: Checkpoint, tie_flag: bool, warn: Callable[[str], None]) -> bool:
    """Whether the output head is the embedding. The file wins over config.json's `tie_word_embeddings`.

    No lm_head.weight in the file: tied, with a warning when the flag says otherwise. One that equals the
    embedding byte for byte, under a true flag: tied. A different one: not tied, with a warning if so flagged.
    Raises CheckpointError when either tensor has an unsupported dtype, or the embedding is missing.
    """
    if HEAD not in checkpoint.tensors and HEAD not in checkpoint.refused:
        if not tie_flag:
            warn(f"{checkpoint.origin} has no {HEAD}, yet tie_word_embeddings is false: the embedding is used")
        return True
    if not tie_flag:
        return False
    if _same_bytes(checkpoint, EMBEDDING, HEAD):
        return True
    warn(f"{checkpoint.origin} has a {HEAD} of its own, yet tie_word_embeddings is true: the file's is used")
    return False


def rotary_row_order(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """For Hugging Face's row i, the row of the file that holds it: (rows,) intp.

    Within a head of d rows, Hugging Face rotates rows (i, i + d/2), GGUF's llama family rows (2i, 2i + 1).
    """
    assert rows % (2 * heads) == 0, (rows, heads)
    order: npt.NDArray[np.intp] = np.arange(rows, dtype=np.intp).reshape(heads, rows // heads // 2, 2)
    return order.swapaxes(1, 2).reshape(rows)


def no_reasons() -> Mapping[str, str]:
    """The `refused` of a checkpoint that refuses nothing."""
    return MappingProxyType({})


def _absence(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint.refused.get(name, f"tensor {name} is missing")


def _problem(checkpoint: Checkpoint, name: str, shape: Shape) -> str | None:
    info = checkpoint.tensors.get(name)
    if info is None:
        return _absence(checkpoint, name)
    if info.shape != shape:
        return f"tensor {name} has shape {list(info.shape)}, the model needs {list(shape)}"
    return None


def _same_bytes(checkpoint: Checkpoint, first: str, second: str) -> bool:
    a, b = find(checkpoint, first), find(checkpoint, second)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    left, right = checkpoint.raw(first), checkpoint.raw(second)
    pieces = range(0, a.nbytes, _COMPARED_BYTES)
    return all(
        np.array_equal(left[start : start + _COMPARED_BYTES], right[start : start + _COMPARED_BYTES])
        for start in pieces
    )

"""Read safetensors files and folders of them. Knows the container; not what a model does with the tensors.

Layout (the safetensors format): 8 bytes little-endian header length, a JSON object {name: {dtype, shape,
data_offsets}, "__metadata__": {text: text}}, then the data, which the tensors cover without overlap or gap.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from rvllm.errors import CheckpointError
from rvllm.model.checkpoint import Bytes, FileCheckpoint, TensorInfo, map_file
from rvllm.model.files import missing_reason, read_json
from rvllm.program.dtype import BF16, F16, F32, DType

_READABLE: dict[str, DType] = {"F32": F32, "F16": F16, "BF16": BF16}
# Known to the format, checked like the others, but never given out.
_KNOWN_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_COPY_AGAIN = "the file is damaged or still being written: copy it again from its source"
_CONVERT = (
    "convert it on a machine that has torch and trusts it, e.g. with transformers: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, safe_serialization=True)"
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a header; `start` and `end` are bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def open_safetensors(folder: Path) -> FileCheckpoint:
    """Open the safetensors file of `folder`, or all shards of its index, every header checked first.

    Raises CheckpointError, naming the file: missing shard or tensor, truncated or trailing data, ranges that
    disagree with shapes, overlap, leave a gap or pass the end, unknown dtype, Git-LFS pointer, pickle.
    """
    index = _find_index(folder)
    shards = [folder / _single_file(folder)] if index is None else _shards(index)
    tensors: dict[str, TensorInfo] = {}
    refused: dict[str, str] = {}
    mappings: dict[Path, Bytes] = {}
    held: dict[str, Path] = {}
    for shard in shards:
        data = mappings[shard] = map_file(shard)
        data_start, entries = _parse(shard, data)
        for entry in entries:
            if entry.name in held:
                raise CheckpointError(f"tensor {entry.name} is in {held[entry.name]} and in {shard.name}")
            held[entry.name] = shard
            if dtype := _READABLE.get(entry.dtype):
                tensors[entry.name] = TensorInfo(
                    entry.name, entry.shape, dtype, shard, data_start + entry.start, entry.end - entry.start
                )
            else:
                refused[entry.name] = f"tensor {entry.name} has dtype {entry.dtype}, which is not supported"
    if index is not None:
        _check_index(index, held)
    return FileCheckpoint(str(folder), tensors, refused, mappings)


def _find_index(folder: Path) -> Path | None:
    if not folder.is_dir():
        raise CheckpointError(missing_reason(folder) if not folder.exists() else f"{folder} is not a folder")
    index = folder / _INDEX
    # A whole file beside an index wins, as in transformers.
    return index if _listed(index) and not _listed(folder / _SINGLE) else None


def _listed(path: Path) -> bool:
    """There is an entry of that name, even if it is a link to nothing: that is an error, not an absence."""
    return path.exists() or path.is_symlink()


def _single_file(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    weights = [name for name in names if name.endswith(".safetensors")]
    if _SINGLE in weights:
        return _SINGLE
    if len(weights) == 1:
        return weights[0]
    if weights:
        raise CheckpointError(
            f"{folder} holds {len(weights)} safetensors files ({', '.join(weights[:3])}) but no {_INDEX}",
            hint="copy the index from where the shards came from",
        )
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise CheckpointError(
            f"{folder} holds only pickle weights ({', '.join(pickles[:3])}), which are refused: "
            "reading a pickle can run any code",
            hint=_CONVERT,
        )
    raise CheckpointError(f"{folder} holds no *.safetensors file", hint="give the folder that holds the weights")


def _shards(index: Path) -> list[Path]:
    """The files that the index names, all of them there."""
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r}, which is not in its folder")
    shards = [index.with_name(name) for name in names]
    missing = [shard for shard in shards if not shard.exists()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(shards)} files named in {index} are missing: "
            + "; ".join(missing_reason(shard) for shard in missing[:3]),
            hint="finish the download, or copy the missing files",
        )
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{index} has no weight_map object")
    for name, file in found.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{index}: weight_map gives {file!r} for {name}, not a file name")
    return found


def _check_index(index: Path, held: dict[str, Path]) -> None:
    for name, file in _weight_map(index).items():
        if name not in held:
            raise CheckpointError(f"tensor {name} is not in {file}, where {index} says it is")
        if held[name].name != file:
            raise CheckpointError(f"tensor {name} is in {held[name].name}, {index} says it is in {file}")


def _parse(path: Path, data: Bytes) -> tuple[int, list[_Entry]]:
    """The start of the data in bytes, and the checked entries."""
    header_bytes = _header_bytes(path, data)
    try:
        header = json.loads(data[8 : 8 + header_bytes].tobytes(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(f"{path}: the header is not valid JSON: {cause}", hint=_COPY_AGAIN) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    _check_metadata(path, header.pop("__metadata__", None))
    entries = [_entry(path, name, value) for name, value in header.items()]
    _check_cover(path, entries, 8 + header_bytes, data.size)
    return 8 + header_bytes, entries


def _header_bytes(path: Path, data: Bytes) -> int:
    start = data[:8].tobytes()
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise CheckpointError(
            f"{path} is a pickle under another name; pickle weights are refused: reading one can run any code",
            hint=_CONVERT,
        )
    if len(start) < 8:
        raise CheckpointError(f"{path} is {data.size} bytes long, too short for a header", hint=_COPY_AGAIN)
    length = int.from_bytes(start, "little")
    if length > min(_HEADER_LIMIT_BYTES, data.size - 8):
        raise CheckpointError(
            f"{path}: the header says it is {length:,} bytes long, the file is {data.size:,} and "
            f"the limit {_HEADER_LIMIT_BYTES:,}",
            hint=_COPY_AGAIN,
        )
    return length


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map text to text")


def _entry(path: Path, name: str, value: object) -> _Entry:
    """One header entry, its byte range equal to what shape and dtype need."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the header's entry of tensor {name} is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _KNOWN_BITS:
        raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {dtype!r}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {shape} and data_offsets {offsets}; both must be lists of "
            "non-negative whole numbers, the offsets two in order"
        )
    bits = math.prod(shape) * _KNOWN_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise CheckpointError(
            f"{path}: tensor {name} of shape {shape} and dtype {dtype} needs {-(-bits // 8):,} bytes, "
            f"data_offsets {offsets} give it {offsets[1] - offsets[0]:,}",
            hint=_COPY_AGAIN,
        )
    return _Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(path: Path, entries: list[_Entry], data_start: int, file_bytes: int) -> None:
    """The tensors must cover the data whole: each starts where the last one ends, up to the end of the file."""
    end = 0
    last = "__metadata__"
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            what = "overlaps" if entry.start < end else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {entry.name} {what} {last}: it starts at byte {entry.start:,} of the data, "
                f"not at {end:,}",
                hint=_COPY_AGAIN,
            )
        end, last = entry.end, entry.name
    if data_start + end != file_bytes:
        raise CheckpointError(
            f"{path} is {file_bytes:,} bytes long, its header says {data_start + end:,} (tensor {last} is last)",
            hint=_COPY_AGAIN,
        )

"""Read GGUF files: metadata and where each tensor lies. Knows the container; not what a key or a name means.

Layout (the GGUF specification, versions 2 and 3): "GGUF", version u32, tensors u64, keys u64, the keys with
their typed values, the tensors' names, dimensions (fastest first), type and offset, then the aligned data.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rvllm.errors import CheckpointError
from rvllm.model.checkpoint import Bytes, TensorInfo, map_file
from rvllm.program.dtype import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    DType,
)

_TENSOR_TYPES: dict[int, DType] = {
    0: F32, 1: F16, 2: Q4_0, 3: Q4_1, 6: Q5_0, 7: Q5_1, 8: Q8_0, 12: Q4_K, 13: Q5_K, 14: Q6_K, 30: BF16
}  # fmt: skip
_REFUSED_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_COPY_AGAIN = "the file is damaged or still being written: copy it again from its source"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file.

    `metadata` has text, numbers, booleans and lists of them; `tensors` is by GGUF's names, with shapes turned
    into Hugging Face's order (out, in); `data` is the whole file, mapped, (file bytes,) uint8.
    """

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]
    data: Bytes

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Parse the head of `path` and check every tensor's range. Raises CheckpointError, naming the file."""
        data = map_file(path)
        cursor = _Cursor(path, memoryview(data.data))
        if data[:4].tobytes() != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it does not start with GGUF", hint=_COPY_AGAIN)
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(f"{path}: GGUF version {version} is not supported", hint="supported are 2 and 3")
        tensor_count, key_count = cursor.count(24), cursor.count(13)
        metadata = _metadata(cursor, key_count)
        return cls(path, metadata, _tensors(cursor, tensor_count, metadata), data)


class _Cursor:
    """Reads little-endian values one after the other, never past the end of the file."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.view = view
        self.position = 0

    def take(self, length: int) -> int:
        """Step over `length` bytes and return where they start."""
        start = self.position
        if length > len(self.view) - start:
            raise CheckpointError(
                f"{self.path} is {len(self.view):,} bytes long; at byte {start:,} it needs {length:,} more",
                hint=_COPY_AGAIN,
            )
        self.position = start + length
        return start

    def scalar(self, code: str) -> int | float | bool:
        value: int | float | bool
        (value,) = struct.unpack_from("<" + code, self.view, self.take(struct.calcsize("<" + code)))
        return value

    def count(self, least_bytes: int) -> int:
        """A u64 count of things that take at least `least_bytes` each: bounded by what the file can hold."""
        count = int(self.scalar("Q"))
        if count * least_bytes > len(self.view) - self.position:
            raise CheckpointError(
                f"{self.path} is {len(self.view):,} bytes long; at byte {self.position:,} it says that {count:,} "
                f"entries of at least {least_bytes} bytes follow",
                hint=_COPY_AGAIN,
            )
        return count

    def text(self) -> str:
        length = int(self.scalar("Q"))
        start = self.take(length)
        try:
            return str(self.view[start : start + length], "utf-8")
        except UnicodeDecodeError as cause:
            raise CheckpointError(f"{self.path}: the text at byte {start:,} is not UTF-8: {cause}") from None

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: unknown value type {kind} before byte {self.position:,}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[object]:
        kind = int(self.scalar("I"))
        if kind in _SCALARS:
            code = _SCALARS[kind]
            count = self.count(struct.calcsize("<" + code))
            start = self.take(count * struct.calcsize("<" + code))
            return list(struct.unpack_from(f"<{count}{code}", self.view, start))
        if kind != _STRING:  # no model file nests arrays
            raise CheckpointError(f"{self.path}: unknown array type {kind} before byte {self.position:,}")
        return [self.text() for _ in range(self.count(8))]


def _metadata(cursor: _Cursor, count: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(count):
        key = cursor.text()
        if key in found:
            raise CheckpointError(f"{cursor.path}: the key {key!r} is there twice")
        found[key] = cursor.value(int(cursor.scalar("I")))
    return found


def _tensors(cursor: _Cursor, count: int, metadata: Mapping[str, object]) -> dict[str, TensorInfo]:
    entries = [_entry(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment % 8:
        raise CheckpointError(f"{cursor.path}: general.alignment must be a multiple of 8, not {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    found: dict[str, TensorInfo] = {}
    end, last = 0, ""
    for info in sorted(entries, key=lambda info: info.offset):
        if info.name in found:
            raise CheckpointError(f"{cursor.path}: tensor {info.name} is there twice")
        if info.offset < end or info.offset % alignment:
            raise CheckpointError(
                f"{cursor.path}: tensor {info.name} starts at byte {info.offset:,} of the data, which is inside "
                f"tensor {last or 'none'} or not a multiple of {alignment}",
                hint=_COPY_AGAIN,
            )
        end, last = info.offset + info.nbytes, info.name
        if data_start + end > len(cursor.view):
            raise CheckpointError(
                f"{cursor.path} is {len(cursor.view):,} bytes long, tensor {info.name} ends at {data_start + end:,}",
                hint=_COPY_AGAIN,
            )
        found[info.name] = replace(info, offset=data_start + info.offset)
    return found


def _entry(cursor: _Cursor) -> TensorInfo:
    """One tensor of the head; its offset still counts from the start of the data."""
    name = cursor.text()
    rank = int(cursor.scalar("I"))
    if not 1 <= rank <= 4:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {rank} dimensions, the format allows 1 to 4")
    fastest_first = [int(cursor.scalar("Q")) for _ in range(rank)]
    kind, offset = int(cursor.scalar("I")), int(cursor.scalar("Q"))
    dtype = _TENSOR_TYPES.get(kind)
    if dtype is None:
        raise CheckpointError(
            f"{cursor.path}: tensor {name} has type {_REFUSED_TYPES.get(kind, kind)}, which is not supported",
            hint=f"supported are {', '.join(str(known).upper() for known in _TENSOR_TYPES.values())}",
        )
    if fastest_first[0] % dtype.block:
        raise CheckpointError(
            f"{cursor.path}: tensor {name} has rows of {fastest_first[0]} elements, no whole {dtype} blocks"
        )
    nbytes = dtype.nbytes(math.prod(fastest_first))
    return TensorInfo(name, tuple(reversed(fastest_first)), dtype, cursor.path, offset, nbytes)

"""safetensors files: what the reference library writes is read, and what it refuses is refused, by name."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from rvllm.errors import CheckpointError
from rvllm.model.checkpoint import FileCheckpoint
from rvllm.model.safetensors import open_safetensors
from rvllm.program.dtype import F16, F32

Array = np.ndarray[Any, Any]
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def file_bytes(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def reference(content: bytes) -> list[Any]:
    """What the reference library finds in a file's bytes."""
    found: list[Any] = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    return found


def entry(dtype: str, shape: list[Any], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def opened(folder: Path, content: bytes) -> FileCheckpoint:
    (folder / "model.safetensors").write_bytes(content)
    return open_safetensors(folder)


def sharded(folder: Path) -> dict[str, Array]:
    """Two shards of one tensor each, and their index."""
    tensors: dict[str, Array] = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float16)}
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for (name, tensor), file in zip(tensors.items(), names, strict=True):
        safetensors.numpy.save_file({name: tensor}, folder / file)
    index = {"metadata": {}, "weight_map": dict(zip(tensors, names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_what_the_reference_library_writes_is_read_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, Array] = {
        "w": rng.standard_normal((3, 5)).astype(np.float32),
        "h": rng.standard_normal((2, 2, 2)).astype(np.float16),
        "one": np.array(3.5, np.float32),
        "none": np.zeros((0, 4), np.float32),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_safetensors(tmp_path)
    assert set(checkpoint.tensors) == set(tensors)
    assert (checkpoint.tensors["w"].dtype, checkpoint.tensors["h"].dtype) == (F32, F16)
    for name, tensor in tensors.items():
        assert checkpoint.tensors[name].shape == tensor.shape
        assert checkpoint.raw(name).tobytes() == tensor.tobytes()
        np.testing.assert_array_equal(checkpoint.read(name), tensor.astype(np.float32))


def test_bfloat16_is_expanded_exactly(tmp_path: Path) -> None:
    content = file_bytes({"w": entry("BF16", [2], 0, 4)}, struct.pack("<2H", 0x3F80, 0xC040))
    assert opened(tmp_path, content).read("w").tolist() == [1.0, -3.0]


def test_raw_bytes_are_a_read_only_view_of_a_shared_mapping_of_the_file(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, file_bytes({"w": entry("F32", [2], 0, 8)}, struct.pack("<2f", 1.0, 2.0)))
    raw = checkpoint.raw("w")
    assert not raw.flags.writeable
    assert np.shares_memory(raw, checkpoint.mappings[tmp_path / "model.safetensors"])
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    # r--s: a driver registers shared pages in milliseconds, private ones in minutes.
    assert [permissions for _, permissions, *_ in mapped] == ["r--s"]


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    checkpoint = open_safetensors(tmp_path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.astype(np.float32))
    assert len(checkpoint.mappings) == 2


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, tmp_path / "weights.safetensors")
    assert set(open_safetensors(tmp_path).tensors) == {"a"}


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files .* but no model\.safetensors\.index\.json"):
        open_safetensors(tmp_path)


def test_a_missing_shard_is_named_with_its_index_and_not_left_uninitialised(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(tmp_path)
    assert "model-00002-of-00002.safetensors does not exist" in str(caught.value)
    assert "model.safetensors.index.json" in str(caught.value)


def test_a_shard_that_is_a_broken_link_is_named_with_its_missing_target(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match=r"00002\.safetensors is a link to \.\./blobs/gone, which does not exist"):
        open_safetensors(tmp_path)


def test_links_into_a_folder_of_blobs_are_followed(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots é" / "abc", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, blobs / "0f0f")
    (folder / "model.safetensors").symlink_to("../../blobs/0f0f")
    assert open_safetensors(folder).read("a").tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("c", "tensor c is not in model-00002-of-00002.safetensors, where"),
        ("a", "tensor a is in model-00001-of-00002.safetensors, "),
    ],
)
def test_a_tensor_that_is_not_where_the_index_says_is_refused(tmp_path: Path, name: str, message: str) -> None:
    sharded(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    # The last entry keeps the first shard among the files that are opened.
    index["weight_map"] |= {name: "model-00002-of-00002.safetensors", "e": "model-00001-of-00002.safetensors"}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}])
def test_an_index_that_names_no_files_of_its_folder_is_refused(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    safetensors.numpy.save_file(
        {name: np.zeros(2, np.float32) for name in ("a", "b")}, tmp_path / "model-00002-of-00002.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"tensor a is in .*00001-of-00002\.safetensors and in .*00002-of-00002"):
        open_safetensors(tmp_path)


def test_a_shard_shorter_or_longer_than_its_header_says_is_refused_with_both_sizes(tmp_path: Path) -> None:
    whole = file_bytes({"w": entry("F32", [2048], 0, 8192)}, bytes(8192))
    for content in (whole[:-4096], whole + b"1234"):
        with pytest.raises(CheckpointError) as caught:
            opened(tmp_path, content)
        assert f"model.safetensors is {len(content):,} bytes long, its header says {len(whole):,}" in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 6, 8, 20])
def test_a_file_cut_inside_its_header_is_refused(tmp_path: Path, length: int) -> None:
    whole = file_bytes({"w": entry("F32", [1], 0, 4)}, bytes(4))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        opened(tmp_path, whole[:length])


def test_a_git_lfs_pointer_in_place_of_a_file_or_a_shard_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a Git-LFS pointer"):
        opened(tmp_path, LFS_POINTER)
    (tmp_path / "model.safetensors").unlink()
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(LFS_POINTER)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is a Git-LFS pointer"):
        open_safetensors(tmp_path)


GOOD = {"k": entry("F32", [4], 0, 16), "v": entry("F32", [4], 16, 32)}
BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "shape and byte range disagree": ({"w": entry("F32", [1000, 1000], 0, 4)}, "tensor w of shape"),
    "negative offsets": ({"w": entry("F32", [1], -4, 0)}, "tensor w has shape"),
    "reversed offsets": ({"w": entry("F32", [1], 4, 0)}, "tensor w has shape"),
    "offsets past the end": ({"w": entry("F32", [2**40], 0, 2**42)}, "tensor w is last"),
    "shape product overflows": ({"w": entry("F32", [2**40, 2**40], 0, 4)}, "tensor w of shape"),
    "shape product overflows to zero": ({"w": entry("F32", [2**32, 2**32], 0, 0)}, "tensor w of shape"),
    "negative dimension": ({"w": entry("F32", [-1, -8], 0, 32)}, "tensor w has shape"),
    "fractional dimension": ({"w": entry("F32", [8.0], 0, 32)}, "tensor w has shape"),
    "two tensors share one range": ({**GOOD, "v": entry("F32", [4], 0, 16)}, "tensor v overlaps k"),
    "two tensors overlap": ({**GOOD, "v": entry("F32", [4], 12, 28)}, "tensor v overlaps k"),
    "gap between tensors": ({"k": GOOD["k"], "v": entry("F32", [2], 24, 32)}, "tensor v leaves a gap after k"),
    "gap before the first": ({"k": entry("F32", [4], 16, 32)}, "tensor k leaves a gap"),
    "unknown dtype": ({"w": entry("ZZ", [8], 0, 32)}, "tensor w has the unknown dtype 'ZZ'"),
    "dtype is no text": ({"w": {**entry("F32", [8], 0, 32), "dtype": 5}}, "tensor w has the unknown dtype 5"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [8]}}, "tensor w has shape"),
    "entry is no object": ({"w": 5}, "tensor w is not an object"),
    "nested metadata": ({**GOOD, "__metadata__": {"a": {"b": "c"}}}, "__metadata__ must map text to text"),
    "a name twice": (
        b'{"w":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},"w":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}',
        "'w' is there twice",
    ),
    "not an object": (b"[1, 2]", "header is not a JSON object"),
    "not JSON": (b"{" * 50, "header is not valid JSON"),
    "deeply nested": (b"[" * 100_000, "header is not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "header is not valid JSON"),
}


@pytest.mark.parametrize("fault", BAD_HEADERS)
def test_an_inconsistent_header_is_refused_here_and_by_the_reference_library(tmp_path: Path, fault: str) -> None:
    header, message = BAD_HEADERS[fault]
    content = file_bytes(header, bytes(32))
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, content)
    assert message in str(caught.value)
    assert "model.safetensors" in str(caught.value)
    if fault != "a name twice":  # the reference keeps the last of two
        with pytest.raises(safetensors.SafetensorError):
            reference(content)


def test_the_header_that_the_faults_are_planted_in_is_good(tmp_path: Path) -> None:
    content = file_bytes(GOOD, bytes(32))
    assert set(opened(tmp_path, content).tensors) == {"k", "v"}
    assert len(reference(content)) == 2


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 33])
def test_a_header_length_beyond_the_file_is_refused_before_anything_is_read(tmp_path: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match=rf"the header says it is {length:,} bytes long"):
        opened(tmp_path, struct.pack("<Q", length) + bytes(32))


@pytest.mark.parametrize(("dtype", "size"), [("F8_E5M2", 1), ("I64", 8), ("BOOL", 1), ("F64", 8)])
def test_an_unsupported_dtype_is_an_error_only_when_its_tensor_is_asked_for(
    tmp_path: Path, dtype: str, size: int
) -> None:
    header = {"w": entry("F32", [1], 0, 4), "x": entry(dtype, [4], 4, 4 + 4 * size)}
    checkpoint = opened(tmp_path, file_bytes(header, bytes(4 + 4 * size)))
    assert set(checkpoint.tensors) == {"w"}
    for ask in (checkpoint.raw, checkpoint.read):
        with pytest.raises(CheckpointError, match=f"tensor x has dtype {dtype}, which is not supported"):
            ask("x")


class _RunsWhenUnpickled:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_folder_with_only_pickle_weights_is_refused_and_nothing_is_unpickled(tmp_path: Path, name: str) -> None:
    witness = tmp_path / "ran"
    (tmp_path / name).write_bytes(pickle.dumps(_RunsWhenUnpickled(witness)))
    with pytest.raises(CheckpointError, match=rf"only pickle weights \({name}\), which are refused.*hint: convert"):
        open_safetensors(tmp_path)
    assert not witness.exists()


def test_a_pickle_renamed_to_safetensors_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    for protocol in (2, 4):
        with pytest.raises(CheckpointError, match="is a pickle under another name"):
            opened(tmp_path, pickle.dumps(_RunsWhenUnpickled(witness), protocol=protocol))
    with zipfile.ZipFile(tmp_path / "model.safetensors", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_RunsWhenUnpickled(witness)))
    with pytest.raises(CheckpointError, match="is a pickle under another name"):
        open_safetensors(tmp_path)
    assert not witness.exists()


def test_a_folder_without_weights_or_no_folder_at_all_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        open_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="absent does not exist"):
        open_safetensors(tmp_path / "absent")

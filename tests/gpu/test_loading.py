"""Weights on the device are numpy's bytes: copied as they lie, or expanded there, from every kind of file."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from rvllm.backend.cuda import cold, weights
from rvllm.backend.cuda.kernels import Gpu
from rvllm.backend.cuda.launch import Launch
from rvllm.backend.cuda.model import CudaModel
from rvllm.backend.cuda.weights import expand_grid
from rvllm.errors import CheckpointError
from rvllm.model.checkpoint import Checkpoint, FileCheckpoint, map_file
from rvllm.model.source import Source, weights_for
from rvllm.program.dtype import BF16, F16, DType, Float32, f32_to_bf16
from rvllm.program.program import matrices
from tests.fixtures.gguf_files import llama_gguf
from tests.fixtures.models import Shape, random_model
from tests.gpu.running import BOTH, Backend, cuda_model, opened
from tests.kernels.host_device import HostDevice

SMALL = {"hidden": 64, "intermediate": 96, "heads": 2, "kv_heads": 1}


def bits(values: Float32, dtype: DType) -> np.ndarray:
    """Values rounded to the dtype, as the 16 bits that it stores."""
    return f32_to_bf16(values) if dtype is BF16 else values.astype(np.float16).view(np.uint16)


def on_device(model: CudaModel) -> dict[str, np.ndarray]:
    """Every matrix's 16-bit elements, by joined name."""
    found = {}
    for name, segments in matrices(model.program).items():
        rows = sum(segment.sizes({})[0] for segment in segments)
        found[name] = np.empty((rows, *segments[0].sizes({})[1:]), dtype=np.uint16)
        model._device.read(model._addresses[name], found[name])
    return found


def assert_loaded(source: Source, dtype: DType, backend: Backend) -> CudaModel:
    model = cuda_model(source, dtype, backend.device)
    checkpoint: Checkpoint = weights_for(source, model.program)
    for name, found in on_device(model).items():
        segments = matrices(model.program)[name]
        expected = np.concatenate([bits(checkpoint.read(segment.name), dtype) for segment in segments])
        assert np.array_equal(found, expected), name
    return model


@pytest.mark.parametrize("backend", BOTH, indirect=True)
@pytest.mark.parametrize("stored", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_safetensors_of_every_dtype_arrive_rounded_once(
    stored: str, dtype: DType, backend: Backend, tmp_path: Path
) -> None:
    random_model(tmp_path, Shape(**SMALL, dtype=stored), shards=2)
    assert_loaded(opened(tmp_path), dtype, backend)


@pytest.mark.parametrize("backend", BOTH, indirect=True)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_gguf_blocks_are_expanded_and_rows_put_back_in_order(dtype: DType, backend: Backend, tmp_path: Path) -> None:
    plain = llama_gguf(tmp_path / "m.gguf")
    model = assert_loaded(opened(tmp_path / "m.gguf"), dtype, backend)
    for name, values in plain.items():  # by their own order, apart from the product's reader
        joined = next(key for key in matrices(model.program) if name in key.split("+"))
        segments = matrices(model.program)[joined]
        begin = sum(s.sizes({})[0] for s in segments[: [s.name for s in segments].index(name)])
        found = on_device(model)[joined][begin : begin + len(values)]
        assert np.array_equal(found, bits(values.astype(np.float32), dtype)), name


@pytest.mark.parametrize("backend", BOTH, indirect=True)
@pytest.mark.parametrize("window", [4096, 8192, 24 * 4096])
def test_a_file_larger_than_a_window_arrives_whole(
    window: int, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[tuple[int, int] | None] = []
    original = type(backend.device).lock_pages

    def lock(self: object, pages: tuple[int, int]) -> tuple[int, int] | None:
        locked.append(original(self, pages))  # type: ignore[arg-type]
        return locked[-1]

    monkeypatch.setattr(type(backend.device), "lock_pages", lock)
    monkeypatch.setattr(weights, "WINDOW_BYTES", window)
    random_model(tmp_path, Shape(**SMALL), shards=2)
    source = opened(tmp_path)
    assert_loaded(source, BF16, backend)
    assert len(locked) >= (3 if window == 24 * 4096 else 10)
    assert isinstance(source.checkpoint, FileCheckpoint)
    offsets = {info.offset % mmap.PAGESIZE for info in source.checkpoint.tensors.values()}
    assert offsets - {0}  # tensors begin in the middle of a page
    assert any(data.nbytes % mmap.PAGESIZE for data in source.checkpoint.mappings.values())


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_pages_that_the_driver_will_not_lock_are_copied_all_the_same(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(backend.device), "lock_pages", lambda self, pages: None)
    random_model(tmp_path, Shape(**SMALL))
    assert_loaded(opened(tmp_path), BF16, backend)


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_a_file_that_is_not_in_memory_is_read_by_threads(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "is_resident", lambda begin, nbytes: False)
    monkeypatch.setattr(cold, "BUFFER_BYTES", 5000)
    monkeypatch.setattr(weights, "WINDOW_BYTES", 24 * 4096)
    random_model(tmp_path, Shape(**SMALL), shards=2)
    assert_loaded(opened(tmp_path), BF16, backend)


@pytest.mark.gpu
def test_what_was_written_is_there_for_the_next_kernel(gpu: Gpu) -> None:
    """Also when it comes from memory that is not page-locked, whose last part the driver sends after it returns."""
    most = 1 << 21
    staging, target = gpu.allocate(2 * most), gpu.allocate(2 * most)
    stale = []
    for turn in range(600):
        count = (1 << 13, 1 << 15, 1 << 17, 1 << 19, most)[turn % 5]
        gpu.write(staging, np.full(count, turn, dtype=np.uint16))
        gpu.launch(Launch("expand", "expand_f16_f16", expand_grid(1, count), 256, 0, (staging, target, 1, count, 0)))
        found = np.empty(count, dtype=np.uint16)
        gpu.read(target, found)
        stale.append(int(np.count_nonzero(found != turn)))
    for address in (staging, target):
        gpu.free(address)
    assert not any(stale), f"{np.count_nonzero(stale)} of {len(stale)} copies came too late"


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match="ends at 100"):
        cold.copy_cold(HostDevice("t70"), tmp_path / "file", [cold.Extent(50, 60, 0)], print)


def test_pages_just_read_are_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    data = map_file(tmp_path / "file")
    assert data.sum() == 100_000 * ord("x") and cold.is_resident(data.ctypes.data, data.nbytes)

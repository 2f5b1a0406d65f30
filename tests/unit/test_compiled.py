"""Compiled kernels are kept where the driver does not keep them; every way in which that can fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda.bindings import driver as cuda

from rvllm.backend.cuda import compiled
from rvllm.backend.cuda.compiled import CubinStore, ModuleLoader, driver_keeps, module_loader
from rvllm.backend.cuda.context import Context
from rvllm.backend.cuda.kernels import Gpu
from rvllm.errors import DeviceError
from tests.fixtures.fake_cuda import FakeCuda

PTX = b".version 8.0\n.target sm_80\n.address_size 64\n\0"
TARGET = "sm_90-cuda_13.0"


def loader(
    driver: FakeCuda, folder: Path | None, said: list[str] | None = None, clock: Callable[[], float] = lambda: 0.0
) -> ModuleLoader:
    store = None if folder is None else CubinStore(folder)
    warn = [].append if said is None else said.append
    return ModuleLoader(Context(0, driver), store, target=TARGET, warn=warn, clock=clock)


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that moves on by `step_s` each time it is read."""
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += step_s
        return now_s[0]

    return clock


def unwritable(folder: Path) -> Path:
    """A place below a file: nobody can write there, not even root."""
    folder.write_bytes(b"")
    return folder / "kernels"


def test_ptx_goes_to_the_driver_as_it_is_where_the_driver_keeps_what_it_compiles() -> None:
    driver = FakeCuda()
    assert loader(driver, None).load(PTX) == "module 1"
    assert driver.loaded == [PTX] and "cuLinkCreate" not in driver.calls


def test_the_first_start_compiles_and_the_second_takes_what_was_kept(tmp_path: Path) -> None:
    first, second = FakeCuda(), FakeCuda()
    loader(first, tmp_path / "kernels").load(PTX)
    loader(second, tmp_path / "kernels").load(PTX)
    assert first.loaded == second.loaded == [b"\x7fELF" + PTX]
    assert first.calls.count("cuLinkComplete") == first.calls.count("cuLinkDestroy") == 1
    assert "cuLinkCreate" not in second.calls
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".cubin"]


def test_another_ptx_gpu_or_driver_is_another_cubin(tmp_path: Path) -> None:
    keys = set()
    for capability, version, ptx in (((9, 0), (13, 0), PTX), ((8, 0), (13, 0), PTX), ((9, 0), (12, 4), PTX)):
        driver = FakeCuda()
        made = module_loader(Context(0, driver), capability, version, print, {"CUDA_CACHE_DISABLE": "1"})
        made._store = CubinStore(tmp_path)
        made.load(ptx)
        keys |= {path.name for path in tmp_path.iterdir()}
        assert "cuLinkCreate" in driver.calls
    loader(FakeCuda(), tmp_path).load(PTX + b"\0")
    assert len(keys) == 3 and len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_file_is_made_again(damage: str, tmp_path: Path) -> None:
    loader(FakeCuda(), tmp_path).load(PTX)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    flipped = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
    path.write_bytes({"cut": whole[:-1], "flipped": flipped, "empty": b"", "other": b"x" * 100}[damage])
    driver = FakeCuda()
    loader(driver, tmp_path).load(PTX)
    assert driver.loaded == [b"\x7fELF" + PTX] and "cuLinkComplete" in driver.calls
    assert path.read_bytes() == whole


def test_a_whole_file_that_the_driver_refuses_is_made_again(tmp_path: Path) -> None:
    loader(FakeCuda(), tmp_path).load(PTX)
    driver = FakeCuda()
    refuse_once = iter([(cuda.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None), (cuda.CUresult.CUDA_SUCCESS, "module")])
    driver.cuModuleLoadData = lambda image: next(refuse_once)  # type: ignore[method-assign]
    assert loader(driver, tmp_path).load(PTX) == "module"
    assert driver.calls.count("cuLinkComplete") == 1


def test_a_refused_ptx_is_told_with_the_compilers_words_and_keeps_nothing(tmp_path: Path) -> None:
    invalid = cuda.CUresult.CUDA_ERROR_INVALID_PTX
    for call in ("cuLinkAddData", "cuLinkComplete"):
        driver = FakeCuda(broken={call: invalid}, words=b"ptxas line 3: unknown opcode")
        with pytest.raises(DeviceError, match=r"CUDA_ERROR_INVALID_PTX \(218\).*ptxas line 3: unknown opcode"):
            loader(driver, tmp_path).load(PTX)
        assert "cuLinkDestroy" in driver.calls and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        driver = FakeCuda()
        loader(driver, unwritable(tmp_path / "file"), said).load(PTX)
        assert driver.calls.count("cuLinkComplete") == 1
    assert said == []  # it took no time


def test_a_folder_that_can_only_be_read_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader(FakeCuda(), tmp_path).load(PTX)

    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    driver = FakeCuda()
    loader(driver, tmp_path).load(PTX)
    assert "cuLinkCreate" not in driver.calls


def test_an_interrupted_write_leaves_no_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert loader(FakeCuda(), tmp_path).load(PTX)
    assert not list(tmp_path.iterdir())


def test_what_was_used_longest_ago_goes_when_there_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_BYTES", 400)
    store = CubinStore(tmp_path)
    for age, key in enumerate(("new", "middle", "old")):
        assert store.write(key, bytes(50))
        os.utime(tmp_path / f"{key}.cubin", (1000 - age, 1000 - age))
    (tmp_path / "killed.1.new").write_bytes(bytes(50))
    os.utime(tmp_path / "killed.1.new", (1, 1))
    assert store.read("old") is not None  # used now
    assert store.write("last", bytes(80))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.cubin", "new.cubin", "old.cubin"]


def test_a_cubin_larger_than_the_bound_is_kept_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_BYTES", 10)
    store = CubinStore(tmp_path)
    assert store.write("a", b"a") and store.write("b", b"b")
    assert [path.name for path in tmp_path.iterdir()] == ["b.cubin"]


@pytest.mark.parametrize(
    ("writable", "driver_caches", "words"),
    [
        (True, False, "once: they are kept in "),
        (False, False, "at every start: neither the driver's cache nor "),
        (True, True, "once: the driver keeps "),
    ],
)
def test_compiling_for_more_than_five_seconds_is_said_once(
    writable: bool, driver_caches: bool, words: str, tmp_path: Path
) -> None:
    said: list[str] = []
    folder = tmp_path / "kernels" if writable else unwritable(tmp_path / "file")
    made = loader(FakeCuda(), None if driver_caches else folder, said, ticking(2.0))
    for number in range(2):
        made.load(PTX + bytes([number]) + b"\0")
    assert said == []  # four seconds
    for number in range(2, 8):
        made.load(PTX + bytes([number]) + b"\0")
    assert len(said) == 1 and words in said[0]


@pytest.mark.parametrize(
    ("environment", "keeps"),
    [
        ({"HOME": "{home}"}, True),
        ({"HOME": "{home}", "CUDA_CACHE_DISABLE": "0"}, True),
        ({"HOME": "{home}", "CUDA_CACHE_DISABLE": "1"}, False),
        ({}, False),
        ({"HOME": ""}, False),
        ({"HOME": "{home}/nowhere"}, False),
        ({"HOME": "{home}/file"}, False),
        ({"CUDA_CACHE_PATH": "{home}"}, True),
        ({"HOME": "{home}", "CUDA_CACHE_PATH": "{home}/file/below"}, False),
        ({"CUDA_CACHE_PATH": "{home}", "CUDA_CACHE_DISABLE": "1"}, False),
    ],
)
def test_the_drivers_own_cache_is_trusted_where_it_can_be_written(
    environment: dict[str, str], keeps: bool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert driver_keeps({name: value.format(home=tmp_path) for name, value in environment.items()}) is keeps


def test_a_read_only_home_folder_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert not driver_keeps({"HOME": str(tmp_path)})


def test_a_gpu_loads_its_kernels_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    driver = FakeCuda()
    Gpu(0, print, driver)._load_module("norm")
    assert driver.loaded[0].startswith(b"\x7fELF") and len(list((tmp_path / "kernels").iterdir())) == 1
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "0")
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path))
    Gpu(0, print, driver)._load_module("norm")
    assert b"\n.target sm_" in driver.loaded[1] and driver.loaded[1].endswith(b"\0")


def test_a_user_without_a_home_folder_compiles_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "RVLLM_CACHE", "XDG_CACHE_HOME", "CUDA_CACHE_PATH"):
        monkeypatch.delenv(variable, raising=False)

    def unknown(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    driver = FakeCuda()
    Gpu(0, print, driver)._load_module("norm")
    assert driver.calls.count("cuLinkComplete") == 1

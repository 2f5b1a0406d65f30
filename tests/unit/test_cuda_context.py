"""What a user is told when the driver refuses, fails in the middle of a step, or is used across a fork."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from kernels_ptx.tiers import TIERS
from rvllm.backend.cuda.context import Context, Graph, Kernel, ptx_needs
from rvllm.backend.cuda.driver import OLDEST_CUDA, check, devices
from rvllm.backend.cuda.kernels import Build, Gpu, read_manifest
from rvllm.errors import DeviceError, EngineError, StartError
from tests.fixtures.fake_cuda import GIB, FakeCuda

ROOT = Path(__file__).parents[2]
PTX = b"// made by a compiler\n.version 8.4\n.target sm_89\n.address_size 64\n\0"
REFUSALS = {
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": (222, "update the driver"),
    "CUDA_ERROR_NO_BINARY_FOR_GPU": (209, "older than compute capability 7.0"),
    "CUDA_ERROR_INVALID_PTX": (218, "please report"),
}
LOST = cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


# --- Kernels and drivers


@pytest.mark.parametrize("build", read_manifest(), ids=lambda build: build.path)
def test_every_ptx_asks_for_no_more_than_its_tier_promises(build: Build) -> None:
    path = ROOT / "kernels_ptx" / build.path
    tier = TIERS[build.tier]
    text = path.read_text(encoding="utf-8")
    ((major, minor),) = re.findall(r"^\.version (\d+)\.(\d+)$", text, re.MULTILINE)
    assert (int(major), int(minor)) <= tuple(map(int, tier.ptx_version.split(".")))
    assert re.findall(r"^\.target (\S+)$", text, re.MULTILINE) == [f"sm_{tier.architecture}"]


def test_every_kernel_has_a_build_for_the_oldest_gpu_and_driver() -> None:
    oldest = {build.stem for build in read_manifest() if build.tier == "t70" and build.minimum_driver <= 525}
    tied = {build.stem for build in read_manifest() if build.stem.endswith(f"_{build.tier}")}  # others have their part
    assert oldest == {build.stem for build in read_manifest()} - tied and all("t90a" in stem for stem in tied)
    assert OLDEST_CUDA == (12, 0)  # R525


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_kernel_is_told_with_what_it_needs_what_there_is_and_advice(name: str) -> None:
    number, advice = REFUSALS[name]
    driver = FakeCuda(
        broken={"cuModuleLoadData": getattr(cuda.CUresult, name)}, words=b"ptxas: no", version=12020, capability=(7, 0)
    )
    with pytest.raises(DeviceError) as refusal:
        Context(0, driver).load_image(PTX)
    message = refusal.value.message
    assert message.startswith(f"the driver refuses a kernel: {name} ({number})") and message.endswith(": ptxas: no")
    assert "needs CUDA 12.4 and compute capability 8.9" in message
    assert "has CUDA 12.2 and compute capability 7.0" in message
    assert advice in str(refusal.value.hint)


def test_an_old_driver_is_refused_before_any_kernel_with_both_versions() -> None:
    driver = FakeCuda(version=11040)
    with pytest.raises(DeviceError, match=r"supports CUDA 11\.4, the oldest that works is 12\.0"):
        Gpu(0, print, driver)
    assert not driver.opened


def test_a_refused_tier_falls_to_the_next_lower_one_and_is_told() -> None:
    said: list[str] = []
    driver = FakeCuda(capability=(8, 0))
    gpu = Gpu(0, said.append, driver)
    original = driver.cuModuleLoadData
    bad = cuda.CUresult.CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    driver.cuModuleLoadData = lambda image: (  # type: ignore[method-assign]
        (bad, None) if b".target sm_80" in image else original(image)
    )
    build, _ = gpu._load_module("norm")
    assert build.tier == "t70" and b".target sm_70" in driver.loaded[-1]
    assert len(said) == 1 and "ptx/t80/norm.ptx was refused, a lower tier is used" in said[0]


def test_what_ptx_needs_is_read_from_its_head() -> None:
    assert ptx_needs(PTX) == "CUDA 12.4 and compute capability 8.9"
    assert ptx_needs(b".version 7.8\n.target sm_90a\n") == "CUDA 11.8 and compute capability 9.0"
    assert ptx_needs(b".version 8.0\n.target sm_120\n") == "CUDA 12.0 and compute capability 12.0"
    assert ptx_needs(b"\x7fELF\0\0") is None


# --- Errors while a step runs


IN_STEPS: dict[str, Callable[[Gpu], object]] = {
    "cuStreamSynchronize": lambda gpu: gpu.synchronize(),
    "cuMemcpyDtoH": lambda gpu: gpu.read(256, np.zeros(4, np.int32)),
    "cuMemcpyHtoDAsync": lambda gpu: gpu.copy_in(256, 512, 4),
    "cuEventRecord": lambda gpu: gpu.mark(),
    "cuEventSynchronize": lambda gpu: gpu.wait(1),
    "cuGraphLaunch": lambda gpu: gpu.replay(Graph(1)),
    "cuLaunchKernel": lambda gpu: gpu.launch_kernel(Kernel("norm_bf16", ("u64",), 7, False), (1,), 32, 0, (1,)),
}
AT_THE_START: dict[str, Callable[[Gpu], object]] = {
    "cuMemAlloc": lambda gpu: gpu.allocate(4),
    "cuMemHostAlloc": lambda gpu: gpu.pinned(4),
    "cuModuleLoadData": lambda gpu: gpu.load_image(PTX),
    "cuLinkCreate": lambda gpu: gpu.compile(PTX),
    "cuStreamBeginCapture": lambda gpu: gpu.capture([]),
}


@pytest.mark.parametrize("call", IN_STEPS)
def test_what_fails_in_a_step_is_an_engine_error_that_names_the_cuda_error_once(call: str) -> None:
    gpu = Gpu(0, print, FakeCuda(broken={call: LOST}))
    with pytest.raises(EngineError) as failure:
        IN_STEPS[call](gpu)
    assert failure.value.message.startswith(call)
    assert str(failure.value).count("CUDA_ERROR_ILLEGAL_ADDRESS (700)") == 1
    assert "start it again" in str(failure.value.hint)


@pytest.mark.parametrize("call", AT_THE_START)
def test_what_fails_at_the_start_is_a_start_error(call: str) -> None:
    gpu = Gpu(0, print, FakeCuda(broken={call: LOST}))
    with pytest.raises(StartError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        AT_THE_START[call](gpu)


def test_memory_that_is_not_there_is_told_in_bytes() -> None:
    gpu = Context(0, FakeCuda(broken={"cuMemAlloc": cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY}))
    with pytest.raises(
        DeviceError, match=f"no room for {200 * GIB:,} bytes: {70 * GIB:,} of its {140 * GIB:,} are free"
    ):
        gpu.allocate(200 * GIB)


# --- Which GPU


@pytest.mark.parametrize(
    "visible", ["1", "1,0", "GPU-00112233-4455-6677-8899-aabbccddeeff", "GPU-00112233", "MIG-0011"]
)
def test_the_driver_alone_reads_what_is_visible_and_the_first_of_that_is_opened(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    slice_of = FakeCuda(names=("NVIDIA H200 MIG 1g.18gb",), nbytes=18 * GIB)
    gpu = Context(0, slice_of)
    assert slice_of.opened == [0]
    assert gpu.gpu.total_bytes == 18 * GIB and gpu.free_bytes() == 9 * GIB  # the slice's, not its parent's


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="there is no GPU 1, the driver shows 1"):
        Context(1, FakeCuda())


def test_no_other_name_of_the_drivers_library_is_looked_for() -> None:
    for path in (ROOT / "rvllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"libcuda\.so(?!\.1)", node.value), path


# --- Forks and imports


def in_a_fork(work: Callable[[], str]) -> str:
    """What `work` returns, or how it fails, in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = work()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode()
    os.waitpid(child, 0)
    return said


def test_a_gpu_is_refused_by_name_in_a_forked_child() -> None:
    driver = FakeCuda()
    gpu = Context(0, driver)
    said = in_a_fork(lambda: str(gpu.synchronize()))
    assert said.startswith("DeviceError: process ") and f"forked from process {os.getpid()}, which had" in said
    assert "NVIDIA H200" in said and "spawn" in said
    gpu.synchronize()  # here it goes on


def test_a_driver_that_was_started_before_a_fork_says_so() -> None:
    with pytest.raises(DeviceError, match="forked") as refusal:
        devices(FakeCuda(broken={"cuInit": cuda.CUresult.CUDA_ERROR_NOT_INITIALIZED}))
    assert "--device cpu" in str(refusal.value.hint)


def test_importing_everything_starts_no_driver() -> None:
    statement = "import sys, rvllm, rvllm.llm, rvllm.backend.cuda.kernels, rvllm.cli.check; print('cuda.bindings.driver' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"


def test_a_call_without_a_result_gives_none_and_one_with_several_the_first() -> None:
    assert check("cuInit", (cuda.CUresult.CUDA_SUCCESS,)) is None
    assert check("cuLinkComplete", (cuda.CUresult.CUDA_SUCCESS, 1, 2)) == 1


def test_a_matrix_is_described_by_its_sizes_its_rows_bytes_and_the_box() -> None:
    map_of = Context(cuda=FakeCuda()).matrix_map(4096, rows=17, columns=1536, box_rows=128)
    assert map_of.nbytes == 128
    assert map_of.view(np.uint64)[:6].tolist() == [4096, 1536, 17, 3072, 64, 128]


def test_a_matrix_that_the_driver_refuses_is_named() -> None:
    fake = FakeCuda(broken={"cuTensorMapEncodeTiled": cuda.CUresult.CUDA_ERROR_INVALID_VALUE})
    with pytest.raises(DeviceError, match=r"17 x 1536, boxes of 128 x 64.*INVALID_VALUE"):
        Context(cuda=fake).matrix_map(4096, rows=17, columns=1536, box_rows=128)

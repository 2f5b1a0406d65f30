"""Processes on a machine with a GPU: which one they see, what a fork does, how a lost GPU ends a command, and caches."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rvllm import SamplingParams
from rvllm.__main__ import Interrupts, run
from rvllm.backend.cuda.driver import check, devices
from rvllm.backend.cuda.kernels import FORCED_TIER, Gpu
from rvllm.config import EngineConfig
from rvllm.engine.request import Request
from rvllm.errors import EngineError
from rvllm.link.client import EngineClient, Parent
from rvllm.link.process import EngineProcess
from tests.fixtures.commands import LIMIT_S, environment, rvllm
from tests.fixtures.models import EOS, TinyModel, chain_model, loop_model
from tests.gpu.running import Backend
from tests.kernels.host_device import HostDevice

ON_GPU = pytest.mark.gpu
TINY = ("--max-model-len", "64", "--kv-cache-memory-bytes", "1MiB", "--device", "cuda", "--raw")
SEEN = "from rvllm.backend.cuda.context import Context; g = Context(0); print(g.gpu.uuid, g.gpu.total_bytes, g.free_bytes())"


@pytest.fixture
def hello(tmp_path: Path) -> TinyModel:
    return chain_model(tmp_path / "hello", ["hello", " there", EOS])


def python(statement: str, *, drop: tuple[str, ...] = (), **changes: str) -> subprocess.CompletedProcess[str]:
    """A Python that sees the GPUs and uses the tier that this one does, but for `changes` and `drop`."""
    kept = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", FORCED_TIER) if name in os.environ}
    clean = {key: value for key, value in environment().items() if key not in (*drop, "CUDA_VISIBLE_DEVICES")}
    variables = clean | kept | changes
    return subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, timeout=LIMIT_S, env=variables
    )


# --- Which GPU


@pytest.mark.parametrize("visible", ["", "-1", "99", "abc"])
def test_a_command_that_may_see_no_gpu_runs_on_the_cpu_or_is_refused(visible: str, hello: TinyModel) -> None:
    auto = rvllm("generate", "x", "--model", hello.folder, "--raw", CUDA_VISIBLE_DEVICES=visible)
    assert (auto.returncode, auto.stdout) == (0, "hello there\n")
    assert len([line for line in auto.stderr.splitlines() if line.startswith("note: running on the CPU")]) == 1
    cuda = rvllm("generate", "x", "--model", hello.folder, *TINY, CUDA_VISIBLE_DEVICES=visible)
    assert cuda.returncode == 1 and "Traceback" not in cuda.stderr and len(cuda.stderr.splitlines()) <= 10
    assert "CUDA_VISIBLE_DEVICES" in cuda.stderr or "libcuda.so.1" in cuda.stderr
    assert rvllm("--help", CUDA_VISIBLE_DEVICES=visible).returncode == 0


@ON_GPU
@pytest.mark.parametrize("length", [None, 12])
def test_a_gpu_may_be_named_by_its_whole_uuid_or_its_beginning(length: int | None, gpu: Gpu) -> None:
    done = python(SEEN, CUDA_VISIBLE_DEVICES=gpu.gpu.uuid[:length])
    uuid, total, free = done.stdout.split()
    assert uuid == gpu.gpu.uuid and int(total) == gpu.gpu.total_bytes and 0 < int(free) <= int(total), done.stderr


@ON_GPU
@pytest.mark.parametrize("visible", ["1", "1,0"])
def test_the_second_gpu_is_the_first_one_where_only_it_is_visible(visible: str, gpu: Gpu) -> None:
    found = devices()
    if len(found) < 2 or "CUDA_VISIBLE_DEVICES" in os.environ:
        pytest.skip("this needs a machine that shows two GPUs, and no CUDA_VISIBLE_DEVICES")
    assert python(SEEN, CUDA_VISIBLE_DEVICES=visible).stdout.split()[0] == found[1].uuid


# --- Forks


@ON_GPU
def test_a_child_forked_after_cuda_was_used_runs_on_the_cpu_and_is_refused_the_gpu(gpu: Gpu, hello: TinyModel) -> None:
    statement = f"""
import os, sys
from rvllm import LLM, SamplingParams
def text(device):
    llm = LLM({str(hello.folder)!r}, device=device, max_model_len=64, kv_cache_memory_bytes=1 << 20)
    return llm, llm.generate("x", SamplingParams(temperature=0, max_tokens=9))[0].outputs[0].text
first, said = text("cuda")
child = os.fork()
if child == 0:
    try:
        first.generate("x")
    except Exception as error:
        print(type(error).__name__, error)
    print("child", text("cpu")[1])
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
print("parent", said, "|", text("cuda")[1])
"""
    done = python(statement)
    refused, child, parent = done.stdout.splitlines()
    assert refused.startswith("DeviceError process") and "was forked from process" in refused, done.stderr
    assert (child, parent) == ("child hello there", "parent hello there | hello there")


@ON_GPU
def test_an_engine_process_has_the_gpu_though_its_parent_uses_it_and_gives_it_back_when_killed(
    gpu: Gpu, hello: TinyModel
) -> None:
    free = gpu.free_bytes()
    config = EngineConfig(str(hello.folder), device="cuda", max_model_len=64, kv_cache_memory_bytes=64 << 20)
    with EngineProcess() as child:
        child.load(config, vocab_limit=hello.vocabulary, eos_ids=frozenset())
        client = EngineClient(child.link, Parent(death=child.end))
        assert client.ready().device == gpu.gpu.name
        for name in ("first", "second"):
            request = Request(name, tuple(hello.ids("x")), SamplingParams(temperature=0, max_tokens=9), 0)
            assert [event.token_id for event in client.stream(request)] == list(hello.script)
        assert gpu.free_bytes() < free - (64 << 20)
        os.kill(child.pid, signal.SIGKILL)
        assert str(client.wait()) == "the engine process was killed by SIGKILL"
    end_s = time.monotonic() + 5
    while gpu.free_bytes() < free - (16 << 20):
        assert time.monotonic() < end_s, (gpu.free_bytes(), free)
        time.sleep(0.05)


# --- A GPU that is lost while it serves


class LostDevice(HostDevice):
    """Fails from its `last`th wait on, as a GPU does once a kernel has read outside its memory."""

    def __init__(self, last: int) -> None:
        super().__init__("t80")
        self._waits, self._last = 0, last
        self.since_s = 0.0  # when it was lost

    def wait(self, mark: None) -> None:
        from cuda.bindings import driver

        self._waits += 1
        if self._waits >= self._last:
            self.since_s = self.since_s or time.monotonic()
            check("cuEventSynchronize", (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,), EngineError)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> LostDevice:
    device = LostDevice(6)
    monkeypatch.setattr("rvllm.engine.load.choose_device", lambda asked, warn: "cuda")
    monkeypatch.setattr("rvllm.backend.cuda.kernels.Gpu", lambda index, warn: device)
    return device


def test_a_lost_gpu_ends_generate_with_exit_code_1_and_its_error_once(
    lost: LostDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = loop_model(tmp_path)
    assert run(["generate", "x", "--model", str(model.folder), *TINY, "--max-tokens", "40"], Interrupts()) == 1
    assert time.monotonic() - lost.since_s < 5  # what came before may have been the stand-in's compiler
    said = capsys.readouterr()
    assert said.out.startswith("a") and said.err.count("CUDA_ERROR_ILLEGAL_ADDRESS") == 1
    assert said.err.startswith(
        "error: cuEventSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)\nhint: the GPU is lost"
    )


def test_every_request_in_flight_ends_with_the_error(lost: LostDevice, tmp_path: Path) -> None:
    model = loop_model(tmp_path)
    llm = Backend("shim", lost).llm(model.folder, max_model_len=64)
    with pytest.raises(EngineError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        llm.generate(["x"] * 10, SamplingParams(temperature=0, max_tokens=40))
    assert not llm._engine.busy
    with pytest.raises(EngineError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        llm.generate("x", SamplingParams(temperature=0, max_tokens=40))


@ON_GPU
def test_a_kernel_that_reads_outside_its_memory_ends_generate_with_exit_code_1(gpu: Gpu, tmp_path: Path) -> None:
    model = loop_model(tmp_path)
    arguments = ["generate", "x", "--model", str(model.folder), *TINY, "--max-tokens", "40"]
    statement = f"""
import sys
from rvllm.__main__ import Interrupts, run
from rvllm.backend.cuda.kernels import Gpu
from rvllm.backend.cuda.launch import Launch
replay, steps = Gpu.replay, []
def spoilt(self, graph):
    steps.append(graph)
    if len(steps) == 6:
        self.launch(Launch("add", "add_bf16", (1,), 256, 0, (256, 256, 256, 2048)))
    replay(self, graph)
Gpu.replay = spoilt
sys.exit(run({arguments!r}, Interrupts()))
"""
    done = python(statement)
    assert done.returncode == 1 and done.stderr.count("CUDA_ERROR_ILLEGAL_ADDRESS") == 1, done.stderr
    assert "Traceback" not in done.stderr and done.stdout.startswith("a")


# --- Compiled kernels

LOADS = """
import json, sys, time
from rvllm.backend.cuda.kernels import Gpu, read_manifest
said = []
gpu = Gpu(0, said.append)
begin = time.perf_counter()
for stem in ("attention_decode", "linear", "sample"):
    gpu._load_module(stem)
print(json.dumps({"seconds": time.perf_counter() - begin, "said": said}))
"""


def loads(*, drop: tuple[str, ...] = (), **changes: str) -> float:
    done = python(LOADS, drop=drop, **changes)
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout)["seconds"])


@ON_GPU
@pytest.mark.parametrize("whose", ["ours", "the driver's"])
def test_a_second_start_takes_its_kernels_from_a_cache(whose: str, gpu: Gpu, tmp_path: Path) -> None:
    (tmp_path / "nv").mkdir()
    ours = {"CUDA_CACHE_DISABLE": "1"}
    changes = ours if whose == "ours" else {"CUDA_CACHE_PATH": str(tmp_path / "nv")}
    first, second = (loads(RVLLM_CACHE=str(tmp_path), **changes) for _ in range(2))
    assert second < 0.3 * first, (first, second)
    assert bool(list(tmp_path.glob("kernels/*.cubin"))) is (whose == "ours")


@ON_GPU
@pytest.mark.parametrize("home", [None, "/nonexistent/below", "a file"])
def test_kernels_load_without_a_home_folder(home: str | None, gpu: Gpu, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    changes = {"CUDA_CACHE_DISABLE": "0"}
    if home is not None:
        changes["HOME"] = str(tmp_path / "file" / "below") if home == "a file" else home
    loads(drop=("HOME", "XDG_CACHE_HOME") if home is None else ("XDG_CACHE_HOME",), **changes)


@ON_GPU
def test_our_cubins_compute_the_same_bits_as_the_drivers(gpu: Gpu, hello: TinyModel, tmp_path: Path) -> None:
    statement = f"""
from rvllm import LLM, SamplingParams
llm = LLM({str(hello.folder)!r}, device="cuda", max_model_len=64, kv_cache_memory_bytes=1 << 20)
print(llm.generate("x", SamplingParams(temperature=0, max_tokens=9, logprobs=5))[0].outputs[0])
"""
    (tmp_path / "nv").mkdir()
    theirs = python(statement, CUDA_CACHE_PATH=str(tmp_path / "nv"))
    ours = python(statement, CUDA_CACHE_DISABLE="1", RVLLM_CACHE=str(tmp_path / "rvllm"))
    assert ours.stdout == theirs.stdout and "hello there" in ours.stdout, ours.stderr


# --- The driver's library


@pytest.mark.parametrize(("name", "said"), [("libcuda.so.1", "supports CUDA 11.4"), ("libcuda.so", "")])
def test_the_library_is_found_by_the_one_name_that_containers_mount(name: str, said: str, tmp_path: Path) -> None:
    """A library of that name alone, which answers as a driver of 2021 does; another name is not looked for."""
    (tmp_path / "driver.c").write_text("int cuDriverGetVersion(int *v) { *v = 11040; return 0; }", encoding="utf-8")
    made = [shutil.which("cc") or "g++", "-shared", "-fPIC", "-o", str(tmp_path / name), str(tmp_path / "driver.c")]
    subprocess.run(made, check=True)
    statement = "from rvllm.backend.cuda.driver import devices; devices()"
    done = python(statement, LD_LIBRARY_PATH=str(tmp_path))
    assert said in done.stderr and ("11.4" in done.stderr) is bool(said), done.stderr

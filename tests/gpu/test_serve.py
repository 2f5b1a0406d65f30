"""`rvllm serve` on a GPU, where other processes, big batches and signals meet its memory. Plain HTTP to it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from rvllm.backend.cuda.kernels import FORCED_TIER, Gpu
from tests.fixtures.commands import LIMIT_S, alive, children
from tests.fixtures.engines import until
from tests.fixtures.models import Shape, TinyModel, random_model
from tests.fixtures.servers import Server, starting

pytestmark = pytest.mark.gpu

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "0"} | {name: os.environ[name] for name in [FORCED_TIER] if name in os.environ}
NEARLY_ALL = ("--device", "cuda", "--gpu-memory-utilization", "0.98")
MIB, GIB = 1 << 20, 1 << 30
OTHER = """
import sys, time
from rvllm.backend.cuda.context import Context
gpu, takes = Context(0), int(sys.argv[1])
held = gpu.allocate(-takes) if takes < 0 else None
print("ready", flush=True)
sys.stdin.readline()
time.sleep(float(sys.argv[2]))
gpu.free(held) if takes < 0 else gpu.allocate(takes)
sys.stdin.readline()
"""


@pytest.fixture
def small(tmp_path: Path) -> TinyModel:
    return random_model(tmp_path / "model", Shape(hidden=64, intermediate=96, heads=2, kv_heads=1), std=0.1)


def start(model: TinyModel, tmp_path: Path, *arguments: str) -> AbstractContextManager[Server]:
    """A server that has just been started."""
    return starting(model.folder, *NEARLY_ALL, *arguments, folder=tmp_path / "server", **ENVIRONMENT)


def ids(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(200), k=length)


@contextmanager
def another_process(takes: int, seconds: float) -> Iterator[None]:
    """It takes so many bytes of the GPU's memory, or gives them back, so many seconds after this returns."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(takes), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("\n")
        other.stdin.flush()
        yield
        other.communicate("\n", timeout=60)


@pytest.mark.parametrize("takes", [-8 * GIB, 4 * GIB], ids=["gives back", "takes"])
@pytest.mark.parametrize("turn", range(10))
def test_memory_that_another_process_takes_or_gives_back_meanwhile_breaks_no_start(
    gpu: Gpu, small: TinyModel, tmp_path: Path, takes: int, turn: int
) -> None:
    """B103. The server starts, or says in numbers what it lacked."""
    with another_process(takes, random.Random(turn).uniform(0.1, 2.0)), start(small, tmp_path) as server:
        until(lambda: server.process.poll() is not None or any("ready: " in line for line in server.said), LIMIT_S)
        if server.process.poll() is None:
            reply = server.post("/v1/completions", prompt=[5, 6, 7], max_tokens=3, ignore_eos=True).json
            assert reply["usage"]["completion_tokens"] == 3
        else:
            said = "".join(server.said)
            assert takes > 0 and server.process.returncode == 1 and "bytes" in said, said
            assert "Traceback" not in said


def test_the_first_big_batch_does_not_run_out_of_memory(gpu: Gpu, small: TinyModel, tmp_path: Path) -> None:
    """B113. Whatever comes after the caches has to fit beside them."""
    sizes = ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192")
    with start(small, tmp_path, *sizes) as server, ThreadPoolExecutor(256) as pool:
        server.told("ready: ")
        ask = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 16, "ignore_eos": True, "logprobs": 5}
        asked = [pool.submit(server.post, "/v1/completions", prompt=ids(512, seed), **ask) for seed in range(256)]
        answers = [one.result() for one in asked]
        assert {answer.status for answer in answers} == {200}, server.said
        assert sum(answer.json["usage"]["completion_tokens"] for answer in answers) == 256 * 16


@pytest.mark.parametrize("fronts", [1, 2])
@pytest.mark.parametrize("after_s", [0.3, 0.7, None])
def test_who_is_killed_leaves_no_process_no_port_and_no_memory(
    gpu: Gpu, small: TinyModel, tmp_path: Path, after_s: float | None, fronts: int
) -> None:
    """B143. While it loads, and when it is ready and at work."""
    before = gpu.free_bytes()
    with start(small, tmp_path, "--api-server-count", str(fronts)) as killed:
        port = killed.port
        if after_s is None:
            killed.told("ready: ")
            assert gpu.free_bytes() < before - GIB
            killed.post("/v1/completions", prompt=[5], max_tokens=3, ignore_eos=True)
        else:
            time.sleep(after_s)
        ours = children(killed.process.pid)
        assert ours
        killed.process.send_signal(signal.SIGKILL)
        assert killed.ended() == -signal.SIGKILL
        until(lambda: not any(map(alive, ours)), 10.0)
        until(lambda: gpu.free_bytes() >= before - 64 * MIB, 10.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), LIMIT_S)


@pytest.mark.parametrize("interrupts", [1, 2])
@pytest.mark.parametrize("after_s", [0.1, 0.5, 0.8, 1.0, 1.3, 3.0])
def test_an_interrupt_at_any_moment_ends_in_few_words_and_gives_all_memory_back(
    gpu: Gpu, small: TinyModel, tmp_path: Path, after_s: float, interrupts: int
) -> None:
    """B144. While it imports, opens the GPU, loads, captures graphs, and when it is ready."""
    before = gpu.free_bytes()
    with start(small, tmp_path) as ending:
        time.sleep(after_s)
        ours = [] if after_s < 0.5 else children(ending.process.pid)
        started_s = time.monotonic()
        for _ in range(interrupts):
            ending.process.send_signal(signal.SIGINT)
        # Python itself, before it has got as far as we, ends by the signal.
        assert ending.ended() in (0, 130, -signal.SIGINT)
        assert time.monotonic() - started_s < 5
        if ending.process.returncode >= 0:
            assert len(ending.said) <= 3 and not any("Traceback" in line for line in ending.said), ending.said
        until(lambda: not any(map(alive, ours)), 5.0)
        until(lambda: gpu.free_bytes() >= before - 64 * MIB, 5.0)


def test_a_prompt_that_is_long_in_reading_stops_no_stream(gpu: Gpu, small: TinyModel, tmp_path: Path) -> None:
    """B111. Others' tokens come between its chunks, and a short prompt is not behind it."""
    sizes = ("--max-num-batched-tokens", "48", "--max-num-seqs", "16", "--enforce-eager")
    with start(small, tmp_path, *sizes) as server, ThreadPoolExecutor(12) as pool:
        server.told("ready: ")
        moments: list[float] = []
        gaps_s: dict[str, float] = {}

        def stream() -> None:
            connection = server.connect()
            body = b'{"prompt":[5],"max_tokens":2000,"stream":true,"ignore_eos":true}'
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            reply = connection.getresponse()
            while reply.readline():
                moments.append(time.monotonic())
            connection.close()

        running = pool.submit(stream)
        until(lambda: len(moments) > 200, LIMIT_S)
        gaps_s["alone"] = max(after - before for before, after in zip(moments[50:], moments[51:]))
        begun, length = len(moments), 2000
        long = [pool.submit(server.post, "/v1/completions", prompt=ids(length, 9 + n), max_tokens=1) for n in range(10)]
        time.sleep(0.05)
        asked_s = time.monotonic()
        assert server.post("/v1/completions", prompt=[7], max_tokens=1).status == 200
        short_s = time.monotonic() - asked_s
        unfinished = sum(not one.done() for one in long)
        assert {one.result().status for one in long} == {200}
        ended = len(moments)
        gaps_s["beside"] = max(
            after - before for before, after in zip(moments[begun:ended], moments[begun + 1 : ended])
        )
        running.result()
        assert unfinished and short_s < 1.0, (unfinished, short_s)
        assert gaps_s["beside"] <= 20 * gaps_s["alone"], gaps_s

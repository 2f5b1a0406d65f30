"""A server of a shape with dummy weights: ready after how long, what its processes hold, how fast it answers.

    python benchmarks/serving.py [benchmarks/shapes/qwen2.5-7b] [--concurrency 1,64,256] [--rvllm COMMAND]

Starts `rvllm serve`, waits until /health says 200, and runs `rvllm benchmark serve` against it once for each
concurrency: random prompts of 512 tokens, answers of 128. It prints no figure where a request failed. Memory is what
/proc/PID/smaps_rollup says of all processes, once loaded and after the load: RSS, which counts pages that processes
share once for each, and PSS, which divides them. A tokenizer is borrowed from the tests. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "tests" / "reference" / "qwen2-tied"
TOLD = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms", "p99_itl_ms")


def requests_at(concurrency: int) -> int:
    """As many as keep the server busy for some seconds."""
    return max(8, 4 * concurrency if concurrency <= 64 else 2 * concurrency)


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


def stages(url: str) -> dict[str, float]:
    """Seconds, as /metrics tells them."""
    found = {}
    for line in fetched(f"{url}/metrics")[1].splitlines():
        if line.startswith("rvllm:startup_seconds{"):
            found[line.split('stage="')[1].split('"')[0]] = round(float(line.split()[-1]), 3)
    return found


def answers(rvllm: list[str], url: str, concurrency: int) -> dict[str, Any]:
    count = requests_at(concurrency)
    command = [*rvllm, "benchmark", "serve", "--base-url", url, "--skip-tokenizer-init", "--ignore-eos", "--input-len",
               "512", "--output-len", "128", "--num-prompts", str(count), "--max-concurrency", str(concurrency),
               "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--disable-tqdm"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["completed"] == count, f"{count - told['completed']} of {count} requests failed"
    return {"concurrency": concurrency} | {name: round(told[name], 2) for name in TOLD if name in told}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", nargs="?", default="benchmarks/shapes/qwen2.5-7b")
    parser.add_argument("--concurrency", default="1,64,256")
    parser.add_argument("--rvllm", default=f"{sys.executable} -m rvllm")
    parser.add_argument("--fronts", type=int, default=1)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    rvllm, port = shlex.split(given.rvllm), free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / given.shape / "config.json", folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, folder)
        command = [*rvllm, "serve", folder, "--load-format", "dummy", "--port", str(port), "--device", given.device,
                   "--max-model-len", "1024", "--max-num-seqs", "256", "--no-enable-prefix-caching",
                   "--api-server-count", str(given.fronts), "--host", "127.0.0.1"]  # fmt: skip
        begun_s = time.monotonic()
        server = subprocess.Popen(command, cwd=ROOT)
        try:
            wait_until_ready(server, url)
            ready_s = time.monotonic() - begun_s
            answers(rvllm, url, 1)  # graphs are there then
            found: dict[str, Any] = {"shape": given.shape, "ready_s": round(ready_s, 3), "stages_s": stages(url)}
            found["loaded_mib"] = memory(server.pid)
            print(json.dumps(found), flush=True)
            found["answers"] = []
            for concurrency in map(int, given.concurrency.split(",")):
                found["answers"].append(answers(rvllm, url, concurrency))
                print(json.dumps(found["answers"][-1]), flush=True)
            found["afterwards_mib"] = memory(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(30)
    assert status == 0, f"the server ended with {status}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()

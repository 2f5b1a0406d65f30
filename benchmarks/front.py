"""What fronts of the server forward: streams over loopback, before an engine whose model takes no time.

    python benchmarks/front.py [--fronts 1] [--streams 256] [--tokens 400] [--steps-per-s 0] [--scripted]

The engine draws a letter for every stream, as fast as it can, or so many steps a second; a client for each front
reads and counts. Scripted, it plans nothing and only says the letters: what several fronts forward shows then, of
which its thread would soon be the limit. Fronts parse, tokenize, detokenize, look for a stop string that never comes,
and count for /metrics. Told are tokens/s, CPU time of fronts and engine a token, and with a pace how much later than
the earliest a token came, which counts the engine's own step. Every stream must end with [DONE] and have all its
letters. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import selectors
import socket
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rvllm.engine.engine import Engine
from rvllm.engine.request import Request, TokenEvent
from rvllm.engine.scheduler import Limits
from rvllm.link.messages import Facts, Start
from rvllm.program.program import Step
from rvllm.sampling.sampler import Sampled
from tests.fixtures.engines import CountingModel
from tests.fixtures.models import loop_model

LOADER = "benchmarks.front:load"
PACE, SCRIPTED = "RVLLM_BENCH_STEPS_PER_S", "RVLLM_BENCH_SCRIPTED"
LENGTH = 4096


class Pace:
    """Lets steps begin no sooner than so many a second."""

    def __init__(self, steps_per_s: float) -> None:
        self._period_s = 1 / steps_per_s if steps_per_s else 0.0
        self._next_s = time.monotonic()

    def wait(self) -> None:
        if self._period_s:
            self._next_s = max(self._next_s + self._period_s, time.monotonic())
            time.sleep(max(self._next_s - time.monotonic(), 0.0))


class Letters(CountingModel):
    """Draws a letter for every row, at a pace."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def start(self, step: Step, rows: Any, **how: Any) -> list[Sampled]:
        self._pace.wait()
        return [Sampled(97 + int(token) % 26) for token in step.ids[step.rows].tolist()]


class Script(Engine):
    """Says a letter for every request in each step, at a pace, whatever its place in memory."""

    def __init__(self, limits: Limits, pace: Pace) -> None:
        super().__init__(CountingModel(), limits)
        self._pace = pace
        self._left: dict[str, int] = {}  # how many tokens a request still has to come
        self._letter = 0

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def add(self, *requests: Request) -> None:
        self._left |= {request.id: request.params.max_tokens or 1 for request in requests}

    def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def step(self) -> list[TokenEvent]:
        self._pace.wait()
        self._letter = (self._letter + 1) % 26
        letter, left, self._left = 97 + self._letter, self._left, {}
        events = []
        for name, count in left.items():
            if count > 1:
                self._left[name] = count - 1
            events.append(TokenEvent(name, letter, None, (), None if count > 1 else "length", None))
        return events


def load(start: Start, say: object) -> tuple[Engine, Facts]:
    config = start.config
    limits = Limits(
        max_model_len=LENGTH,
        block_size=config.block_size,
        blocks=config.max_num_seqs * LENGTH // config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk=config.prefill_chunk,
        vocab_limit=start.vocab_limit,
        eos_ids=start.eos_ids,
    )
    pace = Pace(float(os.environ[PACE]))
    engine = Script(limits, pace) if os.environ[SCRIPTED] == "True" else Engine(Letters(pace), limits)
    return engine, Facts(config.model, "none", limits, config.max_logprobs)


def serve(folder: Path, fronts: int, told: Any) -> None:
    """A server over that engine; tells its port once it is ready."""
    import rvllm.api.serve as server
    from rvllm.config import EngineConfig, ServerConfig
    from rvllm.link.process import EngineProcess

    server.EngineProcess = partial(EngineProcess, LOADER)  # type: ignore[misc,assignment]
    port = 0

    def note(text: str) -> None:
        nonlocal port
        if match := re.search(r"listening at http://\S*:(\d+)", text):
            port = int(match[1])
        if text.startswith("ready: "):
            told.send(port)

    settings = ServerConfig(host="127.0.0.1", port=0, api_server_count=fronts)
    engine = EngineConfig(model=str(folder), device="cpu", max_model_len=LENGTH)
    server.serve(engine, settings, note=note, progress=lambda label, done, total: None)


def read_streams(port: int, streams: int, tokens: int, told: Any) -> None:
    """Begin streams, read them to their end, and tell when, and when each one's tokens came."""
    body = {"prompt": "x", "max_tokens": tokens, "stream": True, "ignore_eos": True, "stop": ["0 never comes"]}
    data = json.dumps(body).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    selector = selectors.DefaultSelector()
    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    counts, tails = dict.fromkeys(links, 0), dict.fromkeys(links, b"")
    arrivals_s: dict[Any, list[float]] = {link: [] for link in links}
    for link in links:
        selector.register(link, selectors.EVENT_READ)
        link.sendall(request)
    first_s, left = 0.0, streams
    while left:
        for key, _ in selector.select():
            link: Any = key.fileobj
            chunk = link.recv(1 << 16)
            now_s = time.monotonic()
            first_s = first_s or now_s
            found = (tails[link][-8:] + chunk).count(b'"text":"') - tails[link][-8:].count(b'"text":"')
            counts[link] += found
            arrivals_s[link] += [now_s] * found
            tails[link] = (tails[link] + chunk)[-64:]
            if tails[link].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                selector.unregister(link)
                left -= 1
            assert chunk, "a stream broke off"
    assert set(counts.values()) == {tokens}, "a letter is missing"
    told.send((first_s, time.monotonic(), list(arrivals_s.values())))


def cpu_s(process: int) -> tuple[float, float]:
    """CPU time: of its own code, and of the system for it."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK"), int(fields[12]) / os.sysconf("SC_CLK_TCK")


def cpu_us(processes: list[int]) -> float:
    return 1e6 * sum(sum(cpu_s(process)) for process in processes)


def family(process: int) -> dict[str, list[int]]:
    """The server's processes: those that front, and the engine's."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()
    lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    fronts = [child for child, line in lines.items() if b"front_process" in line] or [process]
    return {"front": fronts, "engine": [child for child, line in lines.items() if b"link.child" in line]}


def measure(fronts: int, streams: int, tokens: int, steps_per_s: float, scripted: bool) -> dict[str, Any]:
    os.environ |= {PACE: str(steps_per_s), SCRIPTED: str(scripted)}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        made = loop_model(Path(name))
        here, there = context.Pipe()
        server = context.Process(target=serve, args=(made.folder, fronts, there), daemon=False)
        server.start()
        port = here.recv()
        assert server.pid is not None
        processes = family(server.pid)
        before = {kind: cpu_us(pids) for kind, pids in processes.items()}
        system_us = 1e6 * sum(cpu_s(process)[1] for process in processes["front"])
        pipes = [context.Pipe() for _ in range(fronts)]
        shares = [streams // fronts + (place < streams % fronts) for place in range(fronts)]
        clients = [
            context.Process(target=read_streams, args=(port, share, tokens, pipe[1]))
            for share, pipe in zip(shares, pipes)
        ]
        for client in clients:
            client.start()
        ends = [pipe[0].recv() for pipe in pipes]
        after = {kind: cpu_us(pids) for kind, pids in processes.items()}
        system_us = 1e6 * sum(cpu_s(process)[1] for process in processes["front"]) - system_us
        for client in clients:
            client.join()
        server.terminate()
        server.join()
    seconds = max(end for _, end, _ in ends) - min(first for first, _, _ in ends)
    all_tokens = streams * tokens
    told: dict[str, Any] = {
        "fronts": fronts,
        "scripted": scripted,
        "streams": streams,
        "tokens_per_s": round(all_tokens / seconds),
        "front_us_per_token": round((after["front"] - before["front"]) / all_tokens, 1),
        "front_system_us_per_token": round(system_us / all_tokens, 1),
        "engine_us_per_token": round((after["engine"] - before["engine"]) / all_tokens, 1),
    }
    if steps_per_s:
        late_ms = lateness_ms([arrivals for *_, streams_s in ends for arrivals in streams_s], 1 / steps_per_s)
        cuts = statistics.quantiles(late_ms, n=100)
        told |= {"steps_per_s": steps_per_s, "late_ms_p50": round(cuts[49], 2), "late_ms_p99": round(cuts[98], 2)}
    return told


def lateness_ms(streams_s: list[list[float]], period_s: float) -> list[float]:
    """How much later each token came than the earliest of all would have, had its stream's first step come at the pace.

    Streams begin at different steps: whole periods by which all of a stream's tokens are later are its beginning's.
    """
    behind_s = [[arrival - place * period_s for place, arrival in enumerate(arrivals)] for arrivals in streams_s]
    first_s = min(map(min, behind_s))
    begun_s = [first_s + (min(one) - first_s) // period_s * period_s for one in behind_s]
    return [1e3 * (late - begin) for one, begin in zip(behind_s, begun_s) for late in one]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fronts", type=int, default=1)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--steps-per-s", type=float, default=0.0)
    parser.add_argument("--scripted", action="store_true")
    given = parser.parse_args()
    print(json.dumps(measure(given.fronts, given.streams, given.tokens, given.steps_per_s, given.scripted)))


if __name__ == "__main__":
    main()

"""`rvllm serve` under random clients, good and bad, for as long as one likes; nothing may be wrong, late or left.

    RVLLM_SOAK_SECONDS=1800 python -m pytest -s tests/e2e/test_soak_serve.py                          by hand
    RVLLM_SOAK_DEVICE=cuda RVLLM_SOAK_SECONDS=300 python -m pytest -s tests/e2e/test_soak_serve.py    on a GPU

The seconds are those of load, of all servers together; two minutes where nothing is said. A third of each server's
goes before memory is measured.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from rvllm.api.serving import WORKERS
from rvllm.engine import grammar
from tests.fixtures.asks import BODY_BYTES, CONTEXT, KEY, prepared
from tests.fixtures.commands import LIMIT_S
from tests.fixtures.crowd import CLIENT_S, DEEDS, Crowd
from tests.fixtures.engines import until
from tests.fixtures.models import Options, Shape, random_model
from tests.fixtures.servers import JSON, Figures, Server, figures, processes, serving, value

SECONDS = float(os.environ.get("RVLLM_SOAK_SECONDS", "120"))
DEVICE = os.environ.get("RVLLM_SOAK_DEVICE", "cpu")
ENVIRONMENT = {
    # Of what is free little is kept, in one heap for all threads: less noise around what is measured.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "CUDA_VISIBLE_DEVICES": "" if DEVICE == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
}
DRIZZLE = 4000
SLACK_KIB, LEAK_KIB = 2560, 0.1
"""What a process may grow by after a third of the load, at all and for each request it saw. Seen, beside other work: 4 to
1,500 KiB after some 4,000 requests, 3,600 after 22,000 (peaks of many large answers at once; a heap does not shrink).
What is free in a heap hides the first megabytes of a leak: hence the drizzle. 2 KB a request are found.
"""

MOST_TURNS, UNEVEN_KIB = 6, 1536
"""How often the worst is tried until it leaves fronts alike: it takes some 4 MB of each, once."""

MORE_THREADS = {"engine": 1 + min(grammar.MOST_THREADS, os.cpu_count() or 1)}
"""Than at first: the one in which grammars are compiled and those that write masks; in others those that read texts."""

AT_REST = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "rvllm:http_generations",
)  # fmt: skip

END_S = 10.0
"""From SIGTERM to the end of a server that does nothing."""

SHAPE = Shape(hidden=128, intermediate=96, heads=2, kv_heads=1)
GUESSES = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
LIMITS = (
    "--max-model-len", str(CONTEXT), "--num-gpu-blocks-override", "24", "--max-num-seqs", "8",
    "--max-num-batched-tokens", "96", "--scheduling-policy", "priority", "--max-num-queued-reqs", "28",
    "--client-timeout", str(CLIENT_S), "--sse-keep-alive-interval", "1", "--max-body-bytes", str(BODY_BYTES),
    "--api-key", "K",
)  # fmt: skip
VARIANTS = {
    "one front": ("--api-server-count", "1"),
    "two fronts, batch-invariant, with guesses": (
        "--api-server-count", "2", "--batch-invariant", "--speculative-config", GUESSES
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Footprint:
    """A process: what it has of its own in memory, in KiB, its threads, and its descriptors by their kind."""

    name: str
    kib: int
    threads: int
    descriptors: Counter[str]

    @classmethod
    def of(cls, process: int) -> Footprint:
        folder = Path(f"/proc/{process}")
        line, status = (folder / "cmdline").read_bytes(), (folder / "status").read_text()
        assert line and "\nState:\tZ" not in status, f"process {process} is dead, and nobody took notice"
        kinds: Counter[str] = Counter()
        for one in (folder / "fd").iterdir():
            try:
                kinds[re.sub(r":\[\d+\]", "", str(one.readlink()))] += 1
            except OSError:
                continue  # closed meanwhile
        told = dict(entry.split(":", 1) for entry in status.splitlines())
        name = "front" if b"front_process" in line else "engine" if b"link.child" in line else "server"
        return cls(name, int(told["RssAnon"].split()[0]), int(told["Threads"]), kinds)


Marks = dict[int, Footprint]
"""Of each process of a server."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_clients_are_answered_and_leave_nothing_behind(tmp_path: Path, variant: str) -> None:
    random_model(tmp_path / "model", SHAPE, Options(max_positions=CONTEXT), std=0.3)
    invariant = "--batch-invariant" in VARIANTS[variant] or DEVICE != "cpu"
    how = (*LIMITS, *VARIANTS[variant], *(("--batch-invariant",) if invariant else ()), "--device", DEVICE)
    with serving(tmp_path / "model", *how, folder=tmp_path / "server", **ENVIRONMENT) as server:
        try:
            marks = soak(server, invariant=invariant, guesses="--speculative-config" in how)
        finally:
            print(*server.said, server.process.poll())
        end(server, marks[0])
    assert not list((tmp_path / "server").glob("rvllm-*"))


def soak(server: Server, *, invariant: bool, guesses: bool) -> list[Marks]:
    """The load, and all that has to hold of it; each process at first, after a third of it, and in the end."""
    crowd = Crowd(server.port, prepared(server, 50, invariant=invariant))
    marks = [marked(server)]
    worst(crowd, server)
    crowd.come_and_go(SECONDS / len(VARIANTS) / 3, "first")
    marks.append(marked(server))
    early = crowd.requests
    crowd.come_and_go(SECONDS / len(VARIANTS) * 2 / 3, "then")
    crowd.drizzle(DRIZZLE)
    marks.append(marked(server, as_before=marks[0]))
    found = figures(server, KEY)
    print(report(crowd, marks, found))
    check_growth(marks, crowd.requests - early)
    check_counts(crowd, found, guesses=guesses)
    for ask in crowd.asks:
        body = ask.body | {"return_token_ids": True}
        ask.check(body, server.send("POST", ask.path, body, JSON | KEY))
    return marks


def worst(crowd: Crowd, server: Server) -> None:
    """Again until every front has had it."""
    fronts = len(of_fronts(marked(server)))
    for _ in range(MOST_TURNS):
        crowd.worst(5 * max(1, fronts))
        sizes = of_fronts(marked(server))
        if not sizes or max(sizes) - min(sizes) < UNEVEN_KIB:
            return


def of_fronts(marks: Marks) -> list[int]:
    return [mark.kib for mark in marks.values() if mark.name == "front"]


def marked(server: Server, as_before: Marks | None = None) -> Marks:
    """Each process once the server has nothing to do, by its own figures, and has the descriptors that it had before."""

    def still() -> bool:
        found = figures(server, KEY)
        return all(value(found, name) == 0 for name in AT_REST)

    until(still, LIMIT_S)
    assert server.send("GET", "/load", headers=KEY).json == {"server_load": 0}
    time.sleep(0.5)  # the engine collects its garbage
    end_s = time.monotonic() + LIMIT_S
    while True:
        marks = {process: Footprint.of(process) for process in processes(server)}
        if as_before is None or descriptors(marks) == descriptors(as_before):
            return marks
        assert time.monotonic() < end_s, (descriptors(as_before), descriptors(marks))
        time.sleep(0.1)


def descriptors(marks: Marks) -> dict[int, Counter[str]]:
    return {process: mark.descriptors for process, mark in marks.items()}


def check_growth(marks: list[Marks], requests: int) -> None:
    """That memory is what it was after a third of the load, `requests` requests ago, but for noise."""
    begun, warm, ended = marks
    fronts = len(of_fronts(begun)) or 1
    for process, mark in ended.items():
        seen = requests if mark.name == "engine" else requests / fronts
        assert mark.kib - warm[process].kib < SLACK_KIB + LEAK_KIB * seen, mark
        assert mark.threads <= begun[process].threads + MORE_THREADS.get(mark.name, WORKERS), mark


def check_counts(crowd: Crowd, found: Figures, *, guesses: bool) -> None:
    """That all happened that was to happen, and that the server's count of it is the clients'."""

    def count(name: str, **labels: str) -> float:
        return value(found, f"vllm:{name}", **labels)

    done = sum(count("request_success_total", finished_reason=reason) for reason in ("length", "stop"))
    assert done >= crowd.texts + sum(len(ask.right) for ask in crowd.asks)
    assert count("request_success_total", finished_reason="abort") > 0
    assert count("num_preemptions_total") > 0 and count("prefix_cache_hits_total") > 0
    assert (count("spec_decode_num_accepted_tokens_total") > 0) == guesses
    counts = crowd.counts
    assert all(counts[deed.__name__] for deed, _ in DEEDS), counts
    assert counts["429"] and counts["cut off"] and counts["200"] > 2 * counts["429"], counts


def end(server: Server, begun: Marks) -> None:
    """End it by SIGTERM; it has said no more than it should."""
    assert len(server.said) == 2, server.said
    server.process.terminate()
    begun_s = time.monotonic()
    assert server.ended() == 0 and time.monotonic() - begun_s < END_S
    assert not any(Path(f"/proc/{process}").exists() for process in begun)
    assert server.told("stopping: ") and len(server.said) == 3, server.said


def report(crowd: Crowd, marks: list[Marks], found: Figures) -> str:
    """What was done, and what each process had of memory and descriptors: at first, after a third, in the end."""
    names = ("generation_tokens", "prefix_cache_hits", "num_preemptions")
    sums = ", ".join(f"{name} {value(found, f'vllm:{name}_total'):,.0f}" for name in names)
    aborts = value(found, "vllm:request_success_total", finished_reason="abort")
    lines = [
        f"\n{crowd.requests:,} requests, {crowd.texts:,} texts read to their end, {aborts:,.0f} aborted, {sums}",
        ", ".join(f"{name} {number:,}" for name, number in sorted(crowd.counts.items())),
    ]
    for process, mark in marks[0].items():
        mine = [one[process] for one in marks]
        memory = " -> ".join(f"{one.kib:,}" for one in mine)
        many = " -> ".join(f"{one.descriptors.total()}" for one in mine)
        threads = " -> ".join(f"{one.threads}" for one in mine)
        lines.append(f"{mark.name}: KiB {memory}, descriptors {many}, threads {threads}")
    return "\n".join(lines)

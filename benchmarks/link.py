"""What the link between engine process and front costs, over an engine whose model takes no time.

    python benchmarks/link.py [--sequences 256]

Per step of so many sequences, each with one token: what the engine's thread spends on sending, what the front's spends
on receiving; the way there and back of one small message; and the CPU time of a whole step in an engine process beside
the same engine with nothing around it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rvllm.config import EngineConfig
from rvllm.engine.request import TokenEvent
from rvllm.link.client import EngineClient
from rvllm.link.messages import Facts, Tokens, frame
from rvllm.link.server import Front, Server
from tests.fixtures.engines import CountingModel, counting, engine, process

ROUNDS = 300
LENGTH = 2048  # tokens
STEPS = 1000  # of the comparison of one process and two


def median_us(work: Callable[[], object]) -> float:
    times_s = []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begun_s)
    return statistics.median(times_s) * 1e6


def events(sequences: int) -> list[TokenEvent]:
    return [TokenEvent(f"chatcmpl-{index:08}", 100_000 + index, None, (), None, None) for index in range(sequences)]


def sending_us(sequences: int) -> float:
    """Of the engine's thread: sort a step's events by front, encode them, write them."""
    here, there = socket.socketpair()
    listener, terminate = socket.socketpair()
    config = EngineConfig(max_model_len=64, max_num_seqs=sequences)
    made = engine(CountingModel(), config)
    front = Front(here)
    server = Server(made, Facts("", "", made.limits, 0), parent=front, listener=listener, terminate=terminate)
    server._welcome(front)
    step = events(sequences)
    for event in step:
        server._owners[event.request_id] = front
    times_s = []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        server.publish(step)
        times_s.append(time.perf_counter() - begun_s)
        there.recv(1 << 20)
    assert not front.unread
    server.close()
    for end in (there, listener, terminate):
        end.close()
    return statistics.median(times_s) * 1e6


def receiving_us(sequences: int) -> float:
    """Of the front's thread: decode a step's message and give each stream its event."""
    here, there = socket.socketpair()
    client = EngineClient(here)
    there.setblocking(False)
    client.submit([counting(event.request_id, 1, 2) for event in events(sequences)])
    data = frame(Tokens(events(sequences)))
    taken = median_us(lambda: client._take(data))
    client.close()
    there.close()
    return taken


def processes(sequences: int) -> dict[str, float]:
    """Of a real engine process: the way there and back while it is idle, and a step's CPU time while it is not."""
    with process(max_model_len=LENGTH, max_num_seqs=sequences) as child:
        client = EngineClient(child.link)
        client.ready()
        there_and_back_us = median_us(client.stats)
        begun_s, first = cpu_s(child.pid), client.stats().steps
        client.submit([counting(str(index), 1, STEPS) for index in range(sequences)])
        while client._streams:
            client.receive()
        taken_s, steps = cpu_s(child.pid) - begun_s, client.stats().steps - first
    return {"there_and_back_us": there_and_back_us, "engine_process_us": taken_s / steps * 1e6}


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used: other work on the machine does not count."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def one_process_us(sequences: int) -> float:
    """CPU time of a step of the same engine with nothing around it."""
    alone = engine(CountingModel(), EngineConfig(max_model_len=LENGTH, max_num_seqs=sequences))
    for index in range(sequences):
        alone.add(counting(str(index), 1, STEPS))
    begun_s, steps = time.process_time(), 0
    while alone.busy:
        alone.step()
        steps += 1
    return (time.process_time() - begun_s) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the link between engine process and front costs.")
    parser.add_argument("--sequences", type=int, default=256)
    sequences = parser.parse_args().sequences
    result = {
        "sequences": sequences,
        "message_bytes": len(frame(Tokens(events(sequences)))),
        "sending_us": sending_us(sequences),
        "receiving_us": receiving_us(sequences),
        "one_process_us": one_process_us(sequences),
        **processes(sequences),
    }
    print(f"a step of {sequences} sequences, one token each: {result['message_bytes']:,} bytes")
    print(f"  engine's thread, sorting, encoding, writing {result['sending_us']:8.1f} us")
    print(f"  front's thread, decoding, sorting           {result['receiving_us']:8.1f} us")
    print(f"  a whole step in one process, CPU            {result['one_process_us']:8.1f} us")
    print(f"  a whole step in the engine process, CPU     {result['engine_process_us']:8.1f} us")
    print(f"one small message there and back, idle        {result['there_and_back_us']:8.1f} us")
    print(json.dumps({key: round(value, 1) for key, value in result.items()}))


if __name__ == "__main__":
    main()

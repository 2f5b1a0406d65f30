"""An engine process from start to end: what everyone is told when it is refused, dies, or is left by its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rvllm import LLM
from rvllm.cli.failure import explain
from rvllm.config import EngineConfig
from rvllm.errors import EngineDied, EngineError, StartError
from rvllm.link.client import AsyncEngineClient, EngineClient, Parent, link_to
from rvllm.link.messages import Facts, Submit, frame
from rvllm.link.process import EngineProcess
from rvllm.link.server import Front, Server
from tests.fixtures.commands import LIMIT_S, environment
from tests.fixtures.engines import (
    DEATH_S,
    LOST,
    MANY,
    CountingModel,
    counting,
    engine,
    front,
    process,
    running,
    until,
)
from tests.fixtures.models import loop_model


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


# --- An engine that dies


def test_a_killed_engine_is_known_to_all_fronts_at_once() -> None:
    with running("pause_s=0.01") as (child, client), front(child) as other:
        (stream,) = client.submit([counting("mine", 0, MANY)])
        client.receive()
        started_s = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        assert str(client.wait()) == "the engine process was killed by SIGKILL"
        stream.take()
        with pytest.raises(EngineDied, match="killed by SIGKILL"):
            stream.take()
        with pytest.raises(EngineDied, match="killed by SIGKILL"):
            client.submit([counting("late", 0, 1)])
        assert other.stderr and other.stderr.readline() == "error: the engine process is gone\n"
        assert time.monotonic() - started_s < DEATH_S
        assert other.wait(LIMIT_S) == 1 and other.stderr.read() == ""
        assert child.exit_code() == -signal.SIGKILL


def test_an_engine_error_reaches_every_front_in_the_engines_words_and_ends_the_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with running("pause_s=0.01 fails_at=5") as (child, client):
        fronts = [client, EngineClient(link_to(child.address))]
        streams = [one.submit([counting(str(index), 0, MANY)])[0] for index, one in enumerate(fronts)]
        for one, stream in zip(fronts, streams):
            ended = one.wait()
            assert isinstance(ended, EngineDied) and explain(ended) == (LOST.message, LOST.hint)
            assert "in start\n    raise LOST" in str(ended.__cause__)
            assert 1 <= len(stream.take()) <= 5
            with pytest.raises(EngineDied, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                stream.take()
        until(lambda: child.exit_code() == 1)
        assert not child.address.exists()
    assert capfd.readouterr() == ("", "")  # it is the fronts' to tell


def test_the_parent_is_told_last_as_the_process_ends_with_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [socket.socketpair() for _ in range(8)]
    ends = [end for pair in pairs for end in pair]
    made = engine(CountingModel(fails_at=1), EngineConfig())
    fronts = [Front(here) for here, _ in pairs[2:]]
    server = Server(made, Facts("", "", made.limits, 0), parent=fronts[0], listener=pairs[0][0], terminate=pairs[1][0])
    for front_ in fronts[1:]:
        server._welcome(front_)
    pairs[2][1].sendall(frame(Submit((counting("a", 1, 2),))))
    told: list[Front] = []
    send = Front.send
    monkeypatch.setattr(Front, "send", lambda self, message: (told.append(self), send(self, message)))
    with pytest.raises(EngineError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        server.run()
    assert told[-1] is fronts[0] and len(told) == 1 + len(fronts)
    server.close()
    for end in ends:
        end.close()


def test_a_client_in_an_event_loop_learns_of_the_end_too() -> None:
    async def talk(child: EngineProcess) -> None:
        client = await AsyncEngineClient.over(child.link, Parent(death=child.end))
        await client.ready()
        stream = client.stream(counting("a", 0, MANY))
        await anext(stream)
        asked = [asyncio.create_task(anext(stream)), asyncio.create_task(client.wait())]
        await asyncio.sleep(0)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="killed by SIGKILL"):
            for _ in range(MANY):  # those that came before
                await asyncio.wait_for(asked[0], DEATH_S)
                asked[0] = asyncio.create_task(anext(stream))
        assert "killed by SIGKILL" in str(await asyncio.wait_for(asked[1], DEATH_S))

    with process("pause_s=0.01", max_model_len=2 * MANY) as child:
        asyncio.run(talk(child))


# --- A start that is refused


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "/nowhere/at all"},
        {"dtype": "bfloat16"},
        {"max_model_len": 2048, "kv_cache_memory_bytes": 1000},
    ],
)
def test_a_start_is_refused_in_the_words_it_has_in_this_process(settings: dict[str, Any], tmp_path: Path) -> None:
    asked = {"model": str(loop_model(tmp_path).folder), "device": "cpu"} | settings
    with pytest.raises(StartError) as here:
        LLM(**asked)
    with EngineProcess() as child:
        child.load(EngineConfig(**asked), vocab_limit=100, eos_ids=frozenset())
        client = EngineClient(child.link, Parent(death=child.end))
        with pytest.raises(type(here.value)) as there:
            client.ready()
        assert explain(there.value) == explain(here.value)
        until(lambda: child.exit_code() == 1)


@pytest.mark.parametrize(("program", "said"), [("", "does not know its own program"), ("/nowhere", "No such file")])
def test_a_python_that_cannot_be_started_is_told(
    program: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(StartError, match=said):
        EngineProcess()
    assert not list(tmp_path.iterdir())


def test_a_fault_of_our_own_at_the_start_is_told_as_one() -> None:
    with process("broken=1") as child:
        early = EngineClient(link_to(child.address))
        with pytest.raises(EngineError, match="unexpected ValueError: a fault of our own"):
            EngineClient(child.link).ready()
        with pytest.raises(EngineDied):
            early.ready()


def test_a_front_may_come_before_the_engine_is_ready() -> None:
    with process("load_s=0.1") as child:
        early = EngineClient(link_to(child.address))
        assert early.ready() == EngineClient(child.link).ready()
        assert [event.token_id for event in early.stream(counting("a", 5, 2))] == [5, 6]
        early.close()


def test_an_engine_killed_while_it_loads_is_told() -> None:
    with process("load_s=60") as child:
        client = EngineClient(child.link, Parent(death=child.end))
        os.kill(child.pid, signal.SIGTERM)
        with pytest.raises(EngineDied, match="killed by SIGTERM"):
            client.ready()


# --- Its end


PARENT = """
import sys
from rvllm.link.client import EngineClient
from tests.fixtures.engines import counting, process
child = process(sys.argv[1])
if sys.argv[2] != "load":
    client = EngineClient(child.link)
    client.ready()
    if sys.argv[2] == "step":
        client.submit([counting("a", 0, 9)])
print(child.pid, child.address, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("model", "state"), [("load_s=60", "load"), ("pause_s=60", "step"), ("", "idle")])
def test_an_engine_does_not_outlive_its_parent(model: str, state: str) -> None:
    command = [sys.executable, "-c", PARENT, model, state]
    with subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        pid, address = parent.stdout.readline().decode().split()
        if state == "load":  # until it has imported what it needs
            until(lambda: len(list(Path(f"/proc/{pid}/task").iterdir())) > 1, 10)
        assert alive(int(pid)) and Path(address).exists()
        parent.kill()
        until(lambda: not alive(int(pid)))
        assert not Path(address).parent.exists()


def test_shutdown_lets_requests_run_out_and_takes_no_more() -> None:
    with running("pause_s=0.002") as (child, client):
        second = EngineClient(link_to(child.address))
        (its,) = second.submit([counting("its", 0, 100)])
        second.receive()
        client.shutdown(drain_s=10.0)
        while not second.stopping:
            second.receive()
        (late,) = second.submit([counting("late", 0, 1)])
        assert str(second.wait()) == str(client.wait()) == "the engine was shut down"
        assert len(its.take()) == 100
        with pytest.raises(EngineError, match="is being shut down"):
            late.take()
        assert child.stop() == 0 and not child.address.parent.exists()


def test_what_is_not_through_in_time_is_told_so() -> None:
    with running("pause_s=0.002") as (child, client):
        (stream,) = client.submit([counting("a", 0, MANY)])
        client.receive()
        client.shutdown(drain_s=0.05)
        client.wait()
        assert stream.take()
        with pytest.raises(EngineError, match="was shut down before the request was through"):
            stream.take()
        assert child.stop() == 0


def test_of_two_shutdowns_the_earlier_end_counts_and_all_fronts_are_told_what_was_cut() -> None:
    """Of the second front's requests one runs, the other waits for its turn."""
    with running("pause_s=0.002", max_num_seqs=3) as (child, client):
        second = EngineClient(link_to(child.address))
        streams = [
            each.submit([counting(f"{name}-{index}", 0, MANY) for index in range(2)])
            for name, each in (("mine", client), ("its", second))
        ]
        client.receive()
        second.receive()
        client.shutdown(drain_s=LIMIT_S)
        while not second.stopping:
            second.receive()
        client.shutdown(drain_s=0.05)
        client.shutdown(drain_s=LIMIT_S)
        started_s = time.monotonic()
        client.wait()
        second.wait()
        assert time.monotonic() - started_s < DEATH_S
        begun = [bool(stream.take()) for each in streams for stream in each if stream._events]
        assert begun == [True] * 3
        for stream in (one for each in streams for one in each):
            with pytest.raises(EngineError, match="was shut down before the request was through"):
                stream.take()
        assert child.stop() == 0


def test_sigterm_lets_requests_run_out_and_sigint_does_nothing() -> None:
    with running("pause_s=0.002") as (child, client):
        (stream,) = client.submit([counting("a", 0, 100)])
        client.receive()
        assert os.getpgid(child.pid) != os.getpgid(0)  # Ctrl-C goes to all of a group
        os.kill(child.pid, signal.SIGINT)
        os.kill(child.pid, signal.SIGTERM)
        client.wait()
        assert len(stream.take()) == 100 and child.stop() == 0


def test_an_address_that_no_socket_can_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(Exception, match="too long a name for a socket") as refused:
        process()
    assert explain(refused.value)[1] == "set TMPDIR to a folder with a shorter name"
    assert not list(folder.iterdir())

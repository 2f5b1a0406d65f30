"""The engine in a process of its own: the same tokens, and what is left when a front, the engine or the parent dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rvllm import LLM, SamplingParams
from rvllm.cli.failure import explain
from rvllm.config import EngineConfig
from rvllm.engine.request import Request, TokenEvent
from rvllm.errors import BadRequest, EngineDied, EngineError, PromptTooLong, StartError
from rvllm.link.client import AsyncEngineClient, EngineClient, Parent, link_to
from rvllm.link.messages import MOST_BYTES, Abort, Facts, Message, Shutdown, Stats, Submit, Tokens, frame
from rvllm.link.process import EngineProcess
from rvllm.link.server import IDLE_BEFORE_COLLECT_S, Front, Server
from tests.fixtures.commands import LIMIT_S, environment
from tests.fixtures.engines import LOST, VOCAB, CountingModel, counting, process
from tests.fixtures.engines import engine as counting_engine
from tests.fixtures.models import loop_model, random_model

DEATH_S = 1.0
"""In which all who are concerned know of a death."""

MANY = 100_000  # tokens: no such request comes to its end here


def until(condition: Callable[[], bool], limit_s: float = DEATH_S) -> None:
    """Wait for something that must be so in time."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come to be"
        time.sleep(0.002)


@contextmanager
def engine(model: str = "", **settings: Any) -> Iterator[tuple[EngineProcess, EngineClient]]:
    """A running one over the counting model, ready, with the parent's client."""
    with process(model, max_model_len=2 * MANY, **settings) as child:
        child.link.settimeout(LIMIT_S)  # a test may fail, and not hang
        client = EngineClient(child.link, Parent(death=child.end))
        client.ready()
        yield child, client


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[EngineProcess, EngineClient]]:
    with engine() as made:
        yield made


def numbers(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


def at_rest(stats: Stats) -> bool:
    return (stats.load.running, stats.load.waiting, stats.load.used_blocks) == (0, 0, 0)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


# --- The same tokens


def test_a_real_model_gives_the_same_events_as_in_this_process(tmp_path: Path) -> None:
    model = random_model(tmp_path)
    settings: dict[str, Any] = {"model": str(model.folder), "device": "cpu", "max_model_len": 64}
    llm = LLM(**settings)
    asked = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=3),
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, seed=5, logit_bias={7: 2.5}),
        SamplingParams(temperature=1.3, max_tokens=None, min_tokens=3, frequency_penalty=0.5),
    ]
    requests = [Request(str(index), (1 + index, 2, 3), params, 40 + index) for index, params in enumerate(asked)]
    wanted: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}
    for request in requests:
        llm._engine.add(request)
    while llm._engine.busy:
        for event in llm._engine.step():
            wanted[event.request_id].append(event)

    said: list[str] = []
    eos_ids = frozenset(llm.tokenizer.eos_token_ids)
    with EngineProcess() as child:
        child.load(EngineConfig(**settings), vocab_limit=llm.tokenizer.vocab_size, eos_ids=eos_ids)
        client = EngineClient(child.link, Parent(progress=lambda label, done, total: said.append(label)))
        assert client.ready().limits == llm._engine.limits
        assert (client.ready().device, set(said)) == ("cpu", {"loading weights"})
        streams = client.submit(requests)
        while not all(stream.ended for stream in streams):
            client.receive()
        assert {stream.request_id: stream.take() for stream in streams} == wanted
        assert at_rest(client.stats())


def test_a_client_in_an_event_loop_gets_the_same(shared: tuple[EngineProcess, EngineClient]) -> None:
    async def collect(client: AsyncEngineClient, name: str, first: int) -> list[int]:
        return [event.token_id async for event in client.stream(counting(name, first, 5))]

    async def talk() -> None:
        client = await AsyncEngineClient.over(link_to(shared[0].address))
        assert (await client.ready()).limits.vocab_limit == VOCAB
        found = await asyncio.gather(*(collect(client, f"loop-{first}", first) for first in (10, 20, 30)))
        assert found == [[first + count for count in range(5)] for first in (10, 20, 30)]
        both = await asyncio.gather(client.stats(), client.stats())
        assert all(map(at_rest, both))
        endless = client.stream(counting("endless", 5, MANY))
        assert (await anext(endless)).token_id == 5
        await endless.aclose()  # type: ignore[attr-defined]
        assert at_rest(await client.stats())
        client.close()
        with pytest.raises(EngineDied, match="the link was closed"):
            client.submit([counting("late", 1, 1)])

    asyncio.run(talk())


def test_two_fronts_get_their_own_tokens_and_cannot_touch_each_others(
    shared: tuple[EngineProcess, EngineClient],
) -> None:
    child, first = shared
    second = EngineClient(link_to(child.address))
    (mine,) = first.submit([counting("mine", 100, 2000)])
    second.ready()
    second._write(Abort(("mine",)))  # as a front would that knows the other's id
    got: list[int] = []
    for event in second.stream(counting("more", 500, 3)):
        got.append(event.token_id)
    assert got == [500, 501, 502]
    (taken,) = second.submit([counting("mine", 1, 1)])
    while not taken.ended:
        second.receive()
    with pytest.raises(BadRequest, match="a request with the id 'mine' is running already"):
        taken.take()
    while not mine.ended:
        first.receive()
    assert numbers(mine.take()) == [(100 + count) % VOCAB for count in range(2000)]
    second.close()


def test_completions_of_one_prompt_are_run_together_and_it_is_read_once() -> None:
    with engine() as (_, client):
        one, other = (Request(name, (*range(100), 7), SamplingParams(max_tokens=2), 0) for name in "ab")
        salted = replace(other, id="c", cache_salt="salt")
        streams = client.submit([one, other, salted, counting("d", 5, 2)])
        while not all(stream.ended for stream in streams):
            client.receive()
        assert [numbers(stream.take()) for stream in streams] == [[8, 9]] * 3 + [[5, 6]]
        assert client.stats().load.prompt_tokens == 101 + 101 + 2


# --- Requests that cannot be run


@pytest.mark.parametrize(
    ("request_", "kind", "said"),
    [
        (Request("r", (), SamplingParams(), 0), BadRequest, "the prompt is empty"),
        (Request("r", (VOCAB,), SamplingParams(), 0), BadRequest, "prompt has token id 1000, ids are 0 to 999"),
        (Request("r", (-1,), SamplingParams(), 0), BadRequest, "prompt has token id -1"),
        (Request("r", (1,), SamplingParams(max_tokens=0), 0), BadRequest, "max_tokens is 0"),
        (Request("r", (1,), SamplingParams(logprobs=21), 0), BadRequest, "logprobs is 21, the limit is 20"),
        (Request("r", (1,), SamplingParams(stop_token_ids=(VOCAB,)), 0), BadRequest, "stop_token_ids has token id"),
        (Request("r", (1,) * 2 * MANY, SamplingParams(), 0), PromptTooLong, "the prompt has 200,000 tokens"),
    ],
)
def test_a_bad_request_fails_alone(
    request_: Request, kind: type[BadRequest], said: str, shared: tuple[EngineProcess, EngineClient]
) -> None:
    _, client = shared
    bad, good = client.submit([request_, counting("good", 7, 3)])
    while not (bad.ended and good.ended):
        client.receive()
    with pytest.raises(kind, match=said) as raised:
        bad.take()
    assert raised.value.param is not None
    assert numbers(good.take()) == [7, 8, 9]
    assert at_rest(client.stats())


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x01\xc1",
        (MOST_BYTES + 1).to_bytes(4, "big"),
        frame(Tokens([])),
        frame(Shutdown(0.0)),  # the parent's to say
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_front_that_sends_nonsense_loses_its_link_and_nobody_else_does(
    data: bytes, shared: tuple[EngineProcess, EngineClient]
) -> None:
    child, client = shared
    (going,) = client.submit([counting("going", 0, 500)])
    link = link_to(child.address)
    other = EngineClient(link)
    other.ready()
    other.submit([counting("others", 0, MANY)])
    link.sendall(data)
    assert "is gone" in str(other.wait())
    while not going.ended:
        client.receive()
    assert len(going.take()) == 500
    until(lambda: at_rest(client.stats()))


# --- Aborts and fronts that die


def test_after_all_requests_are_aborted_at_once_nothing_is_held(shared: tuple[EngineProcess, EngineClient]) -> None:
    _, client = shared
    streams = client.submit([counting(f"all-{index}", 1, MANY) for index in range(200)])
    while not any(stream.take() for stream in streams):
        client.receive()
    before = client.stats()
    assert before.load.running > 0 and before.load.waiting > 0 and before.load.used_blocks > 0
    client.abort([stream.request_id for stream in streams])
    after = client.stats()
    assert at_rest(after) and all(stream.ended for stream in streams)
    assert client.stats().steps == after.steps


FRONT = """
import sys
from pathlib import Path
from rvllm.cli.failure import Debug, report
from rvllm.link.client import EngineClient, link_to
from tests.fixtures.engines import counting
try:
    client = EngineClient(link_to(Path(sys.argv[1])))
    client.submit([counting(f"front-{index}", 0, 100_000) for index in range(int(sys.argv[2]))])
    print("going", flush=True)
    while True:
        client.receive()
except Exception as error:
    sys.exit(report(error, Debug(False)))
"""


@contextmanager
def front(child: EngineProcess, requests: int = 20) -> Iterator[subprocess.Popen[str]]:
    """A front in a process of its own, with requests under way."""
    command = [sys.executable, "-c", FRONT, str(child.address), str(requests)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as running:
        assert running.stdout and running.stdout.readline() == "going\n"
        yield running
        running.kill()


def test_a_request_that_ends_by_itself_is_not_aborted_as_well(
    shared: tuple[EngineProcess, EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = shared
    said: list[Message] = []
    write = client._write
    monkeypatch.setattr(client, "_write", lambda message: (said.append(message), write(message)))
    for index in range(3):
        assert len(list(client.stream(counting(f"whole-{index}", 1, 3)))) == 3
    next(stream := client.stream(counting("part", 1, MANY)))
    stream.close()  # type: ignore[attr-defined]
    assert [type(one) for one in said] == [Submit] * 4 + [Abort]


def test_a_front_that_is_killed_takes_its_requests_along_and_hurts_no_other(
    shared: tuple[EngineProcess, EngineClient],
) -> None:
    child, client = shared
    with front(child) as other:
        until(lambda: client.stats().load.running == 20)
        (mine,) = client.submit([counting("mine", 0, MANY)])
        while not mine.take():
            client.receive()
        other.kill()
        until(lambda: client.stats().load.running == 1)
        client.abort(["mine"])
        (again,) = client.submit([counting("again", 4, 100)])
        while not again.ended:
            client.receive()
        assert numbers(again.take()) == list(range(4, 104))
        assert at_rest(client.stats())


def test_a_front_that_is_gone_before_its_requests_are_read_leaves_none_behind(
    shared: tuple[EngineProcess, EngineClient],
) -> None:
    child, client = shared
    refused = Request("refused", (), SamplingParams(), 0)  # the answer to it finds nobody
    other = EngineClient(link_to(child.address))
    other.ready()
    os.kill(child.pid, signal.SIGSTOP)
    other.submit([refused, counting("left", 0, MANY)])
    other.close()
    os.kill(child.pid, signal.SIGCONT)
    list(client.stream(counting("mine", 0, 10)))
    until(lambda: at_rest(client.stats()))


def test_a_front_that_does_not_read_holds_up_nobody_and_is_cut_off_at_the_limit() -> None:
    with engine("most_unread=1000000") as (child, client):
        notes: list[str] = []
        client._parent = Parent(note=notes.append)
        deaf = EngineClient(link_to(child.address))
        deaf.submit([counting(f"deaf-{index}", 0, MANY) for index in range(60)])
        until(lambda: client.stats().load.running == 60)
        started_s = time.monotonic()
        assert len(list(client.stream(counting("mine", 0, 50)))) == 50
        assert time.monotonic() - started_s < 2
        until(lambda: at_rest(client.stats()), 10)
        assert len(notes) == 1 and "bytes unread" in notes[0]
        with pytest.raises(EngineDied):
            while True:
                deaf.receive()


# --- An engine that dies


def test_a_killed_engine_is_known_to_all_fronts_at_once() -> None:
    with engine("pause_s=0.01") as (child, client), front(child) as other:
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
    with engine("pause_s=0.01 fails_at=5") as (child, client):
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
    made = counting_engine(CountingModel(fails_at=1), EngineConfig())
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
    with engine("pause_s=0.002") as (child, client):
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
    with engine("pause_s=0.002") as (child, client):
        (stream,) = client.submit([counting("a", 0, MANY)])
        client.receive()
        client.shutdown(drain_s=0.05)
        client.wait()
        assert stream.take()
        with pytest.raises(EngineError, match="was shut down before the request was through"):
            stream.take()
        assert child.stop() == 0


def test_sigterm_lets_requests_run_out_and_sigint_does_nothing() -> None:
    with engine("pause_s=0.002") as (child, client):
        (stream,) = client.submit([counting("a", 0, 100)])
        client.receive()
        assert os.getpgid(child.pid) != os.getpgid(0)  # Ctrl-C goes to all of a group
        os.kill(child.pid, signal.SIGINT)
        os.kill(child.pid, signal.SIGTERM)
        client.wait()
        assert len(stream.take()) == 100 and child.stop() == 0


# --- At rest, and in the long run


def test_only_this_user_can_reach_the_engine(shared: tuple[EngineProcess, EngineClient]) -> None:
    address = shared[0].address
    assert stat.S_IMODE(address.stat().st_mode) == 0o600
    assert stat.S_IMODE(address.parent.stat().st_mode) == 0o700


def wakeups(pid: int) -> int:
    """How often a process was given a CPU."""
    said = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(line.split()[1]) for text in said for line in text.splitlines() if "ctxt_switches" in line)


def test_an_idle_engine_sleeps(shared: tuple[EngineProcess, EngineClient]) -> None:
    child, client = shared
    list(client.stream(counting("one", 0, 3)))

    def sleeps() -> bool:
        before = wakeups(child.pid)
        time.sleep(0.3)
        return wakeups(child.pid) == before

    until(sleeps, 3)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_short_requests_leave_nothing_behind(shared: tuple[EngineProcess, EngineClient]) -> None:
    child, client = shared
    grown = []
    for lot in range(20):
        streams = client.submit([counting(f"short-{lot}-{index}", 1, 2) for index in range(500)])
        while not all(stream.ended for stream in streams):
            client.receive()
        grown.append(resident_bytes(child.pid))
    assert at_rest(client.stats()) and not client._streams
    assert grown[-1] - grown[3] < 1 << 20, grown


def test_garbage_is_collected_when_nothing_runs_and_never_in_a_step() -> None:
    with engine("litter_bytes=50000") as (child, client):
        grown = []
        for lot in range(6):
            list(client.stream(counting(f"lot-{lot}", 1, 100)))  # 5 MB
            time.sleep(2 * IDLE_BEFORE_COLLECT_S)
            grown.append(resident_bytes(child.pid))
        assert grown[-1] - grown[1] < 5_000_000, grown


def test_an_address_that_no_socket_can_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(Exception, match="too long a name for a socket") as refused:
        process()
    assert explain(refused.value)[1] == "set TMPDIR to a folder with a shorter name"
    assert not list(folder.iterdir())

"""Fronts and an engine process that lives: the same tokens, bad requests, fronts that die, and the long run."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rvllm import LLM, SamplingParams
from rvllm.config import EngineConfig
from rvllm.engine.request import Request, TokenEvent
from rvllm.errors import BadRequest, EngineDied, PromptTooLong
from rvllm.link.client import AsyncEngineClient, EngineClient, Parent, Stream, link_to, news
from rvllm.link.messages import MOST_BYTES, Abort, Message, Shutdown, Submit, Tokens, frame
from rvllm.link.process import EngineProcess
from rvllm.link.server import IDLE_BEFORE_COLLECT_S
from tests.fixtures.engines import (
    DEATH_S,
    MANY,
    VOCAB,
    at_rest,
    counting,
    front,
    numbers,
    running,
    until,
)
from tests.fixtures.models import random_model


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[EngineProcess, EngineClient]]:
    with running() as made:
        yield made


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
        told = {stream.request_id: stream.take() for stream in streams}
        for event in (event for events in (*told.values(), *wanted.values()) for event in events):
            event.waited_s = None
        assert told == wanted
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
    with running() as (_, client):
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
    streams = client.submit([counting(f"all-{index}", 1, MANY) for index in range(400)])
    while not any(stream.take() for stream in streams):
        client.receive()
    before = client.stats()
    assert before.load.running > 0 and before.load.waiting > 0 and before.load.used_blocks > 0
    client.abort([stream.request_id for stream in streams])
    after = client.stats()
    assert at_rest(after) and all(stream.ended for stream in streams)
    assert client.stats().steps == after.steps


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
    with running("most_unread=1000000") as (child, client):
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
    with running("litter_bytes=50000") as (child, client):
        grown = []
        for lot in range(6):
            list(client.stream(counting(f"lot-{lot}", 1, 100)))  # 5 MB
            time.sleep(2 * IDLE_BEFORE_COLLECT_S)
            grown.append(resident_bytes(child.pid))
        assert grown[-1] - grown[1] < 5_000_000, grown


def test_who_waits_for_several_streams_is_woken_by_any() -> None:
    async def wait_for_the(place: int) -> None:
        streams = [Stream(str(number)) for number in range(3)]
        waiting = asyncio.create_task(news(streams))
        await asyncio.sleep(0)
        assert not waiting.done()
        streams[place].put(TokenEvent(str(place), 5, None, (), None, None), 0.0)
        await asyncio.wait_for(waiting, DEATH_S)
        await asyncio.wait_for(news(streams), DEATH_S)  # what is there already
        assert [event.token_id for event in streams[place].take()] == [5]

    for place in range(3):
        asyncio.run(wait_for_the(place))

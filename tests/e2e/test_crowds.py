"""Many requests at once and long ones over HTTP: all are answered or told why not, and nothing stays behind."""

from __future__ import annotations

import json
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.commands import LIMIT_S, alive, children
from tests.fixtures.engines import at_rest, until
from tests.fixtures.models import EOS, Options, TinyModel, chain_model, loop_model
from tests.fixtures.servers import Answer, Server, serving

PROMPT = {"prompt": "x"}


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return loop_model(tmp_path_factory.mktemp("endless"), options=Options(max_positions=100_000))


@pytest.fixture(scope="module")
def looping(endless: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Writes a for ever. Prompts are read by 64 tokens."""
    small = ("--max-num-batched-tokens", "128", "--max-model-len", "20000", "--max-num-seqs", "64")
    with serving(endless.folder, *small, folder=tmp_path_factory.mktemp("server")) as started:
        yield started
        until(lambda: at_rest(started.stats()), 3.0)
        assert len(started.said) == 2, started.said


def begun(server: Server, port: int | None = None, **body: Any) -> socket.socket:
    """A connection on which a completion has been asked for, and nothing read. port: another one than the server's."""
    link = socket.create_connection(("127.0.0.1", port or server.port), LIMIT_S)
    data = json.dumps(PROMPT | body).encode()
    link.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
    return link


def figure(server: Server, name: str, **labels: str) -> float:
    """The sum of a figure's samples that have these labels."""
    told = server.send("GET", "/metrics").body.decode()
    samples = [one for family in text_string_to_metric_families(told) for one in family.samples if one.name == name]
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


def busy(server: Server) -> list[float]:
    return [figure(server, f"vllm:{name}") for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]  # fmt: skip


def answered(server: Server, within_s: float) -> None:
    started_s = time.monotonic()
    assert server.post("/v1/completions", **PROMPT, max_tokens=2).json["choices"][0]["text"] == "aa"
    assert time.monotonic() - started_s < within_s


def test_clients_that_leave_in_every_way_stop_all_work_and_slow_nobody(looping: Server) -> None:
    """A sending half that was closed counts as gone too: who wants an answer keeps the connection whole."""
    ask = {"max_tokens": 19_000, "ignore_eos": True}
    links = [begun(looping, **ask, stream=True) for _ in range(20)] + [begun(looping, **ask) for _ in range(20)]
    half = [begun(looping, **ask, stream=True) for _ in range(5)]
    deaf = [begun(looping, **ask, stream=True, logprobs=20) for _ in range(5)]
    until(lambda: looping.stats().load.running == 50, LIMIT_S)
    for link in links[:20]:
        told = b""
        while told.count(b"data: ") < 3:
            told += link.recv(4000)
    answered(looping, 2.0)
    for link in half:
        link.shutdown(socket.SHUT_WR)
    for link in [*links, *deaf]:
        link.close()
    until(lambda: busy(looping) == [0, 0, 0], 3.0)
    drawn = figure(looping, "vllm:generation_tokens_total")
    time.sleep(0.2)
    assert figure(looping, "vllm:generation_tokens_total") == drawn > 0
    for link in half:
        link.close()


def test_a_crowd_that_leaves_together_leaves_no_figure_behind(looping: Server) -> None:
    links = [begun(looping, max_tokens=19_000, stream=True) for _ in range(64)]
    until(lambda: figure(looping, "vllm:num_requests_running") == 64, LIMIT_S)
    for link in links:
        link.close()
    until(lambda: busy(looping) == [0, 0, 0], 3.0)


def test_streams_that_end_by_themselves_are_not_aborted_and_keep_no_memory(looping: Server) -> None:
    status = Path(f"/proc/{looping.process.pid}/status")
    aborted = figure(looping, "vllm:request_success_total", finished_reason="abort")

    def resident_mib() -> float:
        return int(status.read_text().split("VmRSS:")[1].split()[0]) / 1024

    def stream(number: int) -> None:
        assert len(looping.post("/v1/completions", **PROMPT, max_tokens=2, stream=True).events) == 2

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(stream, range(200)))
        before = resident_mib()
        list(pool.map(stream, range(800)))
    assert resident_mib() - before < 20
    assert figure(looping, "vllm:request_success_total", finished_reason="abort") == aborted


def test_a_long_prompt_lets_others_go_on_and_begin(looping: Server) -> None:
    """Told by order, not by the clock: what runs has an event for nearly every piece of the prompt that is read.

    The long one's status goes out before it is read.
    """
    with begun(looping, max_tokens=15_000, ignore_eos=True, stream=True) as running:
        until(lambda: looping.stats().load.running == 1, LIMIT_S)
        with begun(looping, prompt="y" * 5000 + "x", max_tokens=1, stream=True) as long:
            until(lambda: looping.stats().load.running == 2, LIMIT_S)
            head = long.recv(4000)
            assert head.startswith(b"HTTP/1.1 200 ") and head.endswith(b"\r\n\r\n") and b"data" not in head
            before = figure(looping, "vllm:generation_tokens_total")
            answered(looping, 5.0)
            assert not select.select([long], [], [], 0)[0], "the prompt is too short for this machine"
            told = b""
            while not told.endswith(b"\r\n0\r\n\r\n"):
                told += long.recv(4000)
        assert (told.count(b'"text":"a"'), told.count(b"data: "), told.count(b"data: [DONE]")) == (1, 2, 1)
        assert figure(looping, "vllm:generation_tokens_total") - before > 5000 / 65 / 2
        assert running.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_long_text_is_read_by_one_thread_more_whatever_the_cores(looping: Server) -> None:
    """The tokenizers library would have a pool of as many as there are, for one text."""
    tasks = Path(f"/proc/{looping.process.pid}/task")
    looping.post("/tokenize", prompt="x")
    before = len(list(tasks.iterdir()))
    assert looping.post("/tokenize", prompt="ab " * 100_000).json["count"] >= 100_000
    assert len(list(tasks.iterdir())) <= before + 1


def test_streams_of_long_prompts_all_come_to_their_end(looping: Server) -> None:
    """B115. One after the other, most of them found in the cache, and three at once that are not."""

    def stream(salt: str) -> None:
        options = {"cache_salt": salt, "stream_options": {"include_usage": True}}
        prompt = "word " * 1638 + "yx"
        *deltas, usage = looping.post("/v1/completions", prompt=prompt, max_tokens=10, stream=True, **options).events
        assert [one["choices"][0]["text"] for one in deltas] == ["a"] * 10
        assert deltas[-1]["choices"][0]["finish_reason"] == "length"
        told = usage["usage"]
        assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (8192, 10, 8202)

    for _ in range(5):
        stream("one")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(stream, ("two", "three", "four")))


def test_a_proxy_that_buffers_what_it_may_hands_on_a_stream_as_it_comes(looping: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def stand_between() -> None:
            """As nginx by default: a reply is handed on when it is whole, unless it says that this is not to be."""
            link, _ = listener.accept()
            with suppress(OSError), link, socket.create_connection(("127.0.0.1", looping.port), LIMIT_S) as behind:
                behind.sendall(link.recv(4000))
                kept = behind.recv(4000)
                straight = b"x-accel-buffering: no\r\n" in kept
                while not straight and not kept.endswith(b"\r\n0\r\n\r\n"):
                    kept += behind.recv(4000)
                while kept:
                    link.sendall(kept)
                    kept = behind.recv(4000)

        with ThreadPoolExecutor(1) as pool:
            proxy = pool.submit(stand_between)
            port = listener.getsockname()[1]
            with begun(looping, port=port, max_tokens=19_000, ignore_eos=True, stream=True) as link:
                told = b""
                while b'"text":"a"' not in told:
                    told += link.recv(4000)
                assert looping.stats().load.running == 1, "the stream was over before its first event came"
            proxy.result()


def test_long_streams_end_alone_and_together(endless: TinyModel, tmp_path: Path) -> None:
    def stream(number: int) -> Answer:
        ask = {"prompt": "word " * 1400 + f"{number}" + "word " * 238 + "x", "max_tokens": 10}
        return large.post("/v1/completions", **ask, stream=True, stream_options={"include_usage": True})

    how = ("--max-model-len", "16384")
    with serving(endless.folder, *how, folder=tmp_path / "server") as large, ThreadPoolExecutor(3) as pool:
        for answer in (stream(0), stream(0), *pool.map(stream, (1, 2, 3))):
            *events, last = answer.events
            assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 9 + ["length"]
            assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (1638 * 5 + 2, 10)


def test_prompts_about_as_long_as_the_pool_end_and_those_behind_them_are_served(
    endless: TinyModel, tmp_path: Path
) -> None:
    with serving(
        endless.folder, "--num-gpu-blocks-override", "64", "--block-size", "16", folder=tmp_path / "server"
    ) as small:
        for length in (1007, 1008, 1009, 1016, 1022, 1023, 1024):
            for tokens in (1, 17, 64):
                with ThreadPoolExecutor(1) as pool:
                    asked = {"prompt": "y" * (length - 1) + "x", "max_tokens": tokens}
                    long = pool.submit(small.post, "/v1/completions", **asked)
                    answered(small, 5.0)
                    answer = long.result(5.0)
                if length == 1024:
                    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
                else:
                    assert answer.json["usage"]["completion_tokens"] == min(tokens, 1024 - length)
        assert busy(small) == [0, 0, 0]


def test_a_salt_is_its_own_even_where_it_is_the_models_name(tmp_path: Path) -> None:
    made = chain_model(tmp_path / "model", ["a", EOS])
    with serving(made.folder, "--served-model-name", "m1", folder=tmp_path / "server") as salted:

        def cached(**more: Any) -> int:
            reply = salted.post("/v1/completions", prompt="salted " * 12 + "x", max_tokens=1, model="m1", **more).json
            found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        salts: list[dict[str, Any]] = [{}, {"cache_salt": "m1"}, {"cache_salt": "grain"}, {"cache_salt": "m1"}, {}]
        assert [cached(**salt) > 0 for salt in salts] == [False, False, False, True, True]
        assert not any("grain" in line for line in salted.said)


def test_who_is_killed_takes_the_engine_along_and_frees_the_port(endless: TinyModel, tmp_path: Path) -> None:
    with serving(endless.folder, folder=tmp_path / "server") as killed:
        port = killed.port
        engines = children(killed.process.pid)
        assert engines
        with begun(killed, max_tokens=90_000, stream=True) as link:
            assert link.recv(10)
            killed.process.send_signal(signal.SIGKILL)
            assert killed.ended() == -signal.SIGKILL
        until(lambda: not any(map(alive, engines)), 5.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), LIMIT_S)

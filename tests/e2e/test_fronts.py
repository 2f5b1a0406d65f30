"""`rvllm serve --api-server-count`: several processes at one port before one engine, and what becomes of them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.commands import LIMIT_S, alive, children
from tests.fixtures.engines import at_rest, until
from tests.fixtures.models import Options, TinyModel, loop_model
from tests.fixtures.servers import JSON, Server, serving, starting

FRONTS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """After x: a, for ever."""
    return loop_model(tmp_path_factory.mktemp("model"), options=Options(max_positions=100_000))


@pytest.fixture
def served(model: TinyModel, tmp_path: Path) -> Iterator[Server]:
    with serving(model.folder, "--api-server-count", str(FRONTS), folder=tmp_path / "server") as started:
        yield started


def fronts(server: Server) -> list[int]:
    """Processes of its fronts."""
    return [
        one for one in children(server.process.pid) if b"front_process" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]


def sockets(process: int) -> int:
    found = 0
    for one in Path(f"/proc/{process}/fd").iterdir():
        try:
            found += "socket:" in str(one.readlink())
        except OSError:
            continue  # closed meanwhile
    return found


class Streams:
    """Streams under way, all closed in the end."""

    def __init__(self) -> None:
        self._connections: list[http.client.HTTPConnection] = []

    def begin(self, server: Server, count: int, max_tokens: int) -> list[http.client.HTTPResponse]:
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": max_tokens})
        made = [server.connect() for _ in range(count)]
        self._connections += made
        for connection in made:
            connection.request("POST", "/v1/completions", body, JSON)
        replies = [connection.getresponse() for connection in made]
        assert {reply.status for reply in replies} == {200}
        return replies

    def close(self) -> None:
        for connection in self._connections:
            if connection.sock is not None:
                connection.sock.close()
            connection.close()
        self._connections.clear()


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams()
    yield made
    made.close()


def figure(server: Server, name: str) -> float:
    families = text_string_to_metric_families(server.send("GET", "/metrics").body.decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_connections_are_spread_and_their_figures_are_added_up(served: Server, streams: Streams) -> None:
    pids = fronts(served)
    assert len(pids) == FRONTS
    before = {one: sockets(one) for one in pids}
    links = [socket.create_connection(("127.0.0.1", served.port), LIMIT_S) for _ in range(48)]
    until(lambda: sum(sockets(one) - before[one] for one in pids) == 48, 3.0)
    assert all(sockets(one) - before[one] >= 4 for one in pids)  # each has 16 in the mean
    for link in links:
        link.close()
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: served.post("/v1/completions", prompt="x", max_tokens=5), range(40)))
    assert all(answer.json["choices"][0]["text"] == "aaaaa" for answer in done)
    assert figure(served, "vllm:generation_tokens_total") == 200
    assert figure(served, "vllm:time_to_first_token_seconds_count") == 40
    assert figure(served, "vllm:prefix_cache_queries_total") == 40  # the engine's, told once
    streams.begin(served, 6, 90_000)
    assert {served.send("GET", "/load").json["server_load"] for _ in range(6)} == {6}
    streams.close()
    until(lambda: at_rest(served.stats()), 3.0)


def test_a_front_that_dies_takes_only_its_own_along_and_another_comes(served: Server, streams: Streams) -> None:
    assert served.post("/v1/completions", prompt="x", max_tokens=9).status == 200
    replies = streams.begin(served, 12, 500)
    killed = fronts(served)[0]
    os.kill(killed, signal.SIGKILL)

    def ended_well(reply: http.client.HTTPResponse) -> bool:
        try:
            told = reply.read()
        except (http.client.HTTPException, ConnectionError):
            return False
        return told.endswith(b"data: [DONE]\n\n")

    with ThreadPoolExecutor(12) as pool:
        well = list(pool.map(ended_well, replies))
    assert 0 < sum(well) < 12
    assert served.told(r"front 0 was killed by SIGKILL: its connections are gone, another one is started")
    until(lambda: at_rest(served.stats()), 3.0)
    until(lambda: len(fronts(served)) == FRONTS and killed not in fronts(served), LIMIT_S)
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: served.post("/v1/completions", prompt="x", max_tokens=2).status, range(24)))
    # The new one may still be loading its tokenizer.
    assert done.count(200) >= 8 and set(done) <= {200, 503}
    until(lambda: all(served.send("GET", "/health").status == 200 for _ in range(12)), LIMIT_S)
    assert figure(served, "vllm:generation_tokens_total") >= 9 + 500 * sum(well)
    assert figure(served, "rvllm:http_generations") == 0


def test_limits_are_the_servers_and_not_each_fronts(model: TinyModel, tmp_path: Path, streams: Streams) -> None:
    few = ("--api-server-count", "3", "--max-num-queued-reqs", "4")
    with serving(model.folder, *few, folder=tmp_path / "server") as full:
        streams.begin(full, 4, 90_000)
        asked = [full.post("/v1/completions", prompt="x", max_tokens=1) for _ in range(9)]
        assert {answer.status for answer in asked} == {429}
        for process in fronts(full):
            os.kill(process, signal.SIGKILL)
        streams.close()
        until(lambda: at_rest(full.stats()), LIMIT_S)

        def again() -> bool:
            try:
                return full.post("/v1/completions", prompt="x", max_tokens=1).status == 200
            except (http.client.HTTPException, OSError):
                return False

        until(lambda: all(again() for _ in range(9)), LIMIT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_run_out_and_leaves_nothing_behind(
    served: Server, number: signal.Signals, streams: Streams
) -> None:
    replies = streams.begin(served, 6, 300)
    assert all(reply.read(1) for reply in replies)  # the status may be there before the engine has the request
    all_of_us = children(served.process.pid)
    served.process.send_signal(number)
    for reply in replies:
        assert reply.read().endswith(b"data: [DONE]\n\n")
    assert served.ended() == 0
    assert not any(map(alive, all_of_us)) and not list(served.folder.iterdir())
    assert not any("Traceback" in line or "error" in line for line in served.said)


def test_requests_end_with_an_error_when_the_time_is_over(model: TinyModel, tmp_path: Path, streams: Streams) -> None:
    hasty = ("--api-server-count", "2", "--shutdown-timeout", "0")
    with serving(model.folder, *hasty, folder=tmp_path / "server") as ending:
        replies = streams.begin(ending, 4, 90_000)
        ending.process.terminate()
        for reply in replies:
            last = reply.read().split(b"\n\n")[-2]
            assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "service_unavailable"
        assert ending.ended() == 0


def test_a_second_signal_ends_all_at_once(served: Server, streams: Streams) -> None:
    streams.begin(served, 1, 90_000)
    all_of_us = children(served.process.pid)
    served.process.terminate()
    served.told("stopping")
    served.process.terminate()
    assert served.ended() == 128 + signal.SIGTERM
    until(lambda: not any(map(alive, all_of_us)), 3.0)
    assert not list(served.folder.iterdir())


def test_nobody_outlives_a_parent_that_is_killed(served: Server, streams: Streams) -> None:
    streams.begin(served, 1, 90_000)
    all_of_us = children(served.process.pid)
    assert len(all_of_us) == FRONTS + 1
    served.process.kill()
    until(lambda: not any(map(alive, all_of_us)), LIMIT_S)
    assert not list(served.folder.iterdir())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port), LIMIT_S)


def test_the_death_of_the_engine_ends_requests_and_the_server(served: Server, streams: Streams) -> None:
    replies = streams.begin(served, 6, 90_000)
    (engine,) = set(children(served.process.pid)) - set(fronts(served))
    os.kill(engine, signal.SIGKILL)
    for reply in replies:
        last = reply.read().split(b"\n\n")[-2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_error"
    assert served.ended() == 1
    assert served.told("^error: .*killed by SIGKILL")
    assert not any("Traceback" in line or "front" in line for line in served.said[2:])


def test_a_refused_start_is_told_once(tmp_path: Path) -> None:
    arguments = ("/nowhere/at/all", "--api-server-count", "2")
    with starting(*arguments, folder=tmp_path / "server") as refused:
        assert refused.ended() == 1 and refused.told("^error: .*/nowhere/at/all")
        assert len(refused.said) <= 3 and not any("Traceback" in line for line in refused.said)
    assert not list((tmp_path / "server").iterdir())


def test_an_interrupt_while_it_loads_ends_in_one_word(model: TinyModel, tmp_path: Path) -> None:
    with starting(model.folder, "--api-server-count", "2", folder=tmp_path / "server") as loading:
        loading.told("listening")
        time.sleep(0.3)
        loading.process.send_signal(signal.SIGINT)
        assert loading.ended() in (0, 130)
        assert not any("Traceback" in line for line in loading.said)
    assert not list((tmp_path / "server").iterdir())


def test_a_port_of_another_server_with_fronts_is_in_use(served: Server, model: TinyModel, tmp_path: Path) -> None:
    for count in ("1", "2"):
        arguments = ("--port", str(served.port), "--api-server-count", count)
        with starting(model.folder, *arguments, folder=tmp_path / "other") as refused:
            assert refused.ended() == 1 and refused.told("Address already in use")


def test_fronts_share_a_unix_socket(model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serving(model.folder, "--uds", str(path), "--api-server-count", "2", folder=tmp_path / "server") as local:
        for process in fronts(local):  # one alone answers, and then the other
            os.kill(process, signal.SIGSTOP)
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(LIMIT_S)
                link.connect(str(path))
                link.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert link.recv(100).startswith(b"HTTP/1.1 200 ")
            os.kill(process, signal.SIGCONT)
        local.process.terminate()
        assert local.ended() == 0 and not path.exists()

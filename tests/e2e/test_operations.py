"""`rvllm serve` as those who run it see it: figures, limits, logs, and clients that are slow or ask for too much."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fixtures.certificates import certificate
from tests.fixtures.commands import LIMIT_S
from tests.fixtures.engines import at_rest, until
from tests.fixtures.models import EOS, Options, TinyModel, chain_model, loop_model
from tests.fixtures.servers import JSON, Answer, Figures, Server, figures, serving, starting, value

USER = [{"role": "user", "content": "hi"}]
VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
    ),
    "vllm:inter_token_latency_seconds": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
    ),
    "vllm:e2e_request_latency_seconds": (
        0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
    ),
    "vllm:iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "vllm:request_prompt_tokens": (1, 2, 5, 10, 20, 50, 100),
    "vllm:request_params_n": (1, 2, 5, 10, 20),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """In a chat and after x: z, ok, end. After Q: a, b, c, ..."""
    return chain_model(tmp_path_factory.mktemp("model"), ["z", " ok", EOS], also={"Q": list("abcdefgh")})


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return loop_model(tmp_path_factory.mktemp("endless"), options=Options(max_positions=100_000))


@pytest.fixture
def looping(endless: TinyModel, tmp_path: Path) -> Iterator[Server]:
    with serving(endless.folder, folder=tmp_path / "server") as started:
        yield started


def begun(server: Server, body: dict[str, Any], headers: dict[str, str] = {}) -> socket.socket:  # noqa: B006
    """A connection on which a request has been sent, and nothing read."""
    link = socket.create_connection(("127.0.0.1", server.port), LIMIT_S)
    data = json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{more}content-length: {len(data)}\r\n\r\n"
    link.sendall(head.encode() + data)
    return link


def buckets(found: Figures, name: str) -> dict[float, float]:
    return {float(dict(labels)["le"]): number for (known, labels), number in found.items() if known == f"{name}_bucket"}


# --- Figures


def test_what_requests_did_is_told_by_vllms_names_and_bounds(model: TinyModel, tmp_path: Path) -> None:
    names = ("--served-model-name", "m1", "--max-model-len", "128")
    with serving(model.folder, *names, folder=tmp_path / "server") as counted:
        assert counted.post("/v1/completions", prompt="Q", max_tokens=5).status == 200
        assert counted.post("/v1/chat/completions", messages=USER, stream=True).events
        assert counted.post("/v1/completions", prompt="x" * 40 + "Q", max_tokens=3, n=2).status == 200
        assert counted.post("/v1/completions", prompt="x" * 40 + "Q", max_tokens=3).status == 200
        assert counted.post("/v1/completions", prompt="Q", temperature=-1).status == 400
        chat = counted.post("/tokenize", messages=USER).json["count"]
        found = figures(counted)
        head = counted.send("HEAD", "/metrics")
        assert (head.status, head.body) == (200, b"")
        for taken, encoding in (("gzip", "gzip"), ("deflate, GZIP;q=0.5", "gzip"), ("gzip;q=0", None), ("br", None)):
            packed = counted.send("GET", "/metrics", headers={"accept-encoding": taken})
            assert packed.headers.get("content-encoding") == encoding and "accept-encoding" in packed.headers["vary"]
            assert packed.body.startswith(b"\x1f\x8b" if encoding else b"# HELP ")
        newer = counted.send("GET", "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert newer.headers["content-type"].startswith("application/openmetrics-text") and newer.body.endswith(
            b"# EOF\n"
        )
    assert all(("model_name", "m1") in labels for (name, labels) in found if name.startswith("vllm:"))
    assert value(found, "vllm:generation_tokens_total") == 5 + 3 + 6 + 3
    assert value(found, "vllm:prompt_tokens_total") == 1 + chat + 3 * 41
    assert value(found, "vllm:request_success_total", finished_reason="length") == 4
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(found, "vllm:prefix_cache_queries_total") == 1 + chat + 2 * 41
    assert value(found, "vllm:prefix_cache_hits_total") == value(found, "vllm:prompt_tokens_cached_total") == 32
    assert value(found, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert value(found, "vllm:request_max_num_generation_tokens_sum") == 5 + 3 + 3 + 3
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert value(found, f"vllm:{name}_seconds_count") == 5
        assert 0 < value(found, f"vllm:{name}_seconds_sum") < LIMIT_S
    assert value(found, "vllm:inter_token_latency_seconds_count") == 4 + 2 + 4 + 2
    assert value(found, "vllm:time_per_output_token_seconds_count") == 12
    assert value(found, "vllm:request_params_n_sum") == 5 and value(found, "vllm:request_params_n_count") == 4
    # Every token but each completion's last goes through the model, and every prompt's once but for what is cached.
    assert value(found, "vllm:iteration_tokens_total_sum") == (1 + chat + 41 + 9) + (4 + 2 + 4 + 2)
    assert value(found, "rvllm:step_seconds_count") == value(found, "vllm:iteration_tokens_total_count")
    assert value(found, "vllm:cache_config_info", block_size="32") == 1
    assert value(found, "rvllm:engine_info", device="cpu", tier="cpu", dtype="f32", weights="bf16") == 1
    assert value(found, "vllm:num_requests_running") == value(found, "vllm:num_requests_waiting") == 0
    assert value(found, "vllm:kv_cache_usage_perc") == value(found, "vllm:gpu_cache_usage_perc") == 0
    assert value(found, "vllm:spec_decode_num_drafts_total") == 0
    assert value(found, "vllm:estimated_read_bytes_per_gpu_total") > 0
    assert (
        0
        < value(found, "rvllm:startup_seconds", stage="listening")
        < value(found, "rvllm:startup_seconds", stage="ready")
    )
    assert value(found, "http_requests_total", handler="/v1/completions", status="4xx") == 1
    for name, bounds in VLLM_HISTOGRAMS.items():
        assert list(buckets(found, name)) == [*bounds, float("inf")], name


def test_guesses_are_counted_by_their_place(endless: TinyModel, tmp_path: Path) -> None:
    guessing = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    with serving(endless.folder, *guessing, folder=tmp_path / "server") as counted:
        assert counted.post("/v1/completions", prompt="x", max_tokens=200).status == 200
        found = figures(counted)
    accepted = value(found, "vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= value(found, "vllm:spec_decode_num_draft_tokens_total")
    places = [value(found, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(at)) for at in range(3)]
    assert sum(places) == accepted
    assert value(found, "vllm:spec_decode_num_drafts_total") >= places[0] >= places[1] >= places[2] > 0
    assert value(found, "vllm:generation_tokens_total") == 200


def test_figures_never_fall_and_add_up_under_load_and_at_its_end(endless: TinyModel, tmp_path: Path) -> None:
    small = ("--num-gpu-blocks-override", "12", "--max-num-seqs", "4", "--max-model-len", "320")
    with serving(endless.folder, *small, folder=tmp_path / "server") as busy:

        def come_and_go(number: int) -> None:
            if number % 3 == 0:
                begun(busy, {"prompt": "x" * 30, "max_tokens": 200, "stream": True}).close()
            else:
                assert busy.post("/v1/completions", prompt="x" * 30, max_tokens=200).status == 200

        seen: list[Figures] = []
        with ThreadPoolExecutor(8) as pool:
            done = [pool.submit(come_and_go, number) for number in range(24)]
            while not all(one.done() for one in done):
                seen.append(figures(busy, {"accept-encoding": ("identity", "gzip")[len(seen) % 2]}))
                assert busy.send("HEAD", "/metrics").status == 200
            for one in done:
                one.result()
        until(lambda: at_rest(busy.stats()), 3.0)
        seen.append(figures(busy))
    for before, after in zip(seen, seen[1:]):
        for (name, labels), number in before.items():
            if name.endswith(("_total", "_count", "_sum", "_bucket")):
                assert after[name, labels] >= number, (name, labels)
    for found in seen:
        for name in VLLM_HISTOGRAMS:
            counts = list(buckets(found, name).values())
            assert counts == sorted(counts) and counts[-1] == value(found, f"{name}_count")
    assert max(value(found, "vllm:num_requests_running") for found in seen) > 1
    assert value(seen[-1], "vllm:num_preemptions_total") > 0
    assert value(seen[-1], "vllm:request_success_total", finished_reason="length") >= 16
    assert value(seen[-1], "vllm:num_requests_running") == value(seen[-1], "rvllm:http_generations") == 0
    assert value(seen[-1], "vllm:kv_cache_usage_perc") == 0


def test_the_load_is_the_number_of_requests_for_text(looping: Server) -> None:
    assert looping.send("GET", "/load").json == {"server_load": 0}
    links = [begun(looping, {"prompt": "x", "max_tokens": 50_000}) for _ in range(3)]
    until(lambda: looping.send("GET", "/load").json == {"server_load": 3}, LIMIT_S)
    for link in links:
        link.close()
    until(lambda: looping.send("GET", "/load").json == {"server_load": 0}, 3.0)
    assert value(figures(looping), "vllm:request_success_total", finished_reason="abort") == 3


# --- Limits


def test_more_than_may_wait_is_told_to_come_again(endless: TinyModel, tmp_path: Path) -> None:
    few = ("--max-num-queued-reqs", "3", "--max-requests-per-key", "2", "--api-key", "K1", "--api-key", "K2")
    with serving(endless.folder, *few, folder=tmp_path / "server") as full:

        def asked(key: str, **more: Any) -> Answer:
            headers = JSON | {"authorization": f"Bearer {key}"}
            return full.send("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2, **more}, headers)

        def refused(answer: Answer, said: str) -> None:
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert answer.error["code"] == "too_many_requests" and said in answer.error["message"]

        links = [begun(full, {"prompt": "x", "max_tokens": 50_000}, {"authorization": "Bearer K1"}) for _ in range(2)]
        until(lambda: full.stats().load.running == 2, LIMIT_S)
        refused(asked("K1"), "this key has 2 requests, the limit is 2")
        refused(asked("K1", stream=True), "this key")
        assert asked("K2").status == 200
        refused(asked("K2", n=2), "there are 2 requests, the limit is 3")
        for link in links:
            link.close()
        until(lambda: at_rest(full.stats()), 3.0)
        assert asked("K1", n=3).status == 200
        metrics = full.send("GET", "/metrics", headers={"authorization": "Bearer K1"}).body.decode()
        for reason, count in (("requests", 1), ("key", 2)):
            assert f'reason="{reason}"}} {count}.0' in metrics


def test_prompts_that_wait_to_be_read_are_limited_by_their_tokens(endless: TinyModel, tmp_path: Path) -> None:
    slow = ("--max-num-queued-tokens", "1000", "--max-num-batched-tokens", "64", "--max-num-seqs", "1")
    with serving(endless.folder, *slow, "--max-model-len", "20000", folder=tmp_path / "server") as full:
        link = begun(full, {"prompt": "x" * 19_000, "max_tokens": 2})
        until(lambda: full.stats().load.running == 1, LIMIT_S)
        refused = full.post("/v1/completions", prompt="x", max_tokens=2)
        assert refused.status == 429 and "19,000 tokens wait to be read" in refused.error["message"]
        link.close()
        until(lambda: at_rest(full.stats()), 3.0)
        assert full.post("/v1/completions", prompt="x" * 1500, max_tokens=2).status == 200
        assert full.post("/v1/completions", prompt="x", max_tokens=2).status == 200


def test_heads_and_bodies_have_limits(model: TinyModel, tmp_path: Path) -> None:
    small = ("--max-body-bytes", "1000", "--h11-max-incomplete-event-size", "2K", "--h11-max-header-count", "20")
    with serving(model.folder, *small, folder=tmp_path / "server") as strict:
        assert strict.post("/v1/completions", prompt="x").status == 200
        large = strict.post("/v1/completions", prompt="x" * 1000)
        assert large.status == 413 and "1,000 bytes" in large.error["message"]
        for headers in ({"a": "x" * 3000}, {f"h{number}": "x" for number in range(21)}):
            wide = strict.send("GET", "/health", headers=headers)
            assert (wide.status, wide.error["code"]) == (431, "head_too_large")
        for head in (b"GET /" + b"x" * 3000, b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 3000):
            with socket.create_connection(("127.0.0.1", strict.port), LIMIT_S) as link:
                link.sendall(head)
                assert b" 431 " in link.recv(100)
        with socket.create_connection(("127.0.0.1", strict.port), LIMIT_S) as link:
            link.sendall(b"nonsense\r\n\r\n")
            told = b"".join(iter(lambda: link.recv(1000), b""))
        assert told.startswith(b"HTTP/1.1 400 ") and json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"]
        assert strict.send("GET", "/health").status == 200 and len(strict.said) == 2


def test_a_request_that_takes_too_long_ends_with_an_error_and_frees_all(endless: TinyModel, tmp_path: Path) -> None:
    with serving(endless.folder, "--request-timeout", "0.5", folder=tmp_path / "server") as hasty:
        late = hasty.post("/v1/completions", prompt="x", max_tokens=50_000)
        assert (late.status, late.error["code"]) == (504, "timeout")
        streamed = hasty.post("/v1/completions", prompt="x", max_tokens=50_000, stream=True)
        *_, last, end = streamed.body.split(b"\n\n")
        assert streamed.status == 200 and json.loads(last.removeprefix(b"data: "))["error"]["code"] == "timeout"
        assert end == b"" and b"[DONE]" not in streamed.body
        until(lambda: at_rest(hasty.stats()), 3.0)
        assert hasty.post("/v1/completions", prompt="x", max_tokens=2).status == 200


# --- Slow clients


def test_a_client_that_reads_nothing_is_taken_for_gone(endless: TinyModel, tmp_path: Path) -> None:
    with serving(endless.folder, "--client-timeout", "1", folder=tmp_path / "server") as patient:
        descriptors = Path(f"/proc/{patient.process.pid}/fd")
        assert patient.post("/v1/completions", prompt="x", max_tokens=2).status == 200
        before = len(list(descriptors.iterdir()))
        # A token with all log-probabilities is large, so that buffers on the way are soon full.
        body = {"prompt": "x", "max_tokens": 90_000, "stream": True, "logprobs": 20, "n": 4}
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", patient.port))
            data = json.dumps(body).encode()
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
            until(lambda: patient.stats().load.running == 4, LIMIT_S)
            until(lambda: at_rest(patient.stats()), LIMIT_S)
            until(lambda: len(list(descriptors.iterdir())) <= before, 3.0)
        assert patient.post("/v1/completions", prompt="x", max_tokens=2).status == 200
        assert value(figures(patient), "vllm:request_success_total", finished_reason="abort") == 4


def test_a_client_that_reads_slowly_gets_all(endless: TinyModel, tmp_path: Path) -> None:
    with serving(endless.folder, "--client-timeout", "1", folder=tmp_path / "server") as patient:
        body = {"prompt": "x", "max_tokens": 1000, "stream": True, "logprobs": 20, "ignore_eos": True}
        link = begun(patient, body)
        told = b""
        while chunk := link.recv(30_000):
            told += chunk
            time.sleep(0.02)
            if told.endswith(b"0\r\n\r\n"):
                break
        link.close()
        assert told.count(b'"text":"a"') == 1000 and b"data: [DONE]" in told


@pytest.mark.parametrize(("stream", "tokens", "size"), [(True, 200, 3000), (False, 700, 10_000)])
def test_a_client_that_reads_on_gets_all_however_slow_it_is(
    endless: TinyModel, tmp_path: Path, stream: bool, tokens: int, size: int
) -> None:
    """Some kilobytes in --client-timeout, where the server's own buffer of 64 waits to be emptied."""
    hasty = ("--client-timeout", "0.5", "--keep-alive-timeout", "1")
    with serving(endless.folder, *hasty, folder=tmp_path / "server") as patient, socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)  # else the kernels' buffers hold it all
        link.connect(("127.0.0.1", patient.port))
        data = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": stream, "logprobs": 20, "ignore_eos": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        link.sendall((head + data).encode())
        told = b""
        while chunk := link.recv(size):
            told += chunk
            time.sleep(0.1)
        assert told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}"), (len(told), told[-200:])
        assert stream or len(told.partition(b"\r\n\r\n")[2]) == int(
            told.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        )


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nhos", b"POST /tokenize HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"]
)
def test_a_request_that_does_not_come_in_time_is_given_up(model: TinyModel, tmp_path: Path, sent: bytes) -> None:
    with (
        serving(model.folder, "--client-timeout", "0.5", folder=tmp_path / "server") as patient,
        socket.create_connection(("127.0.0.1", patient.port), LIMIT_S) as link,
    ):
        link.sendall(sent)
        told = b"".join(iter(lambda: link.recv(1000), b""))
        assert told.startswith(b"HTTP/1.1 408 ") == (b"{" not in sent)
        assert len(patient.said) == 2


def test_a_silent_stream_has_comments(tmp_path: Path) -> None:
    made = loop_model(tmp_path / "model", options=Options(max_positions=100_000))
    quiet = ("--sse-keep-alive-interval", "0.05", "--max-num-seqs", "1")
    with serving(made.folder, *quiet, folder=tmp_path / "server") as waiting:
        first = begun(waiting, {"prompt": "x", "max_tokens": 90_000})
        until(lambda: waiting.stats().load.running == 1, LIMIT_S)
        second = begun(waiting, {"prompt": "x", "max_tokens": 2, "stream": True})
        started_s = time.monotonic()
        told = second.recv(1000)
        assert b" 200 " in told and time.monotonic() - started_s < 0.5
        while told.count(b"\n: nothing yet\n\n") < 3:
            told += second.recv(1000)
        first.close()
        while not told.endswith(b"0\r\n\r\n"):
            told += second.recv(1000)
        second.close()
        assert told.count(b'"text":"a"') == 2 and b"data: [DONE]\n\n" in told


def test_a_signal_ends_what_waits_for_a_slow_client(endless: TinyModel, tmp_path: Path) -> None:
    with serving(endless.folder, "--shutdown-timeout", "1", folder=tmp_path / "server") as ending:
        link = begun(ending, {"prompt": "x", "max_tokens": 90_000, "stream": True, "logprobs": 20, "n": 4})
        until(lambda: ending.stats().load.running == 4, LIMIT_S)
        ending.process.terminate()
        assert ending.ended() == 0
        link.close()
        assert not any("Traceback" in line for line in ending.said)


# --- Logs


def test_every_line_is_json_where_that_is_asked_for_and_tells_no_text(model: TinyModel, tmp_path: Path) -> None:
    asked = ("--log-format", "json", "--enable-log-requests", "--enable-uvicorn-access-log")
    asked += (
        "--disable-access-log-for-endpoints",
        "/health,/ping",
        "--max-num-active-seqs",
        "None",
        "--log-level",
        "debug",
    )
    secret = "secretsecret"
    with starting(model.folder, *asked, folder=tmp_path / "server") as logged:
        until(lambda: any('"ready: ' in line for line in logged.said), LIMIT_S)
        headers = JSON | {"x-request-id": "mine-7"}
        answer = logged.send("POST", "/v1/completions", {"prompt": f"{secret}Q", "max_tokens": 3, "n": 2}, headers)
        assert answer.headers["x-request-id"] == "mine-7" and answer.json["id"] == "cmpl-mine-7"
        logged.send("POST", "/v1/completions", {"prompt": f"{secret}Q", "temperature": -1}, headers)
        logged.send("GET", f"/{secret}?{secret}")
        logged.send("GET", "/health")
        logged.process.terminate()
        assert logged.ended() == 0
        lines = [json.loads(line) for line in logged.said]
    assert not any(secret in line for line in logged.said)
    assert all({"level", "message"} <= set(line) for line in lines)
    access = [(line["route"], line["status"]) for line in lines if line["message"] == "access"]
    assert access == [("/v1/completions", 200), ("/v1/completions", 400), ("none", 404)]
    (request,) = [line for line in lines if line["message"] == "request"]
    told = (request["id"], request["prompt_tokens"], request["completion_tokens"], request["finish_reason"])
    assert told == ("mine-7", len(secret) + 1, 6, "length,length")


def test_a_refused_start_is_json_too(tmp_path: Path) -> None:
    with starting("/nowhere/at/all", "--log-format", "json", folder=tmp_path / "server") as refused:
        assert refused.ended() == 1
        lines = [json.loads(line) for line in refused.said]
    assert lines[-1]["level"] == "error" and "/nowhere/at/all" in lines[-1]["message"]


def test_nothing_is_logged_of_requests_unless_asked_for(model: TinyModel, tmp_path: Path) -> None:
    with serving(model.folder, folder=tmp_path / "server") as quiet:
        quiet.post("/v1/completions", prompt="Q", max_tokens=3)
        quiet.post("/v1/completions", prompt="Q", temperature=-1)
        assert len(quiet.said) == 2
    with serving(model.folder, "--enable-log-requests", folder=tmp_path / "again") as told:
        told.post("/v1/completions", prompt="Q", max_tokens=3)
        assert told.told(r"^request: client=127\.0\.0\.1 .*prompt_tokens=1 completion_tokens=3 finish_reason=length")


# --- How it is reached


def asked_by_tls(port: int, trusted: Path, own: tuple[Path, Path] | None = None) -> int:
    context = ssl.create_default_context(cafile=trusted)
    if own is not None:
        context.load_cert_chain(own[1], own[0])
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=LIMIT_S, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def test_tls_is_spoken_and_clients_may_need_a_certificate(model: TinyModel, tmp_path: Path) -> None:
    key, chain = certificate(tmp_path, "server")
    client = certificate(tmp_path, "client")
    ours = ("--ssl-keyfile", str(key), "--ssl-certfile", str(chain))
    with serving(model.folder, *ours, folder=tmp_path / "server") as secret:
        port = int(secret.told(r"listening at https://127\.0\.0\.1:(\d+)")[1])
        assert asked_by_tls(port, chain) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            asked_by_tls(port, client[1])
        with openai.OpenAI(
            base_url=f"https://127.0.0.1:{port}/v1",
            api_key="none",
            http_client=openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=chain)),
        ) as made:
            reply = made.completions.create(model=made.models.list().data[0].id, prompt="Q", max_tokens=3, stream=True)
            assert "".join(chunk.choices[0].text for chunk in reply) == "abc"
    mutual = (*ours, "--ssl-ca-certs", str(client[1]), "--ssl-cert-reqs", "2")
    with serving(model.folder, *mutual, folder=tmp_path / "mutual") as strict:
        port = int(strict.told(r"listening at https://127\.0\.0\.1:(\d+)")[1])
        assert asked_by_tls(port, chain, client) == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            asked_by_tls(port, chain)
        assert len(strict.said) == 2


def test_a_new_certificate_is_taken_while_it_serves(model: TinyModel, tmp_path: Path) -> None:
    key, chain = certificate(tmp_path, "server")
    ours = ("--ssl-keyfile", str(key), "--ssl-certfile", str(chain), "--enable-ssl-refresh")
    with serving(model.folder, *ours, folder=tmp_path / "server") as secret:
        port = int(secret.told(r"listening at https://127\.0\.0\.1:(\d+)")[1])
        newer = certificate(tmp_path, "newer")
        key.write_bytes(newer[0].read_bytes())
        chain.write_bytes(newer[1].read_bytes())

        def taken() -> bool:
            try:
                return asked_by_tls(port, newer[1]) == 200
            except ssl.SSLError:
                return False

        until(taken, LIMIT_S)


@pytest.mark.parametrize("wrong", ["missing", "mixed", "no certificate", "ciphers"])
def test_tls_that_cannot_be_is_told_before_anything_is_loaded(model: TinyModel, tmp_path: Path, wrong: str) -> None:
    key, chain = certificate(tmp_path, "server")
    other, _ = certificate(tmp_path, "other")
    arguments = {
        "missing": ("--ssl-certfile", str(tmp_path / "nowhere")),
        "mixed": ("--ssl-certfile", str(chain), "--ssl-keyfile", str(other)),
        "no certificate": ("--ssl-keyfile", str(key)),
        "ciphers": ("--ssl-certfile", str(chain), "--ssl-keyfile", str(key), "--ssl-ciphers", "NONSENSE"),
    }[wrong]
    with starting(model.folder, *arguments, folder=tmp_path / "server") as refused:
        assert refused.ended() == 1 and refused.told("^error: ")
        assert not any("listening" in line or "Traceback" in line for line in refused.said)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("key", [(), ("--api-key", "K")])
def test_a_server_that_is_open_to_all_says_so(
    model: TinyModel, tmp_path: Path, host: str, key: tuple[str, ...]
) -> None:
    with serving(model.folder, "--host", host, *key, folder=tmp_path / "server") as open_server:
        assert any("there is no key" in line for line in open_server.said) == (not key)
        port = int(open_server.told(r"listening at http://\S*:(\d+),")[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


def test_a_limit_for_keys_needs_keys(model: TinyModel, tmp_path: Path) -> None:
    with starting(model.folder, "--max-requests-per-key", "2", folder=tmp_path / "server") as refused:
        assert refused.ended() == 2 and refused.told("^error: .*there is no --api-key")


def test_it_listens_at_ipv6_addresses(model: TinyModel, tmp_path: Path) -> None:
    with serving(model.folder, "--host", "::1", folder=tmp_path / "server") as six:
        port = int(six.told(r"listening at http://\[::1\]:(\d+)")[1])
        connection = http.client.HTTPConnection("::1", port, timeout=LIMIT_S)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


def test_it_may_be_mounted_by_a_proxy_that_takes_the_path_away_or_not(model: TinyModel, tmp_path: Path) -> None:
    mounted = ("--root-path", "/llm/", "--api-key", "K")
    with serving(model.folder, *mounted, folder=tmp_path / "server") as behind:
        key = {"authorization": "Bearer K"}
        for path in ("/v1/models", "/llm/v1/models"):
            assert behind.send("GET", path).status == 401
            assert behind.send("GET", path, headers=key).status == 200
        assert [behind.send("GET", path).status for path in ("/health", "/llm/health")] == [200, 200]
        assert behind.send("GET", "/other/v1/models", headers=key).status == 404


@pytest.mark.parametrize(("path", "said"), [("none/here.sock", "No such file"), ("x" * 120, "too long")])
def test_a_unix_socket_that_cannot_be_is_told(model: TinyModel, tmp_path: Path, path: str, said: str) -> None:
    with starting(model.folder, "--uds", str(tmp_path / path), folder=tmp_path / "server") as refused:
        assert refused.ended() == 1 and refused.told(f"^error: --uds .*{said}")


# --- Coming and going


@pytest.mark.parametrize("fronts", [1, 2])
def test_who_comes_while_it_is_ending_is_sent_away_and_who_was_there_is_answered(
    endless: TinyModel, tmp_path: Path, fronts: int
) -> None:
    with serving(endless.folder, "--api-server-count", str(fronts), folder=tmp_path / "server") as ending:
        with ExitStack() as stack:
            ask = {"prompt": "x", "max_tokens": 400, "stream": True}
            links = [stack.enter_context(begun(ending, ask)) for _ in range(10)]
            until(lambda: ending.stats().load.running == 10, LIMIT_S)
            ending.process.terminate()
            ending.told("stopping")

            def refused() -> bool:
                try:
                    answer = ending.send("GET", "/health")
                except ConnectionRefusedError:
                    return True
                except (ConnectionError, http.client.HTTPException):
                    return False  # it was about to be accepted
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                return False

            until(refused, 2.0)
            for link in links:
                told = b"".join(iter(partial(link.recv, 30_000), b""))
                assert told.count(b'"text":"a"') == 400 and b"data: [DONE]" in told
        assert ending.ended() == 0


@pytest.mark.parametrize("after_s", [0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("fronts", [1, 2])
def test_an_interrupt_at_any_moment_ends_in_few_words(
    model: TinyModel, tmp_path: Path, after_s: float, fronts: int
) -> None:
    folder = tmp_path / "server"
    with starting(model.folder, "--api-server-count", str(fronts), folder=folder) as ending:
        time.sleep(after_s)
        ending.process.send_signal(signal.SIGINT)
        started_s = time.monotonic()
        # Python itself, before it has got as far as we, ends by the signal.
        assert ending.ended() in (0, 130, -signal.SIGINT)
        assert time.monotonic() - started_s < 5
        if ending.process.returncode >= 0:
            assert len(ending.said) <= 3 and not any("Traceback" in line for line in ending.said), ending.said
    assert not list(folder.glob("rvllm-*"))  # tempfile may have been trying out the folder


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 2}),
    ],
)
def test_every_route_for_text_has_the_limits_the_timeout_and_the_figures(
    endless: TinyModel, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    with serving(
        endless.folder, "--max-num-queued-reqs", "1", "--request-timeout", "2", folder=tmp_path / "server"
    ) as full:
        with begun(full, {"prompt": "x", "max_tokens": 50_000}):
            until(lambda: full.stats().load.running == 1, LIMIT_S)
            for stream in (False, True):
                refused = full.send("POST", path, {**body, "stream": stream})
                assert (refused.status, refused.headers["retry-after"]) == (429, "1"), refused
                assert "error" in refused.json and refused.headers["x-request-id"]
        until(lambda: at_rest(full.stats()), 3.0)
        ours = {"max_output_tokens": 3} if path == "/v1/responses" else {"max_tokens": 3}
        assert full.send("POST", path, {**body, **ours}).status == 200
        found = figures(full)
        assert value(found, "http_requests_total", handler=path, status="4xx") == 2
        assert value(found, "vllm:generation_tokens_total") >= 3
        assert value(found, "vllm:request_success_total", finished_reason="length") == 1

"""`rvllm benchmark serve` as a process: at our own server, and at one that says what it was told to."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.certificates import certificate
from tests.fixtures.commands import LIMIT_S, assert_refused, command, environment, rvllm
from tests.fixtures.models import TinyModel, random_model
from tests.fixtures.scripted_server import Scripted, completion, scripted
from tests.fixtures.servers import Server, serving

RUN = (
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "latencies"),
    *("queue_times", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
)
TIMES = [f"{part}_{name}_ms" for name in ("ttft", "tpot", "itl") for part in ("mean", "median", "std", "p99")]
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")


def asked(port: int, *more: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return rvllm("benchmark", "serve", "--port", str(port), "--num_prompts", "6", *more, **changes)


def last(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(model.folder, "--max-model-len", "128", "--api-key", "right", folder=folder) as started:
        yield started


SHORT = ("--input-len", "16", "--output-len", "8", "--ignore-eos")


def test_our_server_is_measured_and_the_file_is_vllms(server: Server, model: TinyModel, tmp_path: Path) -> None:
    files = ("--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "r.json")
    done = asked(server.port, *SHORT, *files, "--metadata", "gpu=none", "day=1", OPENAI_API_KEY="right")
    found = last(done)
    assert (found["completed"], found["failed"], found["model_id"]) == (6, 0, str(model.folder))
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (96, 48)
    assert "Total generated tokens:                  48" in done.stdout
    saved = json.loads((tmp_path / "r.json").read_text())
    assert set(saved) == {*RUN, *TIMES, *DETAILS, "gpu", "day"}
    assert saved["output_lens"] == [8] * 6 and saved["errors"] == [""] * 6
    assert saved["request_rate"] == "inf" and len(saved["latencies"]) == 6


def test_chats_have_texts_of_exactly_as_many_tokens(server: Server, model: TinyModel) -> None:
    chat = ("--backend", "openai-chat", "--random-range-ratio", "0.5", "--header", "authorization=Bearer right")
    found = last(asked(server.port, *SHORT[:2], "--ignore-eos", "--output-len", "8", *chat, "--random-prefix-len", "2"))
    assert found["completed"] == 6 and found["failed"] == 0


def test_a_wrong_key_ends_it_at_once(server: Server, model: TinyModel) -> None:
    for named in ((), ("--model", str(model.folder))):
        done = asked(server.port, *SHORT, *named, OPENAI_API_KEY="wrong")
        assert_refused(done, "401", "OPENAI_API_KEY")
        assert done.stdout == "" and done.returncode == 1


def test_an_unknown_model_ends_it_at_once(server: Server) -> None:
    done = asked(server.port, *SHORT, "--model", "other", OPENAI_API_KEY="right")
    assert_refused(done, "404", "other")


def test_a_server_that_is_not_there_is_told() -> None:
    done = asked(1, *SHORT)
    assert_refused(done, "http://127.0.0.1:1/v1/models is not reached")
    done = asked(1, *SHORT, "--model", "m")
    assert_refused(done, "every one of 6 requests failed")


def test_no_more_run_at_once_than_may() -> None:
    with scripted() as server:
        queue = ("--percentile-metrics", "ttft,client_queue_time")
        found = last(asked(server.port, *SHORT, "--max-concurrency", "2", "--num-warmups", "1", *queue))
    assert server.most_open <= 2 and found["mean_client_queue_time_ms"] > 0
    assert (found["max_concurrency"], found["completed"], len(server.bodies)) == (2, 6, 7)


def test_bodies_have_what_was_asked_for() -> None:
    with scripted() as server:
        ways = ("--temperature", "0.5", "--top_k", "3", "--logprobs", "2", "--extra-body", '{"min_tokens": 1}')
        last(asked(server.port, *SHORT, *ways, "--request-id-prefix", "r-", "--header", "A=1", "B=2"))
    for body in server.bodies:
        prompt = body.pop("prompt")
        assert len(prompt) == 16 and all(3 <= number < 256 for number in prompt)
        assert body == {
            "model": "scripted",
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "top_k": 3,
            "logprobs": 2,
            "min_tokens": 1,
            "ignore_eos": True,
        }
    assert {head["x-request-id"] for head in server.headers} == {f"r-{place}" for place in range(6)}
    assert all((head["a"], head["b"]) == ("1", "2") for head in server.headers)


def test_a_ramp_and_who_waited_are_told(tmp_path: Path) -> None:
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "52")
    metrics = ("--percentile-metrics", "e2el,client_queue_time", "--goodput", "e2el:60000")
    with scripted() as server:
        one = ("--max-concurrency", "1", "--save-result", "--result-dir", tmp_path, "--result-filename", "r.json")
        done = asked(server.port, *SHORT, *ramp, *metrics, *one)
    found, saved = last(done), json.loads((tmp_path / "r.json").read_text())
    assert [event["rps"] for event in saved["rps_change_events"]] == [50, 51, 52] and "rps_change_events" not in found
    assert len(saved["queue_times"]) == 6 and found["request_goodput"] == found["request_throughput"]
    assert found["mean_client_queue_time_ms"] >= 0 and "P99 Client Queue Time (ms):" in done.stdout


def test_a_server_that_is_not_ready_yet_is_waited_for() -> None:
    with scripted(loading=2) as server:
        waiting = ("--ready-check-timeout-sec", "30")
        assert last(asked(server.port, *SHORT, *waiting))["completed"] == 6 and server.listed == 3
    with scripted(loading=2) as server:
        assert_refused(asked(server.port, *SHORT), "HTTP 503")


def test_tls_is_spoken_and_certificates_are_checked_unless_told_otherwise(tmp_path: Path) -> None:
    key, chain = certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    with scripted(tls=context) as server:
        url = ("--base-url", f"https://127.0.0.1:{server.port}")
        assert_refused(asked(server.port, *SHORT, *url), "certificate verify failed")
        assert last(asked(server.port, *SHORT, *url, "--insecure"))["completed"] == 6
        assert last(asked(server.port, *SHORT, *url, SSL_CERT_FILE=str(chain)))["completed"] == 6


def failing(bodies: list[Any], way: str) -> Any:
    def script(body: dict[str, Any]) -> tuple[int, list[str]]:
        bodies.append(body)
        if way == "all" or len(bodies) == 2:
            return (500, ['{"error": {"message": "out of luck"}}']) if way != "short" else completion(body, 5)
        return completion(body)

    return script


@pytest.mark.parametrize(("way", "said"), [("one", "HTTP 500: out of luck"), ("short", "8 tokens were asked for")])
def test_a_failed_request_is_counted_and_told(way: str, said: str) -> None:
    with scripted(failing([], way)) as server:
        done = asked(server.port, *SHORT)
    found = last(done)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (5, 1, 40)
    assert "1 of 6 requests failed" in done.stderr and said in done.stderr


def test_where_all_fail_there_is_no_figure() -> None:
    with scripted(failing([], "all")) as server:
        done = asked(server.port, *SHORT)
    assert_refused(done, "every one of 6 requests failed", "out of luck")
    assert done.stdout == ""


def test_results_are_added_as_lines(tmp_path: Path) -> None:
    with scripted() as server:
        for _ in range(2):
            last(asked(server.port, *SHORT, "--append-result", "--result-filename", tmp_path / "r.jsonl"))
    assert [json.loads(line)["completed"] for line in (tmp_path / "r.jsonl").read_text().splitlines()] == [6, 6]


def test_an_interrupt_ends_it_without_a_traceback() -> None:
    with scripted() as server:
        slow = ("--request-rate", "0.001", "--port", str(server.port), "--num-prompts", "5")
        process = subprocess.Popen(
            command("benchmark", "serve", *slow),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        end_s = time.monotonic() + LIMIT_S
        while not connected(server) and time.monotonic() < end_s:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and out == "" and "Traceback" not in said, said


def connected(server: Scripted) -> bool:
    return server.listed > 0


def test_a_chart_needs_a_format_that_there_is(tmp_path: Path) -> None:
    done = rvllm("benchmark", "serve", "--plot", tmp_path / "chart.pdf")
    assert done.returncode != 0 and ".png or .svg" in done.stderr, done


def test_what_is_not_done_is_refused() -> None:
    for wrong in (("--no-stream",), ("--dataset-name", "custom"), ("--request-rate", "0")):
        done = rvllm("benchmark", "serve", *wrong)
        assert done.returncode == 2 and done.stdout == "", done
        assert f"error: {wrong[0]}" in done.stderr

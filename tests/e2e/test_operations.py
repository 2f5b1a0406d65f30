"""`rvllm serve` as those who run it see it: figures, limits, logs, and clients that are slow or ask for too much."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.commands import LIMIT_S
from tests.fixtures.engines import at_rest, until
from tests.fixtures.models import EOS, Options, TinyModel, chain_model, loop_model
from tests.fixtures.servers import Answer, Server, serving

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


Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def figures(server: Server) -> Figures:
    """All samples of /metrics, which has to be well formed."""
    answer = server.send("GET", "/metrics")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: Figures = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found and sample.value == sample.value, sample
            found[key] = sample.value
    return found


def value(found: Figures, name: str, **labels: str) -> float:
    """The sum of a name's samples that have these labels."""
    wanted = set(labels.items())
    values = [number for (known, have), number in found.items() if known == name and wanted <= have]
    assert values, name
    return sum(values)


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
    assert all(("model_name", "m1") in labels for (name, labels) in found if name.startswith("vllm:"))
    assert value(found, "vllm:generation_tokens_total") == 5 + 3 + 6 + 3
    assert value(found, "vllm:prompt_tokens_total") == 1 + chat + 3 * 41
    assert value(found, "vllm:request_success_total", finished_reason="length") == 4
    assert value(found, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(found, "vllm:prefix_cache_queries_total") == 1 + chat + 2 * 41
    assert value(found, "vllm:prefix_cache_hits_total") == value(found, "vllm:prompt_tokens_cached_total") == 32
    assert value(found, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
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
    assert places == sorted(places, reverse=True) and sum(places) == accepted
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
                seen.append(figures(busy))
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

"""`rvllm benchmark` in this process, on the CPU: what it prints and writes, and when it prints nothing."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from rvllm.__main__ import Interrupts, run
from rvllm.cli import measure
from rvllm.cli.benchmark import PEERS, benchmark
from rvllm.cli.failure import Debug
from rvllm.cli.main import commands
from rvllm.cli.options import sizes
from rvllm.config import EngineConfig
from rvllm.engine.request import Request, TokenEvent
from rvllm.version import VERSION

CASE = Path(__file__).parents[1] / "reference" / "qwen2-tied"
QUICK = ("--device", "cpu", "--max-model-len", "48", "-q")
SLOPE = ("--n", "1,2", "--context", "8", "--output-len", "2,38", "--repeat", "3")


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """A benchmark's process ends with it; this one goes on."""
    yield
    gc.unfreeze()


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, ["benchmark", *map(str, arguments)], obj=Debug(False))


def last_line(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_decode_is_what_a_model_alone_means(tmp_path: Path) -> None:
    done = invoke(CASE, *SLOPE, *QUICK, "--json", tmp_path / "all.json")
    found = last_line(done)
    assert found == json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert (found["rvllm"], found["model"], found["protocol"]) == (VERSION, str(CASE), "slope")
    assert (found["dtype"], found["tier"], found["driver"], found["limits"]) == ("f32", None, None, None)
    assert found["settings"]["max_num_seqs"] == 2
    assert {"commit", "date", "device", "checks", "python"} <= found.keys()
    for sequences, entry in zip((1, 2), found["results"], strict=True):
        assert (entry["sequences"], entry["prompt_tokens"], entry["output_tokens"]) == (sequences, 8, [2, 38])
        assert [len(seconds) for seconds in entry["wall_s"]] == [3, 3] and entry["tokens_per_s"] > 0
        assert 0 < entry["step_ms"]["p50"] <= entry["step_ms"]["p95"] <= entry["step_ms"]["p99"]
        assert entry["limit_tokens_per_s"] is entry["share_of_limit"] is None
    lines = done.stdout.splitlines()
    assert lines[2].startswith("limit   unknown for ") and lines[2].endswith(": no shares are given")
    assert [line.split()[:3] for line in lines[6:8]] == [["1", "8", "2-38"], ["2", "8", "2-38"]]
    assert invoke("decode", CASE, *SLOPE, *QUICK).exit_code == 0


def test_with_guesses_their_counts_are_told_and_what_is_drawn_is_what_is_drawn_without(tmp_path: Path) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    found = last_line(invoke(CASE, *SLOPE, *QUICK, "--speculative-config", json.dumps(config)))
    counts = found["speculation"]
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"] <= 4 * counts["drafts"]
    assert found["settings"]["speculative_config"] == {
        name: value for name, value in config.items() if name != "method"
    }
    assert "speculation" not in last_line(invoke(CASE, *SLOPE, *QUICK))


def test_wall_measures_every_pair_of_lengths() -> None:
    lengths = ("--input-len", "4,8", "--output-len", "2,4")
    found = last_line(
        invoke("--model", CASE, "--protocol", "wall", "--n", "1,2,...,4", *lengths, "--repeat", "1", *QUICK)
    )
    cells = [(entry["prompt_tokens"], entry["output_tokens"], entry["sequences"]) for entry in found["results"]]
    assert cells == [(prompt, [output], n) for prompt in (4, 8) for output in (2, 4) for n in (1, 2, 4)]


def test_a_configuration_alone_is_measured_with_dummy_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CASE / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    done = invoke(tmp_path, *SLOPE, *QUICK, "--load-format", "dummy")
    assert last_line(done)["dummy_weights"] and ", f32, dummy weights" in done.stdout


def test_a_guess_that_is_taken_though_it_is_wrong_leaves_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rvllm.engine.engine.accepted", lambda drafts, drawn: min(len(drafts), len(drawn)))
    config = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
    arguments = ["benchmark", str(CASE), *SLOPE, *QUICK, "--speculative-config", config]
    assert run(arguments, Interrupts()) == 1
    said = capsys.readouterr()
    assert "the output is wrong" in said.err and not said.out


def test_throughput_writes_vllms_fields_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "throughput.json"
    options = ("--input-len", "8", "--output-len", "4", "--num-prompts", "6", "--n", "2", "--max-num-seqs", "4")
    ignored = ("--backend", "vllm", "--dataset-name", "random", "--disable-detokenize", "--num-warmups", "1")
    done = invoke("throughput", "--model", CASE, *options, *ignored, "--output-json", path, *QUICK)
    fields = json.loads(path.read_text(encoding="utf-8"))
    assert list(fields) == [
        "model_id", "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second",
    ]  # fmt: skip
    assert (fields["model_id"], fields["num_requests"], fields["total_num_tokens"]) == (str(CASE), 6, 6 * (8 + 2 * 4))
    assert fields["tokens_per_second"] == pytest.approx(96 / fields["elapsed_time"])
    assert fields["requests_per_second"] == pytest.approx(6 / fields["elapsed_time"])
    assert fields.items() <= last_line(done).items()


def test_latency_writes_vllms_fields(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    options = (
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--batch-size",
        "2",
        "--num-iters-warmup",
        "1",
        "--num-iters",
        "4",
    )
    done = invoke("latency", "--model", CASE, *options, "--output-json", path, *QUICK)
    fields = json.loads(path.read_text(encoding="utf-8"))
    assert list(fields) == ["avg_latency", "latencies", "percentiles", "model_id"]
    assert len(fields["latencies"]) == 4 and min(fields["latencies"]) > 0
    assert list(fields["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert fields["avg_latency"] == pytest.approx(sum(fields["latencies"]) / 4)
    assert last_line(done)["settings"]["max_num_seqs"] == 2


# --- When nothing is printed


class Faulty:
    """An engine with a fault in what it tells of the tokens it drew."""

    def __init__(self, engine: Any, fault: Callable[[Request, TokenEvent], TokenEvent]) -> None:
        self._engine = engine
        self._fault = fault
        self._requests: dict[str, Request] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._engine.add(request)

    def step(self) -> list[TokenEvent]:
        return [self._fault(self._requests[event.request_id], event) for event in self._engine.step()]


def other_token(request: Request, event: TokenEvent) -> TokenEvent:
    """Another token for every 7th request."""
    return replace(event, token_id=event.token_id ^ (request.seed % 7 == 3))


def no_number(request: Request, event: TokenEvent) -> TokenEvent:
    return replace(event, logprob=None if event.logprob is None else math.nan)


@pytest.mark.parametrize(("fault", "said"), [(other_token, "expected"), (no_number, "logits are no numbers")])
@pytest.mark.parametrize(
    "mode", [("decode", *SLOPE), ("throughput", "--num-prompts", "2"), ("latency",)], ids=lambda mode: mode[0]
)
def test_a_wrong_output_leaves_no_figure(
    mode: tuple[str, ...],
    fault: Callable[[Request, TokenEvent], TokenEvent],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    load_engine = measure.load_engine
    monkeypatch.setattr(measure, "load_engine", lambda *given, **named: Faulty(load_engine(*given, **named), fault))
    sizes = () if mode[0] == "decode" else ("--input-len", "8", "--output-len", "4")
    path = tmp_path / "all.json"
    name, *options = mode
    assert run(["benchmark", name, str(CASE), *options, *sizes, *QUICK, "--json", str(path)], Interrupts()) == 1
    found = capsys.readouterr()
    assert found.out == "" and said in found.err and "no figure is printed" in found.err
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--n", "1,2,...,5,6"), "one number comes after"),
        (("--n", "4,2"), "must be above 0 and rise"),
        (("--n", "1,4", "--max-num-seqs", "2"), "--max-num-seqs is 2, but 4 sequences"),
        (("--protocol", "wall", "--context", "8"), "--context is for --protocol slope"),
        (("--input-len", "8"), "--input-len is for --protocol wall"),
        (("--output-len", "8"), "--output-len has 1 lengths, a slope is between two"),
        (("--context", "1k"), "prompt and output have 1,144 tokens, the context is 48"),
        (("--json", "/nowhere/at/all.json"), "there is no folder /nowhere/at"),
        (("--model", "another"), "give one"),
        (("--repeat", "0"), "0 is not in the range x>=1"),
    ],
)
def test_what_does_not_go_together_is_wrong_usage(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["benchmark", str(CASE), *QUICK, *arguments], Interrupts()) == 2
    found = capsys.readouterr()
    assert found.out == "" and said in found.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dataset-path", "x.json"), "--dataset-path x.json is not done: prompts are random token ids"),
        (("--dataset_path=x.json",), "--dataset-path x.json is not done: prompts are random token ids"),
        (("--dataset-name", "sharegpt"), "'sharegpt' is not 'random'"),
        (("--backend", "hf"), "'hf' is not 'vllm'"),
        (("--async-engine",), "--async-engine is not done: the engine is called directly"),
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size 2 is not done: one GPU computes"),
        (("--random-range-ratio", "1"), "'1' is not from 0 to below 1"),
        (("--random-range-ratio", '{"input": 0.5}'), "is neither a number nor"),
        (("--random-range-ratio", "NaN"), "'NaN' is not from 0 to below 1"),
        (("--num-warmups", "2001"), "--num-warmups is 2,001, there are 1,000 prompts"),
        (("--no-such-option",), "No such option"),
    ],
)
def test_what_vllm_does_and_we_do_not_is_refused_with_a_reason(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["benchmark", "throughput", str(CASE), *arguments], Interrupts()) == 2
    found = capsys.readouterr()
    assert found.out == "" and said in found.err


def test_no_option_is_both_done_and_refused() -> None:
    refused = {name for flag in PEERS for name in flag.names}
    for mode in ("throughput", "latency"):
        assert not refused & {name for parameter in benchmark.commands[mode].params for name in parameter.opts}


def test_every_engine_setting_is_a_field_of_the_configuration() -> None:
    for name, mode in benchmark.commands.items():
        if name == "serve":  # it asks a server, and has no engine
            continue
        context = click.Context(mode)
        for parameter in mode.params:
            if parameter.name in EngineConfig.__dataclass_fields__ and parameter.name not in ("seed", "max_num_seqs"):
                assert str(parameter.get_default(context)) == str(getattr(EngineConfig(), parameter.name)), (
                    parameter.name
                )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7", (7,)),
        ("128,1k,8K", (128, 1000, 8192)),
        ("1,2,4,...,256", (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ("1,2,...,100", (1, 2, 4, 8, 16, 32, 64, 100)),
        ("1, 3, ..., 81", (1, 3, 9, 27, 81)),
        ("5,10,...,15", (5, 10, 15)),
    ],
)
def test_a_grid_of_sizes_may_go_on_by_its_ratio(text: str, found: tuple[int, ...]) -> None:
    assert sizes(text) == found


@pytest.mark.parametrize(
    "text", ["", "1,,2", "...", "1,...,4", "2,3,...,9", "1,2,...", "1,2,...,2", "0,1", "1,1", "1,x"]
)
def test_what_is_no_grid_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(ValueError, match="'"):
        sizes(text)

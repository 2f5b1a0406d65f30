"""What `rvllm benchmark` reckons with and refuses, on an engine whose every step and token is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rvllm.bench import runs
from rvllm.bench.decode import Bench, Cell, measure
from rvllm.bench.figures import Speed, percentiles, rate, slope, step_times
from rvllm.bench.latency import Batch, latency
from rvllm.bench.limit import Limits, Work
from rvllm.bench.plot import check_plot, plot, plot_latencies
from rvllm.bench.report import table
from rvllm.bench.runs import Workload
from rvllm.bench.throughput import Requests, throughput
from rvllm.bench.trust import check_outputs, check_speed
from rvllm.engine.request import Request
from rvllm.errors import StartError, WrongOutput
from rvllm.model.files import ModelFiles
from rvllm.model.source import open_source, record
from rvllm.program.cost import DEVICES, Device, Load, cost
from rvllm.program.dtype import BF16
from rvllm.program.fuse import ALL_KERNELS, fuse
from tests.fixtures.clockwork import READ_S, ROW_S, STEP_S, VOCAB, Clockwork, plain

REFERENCE = Path(__file__).parents[1] / "reference"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """A bench on clockwork, whose clock is the benchmark's."""

    def make(engine: Clockwork, limits: Limits | None = None, max_tokens: int = 4096) -> Bench:
        monkeypatch.setattr(runs.time, "perf_counter", engine.clock)
        return Bench(engine, Workload(VOCAB, 0), limits, max_tokens, lambda label, done, total: None)

    return make


def limits_of(case: str, card: Device = DEVICES["h200"]) -> Limits:
    source = open_source(ModelFiles(case, REFERENCE / case), warn=lambda message: None)
    program = record(source, dtype=BF16, kv_dtype=BF16, max_length=source.config.max_position)
    return Limits(fuse(program, ALL_KERNELS), card)


# --- Numbers


def test_a_slope_is_free_of_what_both_runs_have_in_common() -> None:
    short, long = ([begun + tokens / 512 for begun in (7.0, 9.0, 8.0)] for tokens in (32, 288))
    assert slope((32, 288), short, long) == Speed(512.0, 0.0)
    # One slow run moves the spread, not the figure.
    assert slope((32, 288), [7.0] * 3, [7.5, 7.75, 7.5]) == Speed(512.0, 0.5)


def test_a_longer_run_that_is_not_slower_has_no_slope() -> None:
    with pytest.raises(WrongOutput, match="no slope"):
        slope((32, 288), [1.0, 1.0, 1.0], [1.0, 2.0, 0.5])


def test_percentiles_are_those_of_numpy() -> None:
    seconds = [0.001 * value for value in (9, 1, 8, 2, 7, 3, 6, 4, 5, 10)]
    assert percentiles(seconds, (10, 50, 99)) == pytest.approx({10: 0.0019, 50: 0.0055, 99: 0.00991})
    steps = step_times(seconds)
    assert (steps.p50, steps.p95, steps.p99) == pytest.approx((5.5, 9.55, 9.91))


def test_a_repeated_rate_is_its_median_and_its_spread() -> None:
    assert rate(100, [1.0, 1.25, 0.5]) == Speed(100.0, 0.75)


# --- Decode


def test_the_slope_is_the_speed_of_steps_that_all_sequences_share(start: Callable[..., Bench]) -> None:
    figures = measure(start(Clockwork()), [Cell(n, 20, (2, 10)) for n in (1, 4, 8)], repeats=3)
    for figure, n in zip(figures, (1, 4, 8)):
        step_s = STEP_S + n * ROW_S
        assert figure.speed == Speed(n / step_s, 0.0)
        assert figure.wall_s == ((n * READ_S + step_s,) * 3, (n * READ_S + 9 * step_s,) * 3)
        assert figure.steps.p50 == figure.steps.p99 == 1e3 * step_s
        assert figure.share is None


def test_output_lengths_are_later_where_prompts_take_long_to_be_read(start: Callable[..., Bench]) -> None:
    """With one prompt a step, 16 sequences decode together only after 16 steps: lengths of 2 and 10 would flatter."""
    bench = start(Clockwork(prompts=1))
    (figure,) = measure(bench, [Cell(16, 20, (2, 10), settled=False)], repeats=1)
    assert figure.cell.outputs[0] >= 16 and figure.cell.outputs[1] - figure.cell.outputs[0] == 8
    assert figure.speed.tokens_per_s == 16 / (STEP_S + 16 * ROW_S)
    short, long = (bench.run(16, 20, output) for output in (2, 10))
    assert 16 * 8 / (long.seconds - short.seconds) > 1.1 * figure.speed.tokens_per_s


def test_lengths_of_the_users_own_are_refused_instead(start: Callable[..., Bench]) -> None:
    with pytest.raises(StartError, match="at most 2 sequences draw a token in one step") as refusal:
        measure(start(Clockwork(prompts=1)), [Cell(16, 20, (2, 10))], repeats=1)
    assert "--output-len" in str(refusal.value)


def test_later_lengths_stay_within_the_context(start: Callable[..., Bench]) -> None:
    with pytest.raises(StartError, match="no slope for 16 requests"):
        measure(start(Clockwork(prompts=1), max_tokens=31), [Cell(16, 20, (2, 10), settled=False)], repeats=1)


def test_wall_counts_all_outputs_over_all_the_time(start: Callable[..., Bench]) -> None:
    (figure,) = measure(start(Clockwork()), [Cell(4, 8, (32,))], repeats=2)
    assert figure.speed.tokens_per_s == 4 * 32 / (4 * READ_S + 31 * (STEP_S + 4 * ROW_S))
    assert figure.steps.p50 == 1e3 * (STEP_S + 4 * ROW_S) < figure.steps.p99


def test_no_two_prompts_begin_alike(start: Callable[..., Bench]) -> None:
    engine = Clockwork()
    measure(start(engine), [Cell(4, 20, (2, 4))], repeats=2)
    prompts = [request.prompt_ids for request in engine.added]
    assert len({ids[:16] for ids in prompts}) == len(prompts) == 4 * (1 + 2 * 2)
    assert {len(ids) for ids in prompts} == {20}
    assert all(0 <= token < VOCAB for ids in prompts for token in ids)
    assert all(request.params.ignore_eos and request.params.greedy for request in engine.added)


def test_the_table_has_a_line_a_figure_in_columns(start: Callable[..., Bench]) -> None:
    head, *lines = table(measure(start(Clockwork()), [Cell(n, 20, (2, 10)) for n in (1, 64)], repeats=1))
    assert head.split() == ["N", "in", "out", "tok/s", "spread", "ms", "a", "step", "P50", "P95", "P99", "limit", "tok/s", "share"]  # fmt: skip
    assert lines[0].split() == ["1", "20", "2-10", "7.5", "0.0%", "132.812", "132.812", "132.812", "-", "-"]
    assert len({len(line) for line in (head, *lines)}) == 1


def test_steps_are_timed_between_returns_and_counted_where_all_draw(start: Callable[..., Bench]) -> None:
    done = start(Clockwork(prompts=1)).run(3, 20, 5)
    assert [len(events) for events in done.events] == [1, 2, 3, 3, 3, 2, 1]
    assert done.step_seconds() == [READ_S] * 3 + [STEP_S + n * ROW_S for n in (3, 3, 2, 1)]
    assert done.step_seconds(3) == [STEP_S + 3 * ROW_S] * 2
    assert (done.most_at_once, done.reading_steps()) == (3, 2)


def test_a_check_of_an_engine_that_keeps_prompts_stays_below_what_it_keeps() -> None:
    engine = Clockwork()
    check_outputs(engine, Workload(VOCAB, 0), vocab=VOCAB, rows=64, max_tokens=4096, max_prompt=31)
    assert max(len(request.prompt_ids) for request in engine.added) == 31


# --- Limits


def test_the_limit_of_decoding_is_explains_at_the_mean_context() -> None:
    limits = limits_of("qwen2-tied")
    ops = cost(limits.program, Load(4, 4, 48))
    at_mean = 4 / sum(limits.card.seconds(op.nbytes, op.flops) for op in ops)
    assert limits.decode_tokens_per_s(4, (34, 62)) == pytest.approx(at_mean, rel=1e-12)


@pytest.mark.parametrize("case", ["qwen2-tied", "mistral-sliding-window"])
@pytest.mark.parametrize("flops_per_s", [775e12, 1e9], ids=["bytes", "FLOPs"])
def test_the_limit_of_a_run_is_no_more_than_its_steps_one_by_one(case: str, flops_per_s: float) -> None:
    """All prompts in one step, then the tokens one by one: the steps of an engine that could do no better."""
    limits = limits_of(case, replace(DEVICES["h200"], flops_per_s=flops_per_s))
    loads = [Load(6 * 20, 6, 20), *(Load(6, 6, 20 + place) for place in range(1, 30))]
    costs = [op for load in loads for op in cost(limits.program, load)]
    nbytes = sum(op.nbytes for op in costs) / limits.card.bytes_per_s
    flops = sum(op.flops for op in costs) / limits.card.flops_per_s
    found = limits.run_seconds(Work([20] * 6, [30] * 6, at_once=6, prompts=6))
    assert 0.9 * max(nbytes, flops) < found <= max(nbytes, flops) * (1 + 1e-12)


def test_sequences_that_wait_make_more_steps() -> None:
    limits = limits_of("qwen2-tied")
    together = limits.run_seconds(Work([8] * 12, [16] * 12, at_once=12, prompts=12))
    in_turns = limits.run_seconds(Work([8] * 12, [16] * 12, at_once=4, prompts=12))
    assert together < in_turns < 3 * together
    assert Work([8] * 12, [16] * 12, at_once=4, prompts=12).steps == 48
    assert Work([8, 8], [1, 20], at_once=64, prompts=2).steps == 20


def test_one_token_each_is_reading_alone() -> None:
    limits = limits_of("qwen2-tied")
    work = Work([8, 8], [1, 1], at_once=2, prompts=2)
    assert work.steps == 1
    assert limits.run_seconds(work) < limits.run_seconds(replace(work, outputs=[2, 2]))
    assert limits.run_seconds(replace(work, reused=6)) < limits.run_seconds(work)


# --- Refusals


def test_an_engine_that_keeps_its_promises_passes() -> None:
    for rows, max_tokens in ((1, 4096), (3, 16), (64, 4096), (256, 4096)):
        check_outputs(
            Clockwork(), Workload(VOCAB, 0), vocab=VOCAB, rows=rows, max_tokens=max_tokens, max_prompt=max_tokens
        )


def forgetful(request: Request, place: int, together: int) -> int:
    """Draws otherwise from the ninth request on."""
    return plain(request, place, together) if int(request.id.split("-")[1]) < 8 or place < 3 else 5


def neighbourly(request: Request, place: int, together: int) -> int:
    """The last of the tokens depends on how many decode together."""
    return together if place == 35 else plain(request, place, together)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Clockwork(draw=forgetful), "a prompt read a second time: token 3 is 5"),
        (Clockwork(draw=neighbourly), "row 0 of a batch of 64, against the row alone: token 35 is 64, expected 1"),
        (Clockwork(draw=lambda request, place, together: VOCAB), "token ids beyond 0 to 99"),
        (Clockwork(draw=lambda request, place, together: -1), "token ids beyond 0 to 99"),
        (Clockwork(logprob=math.nan), "log-probability is nan"),
        (Clockwork(logprob=-math.inf), "log-probability is -inf"),
        (Clockwork(stops_after=4), "8 requests got 32 tokens, asked were 64"),
    ],
    ids=["forgets", "neighbours", "above", "below", "nan", "inf", "short"],
)
def test_an_engine_that_does_not_is_refused_by_name(engine: Clockwork, said: str) -> None:
    with pytest.raises(WrongOutput, match=said):
        check_outputs(engine, Workload(VOCAB, 0), vocab=VOCAB, rows=256, max_tokens=4096, max_prompt=4096)


def test_what_is_promised_everywhere_is_looked_for_among_prompts_and_in_large_batches() -> None:
    def crowded(request: Request, place: int, together: int) -> int:
        return 5 if together > 64 else plain(request, place, together)

    def read(request: Request, place: int, together: int) -> int:
        return together if len(request.prompt_ids) > 1 else plain(request, place, together)

    for draw, said in ((crowded, "row 0 of a batch of 256"), (read, "prompt 0 of 8, against the prompt alone")):
        sizes = {"vocab": VOCAB, "rows": 256, "max_tokens": 4096, "max_prompt": 4096}
        check_outputs(Clockwork(draw=draw), Workload(VOCAB, 0), **sizes)
        with pytest.raises(WrongOutput, match=said):
            check_outputs(Clockwork(draw=draw), Workload(VOCAB, 0), **sizes, batch_invariant=True)


def test_a_speed_beyond_the_limit_is_refused(start: Callable[..., Bench]) -> None:
    slow = limits_of("qwen2-tied", Device("slow", 1 << 30, 1000.0, 1e12))
    for cell in (Cell(2, 8, (2, 10)), Cell(2, 8, (10,))):
        with pytest.raises(WrongOutput, match=r"beyond the device's limit of 0\.0"):
            measure(start(Clockwork(), slow), [cell], repeats=1)
    with pytest.raises(WrongOutput, match="4 requests: "):
        throughput(start(Clockwork(), slow), Requests(4, 8, 8), warmups=0, seed=0, at_once=4, reuses=False)
    with pytest.raises(WrongOutput, match="a batch of 4: "):
        latency(start(Clockwork(), slow), Batch(4, 8, 8), warmups=0, iterations=2)
    check_speed(100.0, 100.0, "just so")
    check_speed(100.0, None, "unknown")


def test_a_speed_within_it_has_a_share(start: Callable[..., Bench]) -> None:
    limits = limits_of("qwen2-tied", Device("fit", 1 << 30, 1e6, 1e12))
    for cell in (Cell(2, 8, (2, 10)), Cell(2, 8, (10,))):
        (figure,) = measure(start(Clockwork(), limits), [cell], repeats=1)
        assert figure.limit_tokens_per_s is not None
        assert figure.share == figure.speed.tokens_per_s / figure.limit_tokens_per_s < 1


# --- vLLM's


def test_throughput_has_vllms_fields_and_counts(start: Callable[..., Bench]) -> None:
    engine = Clockwork()
    asked = Requests(10, 16, 8, shared=4, copies=2)
    result = throughput(start(engine), asked, warmups=3, seed=0, at_once=64, reuses=True)
    seconds = 20 * READ_S + 7 * (STEP_S + 20 * ROW_S)
    assert result.vllm("a-model") == {
        "model_id": "a-model",
        "elapsed_time": seconds,
        "num_requests": 10,
        "total_num_tokens": 10 * 20 + 2 * 10 * 8,
        "requests_per_second": 10 / seconds,
        "tokens_per_second": (10 * 20 + 2 * 10 * 8) / seconds,
    }
    warm, measured = engine.added[:3], engine.added[3:]
    assert len(measured) == 20 and len({request.seed for request in measured}) == 20
    assert len({request.prompt_ids[:4] for request in measured}) == 1
    assert len({request.prompt_ids for request in warm + measured}) == 3 + 10
    assert {request.params.temperature for request in measured} == {1.0}


def test_lengths_are_spread_by_the_range_ratio(start: Callable[..., Bench]) -> None:
    engine = Clockwork()
    asked = Requests(200, 10, 20, input_ratio=0.5, output_ratio=0.25)
    throughput(start(engine), asked, warmups=0, seed=3, at_once=256, reuses=False)
    inputs = {len(request.prompt_ids) for request in engine.added}
    outputs = {request.params.max_tokens for request in engine.added}
    assert (min(inputs), max(inputs)) == (5, 15)
    assert outputs == set(range(15, 26))
    assert asked.most_tokens == 15 + 25
    assert Requests(1, 1, 1, input_ratio=0.9).lengths(np.random.default_rng(0))[0][0] in (1, 2)


def test_latency_has_vllms_fields(start: Callable[..., Bench]) -> None:
    engine = Clockwork()
    result = latency(start(engine), Batch(4, 16, 8), warmups=2, iterations=5)
    seconds = 4 * READ_S + 7 * (STEP_S + 4 * ROW_S)
    assert result.vllm("a-model") == {
        "avg_latency": seconds,
        "latencies": [seconds] * 5,
        "percentiles": dict.fromkeys(("10", "25", "50", "75", "90", "99"), seconds),
        "model_id": "a-model",
    }
    assert len({request.prompt_ids for request in engine.added}) == 7 * 4
    assert json.loads(json.dumps(result.vllm("a-model")))["percentiles"]["99"] == seconds


# --- The chart


@pytest.mark.parametrize(("name", "begins"), [("chart.png", b"\x89PNG\r\n\x1a\n"), ("chart.svg", b"<?xml")])
def test_a_chart_is_a_picture(name: str, begins: bytes, start: Callable[..., Bench], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    limits = limits_of("qwen2-tied", Device("fit", 1 << 30, 1e9, 1e12))
    cells = [Cell(n, prompt, (2, 10)) for prompt in (20, 40) for n in (1, 4, 16)]
    path = tmp_path / name
    check_plot(path)
    plot(measure(start(Clockwork(), limits), cells, repeats=1), "a-model on clockwork", path)
    data = path.read_bytes()
    assert data.startswith(begins)
    if path.suffix == ".png":
        assert data.endswith(b"IEND\xaeB`\x82")
    else:
        import xml.etree.ElementTree as ElementTree

        assert ElementTree.fromstring(data).tag == "{http://www.w3.org/2000/svg}svg"


def test_latencies_are_drawn_by_their_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "latencies.svg"
    plot_latencies({"Time to First Token": [0.01, 0.02], "Inter-token Latency": []}, "a-model", path)
    data = path.read_text(encoding="utf-8")
    assert data.startswith("<?xml") and "Time to First Token, 2" in data and "Inter-token Latency" not in data


def test_a_chart_without_matplotlib_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.bench.plot.find_spec", lambda name: None)
    with pytest.raises(StartError, match="matplotlib") as refusal:
        check_plot(Path("chart.png"))
    assert refusal.value.hint == "pip install 'rvllm[plot]'"
    with pytest.raises(StartError, match=r"no \.png or \.svg file"):
        check_plot(Path("chart.pdf"))

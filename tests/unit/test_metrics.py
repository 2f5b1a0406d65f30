"""Figures at /metrics that are made of what the engine says, without a server or an engine."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rvllm.api import engine_figures
from rvllm.api.metrics import Metrics, Timeline, length_bounds
from rvllm.api.tallies import ManyAtOnce
from rvllm.engine.request import TokenEvent
from rvllm.engine.scheduler import Limits
from rvllm.engine.tally import Histogram, Load
from rvllm.errors import EngineDied
from rvllm.link.messages import Facts, Stats
from rvllm.program.cost import Traffic
from tests.fixtures.commands import LIMIT_S, environment

LIMITS = Limits(64, 16, 8, 4, 67, 64, 100, frozenset())


def stats(**more: int) -> Stats:
    load = Load(1, 2, 8, 4, 0, 0, 10, 5, **more)
    step_s = Histogram.empty((0.1, 1))
    for seconds in (0.05, 0.1, 0.5, 1.35):
        step_s.add(seconds)
    return Stats(load, 4, step_s, Histogram.empty((1,)), Histogram.empty((1,)))


def told(made: Metrics) -> dict[str, float]:
    """Samples by name and labels but the model's."""
    page, _ = made.page("")
    return {
        sample.name
        + "".join(f" {key}={text}" for key, text in sample.labels.items() if key in ("le", "position")): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def made_of(answer: Stats, traffic: Traffic | None) -> dict[str, float]:
    made = Metrics("m", 100)
    made.engine.facts = Facts("m", "cpu", LIMITS, 20, traffic=traffic)
    asyncio.run(made.engine.refresh(Engine(answer)))  # type: ignore[arg-type]
    return told(made)


class Engine:
    """Stands for a client; answers when it is let."""

    def __init__(self, answer: Stats) -> None:
        self.answer, self.let, self.asked = answer, asyncio.Event(), 0
        self.let.set()

    async def stats(self) -> Stats:
        self.asked += 1
        await self.let.wait()
        return self.answer


def test_the_share_of_the_bus_is_what_had_to_be_read_over_what_could_be() -> None:
    found = made_of(stats(steps=5, read_tokens=100), Traffic(1000, 10.0, 1e4))
    assert found["vllm:estimated_read_bytes_per_gpu_total"] == 5 * 1000 + 100 * 10
    assert found["rvllm:bus_bytes_per_second"] == 1e4
    assert found["rvllm:bus_limit_share"] == pytest.approx(6000 / 2.0 / 1e4)
    unknown = made_of(stats(steps=5, read_tokens=100), Traffic(1000, 10.0, None))
    assert "rvllm:bus_limit_share" not in unknown and unknown["vllm:estimated_read_bytes_per_gpu_total"] == 6000
    assert "vllm:estimated_read_bytes_per_gpu_total" not in made_of(stats(), None)


def test_a_histogram_of_the_engine_is_told_in_rising_counts() -> None:
    found = made_of(stats(accepted_at=(3, 1)), None)  # type: ignore[arg-type]
    counts = [found[f"rvllm:step_seconds_bucket le={bound}"] for bound in ("0.1", "1.0", "+Inf")]
    assert counts == [2, 3, 4] and found["rvllm:step_seconds_count"] == 4
    assert found["rvllm:step_seconds_sum"] == pytest.approx(2.0)
    places = [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total position={place}"] for place in (0, 1)]
    assert places == [3, 1] and found["vllm:kv_cache_usage_perc"] == 0.5


def test_an_engine_that_does_not_answer_in_time_has_its_last_word_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_figures, "PATIENCE_S", 0.05)

    async def look() -> list[float]:
        made = Metrics("m", 100)
        made.engine.facts = Facts("m", "cpu", LIMITS, 20)
        engine: Any = Engine(stats())
        seen = []
        for steps, let in ((1, True), (2, False), (3, True), (4, True)):
            engine.answer = stats(drafts=steps)
            (engine.let.set if let else engine.let.clear)()
            await made.engine.refresh(engine)
            seen.append(told(made)["vllm:spec_decode_num_drafts_total"])
        assert engine.asked == 3  # the second question was answered with the third
        return seen

    assert asyncio.run(look()) == [1, 1, 3, 4]


def test_a_fault_of_the_figures_is_told_once_and_harms_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    made = Metrics("m", 100, said.append)

    def full(self: object, value: float) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(prometheus_client.Histogram, "observe", full)
    line = Timeline(made, 0.0, 5)
    line.submit()
    for came_s in (1.0, 2.0, 3.0):
        line.came(TokenEvent("a", 7, None, (), None, None, 0), came_s)
    made.ended(line, "stop")
    assert line.tokens == 3 and said == ["figures at /metrics are not to be trusted any more: unexpected OSError"]


def test_a_fault_in_counting_tokens_does_not_reach_who_forwards_them(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    made = Metrics("m", 100, said.append)

    def full(self: object, amount: float, times: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(ManyAtOnce, "observe_many", full)
    line = Timeline(made, 0.0, 5)
    for came_s in (1.0, 2.0, 4.0, 7.0):  # with another time between two, those before are handed on
        line.came(TokenEvent("a", 7, None, (), None, None, 0), came_s)
    made.ended(line, "stop")
    assert line.tokens == 4 and len(said) == 1
    assert told(made)["vllm:request_generation_tokens_count"] == 1  # what else there is to count is counted


def test_times_between_tokens_are_told_whole_whoever_shares_a_step() -> None:
    made = Metrics("m", 100)
    lines = [Timeline(made, 0.0, 5) for _ in range(3)]
    name = "vllm:inter_token_latency_seconds"
    for came_s in (1.0, 1.25, 1.25, 1.5, 3.5):
        for line in lines:
            line.came(TokenEvent("a", 7, None, (), None, None, 0), came_s)
        lines[0].came(TokenEvent("a", 7, None, (), None, None, 0), came_s)  # two of one step
    found = told(made)
    assert found["vllm:generation_tokens_total"] == 20
    assert found[f"{name}_count"] == 9 and found[f"{name}_sum"] == 3 * 2.5
    assert [found[f"{name}_bucket le={bound}"] for bound in ("0.2", "0.3", "1.0", "2.5")] == [0, 6, 6, 9]
    lines[0].came(TokenEvent("a", 7, None, (), None, None, 0), 3.625)
    made.ended(lines[0], "stop")  # from where on others that read the figures see it, too
    assert made.drawn._drawn == made.drawn._times == 0 and told(made)[f"{name}_count"] == 10


def test_a_dead_engine_leaves_its_last_figures() -> None:
    class Dead:
        async def stats(self) -> Stats:
            raise EngineDied("gone")

    made = Metrics("m", 100)
    asyncio.run(made.engine.refresh(Dead()))  # type: ignore[arg-type]
    assert "vllm:num_requests_running" not in told(made)


def test_bounds_of_lengths_are_vllms() -> None:
    assert length_bounds(128) == (1, 2, 5, 10, 20, 50, 100)
    assert length_bounds(1000)[-3:] == (200, 500, 1000)


class Collecting(float):
    """An amount that, when it is added, has Python's collector run."""

    def __radd__(self, other: float) -> float:
        gc.collect()
        return other + float(self)


@pytest.mark.parametrize("shared", [False, True])
def test_a_collection_while_a_figure_is_locked_holds_up_nothing(tmp_path: Path, shared: bool) -> None:
    """Of a process that shares its figures all have one lock, which is held while one of them grows."""
    source = f"""
import gc
{inspect.getsource(Collecting)}
from rvllm.api.metrics import Metrics
made = Metrics("m", 100)
made.pauses.watch()
made.pauses._pauses_s._sum.inc(Collecting(1.0))
made._prompt_tokens.inc(Collecting(2.0))
page = made.page("")[0].decode()
gc.callbacks.clear()
print([line for line in page.splitlines() if line.startswith(("rvllm:front_gc_pause_seconds_count", "vllm:prompt_tokens_t"))])
"""
    more = {"PROMETHEUS_MULTIPROC_DIR": os.fspath(tmp_path)} if shared else {}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment(**more), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert "vllm:prompt_tokens_total" in done.stdout and "} 2.0" in done.stdout
    count = re.search(r"front_gc_pause_seconds_count ([\d.]+)", done.stdout)
    assert count and float(count[1]) >= 2

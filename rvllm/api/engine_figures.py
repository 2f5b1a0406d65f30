"""What the engine says of itself, as figures; asked of it when somebody wants to know. Knows no request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rvllm.engine import tally
from rvllm.errors import EngineError
from rvllm.link.client import AsyncEngineClient
from rvllm.link.messages import Facts, Stats

PATIENCE_S = 1.0
"""How long /metrics waits for the engine, which answers between two steps; then what it said last is told."""


class EngineFigures(Collector):
    """What the engine says of itself, asked for anew by `refresh`."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._stats: Stats | None = None
        self._asking: asyncio.Task[Stats] | None = None
        self.facts: Facts | None = None
        self.stages: dict[str, float] = {}
        """Seconds: from the process's begin until it listened and until it was ready, and of what the engine did."""

    async def refresh(self, client: AsyncEngineClient) -> None:
        """Ask the engine, for PATIENCE_S at the most."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(client.stats())
        asking = self._asking
        await asyncio.wait((asking,), timeout=PATIENCE_S)
        if asking.done():
            self._asking = None if self._asking is asking else self._asking
            if not isinstance(asking.exception(), EngineError):
                self._stats = asking.result()

    def collect(self) -> Iterator[Metric]:
        if self.stages:
            startup = GaugeMetricFamily(
                "rvllm:startup_seconds", "Until it listened, was ready; what the engine did.", None, ["stage"]
            )
            for stage, seconds in self.stages.items():
                startup.add_metric([stage], seconds)
            yield startup
        if self._stats is not None and self.facts is not None:
            yield from self._engine(self._stats, self.facts)

    def _engine(self, stats: Stats, facts: Facts) -> Iterator[Metric]:
        load = stats.load
        yield self._gauge("vllm:num_requests_running", "Requests that run.", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", load.waiting)
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "For what.", None, [*self._labels, "reason"]
        )
        by_reason.add_metric([*self._labels.values(), "capacity"], load.waiting)
        yield by_reason
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the cache in use, 1: all.", load.used_blocks / load.blocks
        )
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", load.prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", load.cached_tokens)
        yield self._counter("vllm:num_preemptions", "Times that a request gave way.", load.preemptions)
        yield self._counter("vllm:spec_decode_num_drafts", "Times that tokens were guessed.", load.drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens guessed.", load.draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Guesses that were right.", load.accepted_tokens)
        places = [*self._labels, "position"]
        right = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos", "By their place.", None, places)
        for place, tokens in enumerate(load.accepted_at):
            right.add_metric([*self._labels.values(), str(place)], tokens)
        yield right
        yield self._histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", stats.step_tokens)
        yield self._histogram("rvllm:step_seconds", "From one step's tokens to the next one's.", stats.step_s)
        yield self._histogram("rvllm:engine_gc_pause_seconds", "Pauses of the engine for garbage.", stats.gc_s)
        names = [*self._labels, *(name for name, _ in facts.cache)]
        cache = GaugeMetricFamily("vllm:cache_config_info", "The cache's settings.", None, names)
        cache.add_metric([*self._labels.values(), *(value for _, value in facts.cache)], 1)
        yield cache
        engine = GaugeMetricFamily("rvllm:engine_info", "What computes.", None, [name for name, _ in facts.about])
        engine.add_metric([value for _, value in facts.about], 1)
        yield engine
        yield from self._traffic(stats, facts)

    def _traffic(self, stats: Stats, facts: Facts) -> Iterator[Metric]:
        if facts.traffic is None:
            return
        traffic, load = facts.traffic, stats.load
        nbytes = traffic.weight_bytes * load.steps + traffic.token_bytes * load.read_tokens
        yield self._counter("vllm:estimated_read_bytes_per_gpu", "That steps had to read at the least.", nbytes)
        if traffic.bytes_per_s is not None:
            yield self._gauge("rvllm:bus_bytes_per_second", "The device's memory, at the most.", traffic.bytes_per_s)
            if stats.step_s.total > 0:
                share = nbytes / stats.step_s.total / traffic.bytes_per_s
                yield self._gauge("rvllm:bus_limit_share", "Bytes over those that could have passed in steps.", share)

    def _gauge(self, name: str, told: str, value: float) -> Metric:
        made = GaugeMetricFamily(name, told, None, list(self._labels))
        made.add_metric(list(self._labels.values()), value)
        return made

    def _counter(self, name: str, told: str, value: float) -> Metric:
        made = CounterMetricFamily(name, told, None, list(self._labels))
        made.add_metric(list(self._labels.values()), value)
        return made

    def _histogram(self, name: str, told: str, counted: tally.Histogram) -> Metric:
        made = HistogramMetricFamily(name, told, None, None, list(self._labels))
        so_far, buckets = 0, []
        for bound, count in zip((*map(float, counted.bounds), "+Inf"), counted.counts):
            so_far += count
            buckets.append((str(bound), float(so_far)))
        made.add_metric(list(self._labels.values()), buckets, counted.total)
        return made

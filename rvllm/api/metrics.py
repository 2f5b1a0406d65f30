"""What is told at /metrics: vLLM's names, labels and buckets, and some of our own. Knows prometheus-client and figures.

What a front sees of requests it counts itself; where several fronts share a folder (PROMETHEUS_MULTIPROC_DIR), each
tells the sum of all. What the engine counts is asked of it when somebody wants to know, and never sent by itself.
"""

from __future__ import annotations

import gzip
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from rvllm.api.engine_figures import EngineFigures
from rvllm.api.tallies import ManyAtOnce, PauseTally, TokenTally
from rvllm.engine.request import TokenEvent
from rvllm.sampling.params import SamplingParams

FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
           2560)  # fmt: skip
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
HTTP_S = (0.1, 0.5, 1)
PAUSE_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
CHOICES = (1, 2, 5, 10, 20)

OLDER = {
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
}
"""Names of vLLM's older versions, which dashboards ask for: told beside the new ones."""

GZIP = re.compile(r"(?i)(?:^|,)\s*(?:x-)?gzip\s*(?:,|$|;\s*q=(?:1|0\.0*[1-9]))")
"""Whether Accept-Encoding takes it: a weight of 0 is a refusal."""

Given = ParamSpec("Given")

METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE")
REASONS = ("stop", "length", "abort", "error")


def length_bounds(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to a length."""
    found = [digit * 10**power for power in range(len(str(longest))) for digit in (1, 2, 5)]
    return tuple(bound for bound in found if bound <= longest)


def harmless(count: Callable[Concatenate[Metrics, Given], None]) -> Callable[Concatenate[Metrics, Given], None]:
    """A way to count, of which a fault harms nobody but the figures."""

    @wraps(count)
    def counted(metrics: Metrics, /, *given: Given.args, **named: Given.kwargs) -> None:
        try:
            count(metrics, *given, **named)
        except Exception as error:
            metrics.fail(error)

    return counted


class Metrics:
    """One front's counters.

    model: the label model_name; longest: what the length of requests may be; tell: is told of a fault in counting.
    """

    def __init__(self, model: str, longest: int, tell: Callable[[str], None] = lambda message: None) -> None:
        self._tell, self._failed = tell, False
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._labels = {"model_name": model, "engine": "0"}
        self._registry = CollectorRegistry()
        self._shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if not self._shared:
            ProcessCollector(registry=self._registry)
        self.engine = EngineFigures(self._labels)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Tokens of prompts that the cache had.")
        sources = self._counter("prompt_tokens_by_source", "Tokens of prompts by where they came from.", "source")
        self._computed, self._hit = (sources.labels(**self._labels, source=one) for one in SOURCES)
        generated = self._counter("generation_tokens", "Tokens generated.")
        ended = self._counter("request_success", "Requests that ended.", "finished_reason")
        self._ended = {reason: ended.labels(**self._labels, finished_reason=reason) for reason in REASONS}
        self._rejected = Counter(
            "vllm:admission_rejections", "Refused for there being too much to do.", ("model_name", "reason"),
            registry=self._registry,
        )  # fmt: skip
        self._first_s = self._histogram("time_to_first_token_seconds", "From a request to its first token.", FIRST_S)
        next_s = ManyAtOnce(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request.", tuple(self._labels),
            buckets=TOKEN_S, registry=self._registry,
        ).labels(**self._labels)  # fmt: skip
        self.drawn = TokenTally(generated, next_s, self.fail)
        self._mean_s = self._histogram("request_time_per_output_token_seconds", "Mean of a request.", TOKEN_S)
        self._all_s = self._histogram("e2e_request_latency_seconds", "From a request to its last token.", REQUEST_S)
        self._queue_s = self._histogram("request_queue_time_seconds", "From a request to its first step.", REQUEST_S)
        self._run_s = self._histogram("request_inference_time_seconds", "From first step to last token.", REQUEST_S)
        self._prefill_s = self._histogram("request_prefill_time_seconds", "From first step to first token.", REQUEST_S)
        self._decode_s = self._histogram("request_decode_time_seconds", "From first token to last.", REQUEST_S)
        lengths = length_bounds(longest)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", lengths)
        self._longest = self._histogram("request_max_num_generation_tokens", "Of its longest completion.", lengths)
        self._output = self._histogram("request_generation_tokens", "Tokens of a completion.", lengths)
        self._most = self._histogram("request_params_max_tokens", "max_tokens of a request.", lengths)
        self._new = self._histogram("request_prefill_kv_computed_tokens", "Prompt tokens not in the cache.", lengths)
        self._n = self._histogram("request_params_n", "n of a request.", CHOICES)
        self._http = Counter(
            "http_requests", "Requests by route.", ("handler", "method", "status"), registry=self._registry
        )
        self._http_s = Histogram(
            "http_request_duration_seconds", "From a request to the end of its reply.", ("handler", "method"),
            buckets=HTTP_S, registry=self._registry,
        )  # fmt: skip
        self._going = Gauge(
            "rvllm:http_generations", "Requests for text that are being answered.", registry=self._registry,
            multiprocess_mode="livesum",
        )  # fmt: skip
        pause_s = ManyAtOnce(
            "rvllm:front_gc_pause_seconds", "Pauses of a front for garbage.", buckets=PAUSE_S, registry=self._registry
        )
        self.pauses = PauseTally(pause_s, PAUSE_S)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        made = Counter(f"vllm:{name}", told, (*self._labels, *labels), registry=self._registry)
        return made if labels else made.labels(**self._labels)

    def _histogram(self, name: str, told: str, bounds: Sequence[float]) -> Histogram:
        made = Histogram(f"vllm:{name}", told, tuple(self._labels), buckets=bounds, registry=self._registry)
        return made.labels(**self._labels)

    def fail(self, error: Exception) -> None:
        """Tell of a fault in counting, once."""
        if not self._failed:
            self._failed = True
            self._tell(f"figures at /metrics are not to be trusted any more: unexpected {type(error).__name__}")

    # --- What happens

    @harmless
    def asked(self, params: SamplingParams) -> None:
        """A request for text was taken on."""
        self._going.inc()
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._most.observe(params.max_tokens)

    @harmless
    def answered(self, longest: int) -> None:
        """It was answered, or its client is gone. longest: tokens of its longest completion."""
        self._going.dec()
        if longest:
            self._longest.observe(longest)

    @harmless
    def rejected(self, reason: str) -> None:
        self._rejected.labels(model_name=self._labels["model_name"], reason=reason).inc()

    @harmless
    def replied(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A reply to any request went out, or broke off; then the status is 0."""
        self.pauses.tell()
        method = method if method in METHODS else "other"
        self._http.labels(handler, method, f"{status // 100}xx").inc()
        self._http_s.labels(handler, method).observe(seconds)

    @harmless
    def begun(self, line: Timeline, event: TokenEvent) -> None:
        """A completion's first token came."""
        cached = event.cached_tokens or 0
        self._prompt_tokens.inc(line.prompt_tokens)
        self._cached_tokens.inc(cached)
        self._hit.inc(cached)
        self._computed.inc(line.prompt_tokens - cached)
        self._new.observe(line.prompt_tokens - cached)
        self._first_s.observe(line.first_s - line.asked_s)

    @harmless
    def ended(self, line: Timeline, reason: str) -> None:
        """A completion is through, or was given up."""
        self.drawn.tell()
        self._ended[reason].inc()
        if not line.tokens:
            return
        self._all_s.observe(line.last_s - line.asked_s)
        self._queue_s.observe(line.waited_s)
        self._prefill_s.observe(max(line.first_s - line.submitted_s - line.waited_s, 0.0))
        self._run_s.observe(max(line.last_s - line.submitted_s - line.waited_s, 0.0))
        self._decode_s.observe(line.last_s - line.first_s)
        if line.tokens > 1:
            self._mean_s.observe((line.last_s - line.first_s) / (line.tokens - 1))
        self._prompt.observe(line.prompt_tokens)
        self._output.observe(line.tokens)

    # --- What is told

    def going(self) -> int:
        """Requests for text that are being answered, by all fronts."""
        for metric in self._own():
            if metric.name == "rvllm:http_generations":
                return int(sum(sample.value for sample in metric.samples))
        return 0

    def page(self, accept: str, encodings: str = "") -> tuple[bytes, dict[str, str]]:
        """The figures and their headers, by the headers Accept and Accept-Encoding."""
        encode, kind = choose_encoder(accept)
        data, headers = encode(_Told(self._families())), {"content-type": kind, "vary": "accept, accept-encoding"}
        if GZIP.search(encodings):
            return gzip.compress(data, 1), headers | {"content-encoding": "gzip"}
        return data, headers

    def _own(self) -> Iterable[Metric]:
        self.drawn.tell()
        self.pauses.tell()
        if not self._shared:
            return self._registry.collect()
        return MultiProcessCollector(CollectorRegistry()).collect()  # type: ignore[no-untyped-call]

    def _families(self) -> Iterator[Metric]:
        for metric in (*self._own(), *self.engine.collect()):
            yield metric
            if metric.name in OLDER:
                yield _renamed(metric, OLDER[metric.name])


SOURCES = ("local_compute", "local_cache_hit")


@dataclass(slots=True)
class Timeline:
    """One completion as a front sees it, on the monotonic clock. asked_s: when its request began to come in.

    waited_s: in the engine, before its first step. began: is told when its first token came.
    """

    metrics: Metrics
    asked_s: float
    prompt_tokens: int
    submitted_s: float = 0.0
    waited_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    began: Callable[[], None] = lambda: None

    def submit(self) -> None:
        self.submitted_s = time.monotonic()

    def came(self, event: TokenEvent, came_s: float) -> None:
        """One token; those of one step come at the same time."""
        if came_s > self.last_s and self.tokens:
            self.metrics.drawn.next_token(came_s - self.last_s)
            self.last_s = came_s
        else:
            self.metrics.drawn.token()
            if not self.tokens:
                self._begin(event, came_s)
        self.tokens += 1

    def _begin(self, event: TokenEvent, came_s: float) -> None:
        self.first_s = self.last_s = came_s
        self.waited_s = event.waited_s or 0.0
        self.metrics.begun(self, event)
        self.began()

    def times(self) -> dict[str, float | None]:
        """vLLM's figures of one request, in milliseconds: what it waited, from its first step to its first token, from
        there to its last; None of what has not been.
        """
        begun_s, tokens = self.submitted_s + self.waited_s, self.tokens
        writing_s, all_s = self.last_s - self.first_s, self.last_s - begun_s
        return {
            "time_to_first_token_ms": (self.first_s - begun_s) * 1000 if tokens else None,
            "generation_time_ms": writing_s * 1000 if tokens else None,
            "queue_time_ms": self.waited_s * 1000 if tokens else None,
            "mean_itl_ms": writing_s * 1000 / (tokens - 1) if tokens > 1 else None,
            "tokens_per_second": tokens / all_s if tokens and all_s > 0 else None,
        }


class _Told(CollectorRegistry):
    """Stands for a registry where there are families already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _renamed(metric: Metric, name: str) -> Metric:
    made = Metric(name, metric.documentation, metric.type)
    made.samples = [sample._replace(name=sample.name.replace(metric.name, name, 1)) for sample in metric.samples]
    return made

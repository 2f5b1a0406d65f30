"""How long the device waits between the graphs of decode steps, what the host takes a step, and how even steps are.

    python benchmarks/idle.py [benchmarks/shapes/qwen2.5-1.5b] [--n 1,256] [--context 512] [--steps 400] [--pinned 2000]

Dummy weights, the engine called directly, greedy. While all sequences decode, events around every graph tell when the
device works; the rest is idle: between steps, and within one between forward and sampler. The host's share is the CPU
time of the engine's thread without its waiting for the device, and of it that of launching graphs. Then one step is
sent over and over with a pinned context, timed by events from one's end to the next one's: P50, P95 and P99. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ops import step_of
from rvllm.bench.runs import Workload
from rvllm.config import EngineConfig
from rvllm.engine.engine import Engine
from rvllm.engine.load import load_engine
from rvllm.model.files import locate
from rvllm.model.source import open_source
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import SamplingRow

SETTLED = 20  # steps after which all have their graphs and run ahead


class Watch:
    """Stands between a model and its GPU: when each graph began and ended, and how long the host waited."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.moments: list[tuple[Any, Any]] = []
        self.waited = self.launching = 0.0  # CPU seconds
        self.timing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def replay(self, graph: Any) -> None:
        first, begun = self._gpu.moment() if self.timing else None, time.thread_time()
        self._gpu.replay(graph)
        self.launching += time.thread_time() - begun
        if self.timing:
            self.moments.append((first, self._gpu.moment()))

    def wait(self, mark: Any) -> None:
        begun = time.thread_time()
        self._gpu.wait(mark)
        self.waited += time.thread_time() - begun

    def busy_and_all(self) -> tuple[float, float]:
        busy = sum(self._gpu.elapsed(*pair) for pair in self.moments)
        return busy, self._gpu.elapsed(self.moments[0][0], self.moments[-1][1])


def decode(engine: Engine, workload: Workload, sequences: int, context: int, steps: int) -> dict[str, float]:
    """Idle share of the device, and the host's CPU time, over so many steps in which all sequences decode."""
    model = engine._model
    for request in workload.requests(workload.prompts([context] * sequences), 2 * (steps + SETTLED) + sequences):
        engine.add(request)
    streak = 0
    while streak < SETTLED:
        streak = streak + 1 if len(engine.step()) == sequences else 0
    plain, watch = model._device, Watch(model._device)
    owners = [model, *(part for part in (model._sampler,) if part is not None)]
    for owner in owners:
        owner._device = watch
    cpu, begun = time.thread_time(), time.perf_counter()
    for _ in range(steps):
        assert len(engine.step()) == sequences
    cpu, wall = time.thread_time() - cpu - watch.waited, time.perf_counter() - begun
    launching = watch.launching
    watch.timing = True
    for _ in range(steps):
        assert len(engine.step()) == sequences
    for owner in owners:
        owner._device = plain
    busy, whole = watch.busy_and_all()
    plain.forget_moments(moment for pair in watch.moments for moment in pair)
    while engine.busy:
        engine.step()
    host = {"host_s": cpu / steps, "graphs_s": launching / steps, "step_s": wall / steps}
    return {"idle": 1 - busy / whole} | host


def pinned(engine: Engine, sequences: int, context: int, steps: int) -> dict[str, float]:
    """Quantiles of the time from one step's end to the next one's, all of them the same step."""
    model = engine._model
    step = step_of(sequences, context)
    rows = [
        SamplingRow(SamplingParams(temperature=0.0), seed=place, position=context, slot=place)
        for place in range(sequences)
    ]
    gpu, ended, started = model._device, [], model.start(step, rows)
    for _ in range(steps):
        following = model.start(step, rows)
        ended.append(gpu.moment())
        model.finish(started)
        started = following
    model.finish(started)
    times = [gpu.elapsed(*pair) for pair in zip(ended[SETTLED:], ended[SETTLED + 1 :])]
    gpu.forget_moments(ended)
    return {f"p{share}_s": float(np.percentile(times, share)) for share in (50, 95, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="benchmarks/shapes/qwen2.5-1.5b")
    parser.add_argument("--n", default="1,256")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pinned", type=int, default=2000)
    given = parser.parse_args()
    counts = [int(count) for count in given.n.split(",")]
    length = given.context + 2 * (given.steps + SETTLED) + max(counts) + 1
    config = EngineConfig(
        model=given.shape,
        load_format="dummy",
        device="cuda",
        max_model_len=length,
        max_num_seqs=max(counts),
        kv_cache_memory_bytes=24 << 30,
        enable_prefix_caching=False,
    )
    source = open_source(locate(given.shape, offline=True, progress=None), load_format="dummy", warn=print)
    vocab = source.config.vocab_size
    engine = load_engine(source, config, vocab_limit=vocab, eos_ids=frozenset(), progress=None, warn=print)
    workload = Workload(vocab, 0)
    gc.collect()
    gc.freeze()
    found = {}
    for count in counts:
        cell = decode(engine, workload, count, given.context, given.steps) | pinned(
            engine, count, given.context, given.pinned
        )
        found[count] = cell
        host, graphs, whole, middle = (1e3 * cell[name] for name in ("host_s", "graphs_s", "step_s", "p50_s"))
        print(
            f"N={count}: idle {cell['idle']:.2%}, host {host:.3f} (graphs {graphs:.3f}) of {whole:.3f} ms a step; "
            f"pinned: P50 {middle:.3f} ms, P95 {1e3 * cell['p95_s'] / middle:.4f} of it, "
            f"P99 {1e3 * cell['p99_s'] / middle:.4f}"
        )
    print(json.dumps({"shape": given.shape, "context": given.context, "n": found}))


if __name__ == "__main__":
    main()

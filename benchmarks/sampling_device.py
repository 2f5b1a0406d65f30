"""How long the sampler's kernels take on a GPU, beside a pass over the logits at the limit of the memory bus.

Run by `python benchmarks/sampling.py --device`. What the device draws is held to the numpy definition first; where a
token differs the run ends with exit code 1 and nothing is timed. A graph holds many chains, which take turns at copies
of the logits that L2 does not hold together, so that launching costs what it does in a decode step and no pass is free.
A kernel's share is what the chain up to it takes longer than the chain before it, by events on the device.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rvllm.backend.cuda.kernels import Gpu
from rvllm.backend.cuda.launch import Launch
from rvllm.backend.cuda.sampling import DeviceSampler
from rvllm.program.dtype import Float32
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import Sampled, SamplingRow, sample_rows

VOCABULARY = 151_936
BATCHES = (1, 64, 256)
COPIES = 4
CHAINS = 20  # in one graph
PAST = 500
BUS_BYTES_S = 4.68e12  # measured on an H200, reading
BOUNDARY = 2.0**-20  # a mass this close to top_p may round to either side
LOGPROB_ERROR = 1e-5

FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    params: SamplingParams
    spread: float = 3.5  # of the logits; a trained model's are about this wide


CASES = (
    Case("greedy", SamplingParams(temperature=0.0)),
    Case("greedy, penalties", SamplingParams(temperature=0.0, **PENALTIES)),
    Case("top-k 50, top-p 0.9", SamplingParams(**FILTERS)),
    Case("top-k 50, top-p 0.9, penalties", SamplingParams(**FILTERS, **PENALTIES)),
    Case("top-k 50, top-p 0.9, penalties, 5 logprobs", SamplingParams(**FILTERS, **PENALTIES, logprobs=5)),
    Case("top-p 0.9", SamplingParams(top_p=0.9)),
    Case("top-p 0.9, flat logits", SamplingParams(top_p=0.9), spread=0.5),
    Case("temperature only", SamplingParams(temperature=0.8)),
)


class Bench:
    """A sampler, and copies of the largest batch's logits on the device."""

    def __init__(self) -> None:
        self.gpu = Gpu(0, warn=print)
        most = BATCHES[-1]
        self.sampler = DeviceSampler(self.gpu, rows=most, vocab=VOCABULARY, vocab_limit=VOCABULARY, eager=False)
        self.copies = [self.gpu.allocate(4 * most * VOCABULARY) for _ in range(COPIES)]
        self.next_ids = self.gpu.allocate(4 * most)
        self.seeds = 0

    def rows(self, params: SamplingParams, count: int) -> list[SamplingRow]:
        """Sequences that no slot has seen."""
        self.seeds += count
        random = np.random.default_rng(self.seeds)
        rows = []
        for slot in range(count):
            prompt = tuple(random.integers(0, VOCABULARY, PAST).tolist())
            output = dict(zip(random.integers(0, VOCABULARY, PAST).tolist(), random.integers(1, 4, PAST).tolist()))
            rows.append(SamplingRow(params, self.seeds + slot, 2 * PAST, prompt, output, slot=slot))
        return rows

    def draw(self, rows: Sequence[SamplingRow]) -> list[Sampled]:
        self.sampler.send(rows, len(rows), 0)
        self.sampler.sample(self.copies[0], self.next_ids, rows, len(rows), 0)
        self.gpu.synchronize()
        return self.sampler.take(rows, 0)

    def kernels_s(self, rows: Sequence[SamplingRow], repeats: int) -> dict[str, float]:
        """Median device seconds of each kernel of a chain, which add up to the chain's; `draw` has sent the rows."""
        chains = [self.launches(copy, rows) for copy in self.copies]
        names = [launch.entry for launch in chains[0]]
        ends = [0.0, *(self._chains_s([chain[: last + 1] for chain in chains], repeats) for last in range(len(names)))]
        return {name: ends[place + 1] - ends[place] for place, name in enumerate(names)}

    def launches(self, copy: int, rows: Sequence[SamplingRow]) -> list[Launch]:
        return self.sampler.launches(self.sampler.chain(copy, self.next_ids, rows, len(rows), 0))

    def _chains_s(self, chains: Sequence[Sequence[Launch]], repeats: int) -> float:
        graph = self.gpu.capture([launch for turn in range(CHAINS) for launch in chains[turn % COPIES]])
        times = [self.gpu.seconds(lambda: self.gpu.replay(graph)) / CHAINS for _ in range(repeats + 1)]
        self.gpu.forget(graph)
        return statistics.median(times[1:])

    def host_s(self, rows: Sequence[SamplingRow], repeats: int) -> float:
        """Median seconds that the host takes to send one step's rows, positions advancing."""
        times = []
        for step in range(repeats):
            ahead = [replace(row, position=row.position + 1 + step) for row in rows]
            start = time.perf_counter()
            self.sampler.send(ahead, len(rows), step % 2)
            times.append(time.perf_counter() - start)
        self.gpu.synchronize()
        return statistics.median(times)


def fault(logits: Float32, rows: Sequence[SamplingRow], drawn: Sequence[Sampled]) -> str | None:
    """What the device drew otherwise than the definition does, or None."""
    for index, (row, got, want) in enumerate(zip(rows, drawn, sample_rows(logits, rows, VOCABULARY))):
        if got.token_id != want.token_id and got.token_id not in near_tokens(logits[index : index + 1], row):
            return f"row {index} drew {got.token_id}, not {want.token_id}"
        if got.token_id != want.token_id:
            continue
        if [token for token, _ in got.top_logprobs] != [token for token, _ in want.top_logprobs]:
            return f"row {index} lists {got.top_logprobs}, not {want.top_logprobs}"
        if want.logprob is not None and abs((got.logprob or 0.0) - want.logprob) > LOGPROB_ERROR:
            return f"row {index} has log-probability {got.logprob}, not {want.logprob}"
    return None


def near_tokens(logits: Float32, row: SamplingRow) -> list[int]:
    """What the row draws where top_p's last token falls the other way."""
    if row.params.top_p == 1:
        return []
    near = [replace(row.params, top_p=row.params.top_p + side) for side in (-BOUNDARY, BOUNDARY)]
    return [sample_rows(logits, [replace(row, params=one)], VOCABULARY)[0].token_id for one in near]


def measure(bench: Bench, case: Case, count: int, logits: Float32, repeats: int) -> dict[str, object]:
    for copy in bench.copies:
        bench.gpu.write(copy, logits)
    rows = bench.rows(case.params, count)
    wrong = fault(logits, rows, bench.draw(rows))
    if wrong:
        raise SystemExit(f"{case.name}, {count} rows: {wrong}; nothing was timed")
    kernels_s, host_s = bench.kernels_s(rows, repeats), bench.host_s(rows, repeats)
    device_s = sum(kernels_s.values())
    parts = " + ".join(f"{name.removeprefix('sample_')} {seconds * 1e6:.1f}" for name, seconds in kernels_s.items())
    pass_s = 4 * count * VOCABULARY / BUS_BYTES_S
    print(
        f"{case.name:43} {count:4} rows {device_s * 1e6:8.1f} us  a pass at the limit {pass_s * 1e6:6.1f} us  "
        f"host {host_s * 1e6:7.1f} us  {parts}"
    )
    return {
        "name": case.name,
        "rows": count,
        "kernels_s": kernels_s,
        "device_s": device_s,
        "pass_s": pass_s,
        "host_s": host_s,
    }


def main(repeats: int) -> None:
    bench = Bench()
    results = []
    for count in BATCHES:
        noise = np.random.default_rng(count).standard_normal((count, VOCABULARY), dtype=np.float32)
        for case in CASES:
            results.append(measure(bench, case, count, noise * np.float32(case.spread), repeats))
    about = {"gpu": bench.gpu.gpu.name, "tier": bench.gpu.tier, "vocabulary": VOCABULARY, "repeats": repeats}
    print(json.dumps({"benchmark": "sampling --device", **about, "cases": results}))

"""How much faster the host sampler is than plain numpy (softmax, sort, cumulative sum, choice), row by row.

    python -m benchmarks.sampling [--rows 64] [--vocabulary 32000] [--repeats 7]

Both give a token and its log-probability a row, on one thread. Ours makes a random number for every kept token,
where inverting a cumulative sum needs one a row: the price, seen where no filter is set, of a token that does not
depend on batch, order or device. Outputs are checked first; where they are wrong the run ends with exit code 1
before that case is timed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import Float32
from rvllm.sampling.draw import keep
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import sample_batch

# A mass this close to top_p may round to either side: the one place where the two sets may differ.
BOUNDARY = 1e-6

Drawn = tuple[int, float]  # token id, logprob


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    logits: str  # uniform: flat over -10..10, as in the original's benchmark; peaked: as a trained model's
    temperature: float
    top_k: int = 0
    top_p: float = 1.0


CASES = (
    Case("top-p 0.9, flat logits", "uniform", 1.0, 0, 0.9),
    Case("top-p 0.9, peaked logits", "peaked", 1.0, 0, 0.9),
    Case("T 0.8, top-k 50, top-p 0.9", "uniform", 0.8, 50, 0.9),
    Case("temperature only", "uniform", 1.0),
    Case("greedy", "uniform", 0.0),
)


def naive_set(logits: Float32, case: Case) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids in order of probability, cut by top-k and top-p, and their probabilities."""
    scaled = logits.astype(np.float64) / case.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights)
    if case.top_k:
        order = order[: case.top_k]
    chances = weights[order] / weights[order].sum()
    kept = int(np.searchsorted(np.cumsum(chances), case.top_p)) + 1 if case.top_p < 1 else order.size
    return order[:kept], chances[:kept] / chances[:kept].sum()


def naive_batch(batch: Float32, case: Case, random: np.random.Generator) -> list[Drawn]:
    """The reference: a token and its logprob a row, the sort left out where no filter asks for it."""
    return [naive_draw(logits, case, random) for logits in batch]


def naive_draw(logits: Float32, case: Case, random: np.random.Generator) -> Drawn:
    if case.top_k or case.top_p < 1:
        ids, chances = naive_set(logits, case)
        place = int(random.choice(ids.size, p=chances))
        return int(ids[place]), math.log(chances[place])
    best = int(logits.argmax())
    weights = np.exp((logits - logits[best]) / np.float32(case.temperature or 1.0))
    sums = np.cumsum(weights, dtype=np.float64) if case.temperature else None
    if sums is None:
        return best, -math.log(weights.sum())
    token = int(np.searchsorted(sums, random.random() * sums[-1], side="right"))
    return token, math.log(weights[token] / sums[-1])


def our_batch(batch: Float32, case: Case, seed: int) -> list[Drawn]:
    outputs = sample_batch(batch, temperature=case.temperature, top_k=case.top_k, top_p=case.top_p, seed=seed)
    return [(output.token_id, output.logprob) for output in outputs]


def fault(batch: Float32, case: Case) -> str | None:
    """What is wrong with our outputs, or None."""
    drawn = our_batch(batch, case, seed=1)
    if drawn != our_batch(batch, case, seed=1):
        return "the same seed gave other tokens"
    return next(filter(None, (row_fault(logits, case, *one) for logits, one in zip(batch, drawn))), None)


def row_fault(logits: Float32, case: Case, token: int, logprob: float) -> str | None:
    """Our token must be in the reference's set, our set be that set, and our logprob its logprob."""
    if case.temperature == 0:
        expected = naive_draw(logits, case, np.random.default_rng())
        same = token == expected[0] and abs(logprob - expected[1]) < 1e-4
        return None if same else f"greedy gave {(token, logprob)}, not {expected}"
    ids, chances = naive_set(logits, case)
    kept = keep(logits, SamplingParams(temperature=case.temperature, top_k=case.top_k, top_p=case.top_p)).ids
    differing = np.setxor1d(kept, ids)
    if differing.size > 1 or (differing.size and chances[-1] > BOUNDARY):
        return f"{differing.size} tokens of {ids.size} are kept by one and not the other"
    if token not in kept:
        return f"token {token} was filtered out, yet drawn"
    if token in ids and abs(math.log(chances[ids == token][0]) - logprob) > 1e-4:
        return f"token {token} has logprob {logprob}, not {math.log(chances[ids == token][0])}"
    return None


def best_s(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of each one's fastest of `repeats` runs, taking turns, after one to warm up."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, own in zip(runs, times):
            start = time.perf_counter()
            run()
            own.append(time.perf_counter() - start)
    return [min(own[1:]) for own in times]


def make_logits(kind: str, rows: int, vocabulary: int) -> Float32:
    random = np.random.default_rng(42)
    if kind == "uniform":
        return random.uniform(-10, 10, (rows, vocabulary)).astype(np.float32)
    return (random.standard_normal((rows, vocabulary)) * 3.5).astype(np.float32)


def measure(case: Case, rows: int, vocabulary: int, repeats: int) -> dict[str, object]:
    batch = make_logits(case.logits, rows, vocabulary)
    wrong = fault(batch, case)
    if wrong:
        raise SystemExit(f"{case.name}: {wrong}; nothing was timed")
    random = np.random.default_rng(0)
    naive_s, ours_s = best_s(
        [lambda: naive_batch(batch, case, random), lambda: our_batch(batch, case, seed=1)], repeats
    )
    ratio = naive_s / ours_s
    print(f"{case.name:28} numpy {naive_s * 1e3:7.2f} ms   rvllm {ours_s * 1e3:7.2f} ms   {ratio:5.2f} times as fast")
    return {"name": case.name, "numpy_s": naive_s, "rvllm_s": ours_s, "ratio": ratio}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    cases = [measure(case, options.rows, options.vocabulary, options.repeats) for case in CASES]
    about = {"machine": platform.machine(), "numpy": np.__version__, **vars(options)}
    print(json.dumps({"benchmark": "sampling", **about, "cases": cases}))


if __name__ == "__main__":
    main(sys.argv[1:])

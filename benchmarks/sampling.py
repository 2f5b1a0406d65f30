"""How much faster the host sampler is than plain numpy, row by row; with --device, how long the GPU's kernels take.

    python -m benchmarks.sampling [--rows 64] [--vocabulary 32000] [--repeats 7]
    python benchmarks/sampling.py --device [--repeats 50]

On the host both sides give a token and its log-probability a row, on one thread; plain numpy is a softmax in float64,
a sort, a cumulative sum and a choice. Ours makes a random number for every kept token, where a choice needs one a row:
the price, seen where no filter is set, of a token that does not depend on batch, order or device. So a draw is timed
twice: beside a choice, and beside the same rule (Gumbel-max) in plain numpy. Outputs are checked first; where they are
wrong the run ends with exit code 1 before that case is timed. Times are CPU seconds, medians of runs that take turns.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from rvllm.program.dtype import Float32
from rvllm.sampling.api import sample_batch
from rvllm.sampling.draw import keep
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import SamplingRow, process_logits

# A mass this close to top_p may round to either side: the one place where the two sets may differ.
BOUNDARY = 1e-6
PAST = 500  # tokens that penalties are for

Drawn = tuple[int, float]  # token id, logprob


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    logits: str  # uniform: flat over -10..10, as in the original's benchmark; peaked: as a trained model's
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    repetition: float = 1.0
    gumbel: bool = False  # the reference draws by the same rule
    wanted: float = 0.0  # the ratio that the project wants; 0: only told


CASES = (
    Case("T 0.8, top-k 50, top-p 0.9, repetition 1.1", "uniform", 0.8, 50, 0.9, 1.1, wanted=5.0),
    Case("draw, beside the same rule", "peaked", 1.0, gumbel=True, wanted=2.0),
    Case("draw, beside Generator.choice", "peaked", 1.0),
    Case("top-p 0.9, flat logits", "uniform", 1.0, 0, 0.9),
    Case("top-p 0.9, peaked logits", "peaked", 1.0, 0, 0.9),
    Case("greedy", "uniform", 0.0),
)


def past_ids(row: int, vocabulary: int) -> list[int]:
    return np.random.default_rng(row).integers(0, vocabulary, PAST).tolist()  # type: ignore[no-any-return]


def naive_penalties(
    logits: Float32, past: Sequence[int], repetition: float, presence: float, frequency: float
) -> npt.NDArray[np.float64]:
    counts = np.bincount(past, minlength=logits.size)
    seen = counts > 0
    out = np.where(seen, np.where(logits > 0, logits / repetition, logits * repetition), logits)
    return out - frequency * counts - presence * seen


def naive_chances(logits: Float32, case: Case, past: Sequence[int]) -> npt.NDArray[np.float64]:
    processed = logits.astype(np.float64)
    if case.repetition != 1:
        processed = naive_penalties(logits, past, case.repetition, 0.0, 0.0)
    scaled = processed / (case.temperature or 1.0)
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def naive_set(
    logits: Float32, case: Case, past: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids, cut by top-k and top-p in order of probability where either asks for it, and their probabilities."""
    chances = naive_chances(logits, case, past)
    if not case.top_k and case.top_p == 1:
        return np.arange(logits.size), chances
    order = np.argsort(-chances)
    if case.top_k:
        order = order[: case.top_k]
    chances = chances[order] / chances[order].sum()
    kept = int(np.searchsorted(np.cumsum(chances), case.top_p)) + 1 if case.top_p < 1 else order.size
    return order[:kept], chances[:kept] / chances[:kept].sum()


def naive_batch(batch: Float32, case: Case, past: Sequence[Sequence[int]], random: np.random.Generator) -> list[Drawn]:
    """The reference: a token and its logprob a row."""
    return [naive_draw(logits, case, own, random) for logits, own in zip(batch, past)]


def naive_draw(logits: Float32, case: Case, past: Sequence[int], random: np.random.Generator) -> Drawn:
    if case.temperature == 0:
        best = int(logits.argmax())
        return best, -math.log(np.exp(logits - logits[best]).sum())
    ids, chances = naive_set(logits, case, past)
    if case.gumbel:
        logs = np.log(chances)
        place = int((logs - np.log(-np.log1p(-random.random(ids.size)))).argmax())
        return int(ids[place]), float(logs[place])
    place = int(random.choice(ids.size, p=chances))
    return int(ids[place]), math.log(chances[place])


def our_batch(batch: Float32, case: Case, past: Sequence[Sequence[int]], seed: int) -> list[Drawn]:
    outputs = sample_batch(
        batch,
        temperature=case.temperature,
        top_k=case.top_k,
        top_p=case.top_p,
        seed=seed,
        repetition_penalty=case.repetition,
        past_ids=past,
    )
    return [(output.token_id, output.logprob) for output in outputs]


def fault(batch: Float32, case: Case, past: Sequence[Sequence[int]]) -> str | None:
    """What is wrong with our outputs, or None."""
    drawn = our_batch(batch, case, past, seed=1)
    if drawn != our_batch(batch, case, past, seed=1):
        return "the same seed gave other tokens"
    faults = (row_fault(logits, case, own, *one) for logits, own, one in zip(batch, past, drawn))
    return next(filter(None, faults), None)


def row_fault(logits: Float32, case: Case, past: Sequence[int], token: int, logprob: float) -> str | None:
    """Our token must be in the reference's set, our set be that set, and our logprob its logprob."""
    if case.temperature == 0:
        expected = naive_draw(logits, case, past, np.random.default_rng())
        same = token == expected[0] and abs(logprob - expected[1]) < 1e-4
        return None if same else f"greedy gave {(token, logprob)}, not {expected}"
    ids, chances = naive_set(logits, case, past)
    params = SamplingParams(
        temperature=case.temperature, top_k=case.top_k, top_p=case.top_p, repetition_penalty=case.repetition
    )
    kept = keep(process_logits(logits, SamplingRow(params, 0, 0, past)), params).ids
    differing = np.setxor1d(kept, ids)
    if differing.size > 1 or (differing.size and chances[-1] > BOUNDARY):
        return f"{differing.size} tokens of {ids.size} are kept by one and not the other"
    if token not in kept:
        return f"token {token} was filtered out, yet drawn"
    if token in ids and abs(math.log(chances[ids == token][0]) - logprob) > 1e-4:
        return f"token {token} has logprob {logprob}, not {math.log(chances[ids == token][0])}"
    return None


def median_s(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """CPU seconds of each one's median of `repeats` runs, taking turns, after one to warm up."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, own in zip(runs, times):
            start = time.process_time()
            run()
            own.append(time.process_time() - start)
    return [statistics.median(own[1:]) for own in times]


def make_logits(kind: str, rows: int, vocabulary: int) -> Float32:
    random = np.random.default_rng(42)
    if kind == "uniform":
        return random.uniform(-10, 10, (rows, vocabulary)).astype(np.float32)
    return (random.standard_normal((rows, vocabulary)) * 3.5).astype(np.float32)


def measure(case: Case, rows: int, vocabulary: int, repeats: int) -> dict[str, object]:
    batch = make_logits(case.logits, rows, vocabulary)
    past = [past_ids(row, vocabulary) for row in range(rows)]
    wrong = fault(batch, case, past)
    if wrong:
        raise SystemExit(f"{case.name}: {wrong}; nothing was timed")
    random = np.random.default_rng(0)
    runs = [lambda: naive_batch(batch, case, past, random), lambda: our_batch(batch, case, past, seed=1)]
    return told(case.name, case.wanted, *median_s(runs, repeats))


def measure_penalties(rows: int, vocabulary: int, repeats: int) -> dict[str, object]:
    """The penalties by themselves, which the engine's CPU path makes of its counts."""
    batch = make_logits("uniform", rows, vocabulary)
    past = [past_ids(row, vocabulary) for row in range(rows)]
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2)
    counts = [dict(zip(*(side.tolist() for side in np.unique(own, return_counts=True)))) for own in past]
    requests = [SamplingRow(params, 0, 0, (), own) for own in counts]

    def naive() -> list[npt.NDArray[np.float64]]:
        return [naive_penalties(logits, own, 1.1, 0.5, 0.2) for logits, own in zip(batch, past)]

    def ours() -> list[Float32]:
        return [process_logits(logits, row) for logits, row in zip(batch, requests)]

    if not np.allclose(naive(), ours(), rtol=0, atol=1e-5):  # float32 beside float64, of numbers up to 13
        raise SystemExit("the penalties give other logits; nothing was timed")
    return told(f"penalties for {PAST} past tokens", 2.0, *median_s([naive, ours], repeats))


def told(name: str, wanted: float, naive_s: float, ours_s: float) -> dict[str, object]:
    ratio = naive_s / ours_s
    aim = f", {wanted:g} wanted" if wanted else ""
    print(f"{name:43} numpy {naive_s * 1e3:7.2f} ms   rvllm {ours_s * 1e3:7.2f} ms   {ratio:5.2f} times as fast{aim}")
    return {"name": name, "numpy_s": naive_s, "rvllm_s": ours_s, "ratio": ratio, "wanted": wanted}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--device", action="store_true")
    options = parser.parse_args(arguments)
    if options.device:
        from benchmarks.sampling_device import main as device

        device(options.repeats or 50)
        return
    sizes = (options.rows, options.vocabulary, options.repeats or 7)
    cases = [measure(CASES[0], *sizes), measure_penalties(*sizes), *(measure(case, *sizes) for case in CASES[1:])]
    about = {"machine": platform.machine(), "numpy": np.__version__, **vars(options)}
    print(json.dumps({"benchmark": "sampling", **about, "cases": cases}))


if __name__ == "__main__":
    main(sys.argv[1:])

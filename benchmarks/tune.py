"""Which figures of rvllm/backend/cuda/tuning.py make decode steps shortest on this GPU.

    python benchmarks/tune.py benchmarks/shapes/qwen2.5-1.5b benchmarks/shapes/qwen2.5-7b [--only ring_bytes]

One figure after another, each of its CHOICES with the others as they are, in the forward graph of every shape and
number of sequences: a kernel that is fastest in a row of its like may not be so in a step. Times are by turns with
those of the figures at hand. A choice is taken where the geometric mean of its ratios is less by GAIN or more; the
next figure is tried with it. Printed are each choice's mean and the cases that it changes by a per cent.

Before, every op of two layers of each shape is held to its definition. Of up to 64 sequences a choice must leave every
bit of the logits; of more, where sums may be cut in another way, their difference must be small. Else: exit code 1 and
no figures. The last line is JSON, the figures to be committed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.ops import load, microseconds, step_of
from rvllm.backend.cuda.kernels import Gpu
from rvllm.backend.cuda.launch import Bucket, Launch, Target
from rvllm.backend.cuda.lower import lower
from rvllm.backend.cuda.model import CudaModel
from rvllm.backend.cuda.step_block import padded_sequences
from rvllm.backend.cuda.tuning import TUNED, UNTUNED, Tuning
from rvllm.cli.measure import check_ops
from rvllm.config import EngineConfig
from rvllm.model.files import locate
from rvllm.model.source import open_source
from rvllm.program.dtype import Float32

CHOICES: dict[str, tuple[int, ...]] = {
    "ring_tokens": (0, 1, 2, 4, 8),
    "ring_bytes": (16 << 10, 32 << 10, 48 << 10, 64 << 10, 96 << 10),
    "ring_stages": (4, 5, 6, 7, 8),
    "low_tile_tokens": (0, 1, 2, 4, 8),
    "wide_tokens_large": (8, 12, 16, 24, 32),
    "wide_tokens": (8, 16, 24, 32),
    "large_bytes": (4 << 20, 12 << 20, 24 << 20, 48 << 20),
    "slot_tile_depth": (600, 900, 1200, 1600),
    "token_tile_depth": (250, 500, 750),
    "most_parts_of_256": (1, 2, 4, 8, 16),
}
GAIN = 0.002
SAME_BITS = 64  # sequences up to which bits follow from weights alone
MOST_DIFFERENCE = 2.0**-5  # of logits of more, root mean square over that of the logits


class WrongOutput(Exception):
    """A choice makes other logits, and so has no speed."""


@dataclass(frozen=True, slots=True)
class Case:
    """A decode step of so many sequences of a shape, and its logits with the figures at hand."""

    name: str
    gpu: Gpu
    model: CudaModel
    target: Target
    sequences: int
    logits: Float32

    def launches(self, tuning: Tuning) -> list[Launch]:
        target = replace(self.target, tuning=tuning)
        return [launch for op in self.model.program.ops for launch in lower(op, target)]

    def ratio(self, tuning: Tuning, present: Tuning) -> float:
        """The step's time with these figures over that with the present ones. Raises WrongOutput."""
        ours, others = self.launches(tuning), self.launches(present)
        if ours == others:
            return 1.0
        before_us = microseconds(self.gpu, others)
        taken_us = microseconds(self.gpu, ours)
        self._check(tuning)
        return taken_us / ((before_us + microseconds(self.gpu, others)) / 2)

    def _check(self, tuning: Tuning) -> None:
        found = np.empty_like(self.logits)
        self.gpu.read(self.model._addresses[self.model.program.output.name], found)
        if self.sequences <= SAME_BITS:
            same = np.array_equal(found, self.logits)
        else:
            same = bool(_rms(found - self.logits) <= MOST_DIFFERENCE * _rms(self.logits))
        if not same:
            raise WrongOutput(f"{self.name}: other logits with {tuning}")


def _rms(values: Float32) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def cases_of(gpu: Gpu, shape: Path, counts: Sequence[int], context: int, present: Tuning) -> list[Case]:
    source = open_source(locate(str(shape), offline=True, progress=None), load_format="dummy", warn=print)
    worst = check_ops(source, EngineConfig(model=str(shape), dtype="bfloat16"), gpu, lambda *_: None)
    print(f"{shape.name}: every op of two layers within {worst:.1f} roundings of its definition")
    model, cases = load(source, gpu, max(counts), context), []
    for count in counts:
        logits = model.forward(step_of(count, context))
        size = padded_sequences(count, max(counts))
        target = replace(model._target(Bucket(size, size, size, False)), tuning=present)
        cases.append(Case(f"{shape.name} N={count}", gpu, model, target, count, logits))
    return cases


def mean_of(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def chosen(means: Mapping[int, float], present: int) -> int:
    """The choice with the smallest mean, or the present one, which has 1, where that gains too little."""
    best = min(means, key=lambda choice: means[choice])
    return best if means[best] <= 1 - GAIN else present


def tuned(cases: Sequence[Case], present: Tuning, figures: Sequence[str]) -> Tuning:
    """The figures at hand with the best choice of each of these. Raises WrongOutput."""
    for figure in figures:
        value, means = getattr(present, figure), {}
        for choice in CHOICES[figure]:
            tuning = replace(present, **{figure: choice})
            ratios = {case.name: case.ratio(tuning, present) for case in cases}
            means[choice] = mean_of(list(ratios.values()))
            changed = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items() if abs(ratio - 1) >= 0.01)
            print(f"{figure:18} {choice:>10,} {means[choice]:.4f}  {changed}", flush=True)
        best = chosen(means, value)
        if best != value:
            print(f"{figure}: {value:,} -> {best:,}")
            present = replace(present, **{figure: best})
    return present


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", type=Path, nargs="+")
    parser.add_argument("--n", default="1,2,4,8,16,24,32,64,128,256")
    parser.add_argument("--context", type=int, default=592)
    parser.add_argument("--only", default=",".join(CHOICES), help="figures, by commas")
    given = parser.parse_args()
    figures = given.only.split(",")
    if unknown := [figure for figure in figures if figure not in CHOICES]:
        parser.error(f"no such figure: {', '.join(unknown)}. hint: known are {', '.join(CHOICES)}")
    counts = [int(count) for count in given.n.split(",")]
    gpu = Gpu(0, print)
    present = TUNED.get(gpu.tier, UNTUNED)
    print(f"{gpu.gpu.name}, {gpu.tier}")
    cases = [case for shape in given.shapes for case in cases_of(gpu, shape, counts, given.context, present)]
    try:
        found = tuned(cases, present, figures)
    except WrongOutput as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Hold every op of a step on the device to its definition, on the device's own inputs, so that drift hides nothing.

Knows both backends' seams; it is what `doctor --check` runs, and how a wrong kernel is found by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rvllm.backend.cpu import define_op, load_weights
from rvllm.backend.cuda.model import CudaModel
from rvllm.model.checkpoint import Checkpoint
from rvllm.program.dtype import BF16, F16, F32, DType, Float32, round_to
from rvllm.program.ops import Kind, Op, RopeKV, kernel_stem, parts, reads
from rvllm.program.program import Step

ROUNDINGS = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
"""Half a unit in the last place, relative: one rounding to nearest."""

ALLOWED = 8.0
"""Roundings, of the largest value of a row, by which an op may differ: a fused op rounds up to three times, attention
also its weights, and sums in another order round the other way."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an op is from its definition, in roundings of its dtype relative to its row's largest value."""

    op: str
    kernel: str
    roundings: float

    @property
    def wrong(self) -> bool:
        return not self.roundings <= ALLOWED  # NaN is wrong


class Checker:
    """Runs steps of a CUDA model op by op beside numpy."""

    def __init__(self, model: CudaModel, checkpoint: Checkpoint) -> None:
        self._model = model
        weights = load_weights(model.program, checkpoint, None)
        self._weights = {name: round_to(values, model.dtype) for name, values in weights.items()}

    def check(self, step: Step) -> list[Difference]:
        """Every op of the step in order; the model's caches then hold the step's tokens."""
        found = []
        for op, run in self._model.one_by_one(step):
            inputs = {
                tensor.name: self._model.read(tensor, step) for tensor in reads(op) if tensor.kind is not Kind.WEIGHT
            }
            run()
            found.append(self._compare(op, inputs, step))
        return found

    def _compare(self, op: Op, inputs: dict[str, Any], step: Step) -> Difference:
        values: dict[str, Any] = dict(inputs)
        for part in parts(op):
            values[part.out.name] = define_op(part, values, self._weights, step)
        out = parts(op)[-1].out
        worst = _roundings(self._model.read(out, step), values[out.name], out.dtype)
        for part in parts(op):
            if isinstance(part, RopeKV):  # it writes to the cache, too
                written = self._model.read(part.cache, step)
                worst = max(worst, _roundings(written, values[part.cache.name], part.cache.dtype))
        return Difference(out.name, kernel_stem(op), worst)


def _roundings(found: Float32, expected: Float32, dtype: DType) -> float:
    """The largest difference of an element, over its row's largest value, in roundings of `dtype`."""
    rows = expected.reshape(-1, expected.shape[-1])
    scale = np.abs(rows).max(axis=1, keepdims=True)
    difference = np.abs(found.reshape(rows.shape) - rows)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(difference == 0, 0, difference / scale)
    return float(relative.max()) / ROUNDINGS[dtype]

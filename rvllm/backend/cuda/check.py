"""Hold every op of a step on the device to its definition, on the device's own inputs, so that drift hides nothing.

Knows both backends' seams; it is what `doctor --check` runs, and how a wrong kernel is found by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rvllm.backend.cpu import define_op
from rvllm.backend.cuda.model import CudaModel
from rvllm.backend.cuda.products import LINEAR_TOKENS
from rvllm.model.checkpoint import Checkpoint
from rvllm.program.dtype import BF16, E4M3, F16, F32, DType, Float32, load, round_to
from rvllm.program.ops import Attention, Embedding, Kind, Linear, Norm, Op, RopeKV, Tensor, kernel_stem, parts, reads
from rvllm.program.program import Step, joined_name

ROUNDINGS = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
"""Half a unit in the last place, relative: one rounding to nearest."""

ALLOWED = 8.0
"""Roundings by which an op may differ, of the largest value of its row: a fused op rounds up to three times, attention
also its weights, and sums in another order round the other way.

A product that stays in float32 has no last rounding to hide its sums', and numpy's sums are no truth for it: they are
further from float64 than the kernels' (benchmarks/LOG.md). It is held to float64, and each element to roundings of the
sum of its terms' magnitudes: the componentwise backward error (Higham 2002, section 3.1), which knows of cancellation.
"""

_PIECE = 1 << 22  # elements rounded at a time


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an op is from its definition, in the roundings that ALLOWED counts."""

    op: str
    kernel: str
    roundings: float

    @property
    def wrong(self) -> bool:
        return not self.roundings <= ALLOWED  # NaN is wrong


class Checker:
    """Runs steps of a CUDA model op by op beside numpy. An op's weights are read when it is reached, and let go."""

    def __init__(self, model: CudaModel, checkpoint: Checkpoint) -> None:
        self._model = model
        self._checkpoint = checkpoint
        readers = Counter(joined_name(segments) for op in model.program.ops for segments in _weights_of(op))
        self._shared = {name for name, count in readers.items() if count > 1}  # the embedding, where it is the head
        self._kept: dict[str, Float32] = {}

    def check(self, step: Step) -> list[Difference]:
        """Every op of the step in order; the model's caches then hold the step's tokens."""
        return list(self.differences(step))

    def differences(self, step: Step) -> Iterator[Difference]:
        """The same, each as soon as it is known."""
        for op, run in self._model.one_by_one(step):
            inputs = {
                tensor.name: self._model.read(tensor, step) for tensor in reads(op) if tensor.kind is not Kind.WEIGHT
            }
            run()
            yield self._compare(op, inputs, step)

    def _compare(self, op: Op, inputs: dict[str, Any], step: Step) -> Difference:
        values: dict[str, Any] = dict(inputs)
        weights = {joined_name(segments): self._weight(segments) for segments in _weights_of(op)}
        if isinstance(op, Linear) and op.out.dtype is F32:
            matrix, bias = weights[joined_name(op.weights)], weights.get(joined_name(op.biases))
            worst = product_roundings(self._model.read(op.out, step), values[op.x.name], matrix, bias)
            return Difference(op.out.name, self._kernel(op, step), worst)
        for part in parts(op):
            values[part.out.name] = define_op(part, values, weights, step)
        out = parts(op)[-1].out
        worst = _roundings(self._model.read(out, step), values[out.name], _coarsest(op))
        for part in parts(op):
            if isinstance(part, RopeKV):  # it writes to the cache, too
                worst = max(worst, self._written(part, values, step))
        return Difference(out.name, self._kernel(op, step), worst)

    def _kernel(self, op: Op, step: Step) -> str:
        """The stem of the op's kernel at this step's size: products have one for few tokens, one for many."""
        stem = kernel_stem(op)
        few = self._model.batch_invariant or step.sizes[str(op.out.shape[0])] <= LINEAR_TOKENS
        return stem if few or not stem.startswith("linear") else stem.replace("linear", "gemm", 1)

    def _written(self, op: RopeKV, values: dict[str, Any], step: Step) -> float:
        """How far the cache is from what it should hold. Codes and their scales have one right value each."""
        if op.scales is None:
            written = load(self._model.read(op.cache, step))
            return _roundings(written, load(values[op.cache.name]), op.cache.dtype)
        same = all(
            np.array_equal(self._model.read(tensor, step), values[tensor.name], equal_nan=tensor is op.scales)
            for tensor in (op.cache, op.scales)
        )
        return 0.0 if same else math.inf

    def _weight(self, segments: tuple[Tensor, ...]) -> Float32:
        """The segments' rows as one matrix, rounded as the device's are."""
        name = joined_name(segments)
        if name in self._kept:
            return self._kept[name]
        shapes = [segment.sizes({}) for segment in segments]
        matrix = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=np.float32)
        begin = 0
        for segment, shape in zip(segments, shapes):
            matrix[begin : begin + shape[0]] = self._checkpoint.read(segment.name)
            begin += shape[0]
        _round_in_place(matrix, self._model.dtype)
        if name in self._shared:
            self._kept[name] = matrix
        return matrix


def _coarsest(op: Op) -> DType:
    """The format with the fewest digits that the op rounds to: its output's, but see `definitions.attention`."""
    over_codes = any(isinstance(part, Attention) and part.cache.dtype is E4M3 for part in parts(op))
    return BF16 if over_codes else parts(op)[-1].out.dtype


def _weights_of(op: Op) -> Iterator[tuple[Tensor, ...]]:
    """What the op reads from the checkpoint: a tensor, or several whose rows make one matrix."""
    for part in parts(op):
        match part:
            case Embedding():
                yield (part.table,)
            case Norm():
                yield (part.weight,)
            case Linear():
                yield part.weights
                if part.biases:
                    yield part.biases


def _round_in_place(values: Float32, dtype: DType) -> None:
    """Round piece by piece: a large matrix leaves no room for temporaries of its size."""
    rows = max(1, _PIECE // math.prod(values.shape[1:]))
    for begin in range(0, len(values), rows):
        values[begin : begin + rows] = round_to(values[begin : begin + rows], dtype)


def product_roundings(found: Float32, x: Float32, weight: Float32, bias: Float32 | None) -> float:
    """The largest difference of x W^T + bias from float64, over the magnitudes of its terms, in roundings of float32.

    found (tokens, rows); x (tokens, depth); weight (rows, depth); bias (rows).
    """
    tokens = x.astype(np.float64)
    worst = 0.0
    rows = max(1, _PIECE // weight.shape[1])
    for begin in range(0, len(weight), rows):
        some = slice(begin, begin + rows)
        matrix = weight[some].astype(np.float64)
        added = np.zeros(len(matrix)) if bias is None else bias[some].astype(np.float64)
        exact = tokens @ matrix.T + added
        magnitude = np.abs(tokens) @ np.abs(matrix).T + np.abs(added)
        worst = np.maximum(worst, _relative(np.abs(found[:, some] - exact), magnitude))  # NaN stays
    return float(worst) / ROUNDINGS[F32]


def _roundings(found: Float32, expected: Float32, dtype: DType) -> float:
    """The largest difference of an element, over its row's largest value, in roundings of `dtype`."""
    rows = expected.reshape(-1, expected.shape[-1])
    scale = np.abs(rows).max(axis=1, keepdims=True)
    return _relative(np.abs(found.reshape(rows.shape) - rows), scale) / ROUNDINGS[dtype]


def _relative(difference: npt.NDArray[Any], scale: npt.NDArray[Any]) -> float:
    """The largest share; nothing of nothing is none."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.where(difference == 0, 0, difference / scale).max())

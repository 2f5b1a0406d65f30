"""Run a program with numpy: the product on a machine with no GPU, the oracle on one with. Knows ops; not requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rvllm.backend import definitions as define
from rvllm.model.checkpoint import Checkpoint
from rvllm.program.dtype import STORED, Float32, Stored
from rvllm.program.ops import (
    ActMul,
    Add,
    Attention,
    Embedding,
    Kind,
    Linear,
    Norm,
    Plain,
    RopeAngles,
    RopeKV,
    SelectRows,
    Tensor,
    parts,
)
from rvllm.program.plan import MemoryPlan, plan
from rvllm.program.program import Program, Step, joined_name, matrices
from rvllm.sampling.lookup import Guessing
from rvllm.sampling.sampler import Sampled, SamplingRow, sample_rows

Progress = Callable[[str, int, int], None]
FLOAT32_BYTES = 4
KEPT_VIEWS = 16  # step sizes whose views are kept


class CpuModel:
    """A program with its weights in float32 and its caches: `forward` computes one step.

    Activations live in one arena at the places the memory plan gives them, as on a device, so that a wrong plan shows.
    """

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        *,
        blocks: tuple[int, ...],
        block_size: int,
        vocab_limit: int | None = None,
        batch_invariant: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """batch_invariant: a token's logits, keys and values have the same bits in every step."""
        self.program = program
        self._batch_invariant = batch_invariant
        self._vocab_limit = vocab_limit or program.output.sizes({"rows": 1})[1]
        self._weights = load_weights(program, checkpoint, progress)
        self._caches = _new_caches(program, blocks, block_size)
        self._plans: dict[int, MemoryPlan] = {}
        self._arena = np.empty(0, dtype=np.float32)
        self._views: dict[tuple[int, int], dict[str, Float32]] = {}

    runs_ahead = guesses = False

    def start(
        self, step: Step, rows: Sequence[SamplingRow], *, follows: bool = False, guessing: Guessing | None = None
    ) -> list[Sampled]:
        """Compute one step and draw a token for each of its wanted rows: here all is done at once."""
        assert not follows and guessing is None
        return sample_rows(self.forward(step), rows, self._vocab_limit)

    def finish(self, started: list[Sampled]) -> list[Sampled]:
        """What `start` gave."""
        return started

    def guessed(self, started: list[Sampled]) -> list[list[int]]:
        """Nothing is guessed here."""
        raise AssertionError("no step was started with guesses to go on from")

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy cache blocks (from, to) in every layer."""
        sources, targets = (list(blocks) for blocks in zip(*pairs))
        for cache in self._caches.values():
            cache[:, targets] = cache[:, sources]

    def forward(self, step: Step) -> Float32:
        """Logits (rows, vocab) float32 of the step's wanted rows; the caches then hold its tokens."""
        values: dict[str, Any] = dict(step.inputs())
        values |= self.program.constants
        values |= self._caches
        arena = self._places(len(step.ids), len(step.rows))
        for op in self.program.ops:
            for part in parts(op):
                result = define_op(part, values, self._weights, step, self._batch_invariant)
                place = arena.get(part.out.name)
                if place is not None:
                    np.copyto(place, result)
                    result = place
                values[part.out.name] = result
        logits: Float32 = values[self.program.output.name]
        return logits.copy()

    def _places(self, tokens: int, rows: int) -> dict[str, Float32]:
        """Where each activation of a step of this size lives; what stays inside a fused op has no place."""
        if (tokens, rows) not in self._views:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            memory = self._plan(1 << (max(tokens, rows) - 1).bit_length())
            if memory.nbytes > self._arena.nbytes:
                self._arena = np.empty(memory.nbytes // FLOAT32_BYTES, dtype=np.float32)
                self._views.clear()
            sizes = {"tokens": tokens, "rows": rows}
            self._views[tokens, rows] = _views(self.program, memory.offsets, self._arena, sizes)
        return self._views[tokens, rows]

    def _plan(self, bucket: int) -> MemoryPlan:
        """The memory plan for up to `bucket` tokens and rows."""
        if bucket not in self._plans:
            sizes = {"tokens": bucket, "rows": bucket}
            self._plans[bucket] = plan(self.program, lambda tensor: math.prod(tensor.sizes(sizes)) * FLOAT32_BYTES)
        return self._plans[bucket]


def define_op(
    op: Plain, values: Mapping[str, Any], weights: Mapping[str, Float32], step: Step, batch_invariant: bool = False
) -> Float32:
    """One op by its definition. `values` has its inputs by name, and the caches, which RopeKV writes to.

    batch_invariant: tokens of prompts are computed as those that decode are, each by itself.
    """

    def value(tensor: Tensor) -> Any:
        return weights[tensor.name] if tensor.kind is Kind.WEIGHT else values[tensor.name]

    dtype = op.out.dtype
    match op:
        case Embedding():
            return define.embedding(value(op.ids), value(op.table), dtype)
        case RopeAngles():
            inv_freq = value(op.inv_freq)
            return define.rope_angles(value(op.positions), value(op.lengths), inv_freq, op.threshold, op.scale)
        case Norm():
            return define.norm(value(op.x), value(op.weight), op.epsilon, dtype)
        case Linear():
            alone = batch_invariant or op.out.shape[0] == "rows"
            decode = len(value(op.x)) if alone else step.decode_tokens
            bias = weights.get(joined_name(op.biases)) if op.biases else None
            return define.linear(value(op.x), weights[joined_name(op.weights)], bias, decode, dtype)
        case RopeKV():
            qkv, angles, cache = value(op.qkv), value(op.angles), value(op.cache)
            scales = value(op.scales) if op.scales else None
            return define.rope_kv(qkv, angles, value(op.slots), cache, op.heads, dtype, scales)
        case Attention():
            tables, starts, lengths = value(op.block_tables), value(op.query_starts), value(op.kv_lengths)
            q, cache = value(op.q), value(op.cache)
            scales = value(op.scales) if op.scales else None
            heads, at_once = op.heads, 1 if batch_invariant else define.BLOCK_QUERIES
            return define.attention(
                q, cache, tables, starts, lengths, heads, op.scale, op.window, dtype, scales, at_once
            )
        case ActMul():
            return define.act_mul(value(op.x), op.activation, dtype)
        case Add():
            return define.add(value(op.x), value(op.y), dtype)
        case SelectRows():
            rows: Float32 = value(op.x)[value(op.rows)]
            return rows


def load_weights(program: Program, checkpoint: Checkpoint, progress: Progress | None) -> dict[str, Float32]:
    """Every weight in float32, the segments of each linear op as one contiguous matrix; equal names share memory."""
    wanted = matrices(program)
    total = sum(checkpoint.tensors[segment.name].nbytes for segments in wanted.values() for segment in segments)
    done = 0
    weights: dict[str, Float32] = {}
    for name, segments in wanted.items():
        rows = [segment.sizes({})[0] for segment in segments]
        matrix = np.empty((sum(rows), *segments[0].sizes({})[1:]), dtype=np.float32)
        begin = 0
        for segment, count in zip(segments, rows):
            matrix[begin : begin + count] = checkpoint.read(segment.name)
            begin += count
            done += checkpoint.tensors[segment.name].nbytes
            if progress:
                progress("loading weights", done, total)
        weights[name] = matrix
    return weights


def _new_caches(program: Program, blocks: tuple[int, ...], block_size: int) -> dict[str, Stored]:
    """Zeroed caches; the system gives them memory only where they are written."""
    known = {f"blocks.{group}": count for group, count in enumerate(blocks)} | {"block": block_size}
    return {name: np.zeros(tensor.sizes(known), STORED[tensor.dtype]) for name, tensor in program.caches.items()}


def _views(program: Program, offsets: Mapping[str, int], arena: Float32, sizes: dict[str, int]) -> dict[str, Float32]:
    views: dict[str, Float32] = {}
    for op in program.ops:
        for part in parts(op):
            if part.out.name in offsets:
                shape = part.out.sizes(sizes)
                begin = offsets[part.out.name] // FLOAT32_BYTES
                views[part.out.name] = arena[begin : begin + math.prod(shape)].reshape(shape)
    return views

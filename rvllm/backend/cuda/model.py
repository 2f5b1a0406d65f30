"""A program on a GPU: weights, caches, arena and step block in place, a graph a decode bucket. Knows no requests.

Steps of decoding sequences only are padded to a bucket and replayed as a graph; steps that read prompts are launched
kernel by kernel at their own sizes. Both run the same launches, so they give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rvllm.backend.cuda.context import Graph
from rvllm.backend.cuda.kernels import Device
from rvllm.backend.cuda.lower import Bucket, Launch, Target, lower, workspace
from rvllm.backend.cuda.sampling import DeviceSampler
from rvllm.backend.cuda.step_block import Layout, fill, layout, views
from rvllm.backend.cuda.weights import aligned, load_weights, place, sizes
from rvllm.model.checkpoint import Checkpoint
from rvllm.program.dtype import F32, STORED, DType, Float32, Stored, load
from rvllm.program.ops import Kind, Op, Tensor
from rvllm.program.plan import MemoryPlan, plan
from rvllm.program.program import Int32, Program, Step
from rvllm.sampling.sampler import Sampled, SamplingRow

Progress = Callable[[str, int, int], None]
DECODE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: tokens (no fewer than sequences), sequences and rows of logits, blocks of one sequence."""

    tokens: int
    sequences: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A bucket's place in memory, its launches, and the graph of them (None: launched one by one)."""

    layout: Layout
    by_op: tuple[tuple[Launch, ...], ...]
    graph: Graph | None
    addresses: Mapping[str, int]
    hosts: tuple[Mapping[str, Int32], ...]
    logits: int
    rows: int


@dataclass(frozen=True, slots=True)
class Started:
    """A step on its way: `turn` says which of the host's buffers it uses, `mark` when it is through."""

    rows: tuple[SamplingRow, ...]
    turn: int
    mark: Any


class CudaModel:
    """`forward` computes one step; `prepare` captures the graphs beforehand, so that no step waits for it."""

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        device: Device,
        *,
        limits: StepLimits,
        blocks: tuple[int, ...],
        block_size: int,
        vocab_limit: int,
        eager: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.program = program
        self.dtype = activation_dtype(program)
        self._device = device
        self._limits = limits
        self._blocks = blocks
        self._block_size = block_size
        self._eager = eager
        self._addresses: dict[str, int] = {}
        self._plans: dict[int, MemoryPlan] = {}
        self._prepared: dict[Bucket, Prepared] = {}
        self._last: Prepared | None = None
        self._turn = 0
        self._load(checkpoint, progress)
        self._allocate_caches()
        self._allocate_step_memory()
        vocab = program.output.sizes({"rows": 1})[1]
        self._sampler = DeviceSampler(device, rows=limits.sequences, vocab=vocab, vocab_limit=vocab_limit, eager=eager)

    runs_ahead = True

    def forward(self, step: Step) -> Float32:
        """Logits (rows, vocab) float32 of the step's wanted rows; the caches then hold its tokens."""
        prepared = self._send(step)
        self._start(prepared)
        logits = np.empty((len(step.rows), self.program.output.sizes({"rows": 1})[1]), dtype=np.float32)
        self._device.read(prepared.logits, logits)
        return logits

    def start(self, step: Step, rows: Sequence[SamplingRow], *, follows: bool = False) -> Started:
        """Start one step and the drawing of a token for each of its wanted rows.

        follows: the step's ids are the tokens that the step started last is drawing for the same rows in the same
        order; that step need not be finished, and `step.ids` is not looked at. At most one step may be unfinished then.
        """
        self._turn ^= 1
        prepared = self._send(step, follows=follows)
        self._sampler.send(rows, prepared.rows, self._turn)
        self._start(prepared)
        if rows:
            ids = prepared.addresses["ids"]
            self._sampler.sample(prepared.logits, ids, rows, prepared.rows, self._turn)
        return Started(tuple(rows), self._turn, self._device.mark())

    def finish(self, started: Started) -> list[Sampled]:
        """The tokens of a started step, in the order of its rows. Raises EngineError where the step failed."""
        self._device.wait(started.mark)
        return self._sampler.take(started.rows, started.turn) if started.rows else []

    def one_by_one(self, step: Step) -> Iterator[tuple[Op, Callable[[], None]]]:
        """Send the step, then give each op with a function that runs it: between them memory can be read."""
        prepared = self._send(step)
        for op, launches in zip(self.program.ops, prepared.by_op):

            def run(launches: Sequence[Launch] = launches) -> None:
                for launch in launches:
                    self._device.launch(launch)
                self._device.synchronize()

            yield op, run

    def read(self, tensor: Tensor, step: Step) -> Stored:
        """What the device has for `tensor` at the step's sizes: float32, int32 inputs, caches in their own format."""
        if tensor.kind is Kind.INPUT:
            return step.inputs()[tensor.name]
        prepared = self._bucket(self._bucket_of(step))
        shape = tensor.sizes(self._known_sizes(step))
        elements = np.empty(shape, dtype=STORED[tensor.dtype])
        self._device.read(prepared.addresses[tensor.name], elements)
        return elements if tensor.kind is Kind.CACHE else load(elements)

    def _known_sizes(self, step: Step) -> dict[str, int]:
        blocks = {f"blocks.{group}": count for group, count in enumerate(self._blocks)}
        return step.sizes | blocks | {"block": self._block_size}

    def prepare(self) -> None:
        """Capture the graph of every decode bucket."""
        for size in DECODE_BUCKETS:
            if size <= self._limits.sequences:
                self._bucket(Bucket(size, size, size, size, 1))

    def _send(self, step: Step, *, follows: bool = False) -> Prepared:
        """Copy the step to the device; if it follows another, all but the ids, which are there or will be."""
        prepared = self._bucket(self._bucket_of(step))
        assert not follows or prepared is self._last, "a step can only follow one of the same bucket"
        self._last = prepared
        host = self._host_blocks[self._turn]
        fill(prepared.hosts[self._turn], prepared.layout, step)
        skipped = prepared.layout.fields["positions"].offset if follows else 0
        nbytes = prepared.layout.nbytes - skipped
        self._device.copy_in(self._step_block + skipped, host.ctypes.data + skipped, nbytes)
        return prepared

    def _start(self, prepared: Prepared) -> None:
        """Start the computation of the step that was sent."""
        if prepared.graph is not None:
            self._device.replay(prepared.graph)
        else:
            for launches in prepared.by_op:
                for launch in launches:
                    self._device.launch(launch)

    def _bucket_of(self, step: Step) -> Bucket:
        tokens, sequences = len(step.ids), len(step.kv_lengths)
        counts = np.diff(step.query_starts)
        if counts.max() == 1 and len(step.rows) == tokens:
            size = next(size for size in (*DECODE_BUCKETS, tokens) if size >= tokens)
            return Bucket(size, size, size, size, 1)
        return Bucket(tokens, len(step.rows), sequences, step.decode_tokens, int(counts.max()))

    def _bucket(self, bucket: Bucket) -> Prepared:
        if bucket in self._prepared:
            return self._prepared[bucket]
        decodes_only = bucket.decodes == bucket.tokens
        where = layout(bucket.tokens, bucket.rows, bucket.sequences, len(self._blocks), self._limits.max_blocks)
        memory = self._plan(1 << (bucket.tokens - 1).bit_length())
        places = {name: self._arena + offset for name, offset in memory.offsets.items()}
        places |= {name: self._step_block + field.offset for name, field in where.fields.items()}
        places |= self._addresses
        target = Target(
            address=places.__getitem__,
            bucket=bucket,
            max_blocks=self._limits.max_blocks,
            blocks=self._blocks,
            block_size=self._block_size,
            workspace=self._workspace,
            counters=self._counters,
            multiprocessors=self._device.multiprocessors,
            tier=self._device.tier,
        )
        by_op = tuple(tuple(lower(op, target)) for op in self.program.ops)
        launches = [launch for launches in by_op for launch in launches]
        graph = self._device.capture(launches) if decodes_only and not self._eager else None
        prepared = Prepared(
            layout=where,
            by_op=by_op,
            graph=graph,
            addresses=places,
            hosts=tuple(views(block, where) for block in self._host_blocks),
            logits=places[self.program.output.name],
            rows=bucket.rows,
        )
        if decodes_only:  # the sizes of other steps are too many to keep
            self._prepared[bucket] = prepared
        return prepared

    def _plan(self, size: int) -> MemoryPlan:
        """The arena for up to `size` tokens and as many rows as there may be sequences."""
        if size not in self._plans:
            known = {"tokens": size, "rows": self._limits.sequences}
            self._plans[size] = plan(self.program, lambda tensor: _nbytes(tensor, known))
        return self._plans[size]

    def _load(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        dtype = self.dtype
        nbytes = sizes(self.program, dtype)
        memory = self._device.allocate(sum(map(aligned, nbytes.values())))
        self._addresses |= place(nbytes, memory)
        load_weights(self._device, checkpoint, self.program, self._addresses, dtype, progress)
        for name, values in self.program.constants.items():
            self._addresses[name] = self._device.allocate(values.nbytes)
            self._device.write(self._addresses[name], np.ascontiguousarray(values, dtype=np.float32))

    def _allocate_caches(self) -> None:
        known = {f"blocks.{group}": count for group, count in enumerate(self._blocks)} | {"block": self._block_size}
        for name, tensor in self.program.caches.items():
            nbytes = _nbytes(tensor, known)
            self._addresses[name] = self._device.allocate(nbytes)
            # What was never written may be read as part of a tile, and times a weight of 0 must stay 0.
            self._device.fill(self._addresses[name], 0, nbytes)

    def _allocate_step_memory(self) -> None:
        limits = self._limits
        powers = range((limits.tokens - 1).bit_length() + 1)
        self._arena = self._device.allocate(max(self._plan(1 << power).nbytes for power in powers))
        block = layout(limits.tokens, limits.sequences, limits.sequences, len(self._blocks), limits.max_blocks)
        self._step_block = self._device.allocate(block.nbytes)
        # Two, so that a step can be written while the one before is still being copied.
        self._host_blocks = tuple(self._device.pinned(block.nbytes) for _ in range(2))
        nbytes, counters = workspace(self.program, limits.sequences)
        self._workspace = self._device.allocate(nbytes)
        self._counters = self._device.allocate(counters)
        # Every kernel that counts leaves its counters at zero.
        self._device.fill(self._counters, 0, counters)


def activation_dtype(program: Program) -> DType:
    """The dtype of the program's activations: the first op's, since logits and angles are float32 in every program."""
    return next(op.out.dtype for op in program.ops if op.out.dtype is not F32)


def memory_bytes(program: Program, limits: StepLimits) -> int:
    """Device memory that a model takes beside its caches: weights, arena, workspaces."""
    dtype = activation_dtype(program)
    arena = plan(program, lambda tensor: _nbytes(tensor, {"tokens": limits.tokens, "rows": limits.sequences})).nbytes
    vocab = program.output.sizes({"rows": 1})[1]
    partials, counters = workspace(program, limits.sequences)
    return (
        sum(map(aligned, sizes(program, dtype).values())) + arena + partials + counters + 5 * limits.sequences * vocab
    )


def _nbytes(tensor: Tensor, sizes: dict[str, int]) -> int:
    assert tensor.kind in (Kind.ACTIVATION, Kind.CACHE), tensor
    return tensor.dtype.nbytes(math.prod(tensor.sizes(sizes)))

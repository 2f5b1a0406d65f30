"""A program on a GPU: weights, caches, arena and step block in place, a graph for every bucket. Knows no requests.

Every step is padded to a bucket and replayed as a graph: one of decoding sequences only by their number, another by its
tokens alone, and then by the rows of logits that are wanted. All buckets have their arrays in the same places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rvllm.backend.cuda.context import Graph
from rvllm.backend.cuda.copy_blocks import BlockCopier
from rvllm.backend.cuda.guess import Guesser
from rvllm.backend.cuda.kernels import Device
from rvllm.backend.cuda.launch import Bucket, Launch, Target
from rvllm.backend.cuda.lower import lower, workspace
from rvllm.backend.cuda.matrix_maps import MatrixMaps
from rvllm.backend.cuda.sampling import DeviceSampler, row_bytes
from rvllm.backend.cuda.slots import slot_bytes
from rvllm.backend.cuda.step_block import (
    BlockTables,
    Layout,
    begin,
    columns_for,
    layout,
    pack,
    pack_tables,
    padded_sequences,
    padded_tokens,
)
from rvllm.backend.cuda.tuning import TUNED, UNTUNED
from rvllm.backend.cuda.weights import aligned, load_weights, place, sizes
from rvllm.model.checkpoint import Checkpoint
from rvllm.program.dtype import F32, STORED, DType, Float32, Stored, load
from rvllm.program.ops import Kind, Op, Tensor
from rvllm.program.plan import MemoryPlan, plan
from rvllm.program.program import Int32, Program, Step
from rvllm.sampling.lookup import Guessing
from rvllm.sampling.sampler import Sampled, SamplingRow

Progress = Callable[[str, int, int], None]
MOST_MULTIPROCESSORS = 256  # of a GPU, where its memory is only estimated
PREPARED_SEQUENCES = 64
"""Up to so many decoding sequences have their graph before the first step; other graphs are captured when first used,
which takes some milliseconds."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: tokens (no fewer than sequences), sequences and rows of logits, blocks of one sequence."""

    tokens: int
    sequences: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Launches that are started together, and the graph of them (None: launched one by one)."""

    launches: tuple[Launch, ...]
    graph: Graph | None


@dataclass(frozen=True, slots=True)
class Started:
    """A step on its way: `turn` says which of the host's buffers it uses, `mark` when it is through."""

    rows: tuple[SamplingRow, ...]
    turn: int
    mark: Any


class CudaModel:
    """`forward` computes one step; `prepare` captures graphs beforehand, so that few steps wait for one."""

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        device: Device,
        *,
        limits: StepLimits,
        blocks: tuple[int, ...] | None,
        block_size: int,
        vocab_limit: int,
        eager: bool = False,
        batch_invariant: bool = False,
        guessed_length: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """blocks: of each cache group; None: `allocate_caches` follows, once it is known what is left for them.

        batch_invariant: a token's logits, keys and values have the same bits in every step, whatever else is in it.
        guessed_length: tokens of the longest sequence that the device makes guesses for; 0: it makes none.
        """
        self.program = program
        self.dtype = activation_dtype(program)
        self._device = device
        self._limits = limits
        self._blocks: tuple[int, ...] = ()
        self._block_size = block_size
        self._eager = eager
        self.batch_invariant = batch_invariant
        self._addresses: dict[str, int] = {}
        self._matrix_maps = MatrixMaps(device)
        self._pieces: dict[Bucket, Piece] = {}
        # From here on ops are for the rows of logits that are wanted.
        self._head = next(place for place, op in enumerate(program.ops) if op.out.shape[0] == "rows")
        self._followed = 0  # the sequences that a next step may follow; 0: none may
        self._tables: BlockTables = ()  # the last step's; the device has the first `_columns` of them
        self._columns, self._longest = 0, 0  # the latter is the last step's longest sequence, tokens
        self._turn = 0
        self._load(checkpoint, progress)
        self._allocate_step_memory()
        vocab = program.output.sizes({"rows": 1})[1]
        self._sampler = DeviceSampler(device, rows=limits.sequences, vocab=vocab, vocab_limit=vocab_limit, eager=eager)
        self._guesser = Guesser(device, guessed_length) if guessed_length else None
        self._guesses = False  # whether the last step's sequences go on with guesses of the device
        if blocks is not None:
            self.allocate_caches(blocks)

    runs_ahead = True

    @property
    def guesses(self) -> bool:
        return self._guesser is not None

    def forward(self, step: Step) -> Float32:
        """Logits (rows, vocab) float32 of the step's wanted rows; the caches then hold its tokens."""
        self._start(self._send(step))
        logits = np.empty((len(step.rows), self.program.output.sizes({"rows": 1})[1]), dtype=np.float32)
        self._device.read(self._addresses[self.program.output.name], logits)
        return logits

    def start(
        self,
        step: Step | None,
        rows: Sequence[SamplingRow],
        *,
        follows: bool = False,
        guessing: Guessing | None = None,
    ) -> Started:
        """Start one step and the drawing of a token for each of its wanted rows.

        follows: the step's ids are the tokens that the step started last is drawing, one for each of its sequences, for
        the same sequences in the same order. That step need not be finished; at most one step may be unfinished then.
        The device moves the sequences on by itself: of `step` only the block tables are looked at, and they are sent if
        they have changed; without a step they have not.
        guessing: the steps that follow bring the device's own guesses, in the same rows; rows' positions are its own.
        """
        self._turn ^= 1
        if follows:
            bucket = self._follow(step)
            assert len(rows) == self._followed, "a step that follows draws a token for each of its sequences"
        else:
            assert step is not None, "only a step that follows is known without saying"
            bucket = self._send(step)
            draws_all = np.array_equal(step.rows + 1, step.query_starts[1:])
            self._followed = len(rows) if draws_all and len(rows) == len(step.rows) else 0
            self._guesses = guessing is not None
        if rows:
            self._sampler.send(rows, bucket.rows, self._turn, positions=not (follows and self._guesses))
        if guessing is not None:
            assert self._guesser is not None and self._followed, "guesses go on where every sequence decodes"
            self._guesser.send(guessing)
        self._start(bucket)
        if rows:
            self._draw(rows, bucket)
        return Started(tuple(rows), self._turn, self._device.mark())

    def _draw(self, rows: Sequence[SamplingRow], bucket: Bucket) -> None:
        """Draw a token for each row: the next step's ids, or what its guesses are made of."""
        logits, ids = self._addresses[self.program.output.name], self._addresses["ids"]
        guesser = self._guesser if self._guesses else None
        self._sampler.sample(logits, guesser.drawn if guesser else ids, rows, bucket.rows, self._turn)
        if guesser is not None:
            positions = self._sampler.positions(bucket.rows)
            self._device.launch(guesser.launch(ids, self._addresses["kv_lengths"], positions, self._turn))

    def guessed(self, started: Started) -> list[list[int]]:
        """Of a finished step that `guessing` was given for, or that follows one: the next one's guesses."""
        assert self._guesser is not None
        return self._guesser.take(started.turn)

    def finish(self, started: Started) -> list[Sampled]:
        """The tokens of a started step, in the order of its rows. Raises EngineError where the step failed."""
        self._device.wait(started.mark)
        return self._sampler.take(started.rows, started.turn) if started.rows else []

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy cache blocks (from, to) in every layer: after the steps started so far, before the next."""
        self._copier.start(pairs)

    def one_by_one(self, step: Step) -> Iterator[tuple[Op, Callable[[], None]]]:
        """Send the step, then give each op with a function that runs it, between which memory can be read."""
        bucket = self._send(step)
        target = self._target(bucket)
        for launch in begin(self.program, target, self._layout):
            self._device.launch(launch)
        for op in self.program.ops[: None if bucket.rows else self._head]:
            launches = lower(op, target)

            def run(launches: Sequence[Launch] = tuple(launches)) -> None:
                for launch in launches:
                    self._device.launch(launch)
                self._device.synchronize()

            yield op, run

    def read(self, tensor: Tensor, step: Step) -> Stored:
        """What the device has for `tensor` at the step's sizes: float32, int32 inputs, caches in their own format."""
        if tensor.kind is Kind.INPUT:
            return step.inputs()[tensor.name]
        shape = tensor.sizes(self._known_sizes(step))
        elements = np.empty(shape, dtype=STORED[tensor.dtype])
        self._device.read(self._addresses[tensor.name], elements)
        return elements if tensor.kind is Kind.CACHE else load(elements)

    def _known_sizes(self, step: Step) -> dict[str, int]:
        blocks = {f"blocks.{group}": count for group, count in enumerate(self._blocks)}
        return step.sizes | blocks | {"block": self._block_size}

    def prepare(self) -> None:
        """Capture the graphs of steps with few decoding sequences."""
        most = self._limits.sequences
        for size in sorted({padded_sequences(count, most) for count in range(1, min(most, PREPARED_SEQUENCES) + 1)}):
            self._piece(Bucket(size, size, size, False))
        if self._guesser is not None:
            self._guesser.load()

    def rehearse(self, free_bytes: Callable[[], int]) -> int:
        """Bytes that will be taken later, before there are caches. Loads the kernels.

        By all graphs, the sampler's too, the largest of which are captured and dropped, and by the sampler for
        sequences with penalties and biases.

        Nothing is run, so it does not matter that the caches are nowhere.
        """
        slots = self._limits.sequences * slot_bytes(self.program.output.sizes({"rows": 1})[1])
        if self._eager:
            return slots
        self._blocks = (1,) * len(self.program.cache_groups)
        self._addresses |= dict.fromkeys(self.program.caches, 0)
        most, tokens = self._limits.sequences, self._limits.tokens
        mixed, head = Bucket(tokens, 0, min(tokens, most), True), Bucket(0, most, 0, True)
        decode = Bucket(most, most, most, False)
        taken = 0
        for bucket in (mixed, head, decode, decode):  # the last is measured, when all kernels have been loaded
            before = free_bytes()
            graph = self._piece(bucket).graph
            taken = before - free_bytes()
            self._pieces.clear()
            if graph is not None:
                self._device.forget(graph)
        by_rows = {padded_sequences(count, most) for count in range(1, most + 1)}
        by_tokens = {padded_tokens(count, tokens) for count in range(1, tokens + 1)}
        drawing = self._sampler.rehearse(self._addresses[self.program.output.name], self._addresses["ids"], free_bytes)
        return slots + max(taken, 0) * (2 * len(by_rows) + len(by_tokens)) + drawing * len(by_rows)

    def _send(self, step: Step) -> Bucket:
        """Copy the step to the device: its padded sizes."""
        limits = self._limits
        assert len(step.ids) <= limits.tokens and len(step.kv_lengths) <= limits.sequences, (step.sizes, limits)
        self._tables, self._followed = step.block_tables, 0
        self._longest = int(step.kv_lengths.max())
        self._columns = columns_for(self._tables, self._longest, self._block_size)
        host = self._hosts[self._turn]
        self._copy_in(host, pack(step, self._columns, host))
        rows, tokens = len(step.rows), len(step.ids)
        if rows == tokens == step.decode_tokens:
            return self._decode_bucket(tokens)
        padded = padded_tokens(tokens, limits.tokens)
        wanted = padded_sequences(rows, limits.sequences) if rows else 0
        return Bucket(padded, wanted, min(padded, limits.sequences), True)

    def _follow(self, step: Step | None) -> Bucket:
        """Send what the device does not know of a step that follows, which is mostly nothing."""
        assert self._followed, "a step can only follow one that draws a token for each of its sequences"
        known = step is None or self._has_tables(step.block_tables)
        if step is not None:
            assert len(step.block_tables[0]) == self._followed, "a step that follows has the same sequences"
            self._tables = step.block_tables
        self._longest += self._guesser.most_ahead if self._guesser is not None and self._guesses else 1
        columns = columns_for(self._tables, self._longest, self._block_size)
        if not known or (self._longest > self._columns * self._block_size and columns > self._columns):
            self._columns = columns
            host = self._hosts[self._turn]
            self._copy_in(host, pack_tables(self._tables, self._columns, host))
        return self._decode_bucket(self._followed)

    def _has_tables(self, tables: BlockTables) -> bool:
        """Whether these are, as far as the device has any, those that it has."""
        if tables[0] is self._tables[0]:  # whoever changes a table makes another array
            return True
        pairs = zip(tables, self._tables)
        return all(np.array_equal(new[:, : self._columns], old[:, : self._columns]) for new, old in pairs)

    def _copy_in(self, host: Int32, words: int) -> None:
        self._device.copy_in(self._addresses["message"], host.ctypes.data, 4 * words)

    def _decode_bucket(self, sequences: int) -> Bucket:
        size = padded_sequences(sequences, self._limits.sequences)
        return Bucket(size, size, size, False)

    def _start(self, bucket: Bucket) -> None:
        """Start the computation of the step that was sent."""
        if not bucket.prefills:
            self._run(self._piece(bucket))
            return
        self._run(self._piece(replace(bucket, rows=0)))
        if bucket.rows:
            self._run(self._piece(Bucket(0, bucket.rows, 0, True)))

    def _run(self, piece: Piece) -> None:
        if piece.graph is not None:
            self._device.replay(piece.graph)
        else:
            for launch in piece.launches:
                self._device.launch(launch)

    def _piece(self, bucket: Bucket) -> Piece:
        """The launches for a bucket: those of tokens if it has any, then those of rows if it has any."""
        if bucket in self._pieces:
            return self._pieces[bucket]
        target = self._target(bucket)
        launches = begin(self.program, target, self._layout) if bucket.tokens else []
        first, last = 0 if bucket.tokens else self._head, None if bucket.rows else self._head
        launches += [launch for op in self.program.ops[first:last] for launch in lower(op, target)]
        graph = None if self._eager else self._device.capture(launches)
        piece = self._pieces[bucket] = Piece(() if graph is not None else tuple(launches), graph)
        return piece

    def _target(self, bucket: Bucket) -> Target:
        return Target(
            address=self._addresses.__getitem__,
            bucket=bucket,
            max_blocks=self._limits.max_blocks,
            blocks=self._blocks,
            block_size=self._block_size,
            workspace=self._workspace,
            counters=self._counters,
            multiprocessors=self._device.multiprocessors,
            tier=self._device.tier,
            matrix_map=self._matrix_maps,
            tuning=TUNED.get(self._device.tier, UNTUNED),
            batch_invariant=self.batch_invariant,
        )

    def _load(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        dtype = self.dtype
        nbytes = sizes(self.program, dtype)
        memory = self._device.allocate(sum(map(aligned, nbytes.values())))
        self._addresses |= place(nbytes, memory)
        load_weights(self._device, checkpoint, self.program, self._addresses, dtype, progress)
        for name, values in self.program.constants.items():
            self._addresses[name] = self._device.allocate(values.nbytes)
            self._device.write(self._addresses[name], np.ascontiguousarray(values, dtype=np.float32))

    def allocate_caches(self, blocks: tuple[int, ...]) -> None:
        """The caches, of so many blocks a group. Raises DeviceError where there is no room for them."""
        self._blocks = blocks
        planes = []
        known = {f"blocks.{group}": count for group, count in enumerate(self._blocks)} | {"block": self._block_size}
        for name, tensor in self.program.caches.items():
            nbytes = _nbytes(tensor, known)
            self._addresses[name] = self._device.allocate(nbytes)
            # What was never written may be read as part of a tile, and times a weight of 0 must stay 0.
            self._device.fill(self._addresses[name], 0, nbytes)
            planes.append((self._addresses[name], nbytes // (2 * blocks[0])))
        self._copier = BlockCopier(self._device, planes, blocks=blocks[0], most=self._limits.sequences)

    def _allocate_step_memory(self) -> None:
        limits = self._limits
        arena = arena_plan(self.program, limits)
        where = self._layout = step_layout(
            self.program, limits, self._device.multiprocessors, batch_invariant=self.batch_invariant
        )
        for offsets, nbytes in ((arena.offsets, arena.nbytes), (where.offsets, where.nbytes)):
            memory = self._device.allocate(nbytes)
            self._addresses |= {name: memory + offset for name, offset in offsets.items()}
        # Two, so that a step can be written while the one before is still being copied.
        self._hosts = tuple(self._device.pinned(4 * where.message_words).view(np.int32) for _ in range(2))
        nbytes, counters = workspace(self.program, limits.sequences, self._device.tier)
        self._workspace = self._device.allocate(nbytes)
        self._counters = self._device.allocate(counters)
        # Every kernel that counts leaves its counters at zero.
        self._device.fill(self._counters, 0, counters)


def arena_plan(program: Program, limits: StepLimits) -> MemoryPlan:
    """Where every activation lies, whatever the step's size."""
    return plan(program, lambda tensor: _nbytes(tensor, {"tokens": limits.tokens, "rows": limits.sequences}))


def step_layout(program: Program, limits: StepLimits, multiprocessors: int, *, batch_invariant: bool = False) -> Layout:
    """Where a step's arrays lie, whatever its size."""
    return layout(program, limits.tokens, limits.sequences, limits.max_blocks, multiprocessors, batch_invariant)


def activation_dtype(program: Program) -> DType:
    """The dtype of the program's activations: the first op's, since logits and angles are float32 in every program."""
    return next(op.out.dtype for op in program.ops if op.out.dtype is not F32)


def step_bytes(program: Program, limits: StepLimits, tier: str = "t90a") -> int:
    """Device memory for steps up to the limits: arena, step block, workspaces, sampler. t90a takes the most."""
    step = arena_plan(program, limits).nbytes + step_layout(program, limits, MOST_MULTIPROCESSORS).nbytes
    sampler = limits.sequences * (row_bytes(program.output.sizes({"rows": 1})[1]) + 512)
    return step + sum(workspace(program, limits.sequences, tier)) + sampler + (1 << 20)  # and what is small


def _nbytes(tensor: Tensor, sizes: dict[str, int]) -> int:
    assert tensor.kind in (Kind.ACTIVATION, Kind.CACHE), tensor
    return tensor.dtype.nbytes(math.prod(tensor.sizes(sizes)))

"""One kernel in a row of its like, each over data of its own: what `kernels.py` times. Launched as the engine does it.

A chain is a program of one op again and again, lowered for a bucket. Weights and caches are the ops' own, so that none
is in L2 when it is read; the activations of products and attention are shared, since in a step they come from the
kernel before. All are normal numbers in bf16, for what a GPU draws and how fast it runs follow from the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import exact
from benchmarks.ops import BLOCK, step_of
from rvllm.backend.cuda.launch import Bucket, Launch, Target
from rvllm.backend.cuda.lower import FUSIONS, lower, workspace
from rvllm.backend.cuda.matrix_maps import MatrixMaps
from rvllm.backend.cuda.model import StepLimits, step_layout
from rvllm.backend.cuda.sampling import DeviceSampler
from rvllm.backend.cuda.step_block import begin, columns_for, pack
from rvllm.backend.cuda.tuning import TUNED, UNTUNED
from rvllm.program.cost import Load, cost
from rvllm.program.dtype import BF16, F32, I32, STORED, DType, Float32, Stored, f32_to_bf16, load, store
from rvllm.program.fuse import fuse
from rvllm.program.ops import ActMul, Add, Attention, Kind, Linear, Norm, Op, Plain, Tensor, reads, writes
from rvllm.program.program import CacheGroup, Int32, Program, Step
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import SamplingRow

Places = npt.NDArray[np.int64]

PRODUCTS = ("linear", "linear_add", "linear_act_mul", "linear_f32")
EPSILON = 1e-6
RING = 16_777_213  # a prime, so that no two rows of a matrix begin at the same number
MOST_SETS = 128
SEQUENCES = 256  # that an engine's steps with prompts have room for
QUERY_SPREAD = 2.0  # of queries: scores are as wide, so that some keys count and others do not
# Looked at of each output.
CHECKED_TOKENS, CHECKED_ROWS, CHECKED_SEQUENCES, CHECKED_QUERIES = 64, 256, 3, 6


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel by its stem, and sizes. Each of `sequences` brings `new` tokens and has `context` with them.

    shape: (depth, rows) of products, where gate and up are 2 * rows; (heads, kv_heads, head_dim) of attention;
    (hidden,) of a norm; (vocabulary,) of the sampler. Where there is no attention, tokens are sequences of one.
    """

    stem: str
    shape: tuple[int, ...]
    sequences: int
    new: int = 1
    context: int = 1

    @property
    def tokens(self) -> int:
        return self.sequences * self.new

    @property
    def set_bytes(self) -> int:
        """What each op of a chain has for itself and reads, or of a norm writes."""
        if self.stem in PRODUCTS:
            return 2 * math.prod(self.shape) * (2 if self.stem == "linear_act_mul" else 1)
        if self.stem.startswith("attention"):
            return 4 * self.sequences * self.context * math.prod(self.shape[1:])
        return 4 * self.tokens * self.shape[0]

    def sets(self, rotated_bytes: int) -> int:
        """Ops of a chain whose data take so many bytes together."""
        return min(MOST_SETS, max(1, math.ceil(rotated_bytes / self.set_bytes)))

    def cost(self) -> tuple[int, int]:
        """(bytes that an op must move at the least, its floating-point operations)."""
        if self.stem == "sample":
            return 4 * math.prod((self.tokens, *self.shape)), math.prod((self.tokens, *self.shape))
        found = cost(program(self, 1), Load(self.tokens, self.sequences, self.context))[0]
        return found.nbytes, found.flops


def program(case: Case, sets: int) -> Program:
    """The op `sets` times, fused as for the engine."""
    make = _products if case.stem in PRODUCTS else _attentions if case.stem.startswith("attention") else _norms
    ops = [op for index in range(sets) for op in make(case, index)]
    groups: tuple[CacheGroup, ...] = ()
    if case.stem.startswith("attention"):
        groups = (CacheGroup(None, case.shape[1], case.shape[2], BF16, sets),)
    return fuse(Program(tuple(ops), ops[-1].out, {}, groups), FUSIONS)


def _activation(name: str, width: int, dtype: DType = BF16, rows: str = "tokens") -> Tensor:
    return Tensor(name, (rows, width), dtype, Kind.ACTIVATION)


def _input(name: str, *shape: int | str) -> Tensor:
    return Tensor(name, shape, I32, Kind.INPUT)


def _products(case: Case, index: int) -> list[Plain]:
    depth, rows = case.shape
    head, gated = case.stem == "linear_f32", case.stem == "linear_act_mul"
    over, dtype = ("rows", F32) if head else ("tokens", BF16)
    weight = Tensor(f"{index}.weight", ((1 + gated) * rows, depth), BF16, Kind.WEIGHT)
    out = _activation(f"{index}.out", (1 + gated) * rows, dtype, over)
    ops: list[Plain] = [Linear(_activation("x", depth, rows=over), (weight,), (), out)]
    if gated:
        ops.append(ActMul(out, "silu", _activation(f"{index}.acted", rows)))
    if case.stem == "linear_add":
        ops.append(Add(_activation("addend", rows), out, _activation(f"{index}.sum", rows)))
    return ops


def _attentions(case: Case, index: int) -> list[Plain]:
    heads, kv_heads, head_dim = case.shape
    cache = Tensor(f"cache.{index}", (2, "blocks.0", kv_heads, "block", head_dim), BF16, Kind.CACHE)
    tables = _input("block_tables.0", "sequences", "max_blocks")
    starts, lengths = _input("query_starts", "sequences+1"), _input("kv_lengths", "sequences")
    q, out = _activation("q", heads * head_dim), _activation(f"{index}.out", heads * head_dim)
    return [Attention(q, cache, None, tables, starts, lengths, heads, head_dim**-0.5, None, out)]


def _norms(case: Case, index: int) -> list[Plain]:
    (hidden,) = case.shape
    weight = Tensor(f"{index}.weight", (hidden,), BF16, Kind.WEIGHT)
    return [Norm(_activation(f"{index}.x", hidden), weight, EPSILON, _activation(f"{index}.out", hidden))]


class Normals:
    """A long ring of normal numbers, drawn once. Every array is a piece of it, from a place of its own on."""

    def __init__(self, count: int = RING) -> None:
        self._random = np.random.default_rng(0)
        values = self._random.standard_normal(count, dtype=np.float32)
        self._rings: dict[DType, Stored] = {F32: values, BF16: f32_to_bf16(values)}

    def array(self, dtype: DType, spread: float = 1.0) -> Drawn:
        return Drawn(self._rings[dtype], int(self._random.integers(len(self._rings[dtype]))), spread)

    def some(self, count: int, most: int) -> Places:
        """Up to `most` places of `count`, the first and the last among them."""
        if count <= most:
            return np.arange(count)
        between = self._random.choice(count - 2, most - 2, replace=False) + 1
        return np.sort(np.concatenate([[0, count - 1], between]))


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """An array of any length. `spread` is a power of two, so that it rounds nothing."""

    ring: Stored
    start: int
    spread: float

    def at(self, places: Places) -> Float32:
        """The elements at these places, as they are on the device."""
        values: Float32 = load(self.ring[(places + self.start) % len(self.ring)]) * np.float32(self.spread)
        return values

    def rows(self, chosen: Places, width: int) -> Float32:
        """Rows of an array of that width."""
        return self.at(chosen[:, None] * width + np.arange(width))

    def write(self, device: Any, address: int, count: int) -> None:
        """Put the first `count` elements there."""
        done, size = 0, self.ring.itemsize
        while done < count:
            begin = (self.start + done) % len(self.ring)
            piece = self.ring[begin : begin + count - done]
            if self.spread != 1:
                piece = store(load(piece) * np.float32(self.spread), self.ring.dtype)
            device.write(address + size * done, piece)
            done += len(piece)


class Memory:
    """What one chain takes of a device, to be given back."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._taken: list[int] = []

    def take(self, nbytes: int, byte: int = 0xFF) -> int:
        """Bytes that are no numbers until they are written, or all the same one."""
        address: int = self._device.allocate(nbytes)
        self._taken.append(address)
        self._device.fill(address, byte, nbytes)
        return address

    def free(self) -> None:
        self._device.synchronize()
        for address in self._taken:
            self._device.free(address)
        self._taken.clear()


@dataclass(frozen=True, slots=True)
class Chain:
    """launches: of each op. wrong: how far an op's output is off, as a share of what is allowed (exact.py)."""

    launches: list[list[Launch]]
    wrong: Callable[[int], float]


class Chains:
    """Makes chains on a device (rvllm.backend.cuda.kernels.Device)."""

    def __init__(self, device: Any, normals: Normals) -> None:
        self._device, self._normals = device, normals
        self._maps = MatrixMaps(device)
        self._samplers: dict[tuple[int, int], DeviceSampler] = {}

    def chain(self, case: Case, sets: int, memory: Memory) -> Chain:
        return self._sampling(case, sets, memory) if case.stem == "sample" else self._ops(case, sets, memory)

    def _ops(self, case: Case, sets: int, memory: Memory) -> Chain:
        recorded = program(case, sets)
        attends, prefills = case.stem.startswith("attention"), case.new > 1
        room = min(case.tokens, SEQUENCES) if prefills else case.sequences
        columns = math.ceil(case.context / BLOCK)
        limits = StepLimits(case.tokens, max(room, case.sequences), columns)
        bucket = Bucket(case.tokens, case.sequences, limits.sequences, prefills)
        sizes = {"tokens": case.tokens, "rows": case.sequences, "blocks.0": case.sequences * columns, "block": BLOCK}
        addresses, drawn = self._operands(case, recorded, sizes, memory)
        partial, counters = workspace(recorded, limits.sequences, self._device.tier)
        target = Target(
            address=addresses.__getitem__,
            bucket=bucket,
            max_blocks=columns,
            blocks=(case.sequences * columns,) if attends else (),
            block_size=BLOCK,
            workspace=memory.take(partial),
            counters=memory.take(counters, 0),
            multiprocessors=self._device.multiprocessors,
            tier=self._device.tier,
            matrix_map=self._maps,
            tuning=TUNED.get(self._device.tier, UNTUNED),
        )
        tables = np.random.default_rng(1).permutation(case.sequences * columns).astype(np.int32)
        tables = tables.reshape(case.sequences, columns)
        if attends:
            step = step_of(case.sequences, case.context, case.new, tables)
            self._begin(recorded, limits, target, step, addresses, memory)
        look = Look(self._device, self._normals, case, addresses, drawn, tables)
        return Chain([lower(op, target) for op in recorded.ops], lambda index: look.wrong(index, recorded.ops[index]))

    def _operands(
        self, case: Case, recorded: Program, sizes: dict[str, int], memory: Memory
    ) -> tuple[dict[str, int], dict[str, Drawn]]:
        """Where every tensor is, and the numbers of those that the program does not write itself."""
        # Sums of products are as large as their terms then, so that it shows what an activation does with them.
        spreads = {"x": 2.0 ** round(-0.5 * math.log2(case.shape[0])), "q": QUERY_SPREAD}
        addresses: dict[str, int] = {}
        drawn: dict[str, Drawn] = {}
        for op in recorded.ops:
            for tensor in reads(op):
                if tensor.kind is Kind.INPUT or tensor.name in addresses:
                    continue
                count = math.prod(tensor.sizes(sizes))
                addresses[tensor.name] = memory.take(tensor.dtype.nbytes(count))
                drawn[tensor.name] = self._normals.array(tensor.dtype, spreads.get(tensor.name, 1.0))
                drawn[tensor.name].write(self._device, addresses[tensor.name], count)
            out = writes(op)[-1]
            addresses[out.name] = memory.take(out.dtype.nbytes(math.prod(out.sizes(sizes))))
        return addresses, drawn

    def _begin(
        self,
        recorded: Program,
        limits: StepLimits,
        target: Target,
        step: Step,
        addresses: dict[str, int],
        memory: Memory,
    ) -> None:
        """Send a step and have begin_step make attention's lists of work, which stay for all replays."""
        layout = step_layout(recorded, limits, self._device.multiprocessors)
        block = memory.take(layout.nbytes)
        addresses |= {name: block + offset for name, offset in layout.offsets.items()}
        columns = columns_for(step.block_tables, int(step.kv_lengths.max()), BLOCK)
        host = np.zeros(layout.message_words, dtype=np.int32)
        pack(step, columns, host)
        self._device.write(addresses["message"], host)
        for launch in begin(recorded, target, layout):
            self._device.launch(launch)
        self._device.synchronize()

    def _sampling(self, case: Case, sets: int, memory: Memory) -> Chain:
        (vocab,) = case.shape
        count, device = case.tokens, self._device
        if (count, vocab) not in self._samplers:
            self._samplers[count, vocab] = DeviceSampler(
                device, rows=count, vocab=vocab, vocab_limit=vocab, eager=False
            )
        sampler = self._samplers[count, vocab]
        greedy = SamplingParams(temperature=0.0)
        rows = [SamplingRow(greedy, seed=index, position=1, slot=index) for index in range(count)]
        sampler.send(rows, count, 0)
        logits = [self._normals.array(F32) for _ in range(sets)]
        places, drawn = [memory.take(4 * count * vocab) for _ in range(sets)], [memory.take(4 * count) for _ in logits]
        for values, place in zip(logits, places):
            values.write(device, place, count * vocab)
        device.synchronize()

        def wrong(index: int) -> float:
            ids = np.empty(count, dtype=np.int32)
            device.read(drawn[index], ids)
            chosen = self._normals.some(count, CHECKED_TOKENS)
            return exact.argmax(ids[chosen], logits[index].rows(chosen, vocab))

        chains = [sampler.chain(place, ids, rows, count, 0) for place, ids in zip(places, drawn)]
        return Chain([sampler.launches(chain) for chain in chains], wrong)


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Holds outputs on the device to float64, in part where they are large."""

    device: Any
    normals: Normals
    case: Case
    addresses: Mapping[str, int]
    drawn: Mapping[str, Drawn]
    tables: Int32

    def wrong(self, index: int, op: Op) -> float:
        out = writes(op)[-1]
        if self.case.stem in PRODUCTS:
            return self._product(index, out)
        return self._attention(index, out) if self.case.stem.startswith("attention") else self._norm(index, out)

    def _read(self, out: Tensor, tokens: Places) -> Float32:
        """Some rows of an output."""
        width = out.sizes({"tokens": 0, "rows": 0})[1]
        elements = np.empty((len(tokens), width), dtype=STORED[out.dtype])
        for row, token in zip(elements, tokens.tolist()):
            self.device.read(self.addresses[out.name] + token * out.dtype.nbytes(width), row)
        return load(elements)

    def _product(self, index: int, out: Tensor) -> float:
        stem, (depth, rows) = self.case.stem, self.case.shape
        tokens = self.normals.some(self.case.tokens, CHECKED_TOKENS)
        chosen = self.normals.some(rows, CHECKED_ROWS)
        found = self._read(out, tokens)[:, chosen]
        x, weight = self.drawn["x"].rows(tokens, depth), self.drawn[f"{index}.weight"]
        if stem == "linear_act_mul":
            return exact.linear_act_mul(found, x, weight.rows(np.concatenate([chosen, rows + chosen]), depth))
        matrix = weight.rows(chosen, depth)
        if stem == "linear_add":
            return exact.linear_add(found, x, matrix, self.drawn["addend"].rows(tokens, rows)[:, chosen])
        return exact.linear_f32(found, x, matrix) if stem == "linear_f32" else exact.linear(found, x, matrix)

    def _norm(self, index: int, out: Tensor) -> float:
        (hidden,) = self.case.shape
        tokens = self.normals.some(self.case.tokens, CHECKED_TOKENS)
        weight = self.drawn[f"{index}.weight"].at(np.arange(hidden))
        return exact.norm(self._read(out, tokens), self.drawn[f"{index}.x"].rows(tokens, hidden), weight, EPSILON)

    def _attention(self, index: int, out: Tensor) -> float:
        return max_of(
            self._sequence(index, out, sequence)
            for sequence in self.normals.some(self.case.sequences, CHECKED_SEQUENCES).tolist()
        )

    def _sequence(self, index: int, out: Tensor, sequence: int) -> float:
        case, (heads, kv_heads, head_dim) = self.case, self.case.shape
        queries = self.normals.some(case.new, CHECKED_QUERIES)
        tokens = sequence * case.new + queries
        q = self.drawn["q"].rows(tokens, heads * head_dim).reshape(-1, heads, head_dim)
        found = self._read(out, tokens).reshape(q.shape)
        places = np.arange(case.context)
        blocks = self.tables[sequence, places // BLOCK].astype(np.int64)
        rows = (blocks[:, None] * kv_heads + np.arange(kv_heads)) * BLOCK + (places % BLOCK)[:, None]
        elements = rows[..., None] * head_dim + np.arange(head_dim)  # of the keys: (context, kv_heads, head_dim)
        cache, plane = self.drawn[f"cache.{index}"], self.tables.size * kv_heads * BLOCK * head_dim
        positions = case.context - case.new + queries
        keys, values = cache.at(elements), cache.at(elements + plane)
        return exact.attention(found, q, keys, values, positions, head_dim**-0.5)


def max_of(shares: Any) -> float:
    """The largest; NaN if there is one, which Python's max may lose."""
    return float(np.max(list(shares)))

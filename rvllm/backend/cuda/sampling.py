"""Draw a step's tokens on the device: the rows' parameters as arrays, and the chain of kernels in sample.cu.

Knows what sample.cu's head block says of its arrays; the rules are rvllm.sampling's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from rvllm.backend.cuda.context import Graph
from rvllm.backend.cuda.kernels import Device
from rvllm.backend.cuda.launch import Launch
from rvllm.backend.cuda.slots import Place, Slots
from rvllm.errors import EngineError
from rvllm.sampling.sampler import Sampled, SamplingRow

MOST_LOGPROBS = 20
UNIT = 1024  # logits: the smallest part of a row that has a block
PARAMETER_BYTES = 92  # of one row
SHORT = 256  # the largest top_k that the last kernel finds by itself
_ROW_BYTES, _UNIT_BYTES = 155728, 1056  # of the workspace
_BLOCKS = 4  # of sample_scan that a multiprocessor is given at once

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Chain:
    """Which of sample.cu's kernels a step's rows need, and on what: what a graph holds."""

    logits: int
    next_ids: int
    rows: int
    turn: int
    draws: bool  # not all rows are greedy or given
    weighs: bool  # log-probabilities, top_p alone or a large top_k


def row_bytes(vocab_limit: int) -> int:
    """Device memory for what the kernels leave each other, of one row."""
    return _ROW_BYTES + _UNIT_BYTES * -(-vocab_limit // UNIT)


class DeviceSampler:
    """Draws one token a row from logits on the device, for up to `rows` rows of `vocab` logits."""

    def __init__(self, device: Device, *, rows: int, vocab: int, vocab_limit: int, eager: bool) -> None:
        self._device = device
        self._rows, self._vocab, self._limit, self._eager = rows, vocab, vocab_limit, eager
        self._units = -(-vocab_limit // UNIT)
        self._workspace = device.allocate(rows * row_bytes(vocab_limit))
        self._counters = device.allocate(4 * rows)
        device.fill(self._counters, 0, 4 * rows)
        self._slots = Slots(device, vocab)
        self._masks: tuple[int, tuple[Bytes, Bytes]] | None = None  # once a row has one of its own
        # Two of each on the host: one step is written or read while another is still on its way.
        self._hosts = tuple(device.pinned(rows * (PARAMETER_BYTES + 8) + 256) for _ in range(2))
        self._block = device.allocate(self._hosts[0].nbytes)
        words = rows * (2 + 2 * MOST_LOGPROBS)
        self._results = tuple(Results(device.pinned(4 * words).view(np.int32), rows) for _ in range(2))
        self._graphs: dict[Chain, Graph | None] = {}
        self._written: list[object] = [None, None]  # what each host block holds
        self._sent: object = None  # what the device's block holds

    def sample(self, logits: int, next_ids: int, rows: Sequence[SamplingRow], bucket: int, turn: int) -> None:
        """Start drawing; the rows' logits are the first of the bucket's, at `logits`. `send` was called for them.

        The tokens also go to `next_ids` (bucket,) i32. Rows of padding are greedy over whatever lies there.
        """
        self._run(self.chain(logits, next_ids, rows, bucket, turn))

    def chain(self, logits: int, next_ids: int, rows: Sequence[SamplingRow], bucket: int, turn: int) -> Chain:
        """What drawing these rows takes."""
        weighs = any(row.logprobs is not None or self._weighs(row) for row in rows)
        return Chain(logits, next_ids, bucket, turn, weighs or any(map(_is_drawn, rows)), weighs)

    def rehearse(self, logits: int, next_ids: int, free_bytes: Callable[[], int]) -> int:
        """Bytes that all graphs of the largest bucket take together, in both turns, whatever their rows ask for.

        They are captured and dropped; nothing is run.
        """
        taken = 0
        for _ in range(2):  # the second time is measured, when all kernels have been loaded
            before = free_bytes()
            graphs = [
                self._device.capture(self.launches(Chain(logits, next_ids, self._rows, turn, *kernels)))
                for turn, kernels in product((0, 1), ((False, False), (True, False), (True, True)))
            ]
            taken = before - free_bytes()
            for graph in graphs:
                if graph is not None:
                    self._device.forget(graph)
        return max(taken, 0)

    def take(self, rows: Sequence[SamplingRow], turn: int) -> list[Sampled]:
        """The tokens, once the device is through. Raises EngineError as sampling.sampler.sample_rows does."""
        return self._results[turn].take(rows)

    def positions(self, bucket: int) -> int:
        """Where the rows' positions are on the device, (bucket,) u32."""
        return self._block + PARAMETER_BYTES * bucket

    def send(self, rows: Sequence[SamplingRow], bucket: int, turn: int, *, positions: bool = True) -> None:
        """Copy what the rows ask for, before the step that makes their logits is started; only what has changed.

        positions: whether the rows' count, or those that the device has by itself.
        """
        assert len(rows) <= bucket <= self._rows, (len(rows), bucket, self._rows)
        assert all((row.logprobs or 0) <= MOST_LOGPROBS for row in rows), rows
        edits = self._places(rows, turn)
        key = (bucket, [(row.params, row.seed, row.given_id, place) for row, place in zip(rows, edits)])
        host, nbytes = self._hosts[turn], PARAMETER_BYTES * bucket
        if key != self._written[turn]:
            self._written[turn] = key
            host[:nbytes] = parameter_arrays(rows, edits, bucket)
        if key != self._sent or (positions and any(_is_drawn(row) for row in rows)):
            self._sent = key
            if positions:
                places = host[nbytes : nbytes + 4 * bucket].view(np.uint32)
                places[: len(rows)] = [row.position for row in rows]
                nbytes += 4 * bucket
            self._device.copy_in(self._block, host.ctypes.data, nbytes)

    def _places(self, rows: Sequence[SamplingRow], turn: int) -> list[Place]:
        places = [self._slots.place(row) for row in rows]
        edited = [row.slot for row, place in zip(rows, places) if place.bits]
        assert len(set(edited)) == len(edited), f"two rows have one slot: {edited}"
        masked = [index for index, row in enumerate(rows) if row.mask is not None and row.given_id is None]
        if masked:
            masks = np.stack([self._slots.step_mask(rows[index]) for index in masked])
            address = self._send_masks(masks, turn)
            for count, index in enumerate(masked):
                places[index] = replace(places[index], mask=address + count * masks[0].nbytes)
        return places

    def _send_masks(self, masks: npt.NDArray[np.uint32], turn: int) -> int:
        if self._masks is None:
            nbytes = 4 * self._rows * self._slots.words
            self._masks = self._device.allocate(nbytes), (self._device.pinned(nbytes), self._device.pinned(nbytes))
        address, hosts = self._masks
        hosts[turn][: masks.nbytes] = masks.reshape(-1).view(np.uint8)
        self._device.copy_in(address, hosts[turn].ctypes.data, masks.nbytes)
        return address

    def _weighs(self, row: SamplingRow) -> bool:
        """Whether all logits have to be looked at again for the row's draw."""
        if 0 < row.params.top_k < self._limit:
            return _is_drawn(row) and row.params.top_k > SHORT
        return _is_drawn(row) and row.params.top_p < 1

    def _run(self, chain: Chain) -> None:
        if not self._eager and chain not in self._graphs:
            self._graphs[chain] = self._device.capture(self.launches(chain))
        graph = self._graphs.get(chain)
        if graph is not None:
            self._device.replay(graph)
            return
        for launch in self.launches(chain):
            self._device.launch(launch)

    def launches(self, chain: Chain) -> list[Launch]:
        """The chain's kernels, in their order."""
        rows, logits, parameters = chain.rows, chain.logits, self._block
        sizes = (rows, self._vocab, self._limit)
        # As many blocks as run at once: each brings some microseconds that are not reading.
        slices = min(max(_BLOCKS * self._device.multiprocessors // rows, 2), self._units)
        head, positions, results = (logits, parameters), parameters + PARAMETER_BYTES * rows, self._results[chain.turn]
        tokens, drawing = (results.tokens, chain.next_ids), (*head, positions, self._workspace)

        def over(entry: str, grid: tuple[int, ...], block: int, *values: int) -> Launch:
            return Launch("sample", entry, grid, block, 0, (*values, *sizes))

        scan = over("sample_scan", (slices, rows), 256, *drawing, self._counters, *tokens)
        if not chain.draws:
            return [scan]
        bound = over("sample_bound", (rows,), 512, *head, self._workspace, *tokens)
        weigh = over("sample_weigh", (slices, rows), 256, *head, self._workspace)
        tells = (results.logprobs, results.top_ids, results.top_logprobs)
        return [
            scan,
            *([bound, weigh] if chain.weighs else []),
            over("sample_finish", (rows,), 512, *drawing, *tokens, *tells, slices),
        ]


def _is_drawn(row: SamplingRow) -> bool:
    return row.given_id is None and not row.params.greedy


@dataclass(frozen=True, slots=True)
class Results:
    """Where the kernels leave a step's tokens and log-probabilities: page-locked memory of the host, so that nothing
    has to be copied behind them."""

    host: npt.NDArray[np.int32]
    rows: int

    @property
    def tokens(self) -> int:
        return self.host.ctypes.data

    @property
    def logprobs(self) -> int:
        return self.tokens + 4 * self.rows

    @property
    def top_ids(self) -> int:
        return self.tokens + 8 * self.rows

    @property
    def top_logprobs(self) -> int:
        return self.top_ids + 4 * self.rows * MOST_LOGPROBS

    def take(self, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """What the kernels left, once they are through."""
        host, count = self.host, len(rows)
        tokens: list[int] = host[:count].tolist()
        if min(tokens) < 0:
            index = next(place for place, token in enumerate(tokens) if token < 0)
            what = "NaN" if tokens[index] == -1 else "nothing but -inf"
            raise EngineError(f"the logits of row {index} of {count} hold {what}")
        if all(row.logprobs is None for row in rows):
            return list(map(Sampled, tokens))
        tops = host[2 * self.rows :].reshape(2, self.rows, MOST_LOGPROBS)[:, :count]
        logprobs = host[self.rows : self.rows + count].view(np.float32)
        found = zip(rows, tokens, logprobs.tolist(), tops[0].tolist(), tops[1].view(np.float32).tolist())
        return [_sampled(*one) for one in found]


def _sampled(row: SamplingRow, token: int, logprob: float, ids: list[int], logprobs: list[float]) -> Sampled:
    asked = row.logprobs
    if asked is None:
        return Sampled(token)
    best = tuple((number, value) for number, value in zip(ids[:asked], logprobs[:asked]) if number >= 0)
    return Sampled(token, logprob, best)


def parameter_arrays(rows: Sequence[SamplingRow], places: Sequence[Place], bucket: int) -> Bytes:
    """The rows' parameters, (92 bucket,) uint8: sample.cuh's arrays one after another. Padding is greedy."""
    wide = np.zeros((7, bucket), dtype=np.uint64)
    wide[:2] = np.array([[1.0], [-math.inf]]).view(np.uint64)
    narrow = np.zeros((4, bucket), dtype=np.float32)
    narrow[0], narrow[1] = 1.0, 1.0
    whole = np.zeros((5, bucket), dtype=np.int32)
    whole[1], whole[2], whole[3] = 1, -1, -1
    for index, (row, place) in enumerate(zip(rows, places)):
        params = row.params
        drop = params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
        wide[:2, index] = np.array([params.top_p if params.top_p > 0 else 1.0, drop]).view(np.uint64)
        wide[2:, index] = (row.seed % 2**64, place.bits, place.counts, place.bias, place.mask)
        narrow[:, index] = (
            params.temperature,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        logprobs = -1 if row.logprobs is None else row.logprobs
        given = -1 if row.given_id is None else row.given_id
        whole[:, index] = (min(params.top_k, 2**31 - 1), params.greedy, logprobs, given, place.edits)
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in (wide, narrow, whole)])

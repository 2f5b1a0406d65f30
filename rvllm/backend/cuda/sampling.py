"""Draw a step's tokens on the device: the rows' parameters as arrays, and the chain of kernels in sample.cu.

Knows what sample.cu's head block says of its arrays; the rules are rvllm.sampling's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.backend.cuda.context import Graph
from rvllm.backend.cuda.kernels import Device
from rvllm.backend.cuda.lower import Launch
from rvllm.errors import EngineError
from rvllm.sampling.sampler import Sampled, SamplingRow, changes_logits

MOST_LOGPROBS = 20
SLICE = 4096  # logits of one block
PARAMETER_BYTES = 56  # of one row
_SEEN, _FORBIDDEN, _BIASED = 1, 2, 4
_FIRST_EDITS = 4096

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Edits:
    """What happens to single logits, row after row: sample.cu's CSR arrays."""

    starts: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint32]
    bias: npt.NDArray[np.float32]


class DeviceSampler:
    """Draws one token a row from logits on the device, for up to `rows` rows of `vocab` logits."""

    def __init__(self, device: Device, *, rows: int, vocab: int, vocab_limit: int, eager: bool) -> None:
        self._device = device
        self._rows, self._vocab, self._limit, self._eager = rows, vocab, vocab_limit, eager
        slices = -(-vocab_limit // SLICE)
        self._workspace = device.allocate(rows * (49168 + 48 * slices + 4 * vocab))
        self._mask_words = -(-vocab // 32)
        self._masks = device.allocate(4 * rows * self._mask_words)
        # Two of each on the host: one step is written or read while another is still on its way.
        self._hosts = tuple(device.pinned(rows * (PARAMETER_BYTES + 8) + 256) for _ in range(2))
        self._block = device.allocate(self._hosts[0].nbytes)
        words = rows * (2 + 2 * MOST_LOGPROBS)
        self._results = tuple(Results(device.pinned(4 * words).view(np.int32), rows) for _ in range(2))
        self._graphs: dict[tuple[int, int, int, int, bool], Graph | None] = {}
        self._written: list[object] = [None, None]  # what each host block holds
        self._sent: object = None  # what the device's block holds
        self._has_edits = False
        self._edit_room = 0
        self._edits: tuple[int, ...] = ()
        self._make_room(_FIRST_EDITS)

    def sample(self, logits: int, next_ids: int, rows: Sequence[SamplingRow], bucket: int, turn: int) -> None:
        """Start drawing; the rows' logits are the first of the bucket's, at `logits`. `send` was called for them.

        The tokens also go to `next_ids` (bucket,) i32. Rows of padding are greedy over whatever lies there.
        """
        full = any(not row.params.greedy or row.params.logprobs for row in rows)
        self._run(logits, next_ids, bucket, turn, full)

    def take(self, rows: Sequence[SamplingRow], turn: int) -> list[Sampled]:
        """The tokens, once the device is through. Raises EngineError as sampling.sampler.sample_rows does."""
        return self._results[turn].take(rows)

    def send(self, rows: Sequence[SamplingRow], bucket: int, turn: int) -> None:
        """Copy what the rows ask for, before the step that makes their logits is started; only what has changed.

        Edits are copied at once: with any, the device must be idle.
        """
        key = (bucket, [(row.params, row.seed) for row in rows])
        host, nbytes = self._hosts[turn], PARAMETER_BYTES * bucket
        if key != self._written[turn]:
            self._written[turn] = key
            host[:nbytes] = parameter_arrays(rows, bucket)
        if key != self._sent or not all(row.params.greedy for row in rows):
            self._sent = key
            positions = host[nbytes : nbytes + 4 * bucket].view(np.uint32)
            positions[: len(rows)] = [row.position for row in rows]
            self._device.copy_in(self._block, host.ctypes.data, nbytes + 4 * bucket)
        self._send_edits(rows, bucket)

    def _send_edits(self, rows: Sequence[SamplingRow], bucket: int) -> None:
        """Edits and masks, where there are any or were any before."""
        edits = edit_arrays(rows, bucket)
        if not len(edits.ids) and not self._has_edits:
            return
        self._has_edits = bool(len(edits.ids))
        if len(edits.ids) > self._edit_room:
            self._make_room(2 * len(edits.ids))
        arrays = (edits.starts, edits.ids, edits.counts, edits.flags, edits.bias)
        for address, array in zip(self._edits, arrays):
            if array.nbytes:
                self._device.write(address, array)
        masks = [mask for row in rows if (mask := self._mask(row)) is not None]
        if masks:
            self._device.write(self._masks, np.stack(masks))

    def _make_room(self, edits: int) -> None:
        """Room for more edits. The graphs hold the old addresses and are made again."""
        for address in self._edits:
            self._device.free(address)
        sizes = (4 * (self._rows + 1), *(4 * edits,) * 4)
        self._edits = tuple(self._device.allocate(nbytes) for nbytes in sizes)
        self._device.fill(self._edits[0], 0, sizes[0])
        self._edit_room = edits
        self._graphs.clear()

    def _mask(self, row: SamplingRow) -> npt.NDArray[np.uint32] | None:
        allowed = row.params.allowed_token_ids
        if allowed is None:
            return None
        bits = np.zeros(32 * self._mask_words, dtype=np.uint8)
        bits[list(allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def _run(self, logits: int, next_ids: int, bucket: int, turn: int, full: bool) -> None:
        key = (logits, next_ids, bucket, turn, full)
        if not self._eager and key not in self._graphs:
            self._graphs[key] = self._device.capture(self._launches(*key))
        graph = self._graphs.get(key)
        if graph is not None:
            self._device.replay(graph)
            return
        for launch in self._launches(*key):
            self._device.launch(launch)

    def _launches(self, logits: int, next_ids: int, rows: int, turn: int, full: bool) -> list[Launch]:
        slices = -(-self._limit // SLICE)
        starts, ids, counts, flags, bias = self._edits
        parameters, positions = self._block, self._block + PARAMETER_BYTES * rows
        sizes = (rows, self._vocab, self._limit)
        edited = (logits, parameters, starts, ids, counts, flags, bias, self._masks, self._workspace, *sizes)
        results = self._results[turn]
        finish = (logits, parameters, self._workspace, results.tokens, next_ids, results.logprobs, *sizes)
        prepare = Launch("sample", "sample_prepare", (slices, rows), 256, 0, edited)
        last = Launch("sample", "sample_finish", (rows,), 32, 0, finish)
        if not full:
            return [prepare, last]
        select = (logits, parameters, starts, self._workspace, results.top_ids, results.top_logprobs, *sizes)
        draw = (logits, parameters, positions, starts, self._workspace, *sizes)
        return [
            prepare,
            Launch("sample", "sample_weigh", (slices, rows, 2), 256, 0, edited),
            Launch("sample", "sample_select", (rows, 2), 1024, 0, select),
            Launch("sample", "sample_draw", (slices, rows), 256, 0, draw),
            last,
        ]


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
        host = self.host
        tokens = host[: self.rows]
        logprobs = host[self.rows : 2 * self.rows].view(np.float32)
        tops = host[2 * self.rows :]
        top_ids = tops[: self.rows * MOST_LOGPROBS].reshape(self.rows, MOST_LOGPROBS)
        top_logprobs = tops[self.rows * MOST_LOGPROBS :].view(np.float32).reshape(self.rows, MOST_LOGPROBS)
        for index in range(len(rows)):
            if tokens[index] < 0:
                what = "NaN" if tokens[index] == -1 else "nothing but -inf"
                raise EngineError(f"the logits of row {index} of {len(rows)} hold {what}")
        return [
            _sampled(row, int(tokens[i]), float(logprobs[i]), top_ids[i].tolist(), top_logprobs[i].tolist())
            for i, row in enumerate(rows)
        ]


def _sampled(row: SamplingRow, token: int, logprob: float, ids: list[int], logprobs: list[float]) -> Sampled:
    asked = row.params.logprobs
    if asked is None:
        return Sampled(token)
    best = tuple((number, value) for number, value in zip(ids[:asked], logprobs[:asked]) if number >= 0)
    return Sampled(token, logprob, best)


def parameter_arrays(rows: Sequence[SamplingRow], bucket: int) -> Bytes:
    """The rows' parameters, (56 bucket,) uint8: sample.cuh's arrays one after another. Padding is greedy."""
    wide = np.zeros((3, bucket), dtype=np.float64)
    wide[0], wide[1] = 1.0, -math.inf
    narrow = np.zeros((4, bucket), dtype=np.float32)
    narrow[0], narrow[1] = 1.0, 1.0
    whole = np.zeros((4, bucket), dtype=np.int32)
    whole[1], whole[2], whole[3] = 1, -1, -1
    masks = 0
    for index, row in enumerate(rows):
        params = row.params
        wide[0, index] = params.top_p if params.top_p > 0 else 1.0
        wide[1, index] = params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
        wide[2].view(np.int64)[index] = row.seed
        narrow[:, index] = (
            params.temperature,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        has_mask = params.allowed_token_ids is not None
        logprobs = -1 if params.logprobs is None else params.logprobs
        whole[:, index] = (params.top_k, params.greedy, masks if has_mask else -1, logprobs)
        masks += has_mask
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in (wide, narrow, whole)])


def edit_arrays(rows: Sequence[SamplingRow], bucket: int) -> Edits:
    """Every logit that bias, penalties or min_tokens touch; rows without any have none."""
    starts = np.zeros(bucket + 1, dtype=np.int32)
    ids: list[int] = []
    entries: list[tuple[int, int, float]] = []
    for index, row in enumerate(rows):
        touched = _touched(row)
        ids += touched
        entries += touched.values()
        starts[index + 1] = len(ids)
    if not ids:
        return Edits(starts, *_NO_EDITS)
    starts[len(rows) + 1 :] = len(ids)
    counts, flags, bias = zip(*entries)
    return Edits(
        starts,
        np.array(ids, dtype=np.int32),
        np.array(counts, dtype=np.uint32),
        np.array(flags, dtype=np.uint32),
        np.array(bias, dtype=np.float32),
    )


_NO_EDITS = (np.zeros(0, np.int32), np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.float32))


def _touched(row: SamplingRow) -> dict[int, tuple[int, int, float]]:
    """(output count, flags, bias) of each id that something happens to."""
    params = row.params
    if not row.forbidden_ids and not changes_logits(row):
        return {}
    found: dict[int, tuple[int, int, float]] = {}

    def mark(token: int, *, count: int = 0, flag: int = 0, bias: float = 0.0) -> None:
        old_count, old_flags, old_bias = found.get(token, (0, 0, 0.0))
        found[token] = (old_count + count, old_flags | flag, old_bias + bias)

    if params.repetition_penalty != 1:
        for token in set(row.prompt_ids):
            mark(int(token), flag=_SEEN)
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        for token, count in row.output_counts.items():
            if count:
                mark(token, count=count, flag=_SEEN)
    for token in row.forbidden_ids:
        mark(token, flag=_FORBIDDEN)
    for token, value in (params.logit_bias or {}).items():
        mark(token, flag=_BIASED, bias=value)
    return found

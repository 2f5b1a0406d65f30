"""A batch for the sampling kernels: requests as arrays, the chain of launches, what came out. Knows no expected value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import Float32
from rvllm.sampling.sampler import SamplingRow
from tests.kernels.device import Device

STEM = "sample"
RNG = np.random.default_rng(22)
TOPS = 20
SLICE = 4096
FULL = (256, 1024)  # threads of a block: of all but sample_select and sample_finish, and of sample_select
SMALL = (32, 32)  # the same bits, and fewer fibers


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the kernels made of a batch; `cuts` (rows, 2) u64: the best rank, and the lowest that may be drawn."""

    tokens: npt.NDArray[np.int32]
    next_ids: npt.NDArray[np.int32]
    logprobs: Float32
    top_ids: npt.NDArray[np.int32]
    top_logprobs: Float32
    cuts: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Arrays:
    """A batch as the kernels take it."""

    parameters: npt.NDArray[np.uint8]
    positions: npt.NDArray[np.uint32]
    edits: tuple[npt.NDArray[Any], ...]  # starts, ids, counts, flags, bias
    masks: npt.NDArray[np.uint32]


def arrays_of(rows: Sequence[SamplingRow], vocab: int) -> Arrays:
    params = [row.params for row in rows]
    allowed = [one.allowed_token_ids for one in params]
    mask_rows = np.full(len(rows), -1, np.int32)
    masks = [np.zeros(-(-vocab // 32), np.uint32)]  # one that is nobody's, so that there is one
    for row, ids in enumerate(allowed):
        if ids is not None:
            bits = np.zeros(len(masks[0]) * 32, np.uint8)
            bits[list(ids)] = 1
            mask_rows[row] = len(masks)
            masks.append(np.packbits(bits, bitorder="little").view(np.uint32))
    with np.errstate(divide="ignore"):
        drops = [one.temperature * float(np.log(one.min_p)) if one.min_p else -np.inf for one in params]
    fields = (
        np.array([one.top_p for one in params], np.float64),
        np.array(drops, np.float64),
        np.array([row.seed for row in rows], np.int64),
        np.array([one.temperature for one in params], np.float32),
        np.array([one.repetition_penalty for one in params], np.float32),
        np.array([one.presence_penalty for one in params], np.float32),
        np.array([one.frequency_penalty for one in params], np.float32),
        np.array([one.top_k for one in params], np.int32),
        np.array([one.greedy for one in params], np.int32),
        mask_rows,
        np.array([-1 if one.logprobs is None else one.logprobs for one in params], np.int32),
    )
    block = np.concatenate([field.view(np.uint8) for field in fields])
    positions = np.array([row.position for row in rows], np.uint32)
    return Arrays(block, positions, edits_of(rows), np.stack(masks))


def edits_of(rows: Sequence[SamplingRow]) -> tuple[npt.NDArray[Any], ...]:
    starts, ids, counts, flags, biases = [0], [], [], [], []
    for row in rows:
        bias = row.params.logit_bias or {}
        seen = {int(token) for token in row.prompt_ids} | {token for token, n in row.output_counts.items() if n}
        named = np.array(sorted(seen | set(bias) | set(row.forbidden_ids)), np.int64)
        for token in RNG.permutation(named).tolist():
            ids.append(token)
            counts.append(row.output_counts.get(token, 0))
            flags.append((token in seen) + 2 * (token in row.forbidden_ids) + 4 * (token in bias))
            biases.append(bias.get(token, 0.0))
        starts.append(len(ids))
    columns = ((starts, np.int32), (ids, np.int32), (counts, np.uint32), (flags, np.uint32), (biases, np.float32))
    return tuple(np.array([*values, *[0] * (name == 1)], dtype) for name, (values, dtype) in enumerate(columns))


def workspace(rows: int, vocab: int, limit: int) -> npt.NDArray[np.uint8]:
    """What any earlier use may have left there."""
    nbytes = rows * (49168 + 48 * -(-limit // SLICE) + 4 * vocab)
    return RNG.integers(0, 256, nbytes, dtype=np.uint8)


def run(
    device: Device,
    logits: Float32,
    rows: Sequence[SamplingRow],
    limit: int,
    threads: tuple[int, int] = FULL,
    chain: str = "all",
    work: npt.NDArray[np.uint8] | None = None,
) -> Drawn:
    count, vocab = logits.shape
    given, slices = arrays_of(rows, vocab), -(-limit // SLICE)
    work = workspace(count, vocab, limit) if work is None else work
    tokens, next_ids = np.full((2, count), -77, np.int32)
    logprobs = np.full(count, np.nan, np.float32)
    top_ids, top_logprobs = np.full((count, TOPS), -77, np.int32), np.full((count, TOPS), np.nan, np.float32)
    sizes = [count, vocab, limit]
    before = logits.tobytes()
    edited = [logits, given.parameters, *given.edits, given.masks, work, *sizes]
    picked = [logits, given.parameters, given.edits[0], work, top_ids, top_logprobs, *sizes]
    drawn = [logits, given.parameters, given.positions, given.edits[0], work, *sizes]
    finished = [logits, given.parameters, work, tokens, next_ids, logprobs, *sizes]
    device.run(STEM, "sample_prepare", (slices, count), threads[0], edited)
    if chain == "all":
        device.run(STEM, "sample_weigh", (slices, count, 2), threads[0], edited)
        device.run(STEM, "sample_select", (count, 2), threads[1], picked)
        device.run(STEM, "sample_draw", (slices, count), threads[0], drawn)
    device.run(STEM, "sample_finish", (count,), 32, finished)
    assert logits.tobytes() == before
    cuts = work[: 16 * count].view(np.uint64).reshape(count, 2)
    return Drawn(tokens, next_ids, logprobs, top_ids, top_logprobs, cuts)


def kept_ids(logits: Float32, cut: int) -> npt.NDArray[np.int64]:
    """The ids whose rank is at least `cut`."""
    bits = np.where(logits == 0, np.float32(0), logits).view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    ranks = keys << np.uint64(32) | np.uint64(0xFFFFFFFF) - np.arange(len(logits), dtype=np.uint64)
    return np.flatnonzero(ranks >= np.uint64(cut))

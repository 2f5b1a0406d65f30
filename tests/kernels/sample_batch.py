"""A batch for the sampling kernels: requests as arrays, the chain of launches, what came out. Knows no expected value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import Float32
from rvllm.sampling.sampler import SamplingRow
from tests.kernels.device import Device, _Buffer

STEM = "sample"
RNG = np.random.default_rng(22)
TOPS = 20
UNIT = 1024
LONG_LIST = 16384
PLANES = 5
PENALISED, BIASED, FORBIDDEN, BARRED = 1, 2, 4, 8
FLAT = 8  # of a row's mode
FULL = (256, 512)  # threads of a block: of sample_bound and sample_finish the second, of the others the first
SMALL = (32, 32)  # the same bits, and fewer fibers

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the kernels made of a batch; `cuts` (rows, 2) u64: the best rank, and the lowest that may be drawn."""

    tokens: npt.NDArray[np.int32]
    next_ids: npt.NDArray[np.int32]
    logprobs: Float32
    top_ids: npt.NDArray[np.int32]
    top_logprobs: Float32
    cuts: npt.NDArray[np.uint64]
    output_bits: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint32]


def bits_of(ids: Sequence[int], words: int) -> npt.NDArray[np.uint32]:
    bits = np.zeros(32 * words, np.uint8)
    bits[[int(token) for token in ids if token < 32 * words]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def slots_of(rows: Sequence[SamplingRow], vocab: int) -> tuple[dict[str, Array], list[int]]:
    """Every row's slot, whatever means nothing in it at random, and which edits the row has."""
    words = -(-vocab // 32)
    bits = RNG.integers(0, 2**32, (len(rows), PLANES, words), np.uint32)
    counts = RNG.integers(0, 2**32, (len(rows), vocab), np.uint32)
    bias = RNG.standard_normal((len(rows), vocab)).astype(np.float32)
    masks = np.zeros((len(rows), words), np.uint32)
    edits = []
    for row, request in enumerate(rows):
        params, output = request.params, {token: n for token, n in request.output_counts.items() if n and token < vocab}
        biases = {token: value for token, value in (params.logit_bias or {}).items() if token < vocab}
        barred = [ids[0] for ids in params.bad_words_token_ids if len(ids) == 1]
        sets = (request.prompt_ids, output, biases, request.forbidden_ids, barred)
        for plane, ids in enumerate(sets):
            bits[row, plane] = bits_of(list(ids), words)
        counts[row, list(output)] = list(output.values())
        bias[row, list(biases)] = list(biases.values())
        allowed = bits_of(params.allowed_token_ids or range(vocab), words)
        masks[row] = allowed if request.mask is None else allowed & request.mask
        asked = (params.penalises, bool(biases), bool(request.forbidden_ids), bool(barred))
        flags = sum(flag for flag, on in zip((PENALISED, BIASED, FORBIDDEN, BARRED), asked) if on)
        edits.append(flags if request.given_id is None else 0)
    return {"bits": bits, "counts": counts, "bias": bias, "masks": masks}, edits


def parameters_of(
    rows: Sequence[SamplingRow], vocab: int, edits: Sequence[int], addresses: dict[str, int]
) -> npt.NDArray[np.uint8]:
    params, words, places = [row.params for row in rows], -(-vocab // 32), np.arange(len(rows), dtype=np.uint64)
    masked = [row.given_id is None and not (row.params.allowed_token_ids is None is row.mask) for row in rows]
    with np.errstate(divide="ignore"):
        drops = [one.temperature * float(np.log(one.min_p)) if one.min_p else -np.inf for one in params]
    masks = addresses["masks"] + places * np.uint64(4 * words)
    fields = (
        np.array([one.top_p for one in params], np.float64),
        np.array(drops, np.float64),
        np.array([row.seed for row in rows], np.int64),
        addresses["bits"] + places * np.uint64(4 * words * PLANES),
        addresses["counts"] + places * np.uint64(4 * vocab),
        addresses["bias"] + places * np.uint64(4 * vocab),
        np.where(np.array(masked, bool), masks, np.uint64(0)),
        np.array([one.temperature for one in params], np.float32),
        np.array([one.repetition_penalty for one in params], np.float32),
        np.array([one.presence_penalty for one in params], np.float32),
        np.array([one.frequency_penalty for one in params], np.float32),
        np.array([one.top_k for one in params], np.int32),
        np.array([one.greedy for one in params], np.int32),
        np.array([-1 if row.logprobs is None else row.logprobs for row in rows], np.int32),
        np.array([-1 if row.given_id is None else row.given_id for row in rows], np.int32),
        np.array(edits, np.int32),
    )
    return np.concatenate([field.view(np.uint8) for field in fields])


def workspace(rows: int, limit: int) -> npt.NDArray[np.uint8]:
    """What any earlier use may have left there."""
    return RNG.integers(0, 256, rows * (155728 + 1056 * -(-limit // UNIT)), dtype=np.uint8)


def run(
    device: Device,
    logits: Float32,
    rows: Sequence[SamplingRow],
    limit: int,
    threads: tuple[int, int] = FULL,
    chain: str = "all",
    work: npt.NDArray[np.uint8] | None = None,
    blocks: tuple[int, int] | None = None,
) -> Drawn:
    count, vocab = logits.shape
    slots, edits = slots_of(rows, vocab)
    arrays: dict[str, Array] = slots | {
        "logits": logits,
        "positions": np.array([row.position for row in rows], np.uint32),
        "workspace": workspace(count, limit) if work is None else work,
        "counters": np.zeros(count, np.uint32),
        "tokens": np.full(count, -77, np.int32),
        "next_ids": np.full(count, -77, np.int32),
        "logprobs": np.full(count, np.nan, np.float32),
        "top_ids": np.full((count, TOPS), -77, np.int32),
        "top_logprobs": np.full((count, TOPS), np.nan, np.float32),
    }
    units = -(-limit // UNIT)
    results = []
    for schedule in device.memory.runs:
        buffers = {name: _Buffer(device.memory, array) for name, array in arrays.items()}
        addresses = {name: buffer.address for name, buffer in buffers.items()}
        parameters = _Buffer(device.memory, parameters_of(rows, vocab, edits, addresses))
        names = ("tokens", "next_ids", "logprobs", "top_ids", "top_logprobs")
        head, sizes = [addresses["logits"], parameters.address], [count, vocab, limit]
        chosen, drawing = [addresses[name] for name in names], [*head, addresses["positions"], addresses["workspace"]]
        scanning = [*drawing, addresses["counters"], *chosen[:2], *sizes]
        slices, weighing = [(grid, count) for grid in blocks or (units, units)], [*head, addresses["workspace"], *sizes]
        launches: list[tuple[str, tuple[int, ...], int, list[int]]] = [("scan", slices[0], threads[0], scanning)]
        if chain != "greedy":
            bounding = [*weighing[:3], *chosen[:2], *sizes]
            weighs = [("bound", (count,), threads[1], bounding), ("weigh", slices[1], threads[0], weighing)]
            finish = ("finish", (count,), threads[1], [*drawing, *chosen, slices[0][0], *sizes])
            launches += [*(weighs if chain == "all" else []), finish]
        for name, grid, block, values in launches:
            device.memory.launch(schedule, STEM, f"sample_{name}", grid, block, values, 0, None)
        parameters.take_back()
        results.append(
            {
                name: np.frombuffer(buffer.take_back(), arrays[name].dtype).reshape(arrays[name].shape)
                for name, buffer in buffers.items()
            }
        )
    for result in results:
        assert result["logits"].tobytes() == logits.tobytes()
        assert not result["counters"].any()
        # The order of a list is free; of the workspace, the states' ranks are not.
        for name in (*names, "counts", "bits"):
            assert result[name].tobytes() == results[0][name].tobytes(), name
    first = results[0]
    if work is not None:
        work[...] = first["workspace"]
    cuts = first["workspace"][: 80 * count].view(np.uint64).reshape(count, 10)[:, :2]
    return Drawn(*(first[name] for name in names), cuts, first["bits"][:, 1], first["counts"])


def kept_ids(logits: Float32, cut: int) -> npt.NDArray[np.int64]:
    """The ids whose rank is at least `cut`."""
    bits = np.where(logits == 0, np.float32(0), logits).view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    ranks = keys << np.uint64(32) | np.uint64(0xFFFFFFFF) - np.arange(len(logits), dtype=np.uint64)
    return np.flatnonzero(ranks >= np.uint64(cut))

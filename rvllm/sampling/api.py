"""The sampler as a Python API: rows of logits in, tokens out, on this machine's CPU. Knows no request, no engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.errors import BadRequest
from rvllm.program.dtype import Float32
from rvllm.sampling.draw import Kept, draw, everything, keep, log_softmax
from rvllm.sampling.params import GREEDY_TEMPERATURE, SamplingParams
from rvllm.sampling.philox import Int64, fresh_seed, offset_seed
from rvllm.sampling.sampler import penalise

Row = Sequence[float] | npt.NDArray[np.floating]
Ids = Sequence[int] | Int64
Best = tuple[Float32, int]  # a row, and the place of its largest logit


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The token, its ln probability, and the k best (id, ln probability), high to low, ties by id.

    With temperature 0 of the logits after penalties; above, of the distribution that was drawn from: after temperature,
    min_p, top_k and top_p.
    """

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


class Sampler:
    """Draws one token from one row of logits on this machine's CPU. Keeps no state."""

    def sample(
        self,
        logits: Row,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        logprobs: int | None = None,
        *,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        past_ids: Ids = (),
    ) -> SamplerOutput:
        """Choose a token. logits: (vocab,) numbers, rounded to float32; `seed` None: by the system's entropy.

        `logprobs` k lists the k best; the penalties are for `past_ids`, the tokens so far. Raises BadRequest where a
        parameter is out of range, the logits are no row of numbers, or they leave no token to draw.
        """
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            logprobs=logprobs,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
        return _sample([logits], params, [past_ids])[0]


def sample_batch(
    logits_batch: Iterable[Row],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    past_ids: Sequence[Ids] = (),
) -> list[SamplerOutput]:
    """Choose a token a row: row i gets what `Sampler.sample` gives with seed + i, wrapping within int64.

    logits_batch: (rows, vocab) as one array, or rows one by one, each of its own length. past_ids: empty, or each
    row's tokens so far.
    """
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    return _sample(logits_batch, params, past_ids)


def _sample(batch: Iterable[Row], params: SamplingParams, past: Sequence[Ids]) -> list[SamplerOutput]:
    rows = [_row(row) for row in batch]
    if past and len(past) != len(rows):
        raise BadRequest(
            f"past_ids has {len(past)} rows, the logits have {len(rows)}",
            param="past_ids",
            hint="give the ids of every row, an empty list where there are none",
        )
    processed = _penalised(rows, params, past) if past and params.penalises else iter(rows)
    drawn: Iterable[tuple[Kept, int]]
    if params.temperature < GREEDY_TEMPERATURE:
        drawn = ((everything(row, row[best]), best) for row, best in processed)
    else:
        first = fresh_seed() if params.seed is None else params.seed
        seeds = [offset_seed(first, index) for index in range(len(rows))]
        drawn = draw((keep(row, params, row[best]) for row, best in processed), seeds, [0] * len(rows))
    count = params.logprobs or 0
    return [SamplerOutput(int(kept.ids[place]), *log_softmax(kept, place, count)) for kept, place in drawn]


def _penalised(rows: Sequence[Best], params: SamplingParams, past: Sequence[Ids]) -> Iterator[Best]:
    """The rows after step 2, each made when it is needed."""
    for (row, _), given in zip(rows, past):
        ids, times = _ids(given, row.size), np.ones(1, np.float32)
        if params.frequency_penalty != 0:  # the others are the same however often an id stands there
            ids, counts = np.unique(ids, return_counts=True)
            times = counts.astype(np.float32)
        row = row.copy()
        penalise(row, params, (), ids, times)
        best = int(row.argmax())
        if row[best] == -np.inf:
            raise BadRequest("the penalties leave no logit above -inf", param="logits")
        yield row, best


def _ids(given: Ids, vocabulary: int) -> Int64:
    ids = np.asarray(given)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocabulary:
        raise BadRequest(f"past_ids are not all token ids, 0 to {vocabulary - 1}", param="past_ids")
    return ids.astype(np.int64, copy=False)


def _row(given: Row) -> Best:
    try:
        with np.errstate(over="ignore"):
            row = np.asarray(given, np.float32)
    except (TypeError, ValueError) as cause:
        raise BadRequest("logits are not all numbers", param="logits") from cause
    if row.ndim != 1 or row.size == 0:
        raise BadRequest(
            f"logits have shape {row.shape}, the limit is one row of at least one number",
            param="logits",
            hint="sample takes one row, sample_batch takes a list of rows",
        )
    best = int(row.argmax())  # of a NaN, where there is one
    if not row[best] > -np.inf:
        raise BadRequest(f"the largest logit is {row[best]}, so no token can be drawn", param="logits")
    return row, best

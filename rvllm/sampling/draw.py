"""From one row of processed logits to a token: temperature, filters, the draw. Knows no request and no history.

The definition, in numpy; device kernels are held to it. For a row z of float32 logits:

3. Greedy: the largest z, ties to the lowest id. Otherwise x = (z - max z) / temperature in float32.
4. min_p, top_k and top_p each keep a prefix of one order, z descending and then id ascending:
   min_p   z >= max z + temperature * ln(min_p), the right side rounded to float32
   top_k   the first k
   top_p   of those, the shortest prefix whose mass reaches top_p of their whole mass, at least one token;
           a token's mass is the integer part of 2**40 * exp(x), so that sums do not depend on their order
5. The draw is Gumbel-max (Gumbel 1954): the kept token with the largest x + g, ties to the lowest id, where
   g = -ln(-ln(1 - v)) and v = uniform(seed, position, id). It depends on nothing but the row's own logits,
   parameters, seed and position. x is float32, g and the sum float64.

(Steps 1 and 2 are `rvllm.sampling.sampler`'s.) A kernel whose exp or ln rounds otherwise may differ where a mass
lies within 2**-20 of top_p, and where two scores lie within 2**-20 of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import Float32
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.philox import Int64, uniform

_MASS_UNIT = np.float32(2.0**40)
_NUCLEUS_SIZES = (1024, 8192)  # most nuclei are small: sorting a few largest logits finds them
_DRAW_TOKENS = 1 << 15  # tokens whose noise is made in one go: arrays that stay in the cache
_LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The tokens that may be drawn, (n,) each: ids int64 ascending, their logits, and x of step 3 (best: 0)."""

    ids: Int64
    logits: Float32
    x: Float32


@np.errstate(over="ignore")
def everything(logits: Float32) -> Kept:
    """One row, (vocab,) float32 with a best above -inf, with nothing filtered, at temperature 1."""
    return _all_kept(logits, logits.max(), 1.0)


@np.errstate(over="ignore")
def keep(logits: Float32, params: SamplingParams) -> Kept:
    """Steps 3 and 4 for one row of processed logits, (vocab,) float32 with a best above -inf."""
    best = logits.max()
    floor = np.maximum(_min_p_floor(best, params), _LOWEST)
    values = logits if logits.min() >= floor else logits[logits >= floor]
    if 0 < params.top_k < values.size:
        values = _largest(values, params.top_k)
    if params.top_p < 1:
        values = _nucleus(values, best, params)
    if values.size == logits.size:
        return _all_kept(logits, best, params.temperature)
    ids = _first(logits, values.min(), values.size)
    return Kept(ids, logits[ids], _scaled(logits[ids], best, params.temperature))


def _all_kept(logits: Float32, best: np.float32, temperature: float) -> Kept:
    return Kept(np.arange(logits.size), logits, _scaled(logits, best, temperature))


def _min_p_floor(best: np.float32, params: SamplingParams) -> np.float32:
    if params.min_p == 0:
        return np.float32(_LOWEST)
    return np.float32(float(best) + params.temperature * math.log(params.min_p))


def _scaled(logits: Float32, best: np.float32, temperature: float) -> Float32:
    """x of step 3. Where the best is +inf, all its equals share the chance and the others have none."""
    if best == np.inf:
        return np.where(logits == best, np.float32(0), np.float32(-np.inf))
    # Taking the best off before dividing: a tiny temperature then overflows to -inf only, which is chance 0.
    x: Float32 = (logits - best) / np.float32(temperature)
    return x


def _nucleus(values: Float32, best: np.float32, params: SamplingParams) -> Float32:
    """The values, descending, of the shortest prefix whose mass reaches top_p of the whole."""
    total = int(_masses(values, best, params.temperature).sum())
    need = max(1, math.ceil(params.top_p * total))
    for size in (*_NUCLEUS_SIZES, values.size):
        head = np.ascontiguousarray(np.sort(_largest(values, size))[::-1])
        reached = np.cumsum(_masses(head, best, params.temperature))
        if reached[-1] >= need:
            break
    return head[: np.searchsorted(reached, need) + 1]


def _masses(values: Float32, best: np.float32, temperature: float) -> Int64:
    weights: Float32 = np.exp(_scaled(values, best, temperature))
    return (weights * _MASS_UNIT).astype(np.int64)


def _largest(values: Float32, count: int) -> Float32:
    if count >= values.size:
        return values
    return np.partition(values, values.size - count)[values.size - count :]


def _first(logits: Float32, threshold: np.float32, count: int) -> Int64:
    """The first `count` ids in order of logit descending, id ascending; returned ascending.

    `threshold` is the logit of the last of them.
    """
    ids = np.flatnonzero(logits >= threshold)
    surplus = ids.size - count
    if surplus == 0:
        return ids
    return np.delete(ids, np.flatnonzero(logits[ids] == threshold)[-surplus:])


def draw(kept: Sequence[Kept], seeds: Sequence[int], positions: Sequence[int]) -> Int64:
    """Step 5: one token a row, (rows,) int64. Noise is made for many short rows, or one long one, at a time."""
    tokens = np.empty(len(kept), np.int64)
    for part in _groups([row.ids.size for row in kept]):
        rows = kept[part]
        lengths = [row.ids.size for row in rows]
        ids = np.concatenate([row.ids for row in rows])
        noise = _gumbel(_spread(seeds[part], lengths), _spread(positions[part], lengths), ids)
        scores = np.concatenate([row.x for row in rows]) + noise
        ends = np.cumsum(lengths)
        tokens[part] = [ids[end - n + scores[end - n : end].argmax()] for n, end in zip(lengths, ends)]
    return tokens


def _groups(lengths: Sequence[int]) -> Iterator[slice]:
    start, tokens = 0, 0
    for index, length in enumerate(lengths):
        if tokens and tokens + length > _DRAW_TOKENS:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += length
    if tokens:
        yield slice(start, len(lengths))


def _spread(values: Sequence[int], lengths: Sequence[int]) -> int | Int64:
    """One value a token; a single row's stays single, which is cheaper."""
    return values[0] if len(values) == 1 else np.repeat(np.asarray(values, np.int64), lengths)


def _gumbel(seeds: int | Int64, positions: int | Int64, ids: Int64) -> npt.NDArray[np.float64]:
    # In float64, 1 - v is exact: the same as log1p(-v), which a kernel in float32 uses, and faster here.
    noise: npt.NDArray[np.float64] = -np.log(-np.log(1.0 - uniform(seeds, positions, ids).astype(np.float64)))
    return noise


def log_softmax(kept: Kept, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """ln softmax over `kept`: of `token`, and the `count` best (id, logprob), high to low, ties by id.

    The terms of the sum are float32, the sum float64: the error is below 1e-6. -inf is never listed.
    """
    normaliser = math.log(np.exp(kept.x).sum(dtype=np.float64))
    own = float(kept.x[np.searchsorted(kept.ids, token)]) - normaliser
    count = min(count, int(np.count_nonzero(kept.x > -np.inf)))
    if count == 0:
        return own, ()
    places = _first(kept.logits, _largest(kept.logits, count).min(), count)
    places = places[np.argsort(-kept.logits[places], kind="stable")]
    return own, tuple((int(kept.ids[place]), float(kept.x[place]) - normaliser) for place in places)

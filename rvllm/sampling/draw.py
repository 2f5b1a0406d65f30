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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rvllm.program.dtype import Float32
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.philox import UNIT_MAX, Int64, RowBits, UInt16, uniform, uniform_bits, unit_float

_MASS_UNIT = np.float32(2.0**40)
_NUCLEUS_SIZES = (1024, 8192)  # most nuclei are small: sorting a few largest logits finds them
_GROUP_VALUES = 16
_TOGETHER_TOKENS = 1 << 13  # kept tokens of the rows that are drawn together
_LONG_TOKENS = 1 << 7  # from here on a row's numbers are made alone
# What random bits cost, in numbers of a row from id 0 on: a row by itself, one of an id, and any number of ids.
_ROW_OVERHEAD, _ROW_PER_ID, _IDS_OVERHEAD = 4_000, 256, 90_000
_PIECE = 1 << 13  # logits weighed at once: larger arrays leave the cache, and go back to the system each time
_BOUND_SLACK = 1e-3
_NO_PLACES = np.zeros(0, np.int64)
_MOST_ALONE = 16  # ids whose lower bits are made one by one
_LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The tokens that may be drawn, (n,) each: ids ascending, their logits, x of step 3 (best: 0), and exp(x)."""

    ids: Int64 | range
    logits: Float32
    x: Float32
    weights: Float32


@np.errstate(over="ignore")
def everything(logits: Float32, best: np.float32 | None = None) -> Kept:
    """One row, (vocab,) float32 with a best above -inf, with nothing filtered, at temperature 1."""
    return _kept(range(logits.size), logits, logits.max() if best is None else best, 1.0)


@np.errstate(over="ignore")
def keep(logits: Float32, params: SamplingParams, best: np.float32 | None = None) -> Kept:
    """Steps 3 and 4 for one row of processed logits, (vocab,) float32 with a `best` above -inf."""
    top_k = params.top_k if params.top_k < logits.size else 0
    ids: Int64 | range = range(logits.size)
    values = logits
    if top_k:
        ids, values = _leaders(logits, top_k)
    best = values.max() if best is None else best
    floor = max(_min_p_floor(best, params), _LOWEST)
    if values.min() < floor:
        places = np.flatnonzero(values >= floor)
        ids, values = (ids[places] if isinstance(ids, np.ndarray) else places), values[places]
    for threshold, count in _cuts(values, best, params, top_k):
        places = _first(values, threshold, count)
        ids, values = (ids[places] if isinstance(ids, np.ndarray) else places), values[places]
    return _kept(ids, values, best, params.temperature)


def _cuts(values: Float32, best: np.float32, params: SamplingParams, top_k: int) -> Iterator[tuple[np.float32, int]]:
    """For each filter that takes some of `values` away, the lowest value that it leaves and how many."""
    if 0 < top_k < values.size:
        values = _largest(values, top_k)
        yield values.min(), top_k
    if params.top_p < 1:
        nucleus = _nucleus(values, best, params)
        if nucleus.size < values.size:
            yield nucleus[-1], nucleus.size


def _kept(ids: Int64 | range, logits: Float32, best: np.float32, temperature: float) -> Kept:
    x = _scaled(logits, best, temperature)
    return Kept(ids, logits, x, np.exp(x))


def _min_p_floor(best: np.float32, params: SamplingParams) -> np.float32:
    if params.min_p == 0:
        return np.float32(_LOWEST)
    return np.float32(float(best) + params.temperature * math.log(params.min_p))


def _scaled(logits: Float32, best: np.float32, temperature: float) -> Float32:
    """x of step 3. Where the best is +inf, all its equals share the chance and the others have none."""
    if best == np.inf:
        return np.where(logits == best, np.float32(0), np.float32(-np.inf))
    # Taking the best off before dividing: a tiny temperature then overflows to -inf only, which is chance 0.
    x: Float32 = logits - best
    if temperature != 1:
        x /= np.float32(temperature)
    return x


def _nucleus(values: Float32, best: np.float32, params: SamplingParams) -> Float32:
    """The values, descending, of the shortest prefix whose mass reaches top_p of the whole."""
    if values.size <= _NUCLEUS_SIZES[0]:
        head, reached = _sums(values, best, params.temperature)
        need = math.ceil(params.top_p * int(reached[-1]))
        return head[: np.searchsorted(reached, need) + 1]
    pieces = range(0, values.size, _PIECE)
    total = sum(int(_masses(values[at : at + _PIECE], best, params.temperature).sum()) for at in pieces)
    need = math.ceil(params.top_p * total)
    for size in (*_NUCLEUS_SIZES, values.size):
        head, reached = _sums(_largest(values, size), best, params.temperature)
        if reached[-1] >= need:
            break
    return head[: np.searchsorted(reached, need) + 1]


def _sums(values: Float32, best: np.float32, temperature: float) -> tuple[Float32, Int64]:
    """The values, descending, and the mass of each and all before it."""
    head = np.ascontiguousarray(np.sort(values)[::-1])
    return head, np.cumsum(_masses(head, best, temperature))


def _masses(values: Float32, best: np.float32, temperature: float) -> Int64:
    weights = _scaled(values, best, temperature)
    np.exp(weights, out=weights)
    weights *= _MASS_UNIT
    return weights.astype(np.int64)


def _largest(values: Float32, count: int) -> Float32:
    """The `count` largest, in any order."""
    if count >= values.size:
        return values
    values = _leaders(values, count)[1]
    return np.partition(values, values.size - count)[values.size - count :]


def _leaders(logits: Float32, count: int) -> tuple[Int64 | range, Float32]:
    """Ids ascending and logits of at least the `count` largest, and where that is cheap not many more.

    The count-th largest of the maxima of groups, each a logit of its own, bounds them from below.
    """
    groups = logits.size // _GROUP_VALUES
    if 2 * count > groups:
        return range(logits.size), logits
    grouped = logits[: groups * _GROUP_VALUES].reshape(_GROUP_VALUES, groups)
    maxima = grouped.max(axis=0)
    bound = np.partition(maxima, groups - count)[groups - count]
    columns = np.flatnonzero(maxima >= bound)
    chosen = grouped[:, columns]
    row, column = np.nonzero(chosen >= bound)
    rest = np.flatnonzero(logits[groups * _GROUP_VALUES :] >= bound) + groups * _GROUP_VALUES
    ids = np.concatenate((row * groups + columns[column], rest))
    return ids, logits[ids]


def _first(values: Float32, threshold: np.float32, count: int) -> Int64:
    """The first `count` places in order of value descending, place ascending; returned ascending.

    `threshold` is the value of the last of them.
    """
    places = np.flatnonzero(values >= threshold)
    surplus = places.size - count
    if surplus == 0:
        return places
    return np.delete(places, np.flatnonzero(values[places] == threshold)[-surplus:])


def draw(kept: Iterable[Kept], seeds: Sequence[int], positions: Sequence[int]) -> Iterator[tuple[Kept, int]]:
    """Step 5: for each row, itself and the place in it that was drawn.

    The random numbers of short rows are made together. Rows are taken as they are needed: few are held at once.
    """
    group: list[tuple[Kept, int, int]] = []
    tokens = 0
    numbers = RowBits()
    for row, seed, position in zip(kept, seeds, positions):
        group.append((row, seed, position))
        tokens += row.x.size
        if tokens >= _TOGETHER_TOKENS:
            yield from _draw_group(group, numbers)
            group, tokens = [], 0
    yield from _draw_group(group, numbers)


def _draw_group(group: Sequence[tuple[Kept, int, int]], numbers: RowBits) -> Iterator[tuple[Kept, int]]:
    scores = iter(_scores_of_short_rows([one for one in group if one[0].x.size < _LONG_TOKENS], numbers))
    for row, seed, position in group:
        if row.x.size < _LONG_TOKENS:
            yield row, int(next(scores).argmax())
        else:
            yield row, _draw_long_row(row, seed, position, numbers)


def _draw_long_row(row: Kept, seed: int, position: int, numbers: RowBits) -> int:
    if isinstance(row.ids, range):
        high = numbers.high(seed, position, len(row.ids))
    else:
        size = int(row.ids[-1]) + 1
        if size >= _ROW_PER_ID * row.ids.size:
            return int(_scores(row.x, uniform(seed, position, row.ids)).argmax())
        high = numbers.high(seed, position, size)[row.ids]

    places = _likely(row, high)
    if len(places) > _MOST_ALONE:
        numbers_of_places = uniform(seed, position, np.array([row.ids[place] for place in places]))
        return int(places[_scores(row.x[places], numbers_of_places).argmax()])
    best, winner = -math.inf, -1
    for place in places.tolist():
        bits = int(high[place]) << 16 | numbers.low(seed, position, int(row.ids[place]))
        score = float(row.x[place]) - math.log(-math.log(1.0 - float(unit_float(np.array([bits], np.uint32))[0])))
        if score > best:
            best, winner = score, place
    return winner


def _scores_of_short_rows(group: Sequence[tuple[Kept, int, int]], numbers: RowBits) -> list[npt.NDArray[np.float64]]:
    if not group:
        return []
    rows, seeds, positions = zip(*group)
    lengths = [row.x.size for row in rows]
    ids = [np.asarray(row.ids) for row in rows]
    sizes = [int(own[-1]) + 1 for own in ids]
    if sum(sizes) + _ROW_OVERHEAD * len(rows) < _ROW_PER_ID * sum(lengths) + _IDS_OVERHEAD:
        given = zip(seeds, positions, sizes, ids)
        bits = np.concatenate([numbers.both(seed, position, size)[own] for seed, position, size, own in given])
    else:
        spread = [np.repeat(np.array(values, np.int64), lengths) for values in (seeds, positions)]
        bits = uniform_bits(spread[0], spread[1], np.concatenate(ids))
    scores = _scores(np.concatenate([row.x for row in rows]), unit_float(bits))
    return np.split(scores, np.cumsum(lengths)[:-1])


def _likely(row: Kept, high: UInt16) -> Int64:
    """The places, ascending, among which the largest x + g is; high: the upper halves of the bits of the row's ids.

    -ln(1 - v) > v, so exp(score) < exp(x) / v, and v is at least high / 2**16. Left are the places where that reaches
    the least score of a likely one, and those where high is 0, of which there is one in 2**16. (The winner's x is above
    -26, far from where exp underflows.)
    """
    zeros = np.flatnonzero(high == 0) if high.min() == 0 else _NO_PLACES
    most: Float32 = high.astype(np.float32)
    most[zeros] = 0.5
    np.divide(row.weights, most, out=most)
    likely = int(most.argmax())
    number = min((int(high[likely]) + 1) * 2.0**-16, UNIT_MAX)
    score = float(row.x[likely]) - math.log(-math.log1p(-number))
    places = np.flatnonzero(most >= np.float32(math.exp(score - _BOUND_SLACK) * 2.0**-16))
    return np.union1d(places, zeros) if zeros.size else places


def _scores(x: Float32, numbers: Float32) -> npt.NDArray[np.float64]:
    # In float64, 1 - v is exact: the same as log1p(-v), which a kernel in float32 uses, and faster here.
    noise: npt.NDArray[np.float64] = -np.log(-np.log(1.0 - numbers.astype(np.float64)))
    return x + noise


def log_softmax(kept: Kept, place: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """ln softmax over `kept`: at `place`, and the `count` best (id, logprob), high to low, ties by id.

    The sum is float32, by halves: 24 roundings at most of 32,000 terms, an error below 2e-6. -inf is never listed.
    """
    normaliser = math.log(float(kept.weights.sum()))
    own = float(kept.x[place]) - normaliser
    if count == 0:
        return own, ()
    count = min(count, int(np.count_nonzero(kept.x > -np.inf)))
    places = _first(kept.logits, _largest(kept.logits, count).min(), count)
    places = places[np.argsort(-kept.logits[places], kind="stable")]
    return own, tuple((int(kept.ids[best]), float(kept.x[best]) - normaliser) for best in places)

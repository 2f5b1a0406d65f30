"""One token for each row of logits. Knows no text and no device.

The definition, in numpy, of what a request's history and wishes do to its logits; device kernels are held to it.
Per row of float32 logits, cut at the vocabulary limit (ids beyond have no token and are never drawn or listed):

1. logit_bias is added; ids outside allowed_token_ids or the row's mask become -inf; then the forbidden ids do, by
   min_tokens or by a bad word that would end with them, unless they are all that remains.
2. For each distinct token of prompt and output, once: a positive logit is divided by repetition_penalty, another
   multiplied (CTRL, Keskar et al. 2019, section 4.1). For each distinct token of the output alone:
   frequency_penalty * count is taken off, then presence_penalty (OpenAI's API reference).
3. to 5. `rvllm.sampling.draw`: greedy, or temperature, min_p, top_k, top_p and a Gumbel-max draw.

Everything here is float32, each operation rounded. The engine's log-probabilities are of the raw logits, before
step 1, as vLLM's are by default. A row whose token is given is drawn from nothing: only those are made for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rvllm.errors import EngineError
from rvllm.program.dtype import Float32
from rvllm.sampling.draw import draw, everything, keep, log_softmax
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.philox import Int64

Mask = npt.NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class SamplingRow:
    """What choosing one sequence's next token needs besides its logits.

    A sequence keeps its row from token to token: the position is counted on, and nothing stays forbidden for ever.

    seed            resolved: an int64 of this sequence alone
    position        0 to 2**32 - 1, of the token to draw; never the same twice under one seed
    prompt_ids      in any order, repeats allowed; read only when there is a repetition penalty
    output_counts   how often each id stands in the output so far; read only when there are penalties, on a device
                    only where the sequence comes to a slot
    forbidden_ids   not to be drawn now: end-of-sequence and stop ids before min_tokens
    slot            the sequence's place, 0 to one below the most that run; no other's while it runs
    given_id        the token, where it is known, as in a prompt: params.prompt_logprobs then says what is told of it
    output_ids      the output so far, or its end; read only when a bad word has several ids
    mask            (ceil(vocabulary / 32),) uint32, bit id % 32 of word id // 32: the ids that a grammar allows now
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int] | Int64 = ()
    output_counts: Mapping[int, int] = field(default_factory=dict)
    forbidden_ids: tuple[int, ...] = ()
    slot: int = 0
    given_id: int | None = None
    output_ids: Sequence[int] = ()
    mask: Mask | None = None

    @property
    def logprobs(self) -> int | None:
        """How many log-probabilities are told besides the token's own; None: not that either."""
        return self.params.logprobs if self.given_id is None else self.params.prompt_logprobs


# Not frozen: one is made for every token, and a frozen one takes three times as long.
@dataclass(slots=True)
class Sampled:
    """A drawn token. Where the row's logprobs is None, `logprob` is None and `top_logprobs` empty.

    `top_logprobs` are the k best (id, logprob) high to low, ties by id, the chosen one among them or not;
    fewer than k where the rest is impossible (-inf).
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def sample_rows(logits: Float32, rows: Sequence[SamplingRow], vocab_limit: int) -> list[Sampled]:
    """Choose one token a row. logits: (rows, vocab) float32, left unchanged; vocab_limit: ids that exist.

    Raises EngineError where a row holds NaN, or nothing but -inf, below the limit.
    """
    assert logits.dtype == np.float32 and logits.ndim == 2, (logits.dtype, logits.shape)
    assert len(rows) == logits.shape[0], (len(rows), logits.shape)
    assert 0 < vocab_limit <= logits.shape[1], (vocab_limit, logits.shape)
    if not rows:
        return []
    logits = logits[:, :vocab_limit]
    _check_logits(logits.max(axis=1))
    tokens = _choose(logits, rows)
    return [_sampled(line, row, int(token)) for line, row, token in zip(logits, rows, tokens)]


def _check_logits(best: Float32) -> None:
    for bad, what in ((np.isnan(best), "NaN"), (best == -np.inf, "nothing but -inf")):
        if bad.any():
            raise EngineError(f"the logits of row {int(bad.argmax())} of {best.size} hold {what}")


def _choose(logits: Float32, rows: Sequence[SamplingRow]) -> Int64:
    tokens = np.empty(len(rows), np.int64)
    chance = []
    plain = []
    for index, row in enumerate(rows):
        if row.given_id is not None:
            tokens[index] = row.given_id
        elif not row.params.greedy:
            chance.append(index)
        elif changes_logits(row):
            tokens[index] = process_logits(logits[index], row).argmax()
        else:
            plain.append(index)
    tokens[plain] = (logits if len(plain) == len(rows) else logits[plain]).argmax(axis=1)
    kept = (keep(process_logits(logits[index], rows[index]), rows[index].params) for index in chance)
    drawn = draw(kept, [rows[index].seed for index in chance], [rows[index].position for index in chance])
    tokens[chance] = [row.ids[place] for row, place in drawn]
    return tokens


def needs_last_token(row: SamplingRow) -> bool:
    """Whether what may be drawn is known only once the host knows the token before: no step may run ahead of that.

    Penalties are not of this kind: a device counts what it draws.
    """
    return row.mask is not None or any(len(ids) > 1 for ids in row.params.bad_words_token_ids)


def changes_logits(row: SamplingRow) -> bool:
    """Whether steps 1 and 2 do anything to the row."""
    params = row.params
    edits = params.logit_bias or params.allowed_token_ids or row.forbidden_ids or params.bad_words_token_ids
    return row.given_id is None and (params.penalises or bool(edits) or row.mask is not None)


@np.errstate(over="ignore")
def process_logits(logits: Float32, row: SamplingRow) -> Float32:
    """Steps 1 and 2 for one row, (vocab,) float32; the given array itself where nothing changes it."""
    if not changes_logits(row):
        return logits
    out = logits.copy()
    if row.params.logit_bias:
        ids, biases = _ids_and_values(row.params.logit_bias)
        out[ids] += biases
    out = _only_allowed(out, row)
    _penalise(out, row)
    if out.max() == -np.inf:
        raise EngineError("the logits of every allowed token are -inf")
    return out


def _only_allowed(logits: Float32, row: SamplingRow) -> Float32:
    allowed = row.params.allowed_token_ids
    if allowed is not None:
        only = np.full_like(logits, -np.inf)
        only[list(allowed)] = logits[list(allowed)]
        logits = only
    if row.mask is not None:
        bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[: logits.size]
        logits = np.where(bits == 1, logits, np.float32(-np.inf))
    forbidden = (*row.forbidden_ids, *barred_ids(row))
    if not forbidden:
        return logits
    without = logits.copy()
    without[_below(logits.size, forbidden)] = -np.inf
    # A request may allow its stop ids or bad words alone: its own contradiction must not leave a row with no token.
    return without if without.max() > -np.inf else logits


def barred_ids(row: SamplingRow) -> tuple[int, ...]:
    """The last ids of the bad words whose other ids the output ends with."""
    return tuple(ids[-1] for ids in row.params.bad_words_token_ids if _ends_with(row.output_ids, ids[:-1]))


def _ends_with(output: Sequence[int], ids: tuple[int, ...]) -> bool:
    return not ids or tuple(output[-len(ids) :]) == ids


def _penalise(logits: Float32, row: SamplingRow) -> None:
    if not row.params.penalises:
        return
    ids, times = _ids_and_values(row.output_counts)
    inside = (ids < logits.size) & (times > 0)
    penalise(logits, row.params, row.prompt_ids, ids[inside], times[inside])


def penalise(
    logits: Float32, params: SamplingParams, prompt: Sequence[int] | Int64, ids: Int64, times: Float32
) -> None:
    """Step 2 in place, of one row; `ids` (n,) stand `times` (n,) in the output, each of them once here.

    Without a frequency penalty `times` is not read, and ids may stand here more than once.
    """
    if params.repetition_penalty != 1:
        # Each assignment below reads the old value: an id that stands here twice is penalised once.
        seen = np.concatenate([_below(logits.size, prompt), ids])
        penalty = np.float32(params.repetition_penalty)
        old = logits[seen]
        logits[seen] = np.where(old > 0, old / penalty, old * penalty)
    if params.frequency_penalty != 0:
        logits[ids] -= np.float32(params.frequency_penalty) * times
    if params.presence_penalty != 0:
        logits[ids] -= np.float32(params.presence_penalty)


def _below(limit: int, ids: Sequence[int] | Int64) -> Int64:
    """Without ids of padded rows, which a prompt or a configuration may hold: they have no logit here."""
    array = np.asarray(ids, np.int64)
    return array[array < limit]


def _ids_and_values(by_id: Mapping[int, float]) -> tuple[Int64, Float32]:
    count = len(by_id)
    return np.fromiter(by_id, np.int64, count), np.fromiter(by_id.values(), np.float32, count)


def _sampled(logits: Float32, row: SamplingRow, token: int) -> Sampled:
    if row.logprobs is None:
        return Sampled(token)
    return Sampled(token, *log_softmax(everything(logits), token, row.logprobs))

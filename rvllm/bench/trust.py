"""What must hold before a figure is believed: the output is right, and no faster than the device can be.

Knows what an engine promises; not what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rvllm.bench.runs import Ids, Run, Stepping, Workload, run
from rvllm.errors import WrongOutput

MOST_ROWS = 64
"""Up to here the engine promises a decoding row the same bits alone and in a batch, if it does not promise more."""

PROMPT_TOKENS = (3, 40, 1, 200)
AFTER_PROMPTS, AFTER_ONE = 8, 36  # tokens of output; 36 after one token cross the border of a cache block of 32
_GUESSED = 4  # rows that are drawn again without guesses
_HINT = "no figure is printed; `rvllm doctor --check MODEL` names the op that is wrong on a GPU"


def check_outputs(
    engine: Stepping,
    workload: Workload,
    *,
    vocab: int,
    rows: int,
    max_tokens: int,
    max_prompt: int,
    batch_invariant: bool = False,
    guesses: bool = False,
) -> int:
    """Raise WrongOutput where the engine breaks a promise; the number of tokens that were looked at.

    The same prompts give the same tokens twice, once with log-probabilities, which have to be finite; rows that decode
    together (up to `rows`, at most MOST_ROWS) draw what each draws alone: prompts of one token do nothing but decode.
    `max_tokens`: the longest prompt and output together; `max_prompt`: the longest prompt that the engine reads anew
    each time: what it finds in its cache may have been read with other neighbours, and so with other roundings.
    batch_invariant: so must prompts of any length, and rows beyond MOST_ROWS.
    `guesses`: whether tokens are guessed: the same are drawn then where they are not.
    """
    rows = rows if batch_invariant else min(rows, MOST_ROWS)
    longest = min(max_prompt, max_tokens - 1)
    lengths = [min(PROMPT_TOKENS[place % len(PROMPT_TOKENS)], longest) for place in range(min(rows, 8))]
    # Each gets as many as the longest leaves room for: a context may be tiny.
    output = min(AFTER_PROMPTS, max_tokens - max(lengths))
    prompts = workload.prompts(lengths)
    told = _outputs(engine, workload, prompts, output, vocab, logprobs=1)
    _compare(_outputs(engine, workload, prompts, output, vocab), told, "a prompt read a second time")
    for place in range(len(prompts) if batch_invariant else 0):
        alone = _outputs(engine, workload, prompts[place : place + 1], output, vocab)
        _compare(told[place : place + 1], alone, f"prompt {place} of {len(prompts)}, against the prompt alone")
    ones = workload.single_tokens(rows)
    output = min(AFTER_ONE, max_tokens - 1)
    batch = _outputs(engine, workload, ones, output, vocab)
    _compare(_outputs(engine, workload, ones, output, vocab), batch, f"a batch of {rows} decoded a second time")
    for row in sorted({0, rows // 2, rows - 1}):
        alone = _outputs(engine, workload, ones[row : row + 1], output, vocab)
        _compare(batch[row : row + 1], alone, f"row {row} of a batch of {rows}, against the row alone")
    if guesses:
        for row in range(min(rows, _GUESSED)):
            plain = _outputs(engine, workload, ones[row : row + 1], output, vocab, speculate=False)
            _compare(batch[row : row + 1], plain, f"row {row} of a batch of {rows}, against the row without guesses")
    return sum(map(len, told)) + sum(map(len, batch))


def _outputs(
    engine: Stepping,
    workload: Workload,
    prompts: Sequence[Ids],
    output: int,
    vocab: int,
    logprobs: int | None = None,
    speculate: bool = True,
) -> list[Ids]:
    """The tokens that are drawn after each prompt, found to be as many as asked for, and each one a token."""
    requests = workload.requests(prompts, output, logprobs=logprobs, speculate=speculate)
    done = run(engine, requests)
    if logprobs is not None:
        _check_logprobs(done)
    drawn = done.drawn(requests)
    for place, tokens in enumerate(drawn):
        if len(tokens) != output:
            raise WrongOutput(f"request {place} of {len(drawn)} got {len(tokens)} tokens, asked were {output}")
        if not all(0 <= token < vocab for token in tokens):
            raise WrongOutput(f"request {place} of {len(drawn)} got token ids beyond 0 to {vocab - 1:,}: {tokens}")
    return drawn


def _check_logprobs(done: Run) -> None:
    """A NaN or an infinity among a row's logits shows in the log-probability of the token drawn from them."""
    for events in done.events:
        for event in events:
            if event.logprob is None or not math.isfinite(event.logprob):
                raise WrongOutput(
                    f"a token's log-probability is {event.logprob}: its logits are no numbers", hint=_HINT
                )


def _compare(found: Sequence[Ids], expected: Sequence[Ids], what: str) -> None:
    for tokens, wanted in zip(found, expected, strict=True):
        if tokens != wanted:
            place = next(place for place, (one, other) in enumerate(zip(tokens, wanted)) if one != other)
            raise WrongOutput(
                f"the output is wrong: {what}: token {place} is {tokens[place]}, expected {wanted[place]}",
                hint=_HINT,
            )


def check_speed(tokens_per_s: float, limit_tokens_per_s: float | None, what: str) -> None:
    """Raise WrongOutput for a speed that the device's memory and arithmetic cannot reach."""
    if limit_tokens_per_s is not None and tokens_per_s > limit_tokens_per_s:
        raise WrongOutput(
            f"{what}: {tokens_per_s:,.1f} tokens/s is beyond the device's limit of {limit_tokens_per_s:,.1f}",
            hint="no figure is printed: either not all work was done, or the device is not the one its name says",
        )

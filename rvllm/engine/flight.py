"""A step under way, and the rows by which its tokens are drawn. Knows whose token each row is; runs nothing."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from rvllm.engine.grammar import Grammars, Matcher
from rvllm.engine.request import Request, Sequence
from rvllm.engine.scheduler import Limits, Plan
from rvllm.engine.speculation import Drafts, Verification
from rvllm.program.program import Int32, Step
from rvllm.sampling.sampler import SamplingRow, needs_last_token


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that the model has started.

    members     whose blocks it writes to; `slots`: theirs, in the order of the step
    asked       its rows and whose they are
    filled      sequences in which it ends a block, and how many tokens they then have in the cache
    followable  whether all it does is to draw one token for each sequence, for which nothing of the host is needed
    left        steps that may still follow until one of them reaches its length
    verifies    guesses, if it does: then its rows are, sequence by sequence, the last token's and theirs
    """

    step: Step
    members: frozenset[Sequence]
    slots: Int32
    asked: Asked
    filled: tuple[tuple[Sequence, int], ...]
    followable: bool
    left: int
    started: Any
    verifies: Verification | None = None


@dataclass(slots=True)
class Asked:
    """The rows of a step: their places in it, how each is drawn, and for whom."""

    places: list[int] = field(default_factory=list)
    rows: list[SamplingRow] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)

    def add(self, place: int, row: SamplingRow, sequence: Sequence) -> None:
        self.places.append(place)
        self.rows.append(row)
        self.sequences.append(sequence)

    @property
    def plain(self) -> bool:
        """Whether every row draws a token, for which the host need not know the one before."""
        return not any(row.given_id is not None or needs_last_token(row) for row in self.rows)

    @property
    def left(self) -> int:
        """Steps beyond this one before one of the sequences reaches its length."""
        return min((one.limit - len(one.token_ids) for one in self.sequences), default=0) - 1


def ask(plan: Plan, starts: Items[int]) -> Asked:
    """A row for each chunk that finishes, for each fork of its sequence, and for each token that is scored."""
    asked = Asked()
    for (sequence, tokens), begin in zip(plan.chunks, starts):
        if sequence.scored and sequence.scoring:
            for place, row in enumerate(_scored_rows(sequence, tokens)):
                asked.add(begin + place, row, sequence)
        if tokens == len(sequence.token_ids) - sequence.computed:
            last = begin + tokens - 1
            asked.add(last, next_row(sequence), sequence)
            if sequence.siblings:
                for sibling in plan.forks:
                    if sibling.leader is sequence:
                        asked.add(last, next_row(sibling), sibling)
    return asked


def ask_verified(sequences: Items[Sequence], drafts: Drafts) -> Asked:
    """A row for each sequence's next token, and one behind each of its drafts, which must be free of edits."""
    asked = Asked()
    for sequence, guesses in zip(sequences, drafts):
        row = next_row(sequence)
        asked.add(len(asked.rows), row, sequence)
        for ahead in range(1, len(guesses) + 1):
            behind = SamplingRow(row.params, row.seed, row.position + ahead, row.prompt_ids)
            asked.add(len(asked.rows), behind, sequence)
    return asked


def write_masks(grammars: Grammars | None, asked: Asked) -> None:
    """What grammars let come next, for the rows of sequences that have one."""
    found = (one.matcher for one, row in zip(asked.sequences, asked.rows) if row.mask is not None)
    if matchers := [matcher for matcher in found if matcher is not None]:
        assert grammars is not None
        grammars.fill(matchers)


def new_sequence(
    request: Request, keys: list[bytes], limits: Limits, arrival: int, turn: int, matcher: Matcher | None = None
) -> Sequence:
    """What a request becomes, and how its first token is drawn. `keys`: of its prompt's full blocks."""
    params, length = request.params, len(request.prompt_ids)
    # The last token is drawn but never cached.
    limit = min(limits.max_model_len, limits.blocks * limits.block_size + 1)
    own = frozenset(params.stop_token_ids)
    sequence = Sequence(
        request,
        limit if params.max_tokens is None else min(length + params.max_tokens, limit),
        [],
        list(request.prompt_ids),
        rank=(request.priority if limits.by_priority else 0, arrival),
        turn=turn,
        keys=list(keys),
        stop_ids=own if params.ignore_eos else own | limits.eos_ids,
        counted=params.penalises,
        matcher=matcher,
    )
    early = tuple(sorted(sequence.stop_ids)) if params.min_tokens else ()
    sequence.row = SamplingRow(params, request.seed, length, request.prompt_ids, sequence.output_counts, early)
    sequence.row.mask = None if matcher is None else matcher.mask
    return sequence


def next_row(sequence: Sequence) -> SamplingRow:
    """How the sequence's next token is drawn: its own row, counted on."""
    row = sequence.row
    assert row is not None
    row.position = len(sequence.token_ids)
    allow_late(row)
    if row.params.bad_words_token_ids:
        row.output_ids = sequence.output_ids
    return row


def allow_late(row: SamplingRow) -> None:
    """What is forbidden before min_tokens tokens is allowed from there on."""
    if row.position - len(row.prompt_ids) >= row.params.min_tokens:
        row.forbidden_ids = ()


def _scored_rows(sequence: Sequence, tokens: int) -> list[SamplingRow]:
    """Rows that draw nothing but score the prompt's own tokens, each behind one of the next `tokens`."""
    request = sequence.request
    begin = sequence.computed + 1
    given = request.prompt_ids[begin : begin + tokens]
    return [SamplingRow(request.params, request.seed, begin + i, given_id=token) for i, token in enumerate(given)]

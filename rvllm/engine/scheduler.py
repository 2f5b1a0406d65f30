"""Decide which sequences run next, how much of each, and who gives way. Pure: knows tokens and blocks, changes none.

Every running sequence that decodes gets its token. Prompts take turns: each is read one chunk at a time, the one whose
last turn is longest ago first, as many as the step's tokens allow. Who waits begins in order of rank, once there is
room for all the tokens it has and one block more for everyone that runs. Where blocks run out, the least important
gives way and is computed again later; the most important never does, so that somebody always gets on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple, Protocol

from rvllm.config import Speculation
from rvllm.engine.block_pool import blocks_for
from rvllm.engine.request import Sequence
from rvllm.errors import PromptTooLong
from rvllm.sampling.lookup import MOST_ROWS

LOOK_AHEAD = 16  # sequences whose first chunk is too long for what is left of a step: so many are passed over


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine holds to. `vocab_limit`: ids from it on are padding and never drawn.

    score_chunk: tokens of a prompt in one step whose log-probabilities are wanted; of one such prompt at a time.
    """

    max_model_len: int
    block_size: int
    blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    vocab_limit: int
    eos_ids: frozenset[int]
    score_chunk: int = 64
    by_priority: bool = False
    prefix_caching: bool = True
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        assert self.max_num_batched_tokens >= self.prefill_chunk + self.max_num_seqs - 1, self

    @property
    def max_rows(self) -> int:
        """Rows of logits in one step: one for each that runs, and those of a prompt that is scored, or of guesses."""
        scored = self.max_num_seqs + min(self.score_chunk, self.prefill_chunk) - 1
        return max(scored, guessed_rows(self.max_num_seqs, self.speculation))

    def chunk(self, sequence: Sequence) -> int:
        """Tokens at whose multiples the sequence's prompt is cut."""
        return min(self.score_chunk, self.prefill_chunk) if sequence.scoring else self.prefill_chunk


def guessed_rows(sequences: int, speculation: Speculation | None) -> int:
    """Rows of a step in which so many sequences have guesses."""
    if speculation is None:
        return 0
    return min(MOST_ROWS, sequences * (1 + speculation.num_speculative_tokens))


def check_length(length: int, limits: Limits) -> None:
    """Raise PromptTooLong for a prompt that can never be served, however long it waits."""
    context, cache = limits.max_model_len, limits.blocks * limits.block_size
    if length >= context:
        raise PromptTooLong(
            f"the prompt has {length:,} tokens, the context is {context:,} with at least one token of output",
            param="prompt",
            hint="shorten the prompt, or raise --max-model-len where the model allows it",
        )
    if length > cache:
        raise PromptTooLong(
            f"the prompt has {length:,} tokens, the whole key/value cache has room for {cache:,}",
            param="prompt",
            hint="shorten the prompt, or raise --kv-cache-memory-bytes",
        )


class Pool(Protocol):
    """What is asked of rvllm.engine.block_pool.BlockPool."""

    @property
    def available(self) -> int: ...

    def holders(self, block: int) -> int: ...

    def find(self, keys: Items[bytes]) -> list[int]: ...


class Chunk(NamedTuple):
    """The next `tokens` tokens of a sequence that are not yet in the cache."""

    sequence: Sequence
    tokens: int

    @property
    def finishes(self) -> bool:
        """Whether the sequence is wholly in the cache afterwards, so that its next token can be drawn."""
        return self.tokens >= self.sequence.pending


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence that begins, with the blocks of the cache that hold its first tokens."""

    sequence: Sequence
    shared: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. To be done in this order: give back `preempted`, share what `admitted` found, grow `chunks`.

    chunks   one-token chunks first
    forks    waiting sequences that go on from their leader's prompt, which this step finishes, without reading it
    """

    chunks: tuple[Chunk, ...]
    admitted: tuple[Admission, ...]
    preempted: tuple[Sequence, ...]
    forks: tuple[Sequence, ...]


def schedule(running: Items[Sequence], waiting: Items[Sequence], pool: Pool, limits: Limits) -> Plan:
    """The next step; empty only where there is nothing to do. Both lists are in order of rank; nothing is in flight."""
    draft = _Draft(running, pool, limits)
    draft.choose(waiting)
    draft.place()
    while draft.preempted and draft.running and not draft.chunks:
        draft.choose(())
        draft.place()
    return draft.plan()


def next_chunk(computed: int, length: int, chunk: int) -> int:
    """Tokens to compute next of `length`: up to the next multiple of `chunk`, whatever else there is to do."""
    return min(length - computed, chunk - computed % chunk)


def _turn(sequence: Sequence) -> tuple[int, int, int]:
    return (sequence.rank[0], sequence.turn, sequence.rank[1])


class _Draft:
    """A plan in the making: what is chosen, what has been used up."""

    def __init__(self, running: Items[Sequence], pool: Pool, limits: Limits) -> None:
        self._pool, self._limits = pool, limits
        self.running = list(running)
        self.chunks: list[Chunk] = []
        self.preempted: list[Sequence] = []
        self._chosen: dict[Sequence, int] = {}
        self._begun: dict[Sequence, Admission] = {}
        self._available = pool.available
        self._let_go: Counter[int] = Counter()  # holders that blocks lose by this plan
        self._seats = self._room = self._skipped = self._tokens = 0
        self._scores = False

    def choose(self, waiting: Items[Sequence]) -> None:
        """Who gets tokens of this step: all that decode, then prompts in turn, begun or not, as many as fit."""
        reading = sorted((sequence for sequence in self.running if sequence.pending > 1), key=_turn)
        self._chosen, self._begun = {}, {}
        self._tokens, self._scores = len(self.running) - len(reading), False
        self._seats = self._limits.max_num_seqs - len(self.running)
        self._skipped = 0
        if waiting and self._seats > 0:
            self._room = self._spare_blocks()
        for sequence in merge(reading, self._line(waiting), key=_turn):
            if sequence.slot is not None:
                self._take(sequence, sequence.computed)
            else:
                self._begin(sequence)

    def _line(self, waiting: Items[Sequence]) -> Iterator[Sequence]:
        """Those that wait, as long as it is any use to look at them."""
        for sequence in waiting:
            if self._seats <= 0 or self._skipped > LOOK_AHEAD:
                return
            if sequence.leader is None:
                yield sequence

    def _begin(self, sequence: Sequence) -> None:
        """Set a seat and blocks aside for one that waits. Where tokens alone are missing, one behind it may begin."""
        shared = self._found(sequence)
        kept = sum(self._pool.holders(block) == 0 for block in shared)
        needed = self._whole(sequence) - len(shared) + kept
        if needed > self._room or self._seats <= 0:
            self._seats = 0
            return
        self._room -= needed + 1
        self._seats -= 1
        if self._take(sequence, len(shared) * self._limits.block_size):
            self._begun[sequence] = Admission(sequence, tuple(shared))
        else:
            self._skipped += 1

    def _take(self, sequence: Sequence, computed: int) -> bool:
        """Choose a prompt if its next chunk fits; the first one always does."""
        tokens = next_chunk(computed, len(sequence.token_ids), self._limits.chunk(sequence))
        full = bool(self._chosen) and self._tokens + tokens > self._limits.max_num_batched_tokens
        if full or (sequence.scoring and self._scores):
            return False
        self._chosen[sequence] = tokens
        self._tokens += tokens
        self._scores = self._scores or sequence.scoring
        return True

    def place(self) -> None:
        """Blocks for the chunks of those that run, the most important first."""
        gone, size, holders = self.preempted, self._limits.block_size, self._pool.holders
        for sequence in tuple(self.running):
            if gone and sequence in gone:
                return
            computed = sequence.computed
            decodes = len(sequence.token_ids) - computed == 1
            if decodes and computed % size and not gone and holders(sequence.blocks[-1]) == 1:
                self.chunks.append(Chunk(sequence, 1))  # as nearly always: the block it is in has room, and is its own
                continue
            tokens = 1 if decodes else self._chosen.get(sequence, 0)
            if tokens and self._make_room(sequence, tokens):
                self.chunks.append(Chunk(sequence, tokens))

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Set blocks aside for a running sequence's next tokens; False where it has to give way itself."""
        size = self._limits.block_size
        grown = blocks_for(sequence.computed + tokens, size) - len(sequence.blocks)
        while True:
            copies = self._must_copy(sequence)
            if grown + copies <= self._available:
                break
            victim = self.running[-1]
            self._give_way(victim)
            if victim is sequence:
                return False
        self._available -= grown + copies
        if copies:
            self._let_go[sequence.blocks[sequence.computed // size]] += 1
        return True

    def _must_copy(self, sequence: Sequence) -> int:
        """1 where the sequence's next token goes into a block that another one holds too."""
        page = sequence.computed // self._limits.block_size
        if page >= len(sequence.blocks):
            return 0
        block = sequence.blocks[page]
        return int(self._pool.holders(block) - self._let_go[block] > 1)

    def _give_way(self, victim: Sequence) -> None:
        """Preempt the least important. It has no chunk yet: chunks are given in order of rank."""
        self.running.pop()
        self.preempted.append(victim)
        for block in victim.blocks:
            if self._pool.holders(block) - self._let_go[block] == 1:
                self._available += 1
            self._let_go[block] += 1

    def plan(self) -> Plan:
        # Whoever gave way is the first to begin when there is room again.
        admitted = () if self.preempted else tuple(self._begun.values())
        chunks = [*self.chunks, *(Chunk(one.sequence, self._chosen[one.sequence]) for one in admitted)]
        shared = {one.sequence: len(one.shared) * self._limits.block_size for one in admitted}
        seats = self._limits.max_num_seqs - len(self.running) - len(admitted)
        forks: list[Sequence] = []
        for chunk in chunks:
            siblings = chunk.sequence.siblings
            if siblings and chunk.tokens + shared.get(chunk.sequence, 0) >= chunk.sequence.pending:
                forks += siblings[: max(seats - len(forks), 0)]
        chunks.sort(key=lambda chunk: chunk.tokens > 1)
        return Plan(tuple(chunks), admitted, tuple(self.preempted), tuple(forks))

    def _spare_blocks(self) -> int:
        """Blocks that those who run will not want soon: for the tokens they have, a copy, and one more each."""
        wanted = sum(max(self._whole(one) - len(one.blocks), 0) + self._must_copy(one) for one in self.running)
        return self._pool.available - wanted - len(self.running)

    def _whole(self, sequence: Sequence) -> int:
        """Blocks for the tokens that a sequence has and the next one. What it draws last is never cached."""
        return blocks_for(min(len(sequence.token_ids) + 1, sequence.limit - 1), self._limits.block_size)

    def _found(self, sequence: Sequence) -> list[int]:
        """Blocks of the cache with the sequence's first tokens, all but one: at least one is computed."""
        if sequence.scoring or not self._limits.prefix_caching:
            return []
        return self._pool.find(sequence.keys[: (len(sequence.token_ids) - 1) // self._limits.block_size])

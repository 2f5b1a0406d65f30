"""The step loop: admit, plan, run, sample, retire. Knows token ids; the front end knows text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rvllm.engine.block_pool import BlockPool, blocks_for
from rvllm.engine.request import Request, Sequence, TokenEvent
from rvllm.engine.scheduler import Chunk, schedule
from rvllm.engine.step import build_step
from rvllm.errors import PromptTooLong
from rvllm.program.program import Program, Step
from rvllm.sampling.sampler import Sampled, SamplingRow, needs_last_token


class Model(Protocol):
    """A program on a device, with its weights and caches. What `start` gives is for `finish` alone."""

    @property
    def program(self) -> Program: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be started that follows one not yet finished; the model then counts what its rows draw."""
        ...

    def start(self, step: Step, rows: Items[SamplingRow], *, follows: bool = False) -> Any:
        """Start a step and the drawing of a token for each of its rows.

        follows: its ids are the tokens being drawn by the step started before, for the same rows in the same order.
        """
        ...

    def finish(self, started: Any) -> list[Sampled]:
        """The tokens that were drawn, in the order of the rows."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine holds to. `vocab_limit`: ids from it on are padding and never drawn."""

    max_model_len: int
    block_size: int
    blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    vocab_limit: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that the model has started: the sequences that get a token from it, in the order of its rows.

    decodes: whether that is all it does, one token of each.
    """

    sequences: tuple[Sequence, ...]
    decodes: bool
    started: Any

    def holds(self, sequence: Sequence) -> bool:
        return any(one is sequence for one in self.sequences)


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread adds, steps and aborts.

    While all that run are decoding, the next step is started before the tokens of this one are read: the device draws
    them and goes on with them by itself. A sequence that ends is then one step behind: what the next step makes of it
    is dropped, and its blocks are free only when that step is through.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        assert limits.blocks >= blocks_for(limits.max_model_len, limits.block_size), limits
        self._model = model
        self.limits = limits
        self._pools = tuple(BlockPool(limits.blocks) for _ in model.program.cache_groups)
        self._waiting: deque[Request] = deque()
        self._running: list[Sequence] = []
        self._flight: Flight | None = None

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks of each cache group."""
        return tuple(pool.free for pool in self._pools)

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong when its prompt leaves no room for a token; ids must be in range."""
        length, limit = len(request.prompt_ids), self.limits.max_model_len
        assert request.prompt_ids and request.params.max_tokens != 0, request
        if length >= limit:
            raise PromptTooLong(
                f"the prompt has {length:,} tokens, the context is {limit:,} with at least one token of output",
                param="prompt",
                hint="shorten the prompt, or raise --max-model-len where the model allows it",
            )
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request in any state; unknown ids are ignored, since it may just have ended."""
        self._waiting = deque(request for request in self._waiting if request.id != request_id)
        for sequence in [sequence for sequence in self._running if sequence.request.id == request_id]:
            self._retire(sequence, self._flight)
        self._settle()

    def step(self) -> list[TokenEvent]:
        """Go on by one step; the new tokens of the sequences that got one."""
        landing = self._flight
        if landing is None:
            self._flight = landing = self._take_off()
        if landing is None:
            return []
        self._flight = self._follow(landing)
        events = self._land(landing)
        self._settle()
        return events

    def _take_off(self) -> Flight | None:
        """Admit, plan and start a step."""
        self._admit()
        limits = self.limits
        chunks = schedule(self._running, prefill_chunk=limits.prefill_chunk, max_tokens=limits.max_num_batched_tokens)
        if not chunks:
            return None
        step = build_step(chunks, limits.block_size)
        finished = tuple(chunk.sequence for chunk in chunks if chunk.finishes)
        rows = [self._sampling_row(sequence, 0) for sequence in finished]
        for chunk in chunks:
            chunk.sequence.computed += chunk.tokens
        return Flight(finished, step.decode_tokens == len(finished) == len(step.ids), self._model.start(step, rows))

    def _follow(self, flight: Flight) -> Flight | None:
        """Start the step after `flight` on the tokens that it is drawing, where that is sure to be what comes next.

        Not so when a request waits, a prompt was read, a sequence is about to reach its length, or what may be drawn
        depends on the tokens before.
        """
        if not self._model.runs_ahead or not flight.decodes or self._waiting:
            return None
        if len(flight.sequences) != len(self._running):
            return None
        if any(len(sequence.token_ids) + 1 >= sequence.limit for sequence in flight.sequences):
            return None
        rows = [self._sampling_row(sequence, 1) for sequence in flight.sequences]
        if any(needs_last_token(row) for row in rows):
            return None
        chunks = [Chunk(sequence, 1) for sequence in flight.sequences]
        step = build_step(chunks, self.limits.block_size)
        for sequence in flight.sequences:
            sequence.computed += 1
        return Flight(flight.sequences, True, self._model.start(step, rows, follows=True))

    def _land(self, flight: Flight) -> list[TokenEvent]:
        """Read a step's tokens."""
        events = []
        for sequence, sampled in zip(flight.sequences, self._model.finish(flight.started)):
            if sequence.ended:
                self._release(sequence)
            else:
                events.append(self._accept(sequence, sampled))
        return events

    def _settle(self) -> None:
        """When nothing runs any more, let the step that is still on its way end, and drop what it drew."""
        if self._flight is not None and not self._running:
            flight, self._flight = self._flight, None
            self._land(flight)

    def _admit(self) -> None:
        """Start waiting requests in order, while there is a place and blocks for all they may ever need."""
        while self._waiting and len(self._running) < self.limits.max_num_seqs:
            request = self._waiting[0]
            most = request.params.max_tokens
            length = len(request.prompt_ids)
            limit = self.limits.max_model_len if most is None else min(length + most, self.limits.max_model_len)
            # The last token is drawn but never cached.
            needed = blocks_for(limit - 1, self.limits.block_size)
            if any(pool.free < needed for pool in self._pools):
                return
            self._waiting.popleft()
            blocks = tuple(np.array(pool.take(needed), dtype=np.int32) for pool in self._pools)
            slot = min(set(range(self.limits.max_num_seqs)) - {sequence.slot for sequence in self._running})
            self._running.append(Sequence(request, limit, blocks, list(request.prompt_ids), slot=slot))

    def _retire(self, sequence: Sequence, flight: Flight | None) -> None:
        """End a sequence. Its blocks are free now, or when the `flight` that still writes to them has landed."""
        self._running.remove(sequence)
        sequence.ended = True
        if flight is None or not flight.holds(sequence):
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        for pool, blocks in zip(self._pools, sequence.blocks):
            pool.give_back(blocks.tolist())

    def _stop_ids(self, request: Request) -> frozenset[int]:
        own = frozenset(request.params.stop_token_ids)
        return own if request.params.ignore_eos else own | self.limits.eos_ids

    def _sampling_row(self, sequence: Sequence, ahead: int) -> SamplingRow:
        """What the sequence's next token is drawn by, or the one `ahead` of it."""
        request = sequence.request
        position = len(sequence.token_ids) + ahead
        early = position - len(request.prompt_ids) < request.params.min_tokens
        return SamplingRow(
            request.params,
            request.seed,
            position,
            request.prompt_ids,
            sequence.output_counts,
            tuple(self._stop_ids(request)) if early else (),
            sequence.slot,
            output_ids=sequence.output_ids if request.params.bad_words_token_ids else (),
        )

    def _accept(self, sequence: Sequence, sampled: Sampled) -> TokenEvent:
        """Append the drawn token and end the sequence where it ends."""
        request = sequence.request
        sequence.token_ids.append(sampled.token_id)
        sequence.output_counts[sampled.token_id] += 1
        stopped = sampled.token_id in self._stop_ids(request)
        finish = "stop" if stopped else "length" if len(sequence.token_ids) >= sequence.limit else None
        if finish:
            self._retire(sequence, self._flight)
        stop_id = sampled.token_id if stopped else None
        return TokenEvent(request.id, sampled.token_id, sampled.logprob, sampled.top_logprobs, finish, stop_id)

"""The step loop: admit, plan, run, sample, retire. Knows token ids; the front end knows text."""

from __future__ import annotations

from bisect import insort
from contextlib import suppress
from dataclasses import replace

import numpy as np

from rvllm.engine.flight import Flight, allow_late, ask, ask_verified, new_sequence, write_masks
from rvllm.engine.garbage import uncollected
from rvllm.engine.grammar import Grammars, Vocabulary, mask_words, matcher_for
from rvllm.engine.holdings import Holdings
from rvllm.engine.model import Model
from rvllm.engine.request import RANK, Request, Sequence, TokenEvent, event_of, leave_family, take_out
from rvllm.engine.scheduler import Limits, Plan, check_length, schedule
from rvllm.engine.speculation import Speculator, Verification, most_ahead
from rvllm.engine.step import advance, build_step, build_verification, slots_of
from rvllm.engine.tally import Counts, Load
from rvllm.errors import EngineError
from rvllm.program.program import length_independent
from rvllm.sampling.lookup import accepted
from rvllm.sampling.sampler import Sampled

__all__ = ["Engine", "Limits"]


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread adds, steps and aborts.

    While all that run are decoding, the next step is started before the tokens of this one are read: the device draws
    them and goes on with them by itself. A sequence that ends is then one step behind: what the next step makes of it
    is dropped, and its blocks are free only when that step is through.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self._model = model
        self.limits, self.program = limits, model.program
        self._held = Holdings(limits, length_independent(model.program))
        self._speculator = Speculator(limits.speculation, limits.max_rows)
        self._follows = model.runs_ahead
        self._groups = len(model.program.cache_groups)
        self._known: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # both in order of rank
        self._running: list[Sequence] = []
        self._ending: list[Sequence] = []  # ended, while the step in flight still writes to their blocks
        self._flight: Flight | None = None
        self._stuck = False  # whether those that wait have to, until something ends
        self.counts = Counts()
        self.grammars: Grammars | None = None  # once it knows its tokens' bytes

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> int:
        """Requests that have not begun, or gave way."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._held.pool.available

    @property
    def load(self) -> Load:
        drafted = self._speculator.drafted
        return self.counts.load(len(self._running), len(self._waiting), self._held.pool, drafted)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._held.pool.forget()
        for sequence in self._running:  # nobody knows its blocks now, and later ones alone would never be found
            sequence.registered = 0

    def learn(self, vocabulary: Vocabulary) -> Grammars:
        """Take the tokens' bytes, for grammars; those that it has, where it has them. Raises BadRequest."""
        self.grammars = self.grammars or Grammars(vocabulary, mask_words(self._model.program), self.limits.eos_ids)
        return self.grammars

    def check(self) -> None:
        """Assert that blocks and slots are held by the sequences that are here, and by nobody else."""
        self._held.check([*self._running, *self._ending])
        assert all(one.slot is None and not one.blocks and not one.computed for one in self._waiting)
        assert {*self._running, *self._waiting} == {*self._known.values()}
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=RANK)
        assert self.busy or (self._flight is None and not self._ending)

    # From outside

    def add(self, *requests: Request) -> None:
        """Queue a request, or several completions of one prompt, which is then read once.

        Raises PromptTooLong when the prompt leaves no room for a token, and BadRequest for a form of its text that
        cannot be held to, unless the grammar is compiled already; ids must be in range.
        """
        first = requests[0]
        assert first.prompt_ids and all(one.params.max_tokens != 0 and one.id not in self._known for one in requests)
        assert len({(one.prompt_ids, one.cache_salt, one.priority) for one in requests}) == 1, requests
        check_length(len(first.prompt_ids), self.limits)
        keys = self._held.prompt_keys(first)
        leader, *siblings = [self._born(request, keys) for request in requests]
        leader.siblings, leader.scored = siblings, first.params.prompt_logprobs is not None
        for sibling in siblings:
            sibling.leader = leader
        for sequence in (leader, *siblings):
            self._known[sequence.request.id] = sequence
            insort(self._waiting, sequence, key=RANK)
        self._stuck = False

    def abort(self, request_id: str) -> None:
        """Forget a request in any state; unknown ids are ignored, since it may just have ended."""
        sequence = self._known.get(request_id)
        if sequence is None:
            return
        leave_family(sequence)
        if sequence.slot is not None:
            self._retire(sequence)
        else:
            take_out(self._waiting, sequence)
            del self._known[request_id]
        self._stuck = False
        self._settle()

    @uncollected
    def step(self) -> list[TokenEvent]:
        """Go on by one step; the new tokens of the sequences that got one. A pause would be one of them all."""
        if self._flight is None:
            self._flight = self._take_off()
        landing = self._flight
        if landing is None:
            return []
        self._flight = self._follow(landing)
        events = self._land(landing)
        if self._flight is None and self._running and self._follows:
            self._flight = self._take_off()  # so that the device works while the caller publishes
        self._settle()
        return events

    # Before a step

    def _born(self, request: Request, keys: list[bytes]) -> Sequence:
        matcher = matcher_for(self.grammars, request.params)
        self.counts.arrivals += 1
        return new_sequence(request, keys, self.limits, self.counts.arrivals, self.counts.steps, matcher)

    def _take_off(self) -> Flight | None:
        """Plan a step, make room for it and start it."""
        plan = schedule(self._running, self._waiting, self._held.pool, self.limits)
        self.counts.steps += 1
        for sequence in plan.preempted:
            self._preempt(sequence)
        for admission in plan.admitted:
            self._admit(admission.sequence, admission.shared)
        copies = self._held.grow(plan.chunks)
        if copies:
            self._model.copy_blocks(copies)
        self._stuck = bool(self._waiting) and not plan.preempted
        if not plan.chunks:
            return None
        verification = self._draft(plan)
        return self._start(plan) if verification is None else self._verify(plan, verification)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to those that wait, with its tokens. Its full blocks stay in the cache until their room is wanted."""
        self.counts.preemptions += 1
        take_out(self._running, sequence)
        self._held.release(sequence)
        if sequence.scoring:
            sequence.scores.clear()
        insort(self._waiting, sequence, key=RANK)

    def _admit(self, sequence: Sequence, shared: tuple[int, ...]) -> None:
        self._seat(sequence)
        self._held.begin(sequence, shared)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            self.counts.prompt_tokens += len(sequence.request.prompt_ids)
            self.counts.cached_tokens += sequence.computed

    def _seat(self, sequence: Sequence) -> None:
        """From those that wait to those that run."""
        take_out(self._waiting, sequence)
        insort(self._running, sequence, key=RANK)
        sequence.begin()

    def _start(self, plan: Plan) -> Flight:
        size = self.limits.block_size
        step = build_step(plan.chunks, size, self._groups, self._held.tables)
        asked = ask(plan, step.query_starts.tolist())
        write_masks(self.grammars, asked)
        if len(asked.places) != len(step.rows):
            step = replace(step, rows=np.array(asked.places, dtype=np.int32))
        filled, number = [], self.counts.steps
        for sequence, tokens in plan.chunks:
            leads = bool(sequence.siblings) and tokens == sequence.pending
            sequence.computed += tokens
            sequence.turn = number
            if sequence.computed // size > sequence.registered:
                filled.append((sequence, sequence.computed))
            if leads:
                self._fork(sequence, plan.forks)
        for sequence, row in zip(asked.sequences, asked.rows):
            row.slot = sequence.slot or 0
        members = [chunk.sequence for chunk in plan.chunks]
        return Flight(
            step,
            frozenset([*members, *plan.forks]),
            slots_of(members),
            asked,
            tuple(filled),
            self._follows and step.decode_tokens == len(step.ids) == len(asked.rows) and not plan.forks and asked.plain,
            asked.left,
            self._model.start(self.counts.start(step), asked.rows),
        )

    def _draft(self, plan: Plan) -> Verification | None:
        """What a step verifies in which all sequences decode; None where no guess is worth it."""
        if self.limits.speculation is None or any(c.tokens != c.sequence.pending or c.tokens > 1 for c in plan.chunks):
            return None
        sequences = [chunk.sequence for chunk in plan.chunks]
        if not all(sequence.told for sequence in sequences):
            return None
        drafts = self._speculator.drafts(sequences)
        if drafts is None:
            return None
        held = self._held
        found = self._speculator.verification(sequences, drafts, self._model.guesses)
        if held.reserve([(one, 1 + room) for one, room in zip(sequences, found.rooms)]):
            return found
        for sequence, guesses in zip(sequences, drafts):  # no more than the blocks hold that they have anyway
            del guesses[held.room(sequence) - 1 :]
        return Verification(drafts, tuple(map(len, drafts)))

    def _verify(self, plan: Plan, verification: Verification) -> Flight:
        """Start a step that draws what comes behind each sequence's last token and behind each of its guesses."""
        sequences = [chunk.sequence for chunk in plan.chunks]
        tokens = verification.filled(sequences)
        step = build_verification(sequences, tokens, self.limits.block_size, self._groups, self._held.tables)
        asked = ask_verified(sequences, tokens)
        write_masks(self.grammars, asked)
        for sequence in sequences:
            sequence.computed += 1
            sequence.turn = self.counts.steps
        for sequence, row in zip(asked.sequences, asked.rows):
            row.slot = sequence.slot or 0
        started = self._model.start(self.counts.start(step), asked.rows, guessing=verification.guessing)
        slots = slots_of(asked.sequences)
        return Flight(step, frozenset(sequences), slots, asked, (), False, 0, started, verification)

    def _fork(self, leader: Sequence, forks: tuple[Sequence, ...]) -> None:
        """Siblings go on from the prompt that their leader has read; those with no seat wait like any other."""
        for sibling in leader.siblings:
            sibling.leader = None
            if sibling in forks:
                self._seat(sibling)
                self._held.fork(sibling, leader)
                sibling.cached_tokens = leader.cached_tokens
        leader.siblings = []

    # While one is in flight

    def _follow(self, flight: Flight) -> Flight | None:
        """Start the step after `flight` on the tokens that it is drawing, where that is sure to be what comes next.

        Not so when a request could begin, a prompt was read, a sequence has ended or is about to reach its length, what
        may be drawn depends on the tokens before, or there are no blocks left: then somebody has to give way first.
        """
        if flight.verifies is not None:
            return self._guess_on(flight, flight.verifies)
        if not flight.followable or flight.left <= 0 or self._ending:
            return None
        sequences = flight.asked.sequences
        if (self._waiting and not self._stuck) or len(sequences) != len(self._running):
            return None
        if self._speculator.promises(sequences):
            return None
        size, held = self.limits.block_size, self._held
        entering = [sequences[row] for row in np.flatnonzero(flight.step.kv_lengths % size == 0).tolist()]
        if len(entering) > held.pool.available:
            return None
        for sequence in entering:
            held.hold(sequence, held.pool.take(1))
        step = advance(flight.step, flight.slots, held.tables, size)
        for sequence, row in zip(sequences, flight.asked.rows):
            sequence.computed += 1
            row.position += 1
            if row.forbidden_ids:
                allow_late(row)
        filling = [sequences[row] for row in np.flatnonzero(step.kv_lengths % size == 0).tolist()]
        return replace(
            flight,
            step=step,
            filled=tuple((sequence, sequence.computed) for sequence in filling),
            left=flight.left - 1,
            started=self._model.start(self.counts.start(step), flight.asked.rows, follows=True),
        )

    def _guess_on(self, flight: Flight, verifies: Verification) -> Flight | None:
        """Start the step after one that verifies guesses, with guesses that the model makes of what that one draws."""
        if verifies.guessing is None or self._ending or (self._waiting and not self._stuck):
            return None
        sequences, held = list(dict.fromkeys(flight.asked.sequences)), self._held
        if len(sequences) != len(self._running) or not self._speculator.goes_on(sequences, verifies):
            return None
        before = sum(len(sequence.blocks) for sequence in sequences)
        # As many as if all guesses were right; this step's last token is drawn and not computed by then.
        if not held.reserve([(one, most_ahead(room) - 1) for one, room in zip(sequences, verifies.rooms)]):
            return None
        step, width = flight.step, max(len(sequence.blocks) for sequence in sequences)
        if sum(len(sequence.blocks) for sequence in sequences) > before:
            step = replace(step, block_tables=(held.tables[flight.slots, :width],) * self._groups)
        for sequence in sequences:
            sequence.computed += 1
        for row in flight.asked.rows:
            row.position += 1  # where there is no room for guesses; the model knows the others' by itself
            allow_late(row)
        started = self._model.start(self.counts.start(step), flight.asked.rows, follows=True)
        return replace(flight, step=step, started=started, verifies=verifies.next())

    # After a step

    def _land(self, flight: Flight) -> list[TokenEvent]:
        """Read a step's tokens. What sequences that have ended got from it is dropped, and their blocks are free."""
        try:
            drawn = self._model.finish(flight.started)
        finally:  # a step that failed writes no more either
            ending, self._ending = self._ending, []
            for sequence in ending:
                self._held.release(sequence)
        if self.limits.prefix_caching:
            for sequence, tokens in flight.filled:
                if not sequence.ended:
                    self._held.register(sequence, tokens)
        if flight.verifies is not None:
            if self._flight is not None and self._flight.verifies is not None:
                self._flight.verifies.drafts.extend(self._model.guessed(flight.started))
            return self._accept(flight, flight.verifies, drawn)
        events = []
        for sequence, row, sampled in zip(flight.asked.sequences, flight.asked.rows, drawn):
            if sequence.ended:
                continue
            if row.given_id is not None:
                sequence.scores.append(sampled)
                continue
            events.append(self._append(sequence, sampled))
        return events

    def _append(self, sequence: Sequence, sampled: Sampled) -> TokenEvent:
        """A sequence's new token."""
        token, ids = sampled.token_id, sequence.token_ids
        ids.append(token)
        if sequence.counted:
            sequence.output_counts[token] += 1
        turns = len(ids) >= sequence.limit or token in sequence.stop_ids or sequence.matcher is not None
        if sequence.told and not turns:
            return TokenEvent(sequence.request.id, token, sampled.logprob, sampled.top_logprobs, None, None)
        event = event_of(sequence, sampled)
        if event.finish_reason is not None:
            self._retire(sequence)
        return event

    def _accept(self, flight: Flight, verifies: Verification, drawn: list[Sampled]) -> list[TokenEvent]:
        """The tokens of a step that verified guesses: each sequence's up to the first behind a guess that was wrong.

        What the step left in the cache behind those is written over by the next.
        """
        events: list[TokenEvent] = []
        end = 0
        for guesses, room in zip(verifies.drafts, verifies.rooms):
            begin, end = end, end + 1 + room
            sequence = flight.asked.sequences[begin]
            if sequence.ended:
                continue
            right = accepted(guesses, [sampled.token_id for sampled in drawn[begin:end]])
            self._speculator.learn(sequence, len(guesses), right)
            sequence.computed += right
            for sampled in drawn[begin : begin + right + 1]:
                self._find(sequence)
                events.append(self._append(sequence, sampled))
                if sequence.ended:
                    break
            else:
                if self._flight is None:
                    self._held.trim(sequence)
        return events

    def _find(self, sequence: Sequence) -> None:
        """Let others find a block that is full of tokens now known to be right."""
        tokens = len(sequence.token_ids)
        if self.limits.prefix_caching and tokens // self.limits.block_size > sequence.registered:
            self._held.register(sequence, tokens)

    def _retire(self, sequence: Sequence) -> None:
        """End a running sequence. Its blocks are free now, or when the flight that writes to them has landed."""
        take_out(self._running, sequence)
        del self._known[sequence.request.id]
        sequence.ended = True
        self._stuck = False
        if self._flight is not None and sequence in self._flight.members:
            self._ending.append(sequence)
        else:
            self._held.release(sequence)

    def _settle(self) -> None:
        """When nothing runs any more, let the step that is still on its way end, and drop what it drew."""
        if self._flight is not None and not self._running:
            flight, self._flight = self._flight, None
            with suppress(EngineError):  # nobody waits for this step; the next one fails too, and says so
                self._land(flight)

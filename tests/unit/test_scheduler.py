"""The scheduler's and the pool's promises, on random situations; the pool beside a model of it, call by call."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rvllm.engine.block_pool import BlockPool, block_key, blocks_for, pool_blocks, root_key
from rvllm.engine.request import Request, Sequence
from rvllm.engine.scheduler import Limits, Plan, next_chunk, schedule
from rvllm.program.dtype import F16
from rvllm.program.program import CacheGroup
from rvllm.sampling.params import SamplingParams

SIZE = 4


def limits(**changes: int) -> Limits:
    sizes = {
        "max_model_len": 100,
        "block_size": SIZE,
        "blocks": 30,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 20,
        "prefill_chunk": 8,
        "vocab_limit": 50,
    }
    return Limits(**sizes | changes, eos_ids=frozenset())


class Situation:
    """Sequences in a pool: each of `running` is (length, computed), computed < length; the oldest first."""

    def __init__(self, running: list[tuple[int, int]], waiting: list[int], blocks: int, shared: bool) -> None:
        self.pool = BlockPool(blocks)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        for length, computed in running:
            wanted = blocks_for(computed, SIZE)
            if wanted > self.pool.available or len(self.running) == 6:
                continue
            one = self.sequence(length, computed)
            one.slot, one.turn = len(self.running), length % 5
            if shared and self.running and len(self.running[-1].blocks) >= wanted > 0:  # as a fork would
                self.pool.share(self.running[-1].blocks[:wanted])
                one.blocks = self.running[-1].blocks[:wanted]
            else:
                one.blocks = self.pool.take(wanted)
            self.running.append(one)
        for length in waiting:
            if blocks_for(length + 1, SIZE) <= blocks:
                self.waiting.append(self.sequence(length, 0))
        self._leave_prefixes()

    def sequence(self, length: int, computed: int) -> Sequence:
        request = Request("r", tuple(range(1, length + 1)), SamplingParams(), 0)
        rank = (0, len(self.running) + len(self.waiting))
        return Sequence(request, 100, [], list(request.prompt_ids), computed, rank=rank, turn=length % 7)

    def _leave_prefixes(self) -> None:
        """Some of what waits is in the cache."""
        for one in self.waiting[::2]:
            key = root_key(None)
            for page in range(min(2, len(one.token_ids) // SIZE)):
                key = block_key(key, one.token_ids[page * SIZE : (page + 1) * SIZE])
                one.keys.append(key)
                if self.pool.available and not self.pool.find([key]):
                    (block,) = self.pool.take(1)
                    self.pool.register(block, key)
                    self.pool.give_back([block])

    def carry_out(self, plan: Plan) -> None:
        """What the engine does with a plan's blocks; asserts wherever one is missing."""
        for one in plan.preempted:
            self.pool.give_back(one.blocks)
            one.blocks = []
        for admission in plan.admitted:
            self.pool.share(admission.shared)
            admission.sequence.blocks = list(admission.shared)
            admission.sequence.computed = len(admission.shared) * SIZE
        for chunk in plan.chunks:
            one = chunk.sequence
            page = one.computed // SIZE
            if page < len(one.blocks) and self.pool.holders(one.blocks[page]) > 1:
                (own,) = self.pool.take(1)
                self.pool.give_back([one.blocks[page]])
                one.blocks[page] = own
            one.blocks += self.pool.take(blocks_for(one.computed + chunk.tokens, SIZE) - len(one.blocks))


situations = st.builds(
    Situation,
    st.lists(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))), max_size=8),
    st.lists(st.integers(1, 60), max_size=6),
    st.integers(16, 40),
    st.booleans(),
)


@settings(max_examples=300)
@given(situations)
def test_a_plan_keeps_every_promise(now: Situation) -> None:
    bounds = limits()
    before = deepcopy((now.pool.__dict__, [one.blocks for one in now.running]))
    plan = schedule(now.running, now.waiting, now.pool, bounds)
    assert before == (now.pool.__dict__, [one.blocks for one in now.running]), "scheduling changed something"
    chunks = {chunk.sequence: chunk.tokens for chunk in plan.chunks}
    assert len(chunks) == len(plan.chunks) and not set(chunks) & set(plan.preempted)
    assert bool(plan.chunks) == bool(now.running or now.waiting)
    # Tokens: each chunk is whole, decodes first, all within the budget; everyone who decodes goes on or gives way.
    assert sum(chunks.values()) <= bounds.max_num_batched_tokens
    assert [tokens > 1 for tokens in chunks.values()] == sorted(tokens > 1 for tokens in chunks.values())
    begun = {one.sequence: len(one.shared) * SIZE for one in plan.admitted}
    for one, tokens in chunks.items():
        assert tokens == next_chunk(begun.get(one, one.computed), len(one.token_ids), bounds.prefill_chunk)
    assert all(one in chunks or one in plan.preempted for one in now.running if one.pending == 1)
    # Who gives way: the least important, and never for somebody less important; nobody begins meanwhile.
    kept = [one for one in now.running if one not in plan.preempted]
    assert now.running == kept + list(reversed(plan.preempted))
    assert not (plan.preempted and plan.admitted) and (kept or not now.running)
    assert len(kept) + len(begun) <= bounds.max_num_seqs
    assert all(shared < len(one.token_ids) for one, shared in begun.items())
    if not now.running and now.waiting:
        assert plan.admitted
    now.carry_out(plan)
    now.pool.check([*(one.blocks for one in kept), *(one.blocks for one in begun)])


@given(situations)
def test_the_prompt_whose_turn_is_longest_ago_is_read(now: Situation) -> None:
    plan = schedule(now.running, (), now.pool, limits())
    reading = [one for one in now.running if one.pending > 1 and one not in plan.preempted]
    served = [chunk.sequence for chunk in plan.chunks if chunk.sequence in reading]
    if reading and not plan.preempted:
        assert min(reading, key=lambda one: (one.turn, one.rank)) in served


@given(st.integers(2, 60), situations)
def test_a_prompt_is_cut_at_the_same_places_whoever_runs_beside_it(length: int, now: Situation) -> None:
    def cuts(neighbours: list[Sequence]) -> list[int]:
        pool, own, places = BlockPool(1000), now.sequence(length, 0), []
        own.rank, own.slot = (0, -1), 99
        for one in neighbours:
            one.blocks = pool.take(blocks_for(one.computed, SIZE))
        for _ in range(100):
            for one, tokens in schedule([own, *neighbours], (), pool, limits()).chunks:
                one.blocks += pool.take(blocks_for(one.computed + tokens, SIZE) - len(one.blocks))
                one.computed += tokens
                if one is own:
                    places.append(own.computed)
                elif not one.pending:
                    one.token_ids.append(1)
                one.turn += 1
            if not own.pending:
                break
        return places

    others = [replace(one, blocks=[], token_ids=list(one.token_ids)) for one in now.running[:5]]
    assert cuts([]) == cuts(others)


def test_who_begins_leaves_a_block_for_everyone_that_runs() -> None:
    now = Situation([(8, 7), (8, 7)], [8], 20, shared=False)  # the two hold two blocks each and will want a third
    for blocks, begins in ((10, False), (11, True)):  # 4 held, 2 wanted soon, one more each, 3 for who begins
        now.pool = BlockPool(blocks)
        for one in now.running:
            one.blocks = now.pool.take(2)
        plan = schedule(now.running, now.waiting, now.pool, limits())
        assert bool(plan.admitted) is begins


class PoolMachine(RuleBasedStateMachine):
    """BlockPool beside sets of what is held and what is known."""

    BLOCKS = 8

    @initialize()
    def begin(self) -> None:
        self.pool = BlockPool(self.BLOCKS)
        self.held: list[list[int]] = []
        self.contents: dict[int, bytes] = {}
        self.keys = 0

    @precondition(lambda self: self.pool.available)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.available))
        idle = set(range(self.BLOCKS)) - {block for blocks in self.held for block in blocks}
        blank = {block for block in idle if block not in self.contents}
        taken = self.pool.take(count)
        assert len(set(taken)) == count and set(taken) <= idle
        assert blank <= set(taken) or set(taken) <= blank, "a kept content went while a blank block was free"
        for block in taken:
            self.contents.pop(block, None)
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.share(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.contents)))
        assert self.pool.find([self.contents[block], b"unknown", self.contents[block]]) == [block]
        self.pool.share([block])
        self.held.append([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.give_back(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), again=st.booleans())
    def register(self, data: st.DataObject, again: bool) -> None:
        block = data.draw(st.sampled_from([block for blocks in self.held for block in blocks]))
        if again and self.contents:  # a content that another block holds already
            key = data.draw(st.sampled_from(sorted(self.contents.values())))
        else:
            key, self.keys = self.keys.to_bytes(4, "big"), self.keys + 1
        if self.contents.get(block, key) == key:
            self.pool.register(block, key)
            if key not in self.contents.values():
                self.contents[block] = key

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.contents.clear()

    @invariant()
    def holds_what_it_should(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.held)
            assert self.pool.available == self.BLOCKS - len({block for blocks in self.held for block in blocks})
            assert all(self.pool.find([key]) == [block] for block, key in self.contents.items())


TestPool = PoolMachine.TestCase


def test_a_block_given_back_twice_is_noticed() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.give_back(blocks)
    with pytest.raises(AssertionError):
        pool.give_back(blocks)


def test_the_content_that_was_given_back_first_goes_first_and_a_tail_before_its_head() -> None:
    pool = BlockPool(4)
    old, new = pool.take(2), pool.take(2)
    for number, block in enumerate([*old, *new]):
        pool.register(block, bytes([number]))
    pool.give_back(old)
    pool.give_back(new)
    pool.share([old[0]])
    pool.give_back([old[0]])
    assert pool.take(4) == [old[1], new[1], new[0], old[0]]


def test_a_blocks_key_depends_on_every_token_before_it_and_on_the_salt() -> None:
    """B109. 256 bits, the same in every process, and no two of 3,000 chains alike."""

    def chain(ids: list[int], salt: str | None = None) -> bytes:
        key = root_key(salt)
        for begin in range(0, len(ids), SIZE):
            key = block_key(key, ids[begin : begin + SIZE])
        return key

    ids = list(range(40))
    changed = [chain([*ids[:place], 99, *ids[place + 1 :]]) for place in range(40)]
    keys = [chain(ids), *changed, chain(ids, "a"), chain(ids, "b"), chain(ids[:36]), chain([*ids[4:]])]
    keys += [chain([number, 0, 0, 0]) for number in range(1500)] + [
        chain([0, 0, 0, number]) for number in range(1, 1500)
    ]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {32}
    assert chain([1, 2, 3, 4]).hex() == FIRST_KEY  # PYTHONHASHSEED changes nothing


FIRST_KEY = "4a083849085c54079541e2995efb9866bf69488ffb62face3b145649bd72986b"


def test_pool_size_counts_every_group() -> None:
    groups = (CacheGroup(None, 2, 64, F16, layers=3), CacheGroup(16, 2, 64, F16, layers=1))
    block_bytes = 32 * 2 * 2 * 64 * 2 * 4
    assert pool_blocks(groups, 32, 10 * block_bytes + 5) == 10
    assert [blocks_for(tokens, 32) for tokens in (1, 32, 33)] == [1, 1, 2]

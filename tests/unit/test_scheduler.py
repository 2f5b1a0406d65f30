"""The scheduler's and the pool's promises, on random situations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.engine.block_pool import BlockPool, blocks_for, pool_blocks
from rvllm.engine.request import Request, Sequence
from rvllm.engine.scheduler import schedule
from rvllm.program.dtype import F16
from rvllm.program.program import CacheGroup
from rvllm.sampling.params import SamplingParams


def sequence(length: int, computed: int) -> Sequence:
    request = Request("r", tuple(range(1, length + 1)), SamplingParams(), 0)
    return Sequence(request, 10_000, ([],), list(request.prompt_ids), computed)


situations = st.lists(
    st.integers(1, 200).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length - 1))), max_size=12
)


@given(situations, st.integers(1, 64), st.integers(1, 300))
def test_decoding_sequences_always_get_their_token_and_prompts_keep_the_budget(
    state: list[tuple[int, int]], chunk: int, budget: int
) -> None:
    running = [sequence(*lengths) for lengths in state]
    chunks = schedule(running, prefill_chunk=chunk, max_tokens=budget)
    assert len({id(c.sequence) for c in chunks}) == len(chunks)
    assert {id(s) for s in running if s.pending == 1} <= {id(c.sequence) for c in chunks}
    assert all(1 <= c.tokens <= c.sequence.pending for c in chunks)
    prompts = [c for c in chunks if c.sequence.pending > 1]
    assert sum(c.tokens for c in chunks) <= max(
        budget, len(chunks) - len(prompts) + (prompts[0].tokens if prompts else 0)
    )
    assert bool(chunks) == bool(running)


@given(situations, st.integers(1, 64), st.integers(1, 300))
def test_one_token_chunks_come_first(state: list[tuple[int, int]], chunk: int, budget: int) -> None:
    tokens = [c.tokens > 1 for c in schedule([sequence(*s) for s in state], prefill_chunk=chunk, max_tokens=budget)]
    assert tokens == sorted(tokens)


@given(st.integers(2, 500), st.integers(1, 64), situations)
def test_a_prompt_is_cut_at_the_same_places_whoever_runs_beside_it(
    length: int, chunk: int, others: list[tuple[int, int]]
) -> None:
    def cuts(neighbours: list[Sequence]) -> list[int]:
        own, places = sequence(length, 0), []
        while own.pending > 1:
            for part in schedule([own, *neighbours], prefill_chunk=chunk, max_tokens=100):
                if part.sequence is own:
                    own.computed += part.tokens
                    places.append(own.computed)
            if own.pending == 0:
                break
        return places

    assert cuts([]) == cuts([sequence(*state) for state in others])


@given(st.lists(st.integers(0, 20), max_size=20))
def test_blocks_are_never_held_twice_nor_lost(sizes: list[int]) -> None:
    pool = BlockPool(200)
    held: list[list[int]] = []
    for size in sizes:
        if size <= pool.free and size % 3:
            held.append(pool.take(size))
        elif held:
            pool.give_back(held.pop(0))
        flat = [block for blocks in held for block in blocks]
        assert len(set(flat)) == len(flat) and pool.free == 200 - len(flat)
        assert all(0 <= block < 200 for block in flat)


def test_a_block_given_back_twice_is_noticed() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.give_back(blocks)
    with pytest.raises(AssertionError):
        pool.give_back(blocks)


def test_pool_size_counts_every_group() -> None:
    groups = (CacheGroup(None, 2, 64, F16, layers=3), CacheGroup(16, 2, 64, F16, layers=1))
    block_bytes = 32 * 2 * 2 * 64 * 2 * 4
    assert pool_blocks(groups, 32, 10 * block_bytes + 5) == 10
    assert [blocks_for(tokens, 32) for tokens in (1, 32, 33)] == [1, 1, 2]

"""Thousands of requests against one engine on the CPU backend, with a pool that is always in need.

Lengths, priorities, penalties, several completions, shared beginnings, aborts: all at random. Every output has to be
what the same request gives alone, without a prefix cache and with nobody beside it, and no block may be missing at the
end. RVLLM_SOAK_REQUESTS says how many for each of two pools; the default is what continuous integration has time for.

A token computed alone, as a matrix-vector product, has other bits than the same token computed in a chunk of a prompt,
so a sequence that gave way, or found its prompt in the cache, may differ in the last bits of its logits. The model's
weights are large, so that its logits lie far apart: where outputs differ all the same, the two best logits of the first
token that does have to be closer than such bits can move them, which is one token in some hundred thousand.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rvllm import LLM
from rvllm.engine.engine import Engine
from rvllm.engine.request import Request, TokenEvent
from rvllm.sampling.params import SamplingParams
from tests.fixtures.models import Shape, random_model

REQUESTS = int(os.environ.get("RVLLM_SOAK_REQUESTS", "80"))
NEAR = 1e-4  # between two logits: float32 sums of some hundred terms around 10, in another order, are off by 1e-5
SHAPE = Shape(hidden=64, intermediate=96, heads=2, kv_heads=1)
SEATS = 8


GUESSES = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def engines(folder: Path, blocks: int, guesses: dict[str, Any] | None) -> tuple[Engine, Engine, int]:
    """The one that is put to the test, one that runs requests alone, and how many ids there are."""
    random_model(folder, SHAPE, std=0.3)
    sizes = {"device": "cpu", "block_size": 16, "max_model_len": 256, "prefill_chunk": 32, "max_num_batched_tokens": 80}
    own = {"num_gpu_blocks_override": blocks, "scheduling_policy": "priority", "speculative_config": guesses}
    busy = LLM(str(folder), max_num_seqs=SEATS, **own, **sizes)
    alone = LLM(str(folder), max_num_seqs=1, enable_prefix_caching=False, **sizes)
    return busy._engine, alone._engine, busy._engine.limits.vocab_limit


def orders(vocab: int, count: int) -> Iterator[list[Request]]:
    """Groups of requests that share a prompt, mostly of one."""
    dice = random.Random(11)
    stems = [dice.choices(range(vocab), k=dice.randint(20, 120)) for _ in range(12)]
    made = 0
    while made < count:
        stem = dice.choice(stems)[: dice.randint(1, 120)] if dice.random() < 0.7 else []
        prompt = [*stem, *dice.choices(range(vocab), k=dice.randint(1, 40))]
        params = SamplingParams(
            temperature=dice.choice([0, 0, 0.8]),
            max_tokens=dice.choice([1, 4, 8, 40, 70]),
            presence_penalty=dice.choice([0, 0, 0, 0.5]),
            ignore_eos=dice.random() < 0.5,
            min_tokens=dice.choice([0, 0, 1]),
            logprobs=2,
            prompt_logprobs=dice.choice([None] * 9 + [0]),
        )
        group = dice.choice([1] * 8 + [2, 4])
        priority, salt = dice.choice([0, 0, 0, 1, -1]), dice.choice([None, None, "a"])
        yield [Request(f"{made + i}", tuple(prompt), params, made + i, priority, salt) for i in range(group)]
        made += group


def agrees(request: Request, events: list[TokenEvent], alone: list[TokenEvent], *, whole: bool) -> bool:
    """Whether the tokens are those of the request alone, all of them or the first. Raises where a tie decided."""
    if whole and not any(event.finish_reason for event in events):
        return False
    for ours, right in zip(events, alone):
        if ours.token_id != right.token_id:
            (_, best), (_, next_best) = right.top_logprobs
            near = request.params.temperature == 0 and not request.params.presence_penalty
            if near and best - next_best < NEAR:
                raise Tie
            return False
    return len(events) == len(alone) if whole else len(events) <= len(alone)


class Tie(Exception):
    """Roundings decided which token is the best one."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "guesses"),
    [(18, None), (80, None), (18, GUESSES)],
    ids=["many give way", "many prefixes are found", "many give way, with guesses"],
)
def test_no_request_notices_the_others_and_no_block_is_lost(
    tmp_path: Path, blocks: int, guesses: dict[str, Any] | None
) -> None:
    busy, alone, vocab = engines(tmp_path, blocks, guesses)
    dice = random.Random(5)
    queue = orders(vocab, REQUESTS)
    asked: dict[str, Request] = {}
    events: dict[str, list[TokenEvent]] = {}
    aborted: set[str] = set()
    begun_s, more = time.perf_counter(), True
    while more or busy.busy:
        while more and busy.load.waiting < 12:
            group = next(queue, None)
            if group is None:
                more = False
                break
            busy.add(*group)
            for request in group:
                asked[request.id], events[request.id] = request, []
        for event in busy.step():
            events[event.request_id].append(event)
        if dice.random() < 0.02:
            name = dice.choice(list(asked)[-20:])
            busy.abort(name)
            aborted.add(name)
        if dice.random() < 0.05:
            busy.check()
    busy.check()
    load, served_s = busy.load, time.perf_counter() - begun_s
    assert busy.free_blocks == blocks and (load.drafts > REQUESTS) == (guesses is not None)
    assert load.preemptions > REQUESTS / 40 if blocks < 20 else load.cached_tokens > 5 * REQUESTS
    ties = 0
    for request in asked.values():
        alone.add(replace(request, params=replace(request.params, prompt_logprobs=None)))
        expected: list[TokenEvent] = []
        while alone.busy:
            expected += alone.step()
        try:
            whole = request.id not in aborted or bool(events[request.id] and events[request.id][-1].finish_reason)
            assert agrees(request, events[request.id], expected, whole=whole), request
        except Tie:
            ties += 1
    assert ties <= 1 + REQUESTS // 1000
    print(
        f"\n{len(asked):,} requests in {served_s:.1f} s, {load.preemptions:,} gave way, {load.cached_tokens:,} of "
        f"{load.prompt_tokens:,} prompt tokens found, {len(aborted):,} aborted, {ties} ties"
    )

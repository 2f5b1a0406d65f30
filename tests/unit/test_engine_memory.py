"""Blocks under the step loop: prefixes found, prompts shared, sequences that give way. The model is its own cache, so
that every wrong block changes a token; each test compares with what a request gives alone, with no cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.engine.engine import Engine
from rvllm.engine.request import Request, TokenEvent
from rvllm.engine.scheduler import Limits
from rvllm.errors import EngineError, PromptTooLong
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import Sampled
from tests.fixtures.recall_model import EOS, VOCAB, RecallModel, continuation, run_all

BLOCK, LONGEST = 16, 160
MADE: list[Engine] = []


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    MADE.clear()
    yield
    for engine in MADE:
        engine.check()
        assert engine.busy or engine.free_blocks == engine.limits.blocks


def made(blocks: int = 40, *, ahead: bool = False, **changes: object) -> tuple[Engine, RecallModel]:
    sizes: dict[str, object] = {
        "max_model_len": LONGEST,
        "block_size": BLOCK,
        "blocks": blocks,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "prefill_chunk": 32,
        "score_chunk": 8,
        "vocab_limit": VOCAB,
        "eos_ids": frozenset({EOS}),
    }
    model = RecallModel(blocks, BLOCK, runs_ahead=ahead)
    engine = Engine(model, Limits(**sizes | changes))  # type: ignore[arg-type]
    MADE.append(engine)
    return engine, model


def ask(name: str, prompt: list[int], most: int | None = 8, **params: object) -> Request:
    given = {"temperature": 0, "ignore_eos": True, "max_tokens": most} | params
    terms = {key: given.pop(key) for key in ("priority", "cache_salt") if key in given}
    return Request(name, tuple(prompt), SamplingParams(**given), 5, **terms)  # type: ignore[arg-type]


def ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def tokens(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


def right(request: Request, events: list[TokenEvent], most: int = LONGEST) -> bool:
    ended = [event.finish_reason for event in events]
    return tokens(events) == continuation(request, most) and ended[-1] is not None and not any(ended[:-1])


both = pytest.mark.parametrize("ahead", [False, True])


# --- Prefixes


@both
def test_a_prompt_that_was_read_before_is_not_read_again(ahead: bool) -> None:
    engine, model = made(ahead=ahead)
    prompt = ids(70)
    first = ask("a", prompt)
    assert right(first, run_all_after(engine, first)["a"]) and model.prompt_tokens == 70
    again = ask("b", [*prompt, 1, 2])
    events = run_all_after(engine, again)["b"]
    assert right(again, events) and events[0].cached_tokens == 64
    assert all(event.cached_tokens is None for event in events[1:])
    assert model.prompt_tokens == 70 + 8


def run_all_after(engine: Engine, *requests: Request) -> dict[str, list[TokenEvent]]:
    for request in requests:
        engine.add(request)
    return run_all(engine)


def test_at_least_the_last_token_of_a_prompt_is_computed() -> None:
    engine, _ = made()
    prompt = ids(64)
    for name in "ab":
        events = run_all_after(engine, ask(name, prompt))[name]
        assert right(ask(name, prompt), events)
    assert events[0].cached_tokens == 48


def test_what_a_completion_added_is_found_by_the_next_turn_of_a_conversation() -> None:
    engine, _ = made()
    first = ask("a", ids(20), 30)
    answer = tokens(run_all_after(engine, first)["a"])
    second = ask("b", [*first.prompt_ids, *answer, 3, 4])
    events = run_all_after(engine, second)["b"]
    assert right(second, events) and events[0].cached_tokens == 48  # of the 49 that were computed


@both
def test_tokens_after_a_stop_never_reach_the_cache(ahead: bool) -> None:
    """The stop token ends a block when it is computed; running ahead computes it, and must not register that block."""
    engine, _ = made(ahead=ahead)
    prompt = ids(BLOCK - 1)
    stop = continuation(ask("a", prompt, 1), LONGEST)[0]
    beside = ask("beside", ids(40, 9), 20)
    engine.add(beside)
    events = run_all_after(engine, ask("a", prompt, stop_token_ids=[stop]))
    assert tokens(events["a"]) == [stop] and events["a"][0].stop_id == stop
    longer = ask("b", [*prompt, stop, 5])
    found = run_all_after(engine, longer)["b"]
    assert found[0].cached_tokens == 0 and right(longer, found)


def test_salts_keep_tenants_apart() -> None:
    """B108. A hit for the second A and for none after none; nothing else, not even for a salt that names a model."""
    engine, _ = made(blocks=64)
    prompt = ids(64)
    found = []
    for number, salt in enumerate(["A", "A", "B", None, "model", None]):
        request = ask(str(number), prompt, cache_salt=salt)
        events = run_all_after(engine, request)[str(number)]
        assert right(request, events)
        found.append(events[0].cached_tokens)
    assert found == [0, 48, 0, 0, 0, 48]


def test_the_cache_can_be_turned_off_and_emptied() -> None:
    engine, _ = made(prefix_caching=False)
    for name in "ab":
        events = run_all_after(engine, ask(name, ids(64)))[name]
        assert events[0].cached_tokens == 0 and right(ask(name, ids(64)), events)
    assert engine.load.kept_blocks == 0
    engine, _ = made()
    engine.add(ask("a", ids(64), 40))
    for _ in range(10):
        engine.step()
    engine.forget_prefixes()
    run_all(engine)
    assert engine.load.cached_tokens == 0
    engine.forget_prefixes()
    assert run_all_after(engine, ask("b", ids(64)))["b"][0].cached_tokens == 0


def test_random_prompts_with_shared_beginnings_give_the_same_with_and_without_a_cache() -> None:
    """B109. 2,000 prompts of 32 to 150 tokens, a pool that has to evict all the time."""
    dice = random.Random(3)
    stems = [ids(dice.randint(16, 120), seed) for seed in range(40)]
    engine, _ = made(blocks=60)
    hits = 0
    for batch in range(100):
        requests = []
        for number in range(20):
            stem = dice.choice(stems)[: dice.randint(16, 120)]
            requests.append(ask(f"{batch}.{number}", [*stem, *ids(dice.randint(16, 30), dice.random())], 4))
        events = run_all_after(engine, *requests)
        assert all(right(request, events[request.id]) for request in requests)
        hits += sum(events[request.id][0].cached_tokens or 0 for request in requests)
    assert hits > 20_000 and engine.load.cached_tokens == hits


# --- Several completions of one prompt


@both
@pytest.mark.parametrize("length", [1, 15, 16, 17, 45, 64])
def test_the_prompt_of_several_completions_is_computed_once(ahead: bool, length: int) -> None:
    engine, model = made(ahead=ahead)
    group = [
        replace(ask(str(seed), ids(length), 30, temperature=1.3, ignore_eos=False), seed=seed) for seed in range(4)
    ]
    engine.add(*group)
    events = run_all(engine)
    assert all(right(request, events[request.id]) for request in group)
    assert len({tuple(tokens(events[request.id])) for request in group}) > 1
    assert sum(count for count, _, _ in model.steps if count > 4) == (length if length > 4 else 0)
    assert model.copies == (0 if length % BLOCK == 0 else 3)


def test_completions_beyond_the_seats_wait_and_find_the_prompt() -> None:
    engine, _ = made(max_num_seqs=2)
    group = [replace(ask(str(seed), ids(40), 5, temperature=1.3), seed=seed) for seed in range(5)]
    engine.add(*group)
    events = run_all(engine)
    assert all(right(request, events[request.id]) for request in group)
    assert [events[str(n)][0].cached_tokens for n in range(5)] == [0, 0, 32, 32, 32]


@both
def test_one_of_several_completions_may_be_aborted_at_any_time(ahead: bool) -> None:
    for steps in range(6):
        for name in "012":
            engine, _ = made(ahead=ahead, max_num_batched_tokens=40)
            group = [replace(ask(str(seed), ids(70), 12, temperature=1.3), seed=seed) for seed in range(3)]
            engine.add(*group)
            events: dict[str, list[TokenEvent]] = {}
            for _ in range(steps):
                for event in engine.step():
                    events.setdefault(event.request_id, []).append(event)
            engine.abort(name)
            for request_id, more in run_all(engine).items():
                events.setdefault(request_id, []).extend(more)
            assert all(right(one, events[one.id]) for one in group if one.id != name)
            engine.check()


# --- Giving way


@both
def test_a_sequence_that_gave_way_goes_on_with_the_same_tokens(ahead: bool) -> None:
    engine, _ = made(blocks=12, ahead=ahead)
    requests = [ask(str(n), ids(20, n), 100, ignore_eos=True) for n in range(5)]  # 8 blocks each in the end
    events = run_all_after(engine, *requests)
    assert all(right(request, events[request.id]) for request in requests)
    assert 0 < engine.load.preemptions < 30


def test_the_oldest_never_gives_way_and_everyone_ends() -> None:
    engine, _ = made(blocks=10)
    requests = [ask(str(n), ids(30, n), 120) for n in range(6)]
    for request in requests:
        engine.add(request)
    ends = []
    while engine.busy:
        ends += [event.request_id for event in engine.step() if event.finish_reason]
        engine.check()
    assert ends == [request.id for request in requests]


def test_priority_decides_who_begins_and_who_gives_way() -> None:
    engine, _ = made(by_priority=True, max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -1), ("middle", 0), ("middle too", 0)):
        engine.add(ask(name, ids(10), 3, priority=priority))
    assert list(run_all(engine)) == ["high", "middle", "middle too", "low"]
    engine, _ = made(by_priority=True, blocks=10)
    engine.add(ask("low", ids(30, 1), 120, priority=1))
    early = engine.step()
    engine.add(ask("high", ids(30, 2), 120, priority=0))
    events = run_all(engine)
    events["low"] = [*early, *events["low"]]
    assert right(ask("low", ids(30, 1), 120), events["low"]) and right(ask("high", ids(30, 2), 120), events["high"])
    assert engine.load.preemptions == 1
    # Counted when a request first begins, not when it comes back to what it left in the cache.
    assert (engine.load.prompt_tokens, engine.load.cached_tokens) == (60, 0)


def test_without_the_policy_a_priority_changes_nothing() -> None:
    engine, _ = made(max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -1)):
        engine.add(ask(name, ids(10), 3, priority=priority))
    assert list(run_all(engine)) == ["low", "high"]


def test_what_can_never_fit_is_refused_at_once_with_numbers() -> None:
    """B101. A context that the pool does not hold: every prompt up to the pool's size ends, beyond it is refused, and
    nobody behind it waits."""
    engine, _ = made(blocks=8, max_model_len=150)
    for length in range(120, 150):
        canary = ask(f"canary {length}", ids(5, length), 3)
        if length > 8 * BLOCK:
            with pytest.raises(PromptTooLong, match=f"{length} tokens, the whole key/value cache has room for 128"):
                engine.add(ask(str(length), ids(length)))
            events = run_all_after(engine, canary)
        else:
            long = ask(str(length), ids(length), length % 64 + 1)
            engine.add(long)
            events = run_all_after(engine, canary)
            assert right(long, events[long.id], most=8 * BLOCK + 1)
        assert right(canary, events[canary.id])
        engine.check()


def test_a_long_prompt_lets_others_decode_and_begin() -> None:
    """B111. While ten long prompts are read, one that decodes gets a token every step, and a short request that comes
    after them has its first token before any of them."""
    engine, _ = made(blocks=120, max_num_seqs=16)
    engine.add(ask("decodes", ids(4), 140))
    engine.step()
    for number in range(10):
        engine.add(ask(f"long {number}", ids(150, number), 2))
    for _ in range(3):
        assert [event.request_id for event in engine.step()] == ["decodes"]
    engine.add(ask("short", ids(6, 5), 2))
    first: list[str] = []
    gaps, last = [], 0
    for step in range(1000):
        names = [event.request_id for event in engine.step()]
        first += [name for name in names if name not in first]
        if "decodes" in names:
            gaps.append(step - last)
            last = step
        if not engine.busy:
            break
    assert first[:2] == ["decodes", "short"] and set(gaps) <= {0, 1}


def test_all_prompts_that_run_take_turns() -> None:
    engine, model = made(blocks=120, max_num_seqs=8, max_num_batched_tokens=40)
    for number in range(6):
        engine.add(ask(str(number), ids(150, number), 1))
    for _ in range(6 * 4):
        engine.step()
        computed = [sequence.computed for sequence in (*engine._running, *engine._waiting)]
        assert max(computed) - min(computed) <= 32
    assert max(count for count, _, _ in model.steps) <= 40


# --- Aborts


@both
def test_after_all_are_aborted_at_once_nothing_is_busy(ahead: bool) -> None:
    """B105, B114."""
    engine, _ = made(blocks=12, ahead=ahead)
    for number in range(64):
        engine.add(ask(str(number), ids(20, number), None))
    for _ in range(40):
        engine.step()
    assert engine.load.preemptions and engine.load.running and engine.load.waiting
    for number in range(64):
        engine.abort(str(number))
    load = engine.load
    assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0) and not engine.busy and engine.step() == []


@both
@pytest.mark.parametrize("at", range(1, 9))
def test_a_step_that_fails_leaves_nothing_behind_once_its_requests_are_aborted(
    ahead: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = made(ahead=ahead)
    finish, calls = RecallModel.finish, []

    def failing(model: RecallModel, started: list[Sampled]) -> list[Sampled]:
        calls.append(started)
        found = finish(model, started)
        if len(calls) >= at:
            raise EngineError("lost")
        return found

    monkeypatch.setattr(RecallModel, "finish", failing)
    for number in range(8):
        engine.add(ask(str(number), ids(40, number), 30))
    with pytest.raises(EngineError, match="lost"):
        run_all(engine)
    for number in range(8):
        engine.abort(str(number))
    engine.check()
    assert not engine.busy and engine.free_blocks == engine.limits.blocks
    engine.add(ask("again", ids(4)))
    with pytest.raises(EngineError, match="lost"):
        run_all(engine)
    engine.abort("again")


# --- Scores of prompts


@both
@pytest.mark.parametrize("length", [1, 2, 8, 9, 40])
def test_a_prompts_log_probabilities_are_those_of_its_own_tokens(ahead: bool, length: int) -> None:
    import numpy as np

    from tests.fixtures.recall_model import logits_after

    engine, model = made(ahead=ahead)
    prompt = ids(length)
    run_all_after(engine, ask("before", prompt))
    beside = ask("beside", ids(30, 4), 20)
    engine.add(beside)
    scored = ask("a", prompt, 3, prompt_logprobs=2)
    events = run_all_after(engine, scored)
    assert right(scored, events["a"]) and right(beside, events["beside"])
    found = events["a"][0].prompt_logprobs
    assert found is not None and [one.token_id for one in found] == prompt[1:]
    assert events["a"][0].cached_tokens == 0 and all(event.prompt_logprobs is None for event in events["a"][1:])
    for place, one in enumerate(found):
        logits = logits_after(np.array(prompt[: place + 1])).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        assert one.logprob == pytest.approx(logprobs[one.token_id], abs=1e-4)
        assert [token for token, _ in one.top_logprobs] == np.argsort(-logprobs, kind="stable")[:2].tolist()
    assert max(rows for _, _, rows in model.steps) <= engine.limits.max_rows


def test_several_scored_prompts_that_give_way_are_scored_whole() -> None:
    engine, model = made(blocks=12)
    requests = [ask(str(n), ids(50 + n, n), 60, prompt_logprobs=0) for n in range(4)]
    events = run_all_after(engine, *requests)
    for request in requests:
        assert right(request, events[request.id])
        scores = events[request.id][0].prompt_logprobs or ()
        assert [one.token_id for one in scores] == list(request.prompt_ids[1:])
    assert max(rows for _, _, rows in model.steps) <= engine.limits.max_rows and engine.load.preemptions


def test_a_scored_prompt_that_gives_way_half_read_is_scored_anew() -> None:
    engine, _ = made(blocks=12)
    old, scored = ask("old", ids(10), 80), ask("scored", ids(150, 2), 4, prompt_logprobs=0)
    engine.add(old)
    early = [event for _ in range(5) for event in engine.step()]
    engine.add(scored)
    sequence, most = engine._known["scored"], 0
    while not engine.load.preemptions:
        early += engine.step()
        most = max(most, len(sequence.scores))
    assert 0 < most < 149 and sequence.scores == []
    events = run_all(engine)
    assert right(scored, events["scored"]) and right(old, [*early, *events["old"]])
    assert [one.token_id for one in events["scored"][0].prompt_logprobs or ()] == list(scored.prompt_ids[1:])


# --- Everything at once

orders = st.lists(
    st.tuples(
        st.integers(0, 3),  # whose beginning
        st.integers(1, 90),  # length
        st.integers(1, 40),  # tokens
        st.sampled_from([0.0, 0.0, 1.2]),
        st.integers(1, 3),  # completions
        st.sampled_from([0, 0, 0, 1, -1]),  # priority
        st.sampled_from([None, None, None, 0]),  # prompt_logprobs
        st.sampled_from([0.0, 0.0, 1.0]),  # presence penalty
        st.integers(0, 12),  # step of its abort; later ones run to the end
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(orders, st.integers(1, 6), st.integers(11, 30), st.booleans(), st.booleans(), st.integers(0, 3))
def test_whatever_happens_every_request_gives_what_it_gives_alone(
    asked: list[tuple[int, int, int, float, int, int, int | None, float, int]],
    seats: int,
    blocks: int,
    ahead: bool,
    by_priority: bool,
    apart: int,
) -> None:
    engine, model = made(blocks, ahead=ahead, max_num_seqs=seats, by_priority=by_priority)
    queue = []
    for number, (stem, length, most, heat, count, priority, scored, penalty, abort) in enumerate(asked):
        prompt = [*ids(length // 2, stem), *ids(length - length // 2, 100 + stem + number % 2)]
        terms = {"temperature": heat, "priority": priority, "presence_penalty": penalty, "ignore_eos": number % 2 > 0}
        if number % 3 == 0:  # the first tokens of the first one may not end it
            terms |= {"min_tokens": min(most, 2), "stop_token_ids": list(range(0, VOCAB, 2))}
        request = ask("", prompt, most, prompt_logprobs=scored, **terms)
        group = [replace(request, id=f"{number}.{index}", seed=index) for index in range(count)]
        queue.append((number * apart, group, abort))
    everyone = [(request, abort) for _, group, abort in queue for request in group]
    events: dict[str, list[TokenEvent]] = {request.id: [] for request, _ in everyone}
    aborted, step = set(), 0
    while queue or engine.busy:
        while queue and queue[0][0] <= step:
            _, group, abort = queue.pop(0)
            engine.add(*group)
            if abort < 8:
                aborted.add(group[abort % len(group)].id)
        if step % 5 == 4:
            for name in sorted(aborted)[: 1 + step % 2]:
                engine.abort(name)
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()
        step += 1
        assert step < 3000, "somebody starves"
    for request, _ in everyone:
        if request.id not in aborted:
            assert right(request, events[request.id]), request
        else:
            expected = continuation(request, LONGEST)
            assert tokens(events[request.id]) == expected[: len(events[request.id])]
    assert engine.free_blocks == blocks
    assert max((rows for _, _, rows in model.steps), default=0) <= engine.limits.max_rows
    assert max((count for count, _, _ in model.steps), default=0) <= engine.limits.max_num_batched_tokens

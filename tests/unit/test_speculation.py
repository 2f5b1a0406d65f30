"""Guesses under the step loop: what comes out is what would come out without them. The model is its own cache, so that
a key left by a wrong guess, or one that was not written, changes a token; what is right is known without an engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.config import Speculation
from rvllm.engine.engine import Engine
from rvllm.engine.request import Request, TokenEvent
from rvllm.engine.scheduler import Limits
from rvllm.program.program import Int32
from rvllm.sampling.lookup import MOST_ROWS
from rvllm.sampling.params import SamplingParams
from tests.fixtures.recall_model import EOS, VOCAB, RecallModel, continuation, echoes, run_all

BLOCK, LONGEST = 16, 240
FIVE = Speculation(5, 2, 4)
MADE: list[Engine] = []
MODES = {"one by one": (False, False), "ahead": (True, False), "with guesses of its own": (True, True)}
both = pytest.mark.parametrize("ahead", MODES)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    MADE.clear()
    yield
    for engine in MADE:
        engine.check()
        assert engine.busy or engine.free_blocks == engine.limits.blocks


def made(
    blocks: int = 60, *, ahead: str = "one by one", guesses: Speculation | None = FIVE, **changes: Any
) -> tuple[Engine, RecallModel]:
    sizes: dict[str, Any] = {
        "max_model_len": LONGEST,
        "block_size": BLOCK,
        "blocks": blocks,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "prefill_chunk": 32,
        "score_chunk": 8,
        "vocab_limit": VOCAB,
        "eos_ids": frozenset({EOS}),
        "speculation": guesses,
    }
    runs_ahead, own = MODES[ahead]
    model = RecallModel(blocks, BLOCK, runs_ahead=runs_ahead, guesses=own, after=echoes)
    engine = Engine(model, Limits(**sizes | changes))
    MADE.append(engine)
    return engine, model


def ask(name: str, prompt: list[int], most: int | None = 60, seed: int = 5, **params: Any) -> Request:
    given = {"temperature": 0, "ignore_eos": True, "max_tokens": most} | params
    return Request(name, tuple(prompt), SamplingParams(**given), seed)


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def scattered(tokens: Int32) -> np.ndarray:
    """Logits of a text in which nothing repeats but by chance."""
    return np.random.default_rng(tokens.tolist()).random(VOCAB, dtype=np.float32)


def right(request: Request, events: list[TokenEvent], most: int = LONGEST) -> bool:
    ended = [event.finish_reason for event in events]
    drawn = [event.token_id for event in events]
    return drawn == continuation(request, most, after=echoes) and ended[-1] is not None and not any(ended[:-1])


def run_after(engine: Engine, *requests: Request) -> dict[str, list[TokenEvent]]:
    for request in requests:
        engine.add(request)
    return run_all(engine)


@both
@pytest.mark.parametrize("heat", [0, 0.3, 0.6])
def test_a_request_gets_its_own_tokens_in_fewer_steps(ahead: str, heat: float) -> None:
    steps = []
    for guesses in (None, FIVE):
        engine, model = made(ahead=ahead, guesses=guesses)
        request = ask("a", text(40), 150, temperature=heat)
        assert right(request, run_after(engine, request)["a"])
        steps.append(len(model.steps))
        load = engine.load
        assert (load.accepted_tokens > 40) == (guesses is not None)
        assert load.accepted_tokens <= load.draft_tokens <= 5 * load.drafts
    assert steps[1] < 0.7 * steps[0]
    assert (model.guessed_steps > 5) == (ahead == "with guesses of its own")


@both
def test_text_that_does_not_repeat_takes_few_steps_of_guesses(ahead: str) -> None:
    engine, model = made(ahead=ahead, guesses=Speculation(5, 1, 4))
    model.after = scattered
    engine.add(ask("a", text(40), 190))
    events = run_all(engine)["a"]
    assert [event.token_id for event in events] == continuation(ask("a", text(40), 190), LONGEST, after=scattered)
    assert 0 < engine.load.drafts < 12
    assert sum(rows > 1 for _, _, rows in model.steps) < 20


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 70),  # of the prompt
            st.integers(1, 90),  # of the output
            st.sampled_from([0.0, 0.2, 1.0]),
            st.sampled_from([{}, {}, {}, {"presence_penalty": 0.5}, {"speculate": False}, {"min_tokens": 20}]),
            st.booleans(),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from(sorted(MODES)),
    st.integers(0, 9),
    st.sampled_from([16, 24, 60]),
    st.integers(1, 7),
)
def test_whatever_runs_beside_it_a_request_gets_its_own_tokens(
    requests: list[tuple[int, int, float, dict[str, Any], bool, int]], ahead: str, late: int, blocks: int, drafts: int
) -> None:
    """Small pools, in which sequences give way; prompts that come late; several completions; stops in between."""
    engine, model = made(blocks, ahead=ahead, guesses=Speculation(drafts, 1, 4))
    groups = []
    for number, (length, most, heat, params, ends, copies) in enumerate(requests):
        most = max(most, params.get("min_tokens", 0))
        stops = {} if ends else {"ignore_eos": True, "stop_token_ids": [7]}
        one = ask(f"{number}", text(length, number), most, temperature=heat, **params | stops)
        groups.append([replace(one, id=f"{number}.{copy}", seed=copy) for copy in range(copies)])
    queue, events, steps = list(groups), {}, 0
    while queue or engine.busy:
        if queue and steps >= late * (len(groups) - len(queue)):
            engine.add(*queue.pop(0))
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.check()
        steps += 1
    assert all(right(request, events[request.id]) for group in groups for request in group)
    assert max(rows for _, _, rows in model.steps) <= min(MOST_ROWS, engine.limits.max_rows)


@both
@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": list(range(40))},
        {"bad_words_token_ids": [[5], [6, 7]]},
        {"speculate": False},
    ],
    ids=str,
)
def test_a_request_whose_logits_are_edited_or_that_wants_none_has_no_guesses(
    ahead: str, params: dict[str, Any]
) -> None:
    engine, _ = made(ahead=ahead)
    engine.add(ask("a", [4, 5, 6] * 20, 40, **params))
    assert len(run_all(engine)["a"]) == 40 and engine.load.drafts == 0


@both
def test_guesses_begin_with_min_tokens(ahead: str) -> None:
    engine, _ = made(ahead=ahead)
    request = ask("a", [4, 5, 6] * 20, 80, min_tokens=30, ignore_eos=False)
    engine.add(request)
    events: list[TokenEvent] = []
    while engine.busy:
        events += engine.step()
        assert len(events) > 29 or engine.load.drafts == 0
    assert right(request, events)


@both
def test_log_probabilities_are_of_the_row_that_the_token_was_drawn_from(ahead: str) -> None:
    request = ask("a", text(40), 120, logprobs=3)
    found = []
    for guesses in (None, FIVE):
        engine, _ = made(ahead=ahead, guesses=guesses)
        found.append([(event.token_id, event.logprob, event.top_logprobs) for event in run_after(engine, request)["a"]])
    assert engine.load.accepted_tokens > 30 and found[0] == found[1]


@both
def test_nothing_comes_after_a_stop_in_the_middle_of_accepted_tokens(ahead: str) -> None:
    """The stop token ends a run of tokens that were all guessed right, and what was computed behind it is not kept."""
    engine, _ = made(ahead=ahead, guesses=Speculation(7, 2, 4))
    whole = continuation(ask("a", text(40), 150), LONGEST, after=echoes)
    seen = 0
    for stop in sorted(set(whole)):
        request = ask(str(stop), text(40), 150, stop_token_ids=[stop])
        events = run_after(engine, request)[request.id]
        assert right(request, events) and events[-1].stop_id == stop
        again = ask(f"{stop} again", [*request.prompt_ids, *(event.token_id for event in events), 1, 2], 3)
        assert right(again, run_after(engine, again)[again.id])
        seen += len(events) > 20
    assert seen > 3


@both
def test_what_guesses_added_is_found_by_the_next_turn_of_a_conversation(ahead: str) -> None:
    engine, _ = made(ahead=ahead)
    first = ask("a", text(20), 90)
    engine.add(first)
    answer: list[int] = []
    while engine.busy:
        answer += [event.token_id for event in engine.step()]
        # What is sure to be right is known to others at once: all but the last token.
        assert all(one.registered == (len(one.token_ids) - 1) // BLOCK for one in engine._running if one.told)
    second = ask("b", [*first.prompt_ids, *answer, 3, 4])
    events = run_after(engine, second)["b"]
    assert engine.load.accepted_tokens > 20
    assert right(second, events) and events[0].cached_tokens == (20 + 90 - 1) // BLOCK * BLOCK


@both
def test_a_request_may_be_aborted_at_any_step(ahead: str) -> None:
    for steps in range(0, 40, 3):
        engine, _ = made(ahead=ahead)
        beside, gone = ask("beside", text(30, 3), 80), ask("gone", text(40), 150)
        engine.add(beside)
        engine.add(gone)
        events: dict[str, list[TokenEvent]] = {}
        for _ in range(steps):
            for event in engine.step():
                events.setdefault(event.request_id, []).append(event)
        engine.abort("gone")
        engine.check()
        for request_id, more in run_all(engine).items():
            events.setdefault(request_id, []).extend(more)
        assert right(beside, events["beside"])


@both
def test_guesses_take_what_blocks_there_are_and_nobody_gives_way_for_them(ahead: str) -> None:
    """The pool holds exactly what the sequences need in the end."""
    engine, _ = made(blocks=16, ahead=ahead, guesses=Speculation(15, 1, 4))
    requests = [ask(str(number), text(30, number), 99) for number in range(2)]  # 128 tokens in the cache, 8 blocks
    events = run_after(engine, *requests)
    assert all(right(request, events[request.id]) for request in requests)
    assert engine.load.preemptions == 0 and engine.load.accepted_tokens > 20


def test_beyond_half_the_rows_there_are_no_guesses() -> None:
    engine, _ = made(blocks=400, max_num_seqs=40, max_num_batched_tokens=96, max_model_len=80)
    for number in range(33):
        engine.add(ask(str(number), [4, 5, 6] * 8, 40))
    drafts = []
    while engine.busy:
        engine.step()
        drafts.append((engine.running, engine.load.drafts))
    assert all(count == 0 for running, count in drafts if running > 32)

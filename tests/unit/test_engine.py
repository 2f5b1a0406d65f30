"""The step loop over a model whose next token is a table: admission, batching, ends, aborts; no backend, no text."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm.engine.block_pool import blocks_for
from rvllm.engine.engine import Engine, Limits
from rvllm.engine.request import Request, TokenEvent
from rvllm.errors import PromptTooLong
from rvllm.program.dtype import F32
from rvllm.program.ops import Kind, Tensor
from rvllm.program.program import CacheGroup, Program, Step
from rvllm.sampling.lookup import Guessing
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import Sampled, SamplingRow, sample_rows

VOCAB, EOS = 32, 31


class TableModel:
    """Logits by the last token alone: the successor in `table`, else the same token again. Remembers its steps."""

    def __init__(self, table: Mapping[int, int], groups: int = 1, *, runs_ahead: bool = False) -> None:
        self.table = table
        self.runs_ahead = runs_ahead
        self.unfinished = 0
        self.drawn = np.zeros(0, dtype=np.int32)
        self.steps: list[Step] = []
        self.follows: list[bool] = []
        self.slots: list[list[int]] = []  # of each step's rows
        output = Tensor("logits", ("rows", VOCAB), F32, Kind.ACTIVATION)
        self.program = Program((), output, {}, (CacheGroup(None, 1, 2, F32, 1),) * groups)

    guesses = False

    def guessed(self, started: list[Sampled]) -> list[list[int]]:
        raise AssertionError("it guesses nothing")

    def start(
        self, step: Step, rows: Sequence[SamplingRow], *, follows: bool = False, guessing: Guessing | None = None
    ) -> list[Sampled]:
        """As a device does, it counts by itself what the host has not read yet."""
        self.unfinished += 1
        assert self.unfinished <= 1 + follows
        step = copied(step)
        if follows:  # the ids that the engine does not know yet
            assert self.runs_ahead and len(self.drawn) == len(step.ids) == len(self.steps[-1].ids)
            step = replace(step, ids=self.drawn)
            rows = [
                replace(row, output_counts=Counter(row.output_counts) + Counter([int(token)]))
                for row, token in zip(rows, self.drawn)
            ]
        self.steps.append(step)
        self.follows.append(follows)
        self.slots.append([row.slot for row in rows])
        logits = np.zeros((len(step.rows), VOCAB), dtype=np.float32)
        for row, token in enumerate(step.ids[step.rows].tolist()):
            logits[row, self.table.get(token, token)] = 10.0
        sampled = sample_rows(logits, rows, VOCAB)
        self.drawn = np.array([one.token_id for one in sampled], dtype=np.int32)
        return sampled

    def finish(self, started: list[Sampled]) -> list[Sampled]:
        self.unfinished -= 1
        return started

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """What a block holds is nothing to this model."""


def copied(step: Step) -> Step:
    """The step as it is now: its arrays are counted on for the next one."""
    arrays = ("ids", "positions", "lengths", "query_starts", "kv_lengths", "rows")
    tables = {name: tuple(a.copy() for a in getattr(step, name)) for name in ("slots", "block_tables")}
    return replace(step, **{name: getattr(step, name).copy() for name in arrays}, **tables)  # type: ignore[arg-type]


MADE: list[Engine] = []


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """After every test, each engine's blocks and slots are where they belong; all free when nothing is left to do."""
    MADE.clear()
    yield
    for made in MADE:
        made.check()
        assert made.busy or made.free_blocks == made.limits.blocks


def engine(model: TableModel, **changes: object) -> Engine:
    settings: dict[str, object] = {
        "max_model_len": 64,
        "block_size": 16,
        "blocks": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "prefill_chunk": 16,
        "vocab_limit": VOCAB,
    }
    made = Engine(model, Limits(**settings | changes, eos_ids=frozenset({EOS})))  # type: ignore[arg-type]
    MADE.append(made)
    return made


def request(name: str, prompt: list[int], **params: object) -> Request:
    return Request(name, tuple(prompt), SamplingParams(temperature=0, **params), seed=0)  # type: ignore[arg-type]


def run(engine: Engine) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    while engine.busy:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def tokens(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


def test_a_request_ends_at_its_eos() -> None:
    runner = engine(TableModel({1: 2, 2: 3, 3: EOS}))
    runner.add(request("a", [5, 1], max_tokens=None))
    events = run(runner)["a"]
    assert tokens(events) == [2, 3, EOS]
    assert [event.finish_reason for event in events] == [None, None, "stop"] and events[-1].stop_id == EOS
    assert runner.free_blocks == 8


def test_ignore_eos_goes_on_and_still_obeys_stop_ids() -> None:
    table = {1: EOS, EOS: 2, 2: 3}
    runner = engine(TableModel(table))
    runner.add(request("a", [1], max_tokens=5, ignore_eos=True))
    runner.add(request("b", [1], max_tokens=5, ignore_eos=True, stop_token_ids=[2]))
    events = run(runner)
    assert tokens(events["a"]) == [EOS, 2, 3, 3, 3] and events["a"][-1].finish_reason == "length"
    assert tokens(events["b"]) == [EOS, 2] and events["b"][-1].stop_id == 2


def test_min_tokens_holds_the_end_back() -> None:
    runner = engine(TableModel({1: EOS}))
    runner.add(request("a", [1], max_tokens=9, min_tokens=3))
    events = run(runner)["a"]
    assert len(events) > 3 or events[-1].finish_reason == "length"
    assert EOS not in tokens(events)[:3]


def test_output_is_clamped_to_the_context() -> None:
    runner = engine(TableModel({}))
    runner.add(request("a", list(range(1, 20)), max_tokens=65535))
    events = run(runner)["a"]
    assert len(events) + 19 == 64 and events[-1].finish_reason == "length"


def test_a_prompt_that_fills_the_context_is_refused_and_one_that_leaves_a_token_is_not() -> None:
    runner = engine(TableModel({}))
    with pytest.raises(PromptTooLong, match="64 tokens, the context is 64"):
        runner.add(request("a", [1] * 64))
    runner.add(request("b", [1] * 63, max_tokens=10))
    assert len(run(runner)["b"]) == 1


def test_more_requests_than_places_wait_their_turn_in_order() -> None:
    runner = engine(TableModel({}), max_num_seqs=2)
    for i in range(5):
        runner.add(request(str(i), [i + 1], max_tokens=3))
    first_seen: list[str] = []
    while runner.busy:
        events = runner.step()
        assert len(events) <= 2
        first_seen += [event.request_id for event in events if event.request_id not in first_seen]
    assert first_seen == ["0", "1", "2", "3", "4"] and runner.free_blocks == 8


def test_a_request_waits_until_there_is_room_for_its_prompt_and_a_block_for_each_that_runs() -> None:
    model = TableModel({})
    runner = engine(model, max_num_seqs=8)
    for i in range(3):
        runner.add(request(str(i), [i + 1] * 40, max_tokens=100))  # 3 of 8 blocks each, 4 in the end
    events = run(runner)
    assert all(len(e) == 24 for e in events.values()) and not runner.load.preemptions
    assert max(len(step.kv_lengths) for step in model.steps) == 2 and runner.free_blocks == 8


def test_two_sequences_never_write_the_same_slot() -> None:
    model = TableModel({}, groups=2)
    runner = engine(model)
    for i in range(4):
        runner.add(request(str(i), [1] * (5 + i), max_tokens=20))
    run(runner)
    for group in range(2):
        for step in model.steps:
            slots = step.slots[group]
            assert len(set(slots.tolist())) == len(slots)
            owners = np.repeat(np.arange(len(step.kv_lengths)), np.diff(step.query_starts))
            expected = step.block_tables[group][owners, step.positions // 16] * 16 + step.positions % 16
            assert np.array_equal(slots, expected)


def test_an_abort_frees_everything_in_any_state() -> None:
    runner = engine(TableModel({}), max_num_seqs=2)
    for name in "abc":
        runner.add(request(name, [1] * 30, max_tokens=None))
    runner.abort("c")  # still waiting
    runner.step()
    runner.abort("a")  # in its prompt
    while not runner.step():
        pass
    runner.abort("b")  # decoding
    runner.abort("b")
    runner.abort("unknown")
    assert not runner.busy and runner.free_blocks == 8


def test_a_long_prompt_is_read_in_chunks_while_others_decode() -> None:
    model = TableModel({})
    runner = engine(model)
    runner.add(request("short", [1], max_tokens=12))
    runner.step()
    runner.add(request("long", [2] * 50, max_tokens=2))
    events = run(runner)
    assert len(events["short"]) == 11 and len(events["long"]) == 2
    mixed = [step for step in model.steps if step.decode_tokens == 1 and len(step.ids) == 17]
    assert len(mixed) == 3  # 16 of the prompt beside one decoding token, three times; then its last two


def test_rope_lengths_are_the_prompts_for_its_tokens_and_then_the_tokens_own() -> None:
    model = TableModel({})
    runner = engine(model)
    runner.add(request("a", [1] * 20, max_tokens=3))
    run(runner)
    lengths = np.concatenate([step.lengths for step in model.steps])
    assert lengths.tolist() == [20] * 20 + [21, 22]


def test_penalties_see_the_output_and_a_seeded_request_does_not_see_its_neighbours() -> None:
    def alone(*neighbours: Request) -> list[int]:
        runner = engine(TableModel({}), max_num_seqs=8)
        for other in neighbours:
            runner.add(other)
        seeded = SamplingParams(temperature=1.5, seed=7, max_tokens=10, ignore_eos=True, frequency_penalty=2.0)
        runner.add(Request("me", (3, 4), seeded, 7))
        return tokens(run(runner)["me"])

    others = [request(str(i), [i + 1] * (i + 1), max_tokens=4 + i) for i in range(3)]
    assert alone() == alone(*others) and len(set(alone())) > 3
    assert blocks_for(10, 16) == 1


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 25), st.sampled_from([0.0, 1.2]), st.sampled_from([0.0, 1.5])),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 5),
    st.integers(0, 12),
)
def test_running_ahead_changes_no_token_and_leaks_no_block(
    requests: list[tuple[int, int, float, float]], places: int, late: int
) -> None:
    def tokens_of(runs_ahead: bool) -> dict[str, list[int]]:
        runner = engine(
            TableModel({i: (i * 7 + 3) % VOCAB for i in range(VOCAB)}, runs_ahead=runs_ahead), max_num_seqs=places
        )
        events: dict[str, list[int]] = {}
        queue = [
            Request(str(i), (i + 1,) * length, SamplingParams(temperature=heat, max_tokens=most, presence_penalty=p), i)
            for i, (length, most, heat, p) in enumerate(requests)
        ]
        steps = 0
        while queue or runner.busy:
            if queue and steps >= late * (len(requests) - len(queue)):
                runner.add(queue.pop(0))
            for event in runner.step():
                events.setdefault(event.request_id, []).append(event.token_id)
            steps += 1
        assert runner.free_blocks == 8
        return events

    assert tokens_of(True) == tokens_of(False)


def test_running_ahead_starts_the_next_step_before_reading_this_one() -> None:
    model = TableModel({}, runs_ahead=True)
    runner = engine(model)
    runner.add(request("a", [1], max_tokens=9))
    runner.step()
    assert model.unfinished == 1 and len(model.steps) == 2
    runner.abort("a")
    assert model.unfinished == 0 and runner.free_blocks == 8


def test_blocks_of_a_sequence_that_ended_are_held_until_the_step_ahead_has_landed() -> None:
    model = TableModel({1: 2, 2: EOS}, runs_ahead=True)
    runner = engine(model)
    runner.add(request("ends", [1], max_tokens=30))
    runner.add(request("goes on", [5], max_tokens=30))
    events = runner.step() + runner.step()
    assert [event.finish_reason for event in events] == [None, None, "stop", None]
    assert runner.free_blocks == 8 - 1 - 1  # both still held
    runner.step()
    assert runner.free_blocks == 8 - 1


@pytest.mark.parametrize(
    ("params", "ahead"),
    [
        ({"presence_penalty": 1.0}, True),
        ({"repetition_penalty": 1.3, "logit_bias": {3: 1.0}, "min_tokens": 3}, True),
        ({"bad_words_token_ids": [[5]]}, True),
        ({"bad_words_token_ids": [[5], [6, 7]]}, False),
    ],
)
def test_only_what_needs_the_last_token_on_the_host_stops_running_ahead(params: dict[str, object], ahead: bool) -> None:
    model = TableModel({}, runs_ahead=True)
    running = engine(model)
    running.add(request("a", [1, 2], max_tokens=6, **params))
    run(running)
    assert any(model.follows) == ahead


def test_no_two_sequences_have_one_slot_and_one_that_leaves_gives_its_own_back() -> None:
    model = TableModel({}, runs_ahead=True)
    running = engine(model, blocks=16)
    for name, tokens in (("a", 2), ("b", 9), ("c", 4), ("d", 3), ("e", 5), ("f", 2)):
        running.add(request(name, [1, 2], max_tokens=tokens))
    run(running)
    assert all(len(set(slots)) == len(slots) for slots in model.slots)
    assert {slot for slots in model.slots for slot in slots} == set(range(4))


def test_no_garbage_is_collected_within_a_step_and_collecting_stays_as_it_was() -> None:
    """Over 10,000 steps that make garbage, with thresholds at which it would be collected many times a step."""
    runner, inside, found = engine(TableModel({}), blocks=8), [False], [0, 0]

    def note(phase: str, _: object) -> None:
        found[inside[0]] += phase == "start"

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(5, 5, 5)
    try:
        for turn in range(10_000):
            if not runner.busy:
                runner.add(request(str(turn), [1], max_tokens=60))
            inside[0] = True
            runner.step()
            inside[0] = False
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert found[True] == 0 and found[False] > 0 and gc.isenabled()
    while runner.busy:
        runner.step()

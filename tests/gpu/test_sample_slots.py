"""The device's sampler over many steps: sequences come, draw, stop and come back, and what their slots have counted is
what the definition is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rvllm.backend.cuda.kernels import Device
from rvllm.backend.cuda.sampling import MOST_LOGPROBS, DeviceSampler
from rvllm.backend.cuda.slots import Slots, _Slot
from rvllm.errors import BadRequest, StartError
from rvllm.program.dtype import Float32
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import Sampled, SamplingRow, needs_last_token, sample_rows
from tests.fixtures.models import Shape, loop_model, random_model
from tests.gpu.running import BOTH, Backend
from tests.kernels.host_device import HostDevice

RNG = np.random.default_rng(31)
ROWS, VOCAB, LIMIT = 4, 68, 66

RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "top_k": 20, "top_p": 0.9},
    {"presence_penalty": 2.0, "repetition_penalty": 0.7, "logit_bias": {3: 4.0, 60: -9.0}},
    {"allowed_token_ids": (2, 3, 5, 7, 64), "frequency_penalty": 2.0},
    {"bad_words_token_ids": ((9,), (2, 3), (64, 2)), "logit_bias": {2: 6.0, 3: 6.0, 9: 9.0}},
    {"temperature": 0.0},
    {"min_p": 0.05, "logprobs": 3},
]


@dataclass
class Running:
    """A sequence as the engine keeps it."""

    params: SamplingParams
    slot: int
    seed: int
    prompt: tuple[int, ...] = field(default_factory=lambda: tuple(RNG.integers(0, LIMIT, 5).tolist()))
    output: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)

    def row(self, ahead: int = 0, **more: Any) -> SamplingRow:
        position = len(self.prompt) + len(self.output) + ahead
        stops = (1, 4) if len(self.output) + ahead < 3 else ()
        return SamplingRow(
            self.params, self.seed, position, self.prompt, self.counts, stops, self.slot, output_ids=self.output, **more
        )

    def take(self, token: int) -> None:
        self.output.append(token)
        self.counts[token] += 1


class Bench:
    """A sampler with logits in memory."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.sampler = DeviceSampler(self.device, rows=ROWS, vocab=VOCAB, vocab_limit=LIMIT, eager=False)
        self.logits = self.device.allocate(4 * ROWS * VOCAB)
        self.next_ids = self.device.allocate(4 * ROWS)
        self.turn = 0

    def start(self, logits: Float32, rows: list[SamplingRow]) -> int:
        self.turn ^= 1
        self.device.write(self.logits, logits)
        self.sampler.send(rows, ROWS, self.turn)
        self.sampler.sample(self.logits, self.next_ids, rows, ROWS, self.turn)
        return self.turn

    def take(self, rows: list[SamplingRow], turn: int) -> list[Sampled]:
        self.device.synchronize()
        return self.sampler.take(rows, turn)

    def draw(self, logits: Float32, rows: list[SamplingRow]) -> list[Sampled]:
        return self.take(rows, self.start(logits, rows))


def some_logits() -> Float32:
    return (RNG.standard_normal((ROWS, VOCAB)) * 3).astype(np.float32)


def agree(drawn: list[Sampled], expected: list[Sampled]) -> None:
    assert [one.token_id for one in drawn] == [one.token_id for one in expected]
    for one, other in zip(drawn, expected):
        assert [token for token, _ in one.top_logprobs] == [token for token, _ in other.top_logprobs]
        assert (one.logprob is None) == (other.logprob is None)
        assert one.logprob is None or abs(one.logprob - (other.logprob or 0)) < 1e-5


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_what_slots_count_is_what_the_definition_is_told(backend: Backend) -> None:
    bench = Bench(backend.device)
    places = {slot: Running(SamplingParams(**RULES[slot]), slot, slot) for slot in range(ROWS)}
    for step in range(30):
        if step % 4 == 3:  # one leaves, another takes its slot, or the same comes back to it, its last token lost
            slot = int(RNG.integers(ROWS))
            old = places[slot]
            if step % 8 == 3:
                places[slot] = Running(SamplingParams(**RULES[RNG.integers(len(RULES))]), slot, 100 + step)
            else:
                old.counts[old.output.pop()] -= 1
        running = [places[slot] for slot in RNG.permutation(ROWS)[: RNG.integers(1, ROWS + 1)]]
        logits = some_logits()
        rows = [one.row() for one in running]
        drawn = bench.draw(logits, rows)
        agree(drawn, sample_rows(logits[: len(rows)], rows, LIMIT))
        for one, sampled in zip(running, drawn):
            one.take(sampled.token_id)


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_penalties_are_right_before_the_host_knows_the_token(backend: Backend) -> None:
    bench = Bench(backend.device)
    running = [Running(SamplingParams(**rule), slot, slot) for slot, rule in enumerate(RULES[:ROWS])]
    assert not any(needs_last_token(one.row()) for one in running)
    found: list[list[int]] = []
    batches = [some_logits() for _ in range(6)]
    pending: list[tuple[list[SamplingRow], int]] = []
    for step, logits in enumerate(batches):
        rows = [one.row(ahead=int(step > 0)) for one in running]  # counts as they were a step ago
        pending.append((rows, bench.start(logits, rows)))
        if step > 0:
            found.append([sampled.token_id for sampled in bench.take(*pending.pop(0))])
            for one, token in zip(running, found[-1]):
                one.take(token)
    found.append([sampled.token_id for sampled in bench.take(*pending.pop())])
    again = [Running(one.params, one.slot, one.seed, one.prompt) for one in running]
    for logits, tokens in zip(batches, found):
        assert [sampled.token_id for sampled in sample_rows(logits, [one.row() for one in again], LIMIT)] == tokens
        for one, token in zip(again, tokens):
            one.take(token)


def test_a_slot_is_written_once_and_not_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = HostDevice("t70")
    bench = Bench(device)
    params = SamplingParams(**RULES[2], allowed_token_ids=range(60), bad_words_token_ids=[[5]])
    running = Running(params, 2, 9)
    writes: list[int] = []
    write = device.write
    monkeypatch.setattr(device, "write", lambda address, array: (writes.append(address), write(address, array)))
    for step in range(6):
        running.take(bench.draw(some_logits(), [running.row()])[0].token_id)
        if step == 0:
            first = len(writes)
    assert len(writes) == first + 5  # the bench's own logits
    assert first > 1


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_masks_change_from_step_to_step_and_keep_to_what_is_allowed(backend: Backend) -> None:
    bench = Bench(backend.device)
    running = [Running(SamplingParams(allowed_token_ids=range(0, 60, 2)), 0, 1), Running(SamplingParams(), 3, 2)]
    for _ in range(5):
        masks = RNG.integers(0, 2**32, (2, 3), np.uint32)
        rows = [one.row(mask=mask) for one, mask in zip(running, masks)]
        assert all(needs_last_token(row) for row in rows)
        logits = some_logits()
        agree(bench.draw(logits, rows), sample_rows(logits[:2], rows, LIMIT))


def test_rows_of_a_prompt_are_told_and_touch_no_slot() -> None:
    device = HostDevice("t70")
    bench = Bench(device)
    params = SamplingParams(prompt_logprobs=MOST_LOGPROBS, presence_penalty=2.0, temperature=0.0)
    running = Running(params, 1, 1)
    logits = some_logits()
    rows = [SamplingRow(params, 1, place, given_id=7 * place, slot=1) for place in range(3)]
    agree(bench.draw(logits, [*rows, running.row()]), sample_rows(logits, [*rows, running.row()], LIMIT))
    assert device.launched == ["sample_scan", "sample_bound", "sample_weigh", "sample_finish"]


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_more_log_probabilities_than_a_gpu_lists_are_refused_at_the_start_or_with_the_request(
    backend: Backend, tmp_path: Path
) -> None:
    folder = loop_model(tmp_path).folder
    with pytest.raises(StartError, match="max_logprobs is 21, a GPU lists at most 20 tokens"):
        backend.llm(folder, max_logprobs=MOST_LOGPROBS + 1)
    llm = backend.llm(folder, max_logprobs=MOST_LOGPROBS)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(BadRequest, match=f"{name} is 21, the limit is 20"):
            llm.generate("xyz", SamplingParams(max_tokens=1, **{name: MOST_LOGPROBS + 1}))
    asked = SamplingParams(temperature=0, max_tokens=1, logprobs=MOST_LOGPROBS)
    (told,) = llm.generate("xyz", asked)[0].outputs[0].logprobs or ()
    assert len(told) == MOST_LOGPROBS


def test_no_step_launches_more_kernels_than_its_rows_need() -> None:
    device = HostDevice("t70")
    bench = Bench(device)
    asked: list[tuple[dict[str, Any], list[str]]] = [
        ({"temperature": 0.0, "presence_penalty": 1.0}, []),
        ({"temperature": 0.5}, ["finish"]),
        ({"top_k": 5}, ["finish"]),
        ({"top_p": 0.5}, ["bound", "weigh", "finish"]),
        ({"top_k": VOCAB}, ["finish"]),
        ({"temperature": 0.0, "logprobs": 0}, ["bound", "weigh", "finish"]),
    ]
    for params, names in asked:
        device.launched.clear()
        bench.draw(some_logits(), [SamplingRow(SamplingParams(**params), 1, 1)])
        assert device.launched == [f"sample_{name}" for name in ("scan", *names)]


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_the_engine_runs_ahead_on_what_the_device_counts(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = {"temperature": 0, "max_tokens": 4, "presence_penalty": 2.0, "frequency_penalty": 1.0, "min_tokens": 3}
    asked = [
        SamplingParams(**greedy),
        SamplingParams(temperature=2, seed=3, max_tokens=4, repetition_penalty=9.0, bad_words_token_ids=[[7]]),
    ]
    llm = backend.llm(random_model(tmp_path, Shape(), std=0.3).folder, max_num_seqs=2)
    prompts = [[5 + place, 9, 30 + place] for place in range(3)]  # more than run at once
    moves: list[int] = []
    move_in = Slots._move_in
    monkeypatch.setattr(Slots, "_move_in", lambda self, slot, row: (moves.append(row.slot), move_in(self, slot, row)))
    ahead = [[one.outputs[0].token_ids for one in llm.generate(prompts, params)] for params in asked]
    assert len(moves) == len(asked) * len(prompts)
    # The host tells every step, and none is started before the one before it is read.
    monkeypatch.setattr(llm._engine, "_follows", False)
    monkeypatch.setattr(_Slot, "follows", lambda self, row: False)
    assert ahead == [[one.outputs[0].token_ids for one in llm.generate(prompts, params)] for params in asked]
    assert len(moves) > 4 * len(asked) * len(prompts)
    assert len({token for tokens in ahead[0] for token in tokens}) > 3

"""Guessed tokens on the device: a row that verifies a guess has the bits of the same token decoded alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rvllm import SamplingParams
from rvllm.backend.cuda.model import CudaModel
from rvllm.engine.request import Request
from rvllm.engine.step import build_verification
from rvllm.program.dtype import BF16, E4M3, F16, DType
from rvllm.sampling.lookup import Guessing, Past, accepted, lookup
from rvllm.sampling.sampler import SamplingRow
from tests.fixtures.models import Shape, loop_model, random_model
from tests.gpu.running import BLOCK, BOTH, REFERENCE, Backend, cuda_model, forward, opened, sequence
from tests.kernels.host_device import HostDevice

both = pytest.mark.parametrize("backend", BOTH, indirect=True)
PLAIN, SLIDING = "llama-gqa-tied-llama3-rope", "qwen2-upper-layers-slide"
LENGTH = 256
TOKENS = np.random.default_rng(31).integers(5, 90, 400).tolist()
GUESSES = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@both
@pytest.mark.parametrize(
    ("case", "dtype", "kv_dtype"), [(PLAIN, BF16, BF16), (SLIDING, F16, F16), (SLIDING, BF16, E4M3)], ids=str
)
def test_rows_that_verify_have_the_bits_of_tokens_decoded_one_by_one(
    case: str, dtype: DType, kv_dtype: DType, backend: Backend
) -> None:
    """Over more than one split of keys, and over the border of a block; another sequence beside has no guesses."""
    source = opened(REFERENCE / case)
    model = cuda_model(source, dtype, backend.device, LENGTH, places=16, kv_dtype=kv_dtype)
    prompts = (125, 2)
    rows = [sequence(model.program, TOKENS[place:][:size], place, LENGTH) for place, size in enumerate(prompts)]
    forward(model, *rows)
    guesses = [[9, 30, 11, 40, 12, 50, 13], []]
    alone = []
    for token in (7, *guesses[0]):
        rows[0].token_ids.append(token)
        alone.append(forward(model, rows[0])[0])
    rows[0].computed, rows[0].token_ids[126:] = 125, []
    rows[1].token_ids.append(7)
    alone.append(forward(model, rows[1])[0])
    rows[1].computed -= 1
    for place, row in enumerate(rows):
        row.slot = place
    tables = np.array([row.blocks for row in rows], dtype=np.int32)
    step = build_verification(rows, guesses, BLOCK, len(model.program.cache_groups), tables)
    together = model.forward(step)
    assert len(together) == 9
    for place, (one, other) in enumerate(zip(together, alone)):
        assert np.array_equal(one, other), place


@both
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0, "logprobs": 2}, {"temperature": 0.1, "seed": 3, "n": 2}, {"temperature": 0.1, "top_p": 0.9}],
    ids=str,
)
def test_guesses_change_no_token_and_no_log_probability(
    params: dict[str, Any], backend: Backend, tmp_path: Any
) -> None:
    random_model(tmp_path, Shape(hidden=64, intermediate=96, heads=2, kv_heads=1), std=0.1)
    pieces = [TOKENS[:9] * 3, TOKENS[40:43], TOKENS[60:75]]
    found = []
    for guesses in (None, GUESSES):
        llm = backend.llm(tmp_path, speculative_config=guesses, seed=5)
        wanted = SamplingParams(max_tokens=40, ignore_eos=True, **params)
        found.append([(o.token_ids, o.logprobs) for one in llm.generate(pieces, wanted) for o in one.outputs])
        llm._engine.check()
        assert llm._engine.free_blocks == llm._engine.limits.blocks
        assert (llm.load.accepted_tokens > 5) == (guesses is not None)
    assert found[0] == found[1]


@both
def test_text_that_repeats_takes_fewer_steps(backend: Backend, tmp_path: Any) -> None:
    model = loop_model(tmp_path)
    llm = backend.llm(tmp_path, speculative_config=GUESSES)
    tokens = llm.generate([model.ids("x")], SamplingParams(temperature=0, max_tokens=60))[0].outputs[0].token_ids
    assert tokens == (model.id("a"),) * 60
    assert llm.load.accepted_tokens > 45


@both
def test_steps_with_guesses_of_the_device_are_started_before_the_step_before_is_read(
    backend: Backend, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is accepted in them is what the host finds accepted, over borders of blocks and with another beside."""
    model = loop_model(tmp_path)
    started: list[bool] = []
    original = CudaModel.start

    def start(self: CudaModel, *given: Any, follows: bool = False, **how: Any) -> Any:
        started.append(follows and self._guesses)
        return original(self, *given, follows=follows, **how)

    monkeypatch.setattr(CudaModel, "start", start)
    llm = backend.llm(tmp_path, speculative_config=GUESSES, block_size=16)
    wanted = [
        SamplingParams(temperature=heat, max_tokens=70, seed=4, presence_penalty=penalty)
        for heat, penalty in ((0, 0), (0.3, 0), (0, 1e-3))
    ]
    asked = [Request(str(n), tuple(model.ids("x")), params, 4) for n, params in enumerate(wanted)]
    for request in asked:
        llm._engine.add(request)
    found: dict[str, list[int]] = {}
    while llm._engine.busy:
        for event in llm._engine.step():
            found.setdefault(event.request_id, []).append(event.token_id)
        llm._engine.check()
    assert all(tokens == [model.id("a")] * 70 for tokens in found.values()) and len(found) == 3
    assert sum(started) > 8 and llm.load.accepted_tokens > 100


@both
def test_the_device_guesses_from_each_sequences_own_past_whoever_had_its_place_before(backend: Backend) -> None:
    """Sequences come and go between two fresh steps, and one has none; what is told is what the definition finds."""
    source, length = opened(REFERENCE / PLAIN), 512
    model = cuda_model(source, BF16, backend.device, length, places=16, guessed_length=length)
    # Every token stands in each, in another place: whatever is drawn, there are guesses. No matter what is in the cache.
    texts = [np.random.default_rng(seed).permutation(source.config.vocab_size).tolist() for seed in range(4)]
    rows = [sequence(model.program, text, place, length) for place, text in enumerate(texts)]
    for row in rows:
        row.computed = len(row.token_ids) - 1
    pasts = [Past(np.empty(length, dtype=np.int32)) for _ in rows]
    tables = np.array([row.blocks for row in rows], dtype=np.int32)
    for chosen, rooms in (((0, 1, 2), (3, 0, 3)), ((2, 3), (4, 4)), ((1, 0), (2, 5))):
        own = [rows[place] for place in chosen]
        for place, one in zip(chosen, own):
            pasts[place].extend(one.token_ids)
            one.slot = place
        guesses = [[9] * room for room in rooms]
        step = build_verification(own, guesses, BLOCK, len(model.program.cache_groups), tables)
        asked = [SamplingRow(SamplingParams(temperature=0), 0, position + 1) for position in step.positions.tolist()]
        guessing = Guessing(rooms, tuple(len(one) for one in guesses), tuple(pasts[place] for place in chosen), 1, 3)
        started = model.start(step, asked, guessing=guessing)
        for turn in range(3):
            after = model.start(None, asked, follows=True) if turn < 2 else None
            drawn = [one.token_id for one in model.finish(started)]
            row = 0
            for one, room, guess in zip(own, rooms, guesses):
                tokens = drawn[row : row + 1 + room]
                one.token_ids += tokens[: accepted(guess, tokens) + 1]
                one.computed = len(one.token_ids) - 1
                row += 1 + room
            known = [np.array(one.token_ids, dtype=np.int32) for one in own]
            guesses = [lookup(past, room, 1, 3).tolist() if room else [] for past, room in zip(known, rooms)]
            assert model.guessed(started) == guesses
            assert list(map(len, guesses)) == list(rooms)
            if after is not None:
                started = after


def test_a_step_with_guesses_of_the_device_is_not_copied() -> None:
    host = HostDevice("t80")
    model = cuda_model(opened(REFERENCE / PLAIN), BF16, host, LENGTH, places=16, guessed_length=LENGTH)
    row = sequence(model.program, TOKENS[:20], 0, LENGTH)
    row.computed, row.slot = 19, 0
    past = Past(np.empty(LENGTH, dtype=np.int32))
    past.extend(row.token_ids)
    tables = np.array([row.blocks[:3]], dtype=np.int32)
    row.blocks = row.blocks[:3]
    step = build_verification([row], [[5] * 7], BLOCK, len(model.program.cache_groups), tables)
    step = replace(step, block_tables=(np.repeat(tables, 8, axis=0),))
    asked = [SamplingRow(SamplingParams(temperature=0.5), 0, 20 + ahead) for ahead in range(8)]
    model.finish(model.start(step, asked, guessing=Guessing((7,), (7,), (past,), 1, 3)))
    before = host.copied_bytes
    for _ in range(3):  # as long as no block is added, though each might bring eight tokens
        model.finish(model.start(step, asked, follows=True))
    assert host.copied_bytes == before

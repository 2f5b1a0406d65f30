"""The Python API over the prefix cache, shared prompts, scores and small pools, on the CPU backend with real attention.

A token computed alone has other last bits than in a chunk of a prompt (docs/architecture.md: two regimes). These models'
weights are large enough that no such bit decides a token here; what is compared is tokens, and numbers but for 1e-4.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rvllm import LLM, SamplingParams
from rvllm.errors import BadRequest, PromptTooLong, StartError
from tests.fixtures.models import (
    EOS,
    Options,
    Shape,
    TinyModel,
    chain_model,
    loop_model,
    random_model,
    reference_logits,
    uniform_model,
)

LOADED: list[LLM] = []


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    LOADED.clear()
    yield
    for llm in LOADED:
        llm._engine.check()
        assert llm._engine.busy or llm._engine.free_blocks == llm._engine.limits.blocks


def load(model: TinyModel, **settings: Any) -> LLM:
    settings = {"warn": lambda message: None, "block_size": 16} | settings
    LOADED.append(LLM(str(model.folder), device="cpu", **settings))
    return LOADED[-1]


def small(folder: Path) -> TinyModel:
    return random_model(folder, Shape(hidden=64, intermediate=96, heads=2, kv_heads=1), std=0.3)


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True} | params)


def test_salts_keep_tenants_apart_and_what_is_no_salt_is_refused_unseen(tmp_path: Path) -> None:
    """B108."""
    llm = load(small(tmp_path))
    prompt = random.Random(1).choices(range(200), k=64)
    found, outputs = [], set()
    for salt in ("A", "A", "B", None, str(tmp_path), None):
        result = llm.generate([prompt], greedy(), cache_salt=salt)[0]
        found.append(result.num_cached_tokens)
        outputs.add(result.outputs[0].token_ids)
    assert found == [0, 48, 0, 0, 0, 48] and len(outputs) == 1
    for salt in ("", 5):
        with pytest.raises(BadRequest) as refused:
            llm.generate([prompt], greedy(), cache_salt=salt)  # type: ignore[arg-type]
        assert refused.value.param == "cache_salt" and "5" not in str(refused.value)
    with pytest.raises(BadRequest) as refused:
        llm.generate([prompt], greedy(), priority=1.5)  # type: ignore[arg-type]
    assert refused.value.param == "priority"


def test_shared_beginnings_give_the_same_tokens_with_and_without_a_cache(tmp_path: Path) -> None:
    """B109, on real attention; the 2,000 prompts are tests/unit/test_engine_memory.py's."""
    model, dice = small(tmp_path), random.Random(2)
    stems = [dice.choices(range(200), k=dice.randint(16, 100)) for _ in range(5)]
    prompts = [
        [*dice.choice(stems)[: dice.randint(16, 100)], *dice.choices(range(200), k=dice.randint(1, 30))]
        for _ in range(60)
    ]
    with_cache = load(model, num_gpu_blocks_override=40, max_model_len=256, max_num_seqs=4)
    without = load(model, enable_prefix_caching=False)
    ours = with_cache.generate(prompts, greedy(max_tokens=3))
    for result, right in zip(ours, without.generate(prompts, greedy(max_tokens=3))):
        assert result.outputs[0].token_ids == right.outputs[0].token_ids
        assert right.num_cached_tokens == 0
    assert sum(result.num_cached_tokens or 0 for result in ours) > 500


@pytest.mark.parametrize("length", [16, 21])
def test_completions_that_share_their_prompt_are_those_of_single_requests(tmp_path: Path, length: int) -> None:
    """A copied block has the bits of the one it was copied from: the same tokens as without sharing anything."""
    llm = load(small(tmp_path))
    prompt = random.Random(3).choices(range(200), k=length)
    drawn = SamplingParams(temperature=1.0, seed=8, max_tokens=40, ignore_eos=True, n=4)
    together = [output.token_ids for output in llm.generate([prompt], drawn)[0].outputs]
    plain = load(small(tmp_path), enable_prefix_caching=False, max_num_seqs=1)
    apart = [
        plain.generate([prompt], SamplingParams(temperature=1.0, seed=8 + i, max_tokens=40, ignore_eos=True))[0]
        for i in range(4)
    ]
    assert together == [result.outputs[0].token_ids for result in apart] and len(set(together)) == 4


def test_three_completions_have_three_ends_and_one_prompt(tmp_path: Path) -> None:
    """B060."""
    llm = load(uniform_model(tmp_path))
    result = llm.generate("x", SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True))[0]
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert sum(len(output.token_ids) for output in result.outputs) == 15 and len(result.prompt_token_ids) == 1
    assert [output.finish_reason for output in result.outputs] == ["length"] * 3


def test_a_stop_string_ends_one_of_several_completions_and_not_the_others(tmp_path: Path) -> None:
    llm = load(uniform_model(tmp_path))
    outputs = llm.generate("x", SamplingParams(n=4, seed=3, max_tokens=60, stop=["5"]))[0].outputs
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    assert all("5" not in output.text for output in outputs)


@pytest.mark.parametrize("most", [0, 4])
def test_a_prompts_log_probabilities_are_those_of_an_independent_forward(tmp_path: Path, most: int) -> None:
    """B048: with max_tokens 0 nothing is generated, and the prompt is scored. The first token has no score."""
    model = small(tmp_path)
    llm = load(model, prefill_chunk=32)
    prompt = random.Random(4).choices(range(200), k=90)
    llm.generate([prompt], greedy())  # in the cache, which a scored prompt may not use
    result = llm.generate([prompt], greedy(max_tokens=most, prompt_logprobs=3))[0]
    assert len(result.outputs[0].token_ids) == most and result.outputs[0].finish_reason == "length"
    assert result.num_cached_tokens == 0 and result.prompt_logprobs is not None
    first, *scores = result.prompt_logprobs
    assert first is None and len(scores) == 89
    limit = llm._engine.limits.vocab_limit
    logits = reference_logits(model.folder, prompt)[:, :limit].astype(np.float64)
    expected = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    for row, token, entry in zip(expected, prompt[1:], scores):
        assert entry is not None and entry[token] == pytest.approx(row[token], rel=1e-3, abs=1e-3)
        assert len(entry) in (3, 4) and {*np.argsort(-row)[:2]} <= {*entry} and max(entry.values()) <= 0


def test_more_log_probabilities_of_a_prompt_than_there_may_be_are_refused(tmp_path: Path) -> None:
    llm = load(loop_model(tmp_path))
    with pytest.raises(BadRequest, match="prompt_logprobs is 21, the limit is 20"):
        llm.generate("x", greedy(prompt_logprobs=21))


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0, "top_k": 1}, {"logit_bias": {65: 100}}, {"allowed_token_ids": [65, 66]}]
)
def test_log_probabilities_are_finite_and_can_be_written_as_json(tmp_path: Path, params: dict[str, Any]) -> None:
    """B049."""
    llm = load(small(tmp_path))
    result = llm.generate("abc", greedy(**{"logprobs": 5, "prompt_logprobs": 5} | params))[0]
    entries = [*(result.outputs[0].logprobs or ()), *(entry for entry in result.prompt_logprobs or () if entry)]
    assert len(entries) == 6 + 2
    assert all(math.isfinite(value) for entry in entries for value in entry.values())
    json.dumps([dict(entry) for entry in entries], allow_nan=False)


def test_empty_prompts_are_refused_and_nobody_suffers(tmp_path: Path) -> None:
    """B047. With a BOS the empty text is one token."""
    llm = load(loop_model(tmp_path / "plain"))
    for prompt in ("", [""], [[]], ["x", ""]):
        with pytest.raises(BadRequest) as refused:
            llm.generate(prompt, greedy())  # type: ignore[arg-type]
        assert refused.value.param == "prompt"
    assert llm.generate([], greedy()) == []
    assert llm.generate("x", greedy(max_tokens=2))[0].outputs[0].text == "aa"
    with_bos = load(loop_model(tmp_path / "bos", options=Options(add_bos=True)))
    assert len(with_bos.generate("", greedy())[0].prompt_token_ids) == 1


def test_a_context_that_the_blocks_do_not_hold_is_refused_or_lowered(tmp_path: Path) -> None:
    """B100."""
    model = loop_model(tmp_path, options=Options(max_positions=8192))
    with pytest.raises(StartError) as refused:
        load(model, num_gpu_blocks_override=64, max_model_len=4096)
    assert "--max-model-len 4,096 does not fit: 64 blocks of 16 tokens hold 1,024 tokens" in refused.value.message
    assert "at most 1,024" in (refused.value.hint or "")
    said: list[str] = []
    llm = load(model, num_gpu_blocks_override=64, warn=said.append)
    assert llm.max_model_len == 1024 and "shortened from 8,192 to 1,024" in said[0]
    assert llm._engine.limits.blocks == 64


def test_a_cache_without_room_for_one_block_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="1,000 bytes are left for it, one block of 16 tokens takes 16,384"):
        load(loop_model(tmp_path), kv_cache_memory_bytes=1000)


@pytest.mark.parametrize(("tokens", "chunk"), [(2048, 512), (100, 37), (64, 1)])
def test_prompt_chunks_leave_room_for_everybody_elses_token(tmp_path: Path, tokens: int, chunk: int) -> None:
    llm = load(loop_model(tmp_path), max_num_batched_tokens=tokens, max_num_seqs=64)
    assert llm._engine.limits.prefill_chunk == chunk
    assert llm.generate(["ax"] * 3, greedy(max_tokens=3))[2].outputs[0].text == "aaa"
    with pytest.raises(StartError, match="--max-num-batched-tokens 63 is less than --max-num-seqs 64"):
        load(loop_model(tmp_path), max_num_batched_tokens=63, max_num_seqs=64)


def test_prompts_about_as_long_as_the_pool_end_and_those_behind_them_are_served(tmp_path: Path) -> None:
    """B101. Pool of 64 blocks of 16 tokens; right after each long prompt a short one."""
    llm = load(loop_model(tmp_path), num_gpu_blocks_override=64)
    for length in (1007, 1008, 1016, 1022, 1023, 1024):
        long = [*b"y" * (length - 1), *b"x"]
        if length >= 1024:
            with pytest.raises(PromptTooLong, match="1,024 tokens, the context is 1,024"):
                llm.generate([long], greedy())
            continue
        results = llm.generate([long, [*b"x"]], greedy(max_tokens=17))
        assert results[0].outputs[0].finish_reason == "length"
        assert len(results[0].outputs[0].token_ids) == min(17, 1024 - length)
        assert results[1].outputs[0].text == "a" * 17


def test_a_conversation_finds_its_earlier_turns(tmp_path: Path) -> None:
    llm = load(chain_model(tmp_path, ["yes", EOS]))
    messages = [{"role": "user", "content": "is this a question with more than a few tokens?"}]
    assert llm.chat(messages, greedy(ignore_eos=False))[0].num_cached_tokens == 0
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and now?"}]
    result = llm.chat(messages, greedy(ignore_eos=False))[0]
    assert result.outputs[0].text == "yes" and (result.num_cached_tokens or 0) >= 48

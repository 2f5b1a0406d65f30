"""Guessed tokens over real attention on the CPU backend: the tokens, and their log-probabilities, of no guesses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rvllm import LLM, SamplingParams
from rvllm.errors import StartError
from tests.fixtures.models import Shape, random_model

GUESSES = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
SHAPE = Shape(hidden=64, intermediate=96, heads=2, kv_heads=1)


def pair(folder: Path, **settings: Any) -> tuple[LLM, LLM]:
    """Without guesses, and with them. std 0.1: outputs of such a model fall into loops, now and then, and leave them."""
    random_model(folder, SHAPE, std=0.1)
    # All prompts are read in one step: their last bits may depend on who is read beside them.
    sizes = {
        "device": "cpu",
        "block_size": 16,
        "max_model_len": 256,
        "prefill_chunk": 128,
        "max_num_batched_tokens": 768,
    }
    given = {"warn": lambda message: None, "max_num_seqs": 12} | sizes | settings
    return LLM(str(folder), **given), LLM(str(folder), **given, speculative_config=GUESSES)


def prompts(vocab: int, count: int) -> list[list[int]]:
    """Some that repeat a piece, and some that repeat nothing."""
    dice = random.Random(4)
    found = []
    for _ in range(count):
        piece = dice.choices(range(vocab), k=dice.randint(1, 30))
        found.append(piece * dice.choice([1, 1, 2, 3]))
    return found


def outputs(llm: LLM, asked: list[list[int]], params: SamplingParams) -> list[Any]:
    found = [out for result in llm.generate(asked, params) for out in result.outputs]
    llm._engine.check()
    assert llm._engine.free_blocks == llm._engine.limits.blocks
    return [(out.token_ids, out.finish_reason, out.logprobs) for out in found]


@pytest.mark.parametrize("blocks", [20, None], ids=["many give way", "room for all"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "ignore_eos": True, "logprobs": 2},
        {"temperature": 0.1, "seed": 3, "n": 2},
        {"temperature": 0, "presence_penalty": 0.4},
        {"temperature": 0.1, "seed": 5, "top_p": 0.9, "top_k": 12, "min_p": 0.01, "ignore_eos": True},
    ],
    ids=str,
)
def test_guesses_change_no_token_and_no_log_probability(
    tmp_path: Path, params: dict[str, Any], blocks: int | None
) -> None:
    plain, guessing = pair(tmp_path, num_gpu_blocks_override=blocks)
    asked = prompts(plain._engine.limits.vocab_limit, 6)
    wanted = SamplingParams(max_tokens=60, **params)
    expected, found = outputs(plain, asked, wanted), outputs(guessing, asked, wanted)
    if blocks is None:
        assert found == expected
    else:  # what is computed again has other last bits
        assert [one[:2] for one in found] == [one[:2] for one in expected]
        assert plain.load.preemptions and guessing.load.preemptions
    load = guessing.load
    assert plain.load.drafts == 0 and (load.accepted_tokens > 10) == ("presence_penalty" not in params)


def test_a_request_may_do_without(tmp_path: Path) -> None:
    plain, guessing = pair(tmp_path)
    asked = prompts(plain._engine.limits.vocab_limit, 3)
    without = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, speculate=False)
    assert outputs(plain, asked, without) == outputs(guessing, asked, without)
    assert guessing.load.drafts == 0


def test_a_setting_that_is_not_done_is_refused(tmp_path: Path) -> None:
    random_model(tmp_path, SHAPE)
    with pytest.raises(StartError, match="method is 'medusa'"):
        LLM(str(tmp_path), device="cpu", speculative_config={"method": "medusa", "num_speculative_tokens": 3})

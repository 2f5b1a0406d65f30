"""The default model, whole: the numbers transformers gives for SmolLM2-135M-Instruct (tests/reference/smollm2.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rvllm import LLM, SamplingParams

pytestmark = pytest.mark.model

SAMPLES = json.loads((Path(__file__).parents[1] / "reference" / "smollm2.json").read_text(encoding="utf-8"))["samples"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", device="cpu")


def ids_of(llm: LLM, sample: dict[str, Any]) -> list[int]:
    if sample["chat"]:
        return llm.encode_chat([{"role": "user", "content": sample["prompt"]}])
    return llm.encode_prompt(sample["prompt"])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["prompt"][:20])
def test_greedy_tokens_and_text_equal_those_of_transformers(llm: LLM, sample: dict[str, Any]) -> None:
    ids = ids_of(llm, sample)
    assert ids == sample["prompt_ids"]
    output = llm.generate([ids], SamplingParams(temperature=0, max_tokens=len(sample["output_ids"])))[0].outputs[0]
    assert list(output.token_ids) == sample["output_ids"]
    assert output.text == sample["text"]


def test_all_prompts_together_get_the_same_bits_as_each_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=3)
    prompts = [sample["prompt_ids"] for sample in SAMPLES]
    together = [result.outputs for result in llm.generate(prompts, params)]
    assert together == [llm.generate([prompt], params)[0].outputs for prompt in prompts]

"""The default model on a GPU beside transformers' greedy tokens (tests/reference/smollm2.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rvllm import LLM, SamplingParams
from rvllm.backend.cuda.kernels import Gpu
from rvllm.engine.load import gpu_dtype
from rvllm.errors import ModelNotFound
from rvllm.model.files import locate
from rvllm.model.source import open_source
from rvllm.program.dtype import F32
from tests.gpu.running import MARGIN, cpu_logits

pytestmark = [pytest.mark.gpu, pytest.mark.model]

SAMPLES = json.loads((Path(__file__).parents[1] / "reference" / "smollm2.json").read_text(encoding="utf-8"))["samples"]


@pytest.fixture(scope="module")
def llm(gpu: Gpu) -> LLM:
    try:
        return LLM("smollm2", device="cuda", max_model_len=512, kv_cache_memory_bytes=256 << 20)
    except ModelNotFound as reason:  # a machine with a GPU is often one without a network
        pytest.skip(str(reason))


def assert_roundings_explain(sample: dict[str, Any], place: int, ours: int) -> str:
    """The gap at the first divergence, in words. Fails where roundings cannot have closed it."""
    source = open_source(locate("smollm2", offline=True, progress=None), warn=print)
    prompt, known = sample["prompt_ids"], sample["output_ids"][: place + 1]
    kinds = (gpu_dtype("auto", source.config.dtype), F32)
    rounded, exact = (cpu_logits(source, kind, prompt, known, 512)[-1] for kind in kinds)
    allowed = MARGIN * float(np.abs(rounded - exact).max())
    gap, behind = sample["gaps"][place], float(rounded.max() - rounded[ours])
    said = f"token {place} is {ours} instead of {known[-1]}: gap {gap}, {behind:.3f} behind, roundings explain {allowed:.3f}"
    assert gap <= allowed and behind <= allowed, said
    return said


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["prompt"][:20])
def test_greedy_tokens_are_those_of_transformers_up_to_a_gap_that_roundings_close(
    llm: LLM, sample: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = sample["output_ids"]
    asked = SamplingParams(temperature=0, max_tokens=len(expected))
    output = llm.generate([sample["prompt_ids"]], asked)[0].outputs[0]
    found = list(output.token_ids)
    place = next((i for i, pair in enumerate(zip(found, expected)) if pair[0] != pair[1]), None)
    if place is None:
        assert found == expected and output.text == sample["text"]
        said = f"all {len(expected)} tokens are equal"
    else:
        said = assert_roundings_explain(sample, place, found[place])
    with capsys.disabled():
        print(f"\n  {sample['prompt'][:30]!r}: {said}")

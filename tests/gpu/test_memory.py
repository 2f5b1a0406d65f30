"""The key/value cache on a device: shared and copied blocks have the bits of computed ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rvllm import SamplingParams
from tests.fixtures.models import Shape, TinyModel, random_model
from tests.gpu.running import BOTH, Backend

SMALL = Shape(hidden=64, intermediate=96, heads=2, kv_heads=1)


@pytest.fixture
def small(tmp_path: Path) -> TinyModel:
    return random_model(tmp_path, SMALL, std=0.1)


def ids(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(200), k=length)


@pytest.mark.parametrize("backend", BOTH, indirect=True)
@pytest.mark.parametrize("length", [32, 37])  # with and without a block that has to be copied
def test_completions_that_share_their_prompt_have_the_bits_of_single_requests(
    backend: Backend, small: TinyModel, length: int
) -> None:
    params = {"temperature": 0.9, "max_tokens": 4, "logprobs": 3, "ignore_eos": True}
    llm = backend.llm(small.folder)
    together = llm.generate([ids(length)], SamplingParams(n=3, seed=4, **params))[0].outputs
    plain = backend.llm(small.folder, enable_prefix_caching=False)
    for number, output in enumerate(together):
        alone = plain.generate([ids(length)], SamplingParams(seed=4 + number, **params))[0].outputs[0]
        assert (output.token_ids, output.logprobs) == (alone.token_ids, alone.logprobs)
    llm._engine.check()
    assert llm._engine.free_blocks == llm._engine.limits.blocks


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_a_prompt_found_in_the_cache_up_to_a_chunks_end_has_the_bits_of_one_that_is_read(
    backend: Backend, small: TinyModel
) -> None:
    llm, params = backend.llm(small.folder), SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    first, again = (llm.generate([ids(70)], params)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 64)
    assert first.outputs == again.outputs

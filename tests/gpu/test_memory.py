"""The key/value cache on a device: shared and copied blocks have the bits of computed ones; a start takes what is there."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from rvllm import SamplingParams
from rvllm.backend.cuda.kernels import Gpu
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


# --- Starts that take nearly the whole GPU, each in a process of its own, which gives it back

BURST = """
import random, sys
from rvllm import LLM, SamplingParams
sizes = dict(max_num_seqs=256, max_num_batched_tokens=8192)
llm = LLM(sys.argv[1], device="cuda", gpu_memory_utilization=0.98, **sizes)
drawn = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=16, ignore_eos=True, logprobs=5)
prompts = [random.Random(seed).choices(range(200), k=512) for seed in range(256)]
results = llm.generate(prompts, drawn)
print(llm._engine.limits.blocks, sum(len(result.outputs[0].token_ids) for result in results))
"""
START = """
import sys
from rvllm import LLM, SamplingParams
from rvllm.errors import StartError
try:
    llm = LLM(sys.argv[1], device="cuda", gpu_memory_utilization=0.98)
except StartError as refused:
    print("refused", refused.message)
else:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    print("served", len(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids))
"""
OTHER = """
import sys, time
from rvllm.backend.cuda.context import Context
gpu, takes = Context(0), int(sys.argv[1])
held = gpu.allocate(-takes) if takes < 0 else None
print("ready", flush=True)
sys.stdin.readline()
time.sleep(float(sys.argv[2]))
gpu.free(held) if takes < 0 else gpu.allocate(takes)
sys.stdin.readline()
"""


def python(statement: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", statement, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.gpu
def test_the_first_big_batch_does_not_run_out_of_memory(gpu: Gpu, small: TinyModel) -> None:
    """B113. Whatever comes after the caches has to fit beside them."""
    said, errors = python(BURST, small.folder).communicate(timeout=300)
    blocks, tokens = map(int, said.split() or (0, 0))
    assert tokens == 256 * 16, errors
    assert blocks > 1000


@pytest.mark.gpu
@pytest.mark.parametrize("takes", [-(8 << 30), 4 << 30], ids=["gives back", "takes"])
@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0, 1.5, 2.0])
def test_memory_that_another_process_takes_or_gives_back_meanwhile_breaks_no_start(
    gpu: Gpu, small: TinyModel, takes: int, seconds: float
) -> None:
    """B103. It starts, or says in numbers what it lacked."""
    other = python(OTHER, takes, seconds)
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("\n")
        other.stdin.flush()
        said, errors = python(START, small.folder).communicate(timeout=300)
        assert said == "served 3\n" or ("refused" in said and "bytes" in said), (said, errors)
    finally:
        other.communicate("\n", timeout=60)

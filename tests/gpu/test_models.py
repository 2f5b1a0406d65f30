"""Whole models through the Python API and op by op: the GPU's tokens are the CPU's wherever roundings leave no doubt.

RVLLM_TIER=t70 runs all of it on the kernels of an old card.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from rvllm import LLM, SamplingParams
from rvllm.cli.check import check_model, verdict
from rvllm.engine.load import gpu_dtype
from rvllm.engine.scheduler import Chunk
from rvllm.engine.step import build_step
from rvllm.program.dtype import BF16, E4M3, F16, F32, DType
from rvllm.sampling.sampler import SamplingRow, sample_rows
from tests.fixtures.gguf_files import VOCAB, llama_gguf
from tests.fixtures.models import EOS, Shape, TinyModel, chain_model, loop_model, random_model
from tests.fixtures.weight_files import read_weights, write_weights
from tests.gpu.running import (
    BLOCK,
    BOTH,
    CASES,
    MARGIN,
    ON_GPU,
    REFERENCE,
    Backend,
    cpu_logits,
    cpu_model,
    cuda_model,
    forward,
    on_devices,
    opened,
    prompts,
    sequence,
)

HOST_CASES = ["llama-gqa-tied-llama3-rope", "qwen2-upper-layers-slide"]
NAMES = {BF16: "bfloat16", F16: "float16"}
TOKENS = 12


def greedy(**params: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **params})  # type: ignore[arg-type]


def test_every_reference_model_is_covered() -> None:
    assert len(CASES) == 16 and set(HOST_CASES) <= set(CASES)


@pytest.mark.parametrize(("backend", "case"), on_devices(CASES, HOST_CASES[:1]), indirect=["backend"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_op_of_every_model_equals_its_definition_but_for_roundings(
    dtype: DType, backend: Backend, case: str
) -> None:
    report = check_model(opened(REFERENCE / case), NAMES[dtype], "auto", backend.name, backend.device)
    assert report.wrong is None, verdict(report)
    assert {entry.kernel for entry in report.kernels} >= {"embedding", "norm", "rope_kv", "attention"}


@pytest.mark.parametrize(("backend", "case"), on_devices(CASES, []), indirect=["backend"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_over_codes_every_op_equals_its_definition_but_for_roundings(dtype: DType, backend: Backend, case: str) -> None:
    report = check_model(opened(REFERENCE / case), NAMES[dtype], "fp8", backend.name, backend.device)
    assert report.wrong is None, verdict(report)


def assert_explained(
    llm: LLM, path: Path, dtype: DType, prompt: list[int], output: list[int], kv_dtype: DType | None = None
) -> None:
    """Each token is the CPU backend's, given those before it, or is behind it by less than roundings move logits.

    Over codes: by less than roundings do that are made before and after the codes, which both then have.
    """
    source, length, known = opened(path), len(prompt) + len(output), llm._engine.limits.vocab_limit
    rounded, exact = (cpu_logits(source, kind, prompt, output, length, kv_dtype)[:, :known] for kind in (dtype, F32))
    allowed = MARGIN * float(np.abs(rounded - exact).max())
    behind = rounded.max(axis=1) - rounded[np.arange(len(output)), output]
    first = next((place for place, gap in enumerate(behind) if gap > 0), None)
    if first is not None:
        print(f"{path.name} {dtype}: first divergence at token {first}, gap {behind[first]:.4f} of {allowed:.4f}")
    assert (behind <= allowed).all(), (behind, allowed)
    assert np.ptp(rounded) > 2 * allowed, "roundings explain everything here, so this test would see nothing"


@pytest.mark.parametrize(("backend", "case"), on_devices(CASES, HOST_CASES), indirect=["backend"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_greedy_tokens_are_the_cpu_backends_but_where_roundings_decide(
    dtype: DType, backend: Backend, case: str
) -> None:
    assert_greedy_explained(backend.llm(REFERENCE / case, dtype=NAMES[dtype]), case, dtype)


@pytest.mark.parametrize(("backend", "case"), on_devices(CASES, HOST_CASES[:1]), indirect=["backend"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_over_codes_greedy_tokens_are_the_cpu_backends_but_where_roundings_decide(
    dtype: DType, backend: Backend, case: str
) -> None:
    llm = backend.llm(REFERENCE / case, dtype=NAMES[dtype], kv_cache_dtype="fp8")
    assert_greedy_explained(llm, case, dtype, E4M3)


def assert_greedy_explained(llm: LLM, case: str, dtype: DType, kv_dtype: DType | None = None) -> None:
    asked = [prompt for prompt in prompts(case) if len(prompt) < llm.max_model_len - 1]
    for prompt, result in zip(asked, llm.generate(asked, greedy())):
        assert_explained(llm, REFERENCE / case, dtype, prompt, list(result.outputs[0].token_ids), kv_dtype)


def drawn(llm: LLM, asked: list[list[int]], params: SamplingParams) -> list[object]:
    """Tokens and log-probabilities, which differ with any bit of the logits that matters."""
    return [(out.token_ids, out.logprobs) for result in llm.generate(asked, params) for out in result.outputs]


@pytest.mark.parametrize("backend", ON_GPU, indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_graphs_give_the_same_bits_as_single_launches(case: str, backend: Backend) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=TOKENS, logprobs=5, ignore_eos=True)
    asked = prompts(case)[:2]
    graphs, eager = (backend.llm(REFERENCE / case, enforce_eager=flag) for flag in (False, True))
    assert drawn(graphs, asked, params) == drawn(eager, asked, params)


@pytest.mark.parametrize(("backend", "case"), on_devices(CASES, HOST_CASES[:1]), indirect=["backend"])
def test_two_runs_give_the_same_bits(backend: Backend, case: str) -> None:
    params = greedy(logprobs=5, max_tokens=4)
    llm = backend.llm(REFERENCE / case)
    first, again = (drawn(llm, prompts(case)[:2], params) for _ in range(2))
    assert first == again == drawn(backend.llm(REFERENCE / case), prompts(case)[:2], params)


@pytest.mark.parametrize(("backend", "case"), on_devices(CASES, HOST_CASES[:1]), indirect=["backend"])
def test_a_row_of_a_batch_of_eight_has_the_bits_of_the_row_alone(backend: Backend, case: str) -> None:
    llm = backend.llm(REFERENCE / case)
    asked = [[5 + row] for row in range(8)]  # one token each: every step is one of decoding
    params = greedy(logprobs=5, max_tokens=6)
    assert drawn(llm, asked, params)[3] == drawn(llm, asked[3:4], params)[0]


@pytest.mark.parametrize(("backend", "case"), on_devices(CASES, HOST_CASES[:1]), indirect=["backend"])
def test_seeded_draws_are_those_of_the_definition_on_the_same_logits(backend: Backend, case: str) -> None:
    source = opened(REFERENCE / case)
    dtype = gpu_dtype("auto", source.config.dtype)
    model = cuda_model(source, dtype, backend.device)
    vocab = source.config.vocab_size
    chosen = [
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=1.5, top_k=9, logit_bias={7: 4.0}),
        SamplingParams(temperature=1.0, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(temperature=0),
    ]
    rows = [sequence(model.program, [5 + place], place) for place in range(len(chosen))]
    for count in range(4):
        asked = [
            SamplingRow(params, 11 + place, 1 + count, row.request.prompt_ids, row.output_counts, slot=place)
            for place, (params, row) in enumerate(zip(chosen, rows))
        ]
        step = build_step([Chunk(row, 1) for row in rows], BLOCK, len(model.program.cache_groups))
        ours = [sampled.token_id for sampled in model.finish(model.start(step, asked))]
        assert ours == [sampled.token_id for sampled in sample_rows(forward(model, *rows), asked, vocab)]
        for row, token in zip(rows, ours):
            row.token_ids.append(token)
            row.output_counts[token] += 1


# --- A cache of codes


@pytest.mark.parametrize(
    ("device", "larger"),
    [("cpu", 2**12), *(pytest.param("cuda", larger, marks=pytest.mark.gpu) for larger in (1, 2**12))],
)
def test_codes_keep_the_first_token_of_nine_prompts_in_ten(
    device: str, larger: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """vllm#13133, #41343, #6761. With keys 2^12 times as large, far above 448, and queries as much smaller."""
    if device == "cuda":
        request.getfixturevalue("gpu")  # skips where there is none
    folder = random_model(tmp_path, Shape(hidden=128, intermediate=192, head_dim=64)).folder
    weights = read_weights(folder)
    for name in weights:
        weights[name] *= larger if "k_proj" in name else 1 / larger if "q_proj" in name else 1
    write_weights(folder, weights)
    rng = np.random.default_rng(128)
    asked = [rng.integers(5, 90, size).tolist() for size in rng.integers(2, 40, 200)]
    plain, codes = (
        [
            result.outputs[0].logprobs[0]
            for result in LLM(
                str(folder),
                device=device,
                kv_cache_dtype=cache,
                max_model_len=64,
                prefill_chunk=16,
                kv_cache_memory_bytes=8 << 20,
            ).generate(asked, greedy(max_tokens=1, logprobs=20))
        ]
        for cache in ("auto", "fp8")
    )
    same = [max(one, key=one.get) == max(other, key=other.get) for one, other in zip(plain, codes)]
    apart = [abs(one[i] - other[i]) for one, other in zip(plain, codes) for i in one.keys() & other.keys()]
    assert np.mean(same) >= 0.9 and np.mean(apart) < 0.1  # NaN is neither


# --- Through the Python API: how a completion ends


def idle(llm: LLM) -> bool:
    return not llm._engine.busy and llm._engine.free_blocks == llm._engine.limits.blocks


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_the_end_of_text_and_stop_strings_end_a_completion(backend: Backend, tmp_path: Path) -> None:
    model: TinyModel = chain_model(tmp_path, [" alpha", " be", "ta", " gamma", EOS])
    llm = backend.llm(model.folder)
    whole = llm.generate("x", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    assert (whole.text, whole.finish_reason) == (" alpha beta gamma", "stop")
    cut = llm.generate("x", SamplingParams(temperature=0, max_tokens=20, stop="beta"))[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (" alpha ", "stop", "beta")
    one = llm.generate("x", SamplingParams(temperature=0, stop_token_ids=[model.id("ta")]))[0].outputs[0]
    assert one.finish_reason == "stop" and one.stop_reason == model.id("ta") and idle(llm)


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_a_stream_that_is_closed_leaves_nothing_behind(backend: Backend, tmp_path: Path) -> None:
    llm = backend.llm(loop_model(tmp_path).folder, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=None)
    stream = llm.stream(llm.encode_prompt("x"), params)
    assert "".join(delta.text for delta in islice(stream, 3)) == "aaa"
    stream.close()  # type: ignore[attr-defined]
    assert idle(llm)
    assert llm.generate("x", greedy(max_tokens=4))[0].outputs[0].text == "aaaa"


# --- Files


@pytest.mark.parametrize("backend", BOTH, indirect=True)
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_safetensors_of_every_dtype_are_served(stored: str, backend: Backend, tmp_path: Path) -> None:
    model = random_model(tmp_path, Shape(hidden=64, intermediate=96, heads=2, kv_heads=1, dtype=stored), std=0.1)
    llm = backend.llm(model.folder)
    dtype = BF16 if stored == "BF16" else F16
    prompt = llm.encode_prompt("The quick brown fox")
    output = llm.generate([prompt], greedy(max_tokens=4))[0].outputs[0]
    assert_explained(llm, model.folder, dtype, prompt, list(output.token_ids))


@pytest.mark.parametrize("backend", BOTH, indirect=True)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_gguf_file_gives_the_logits_of_its_own_expansion(dtype: DType, backend: Backend, tmp_path: Path) -> None:
    llama_gguf(tmp_path / "m.gguf")
    source = opened(tmp_path / "m.gguf")
    models = cuda_model(source, dtype, backend.device), cpu_model(source, dtype), cpu_model(source, F32)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 20).tolist()
    rows = [sequence(model.program, list(prompt)) for model in models]
    for token in (3, 4):  # the prompt, and a step of decoding
        ours, rounded, exact = (forward(model, row) for model, row in zip(models, rows))
        assert np.abs(ours - rounded).max() <= MARGIN * np.abs(rounded - exact).max()
        assert np.abs(exact).max() > 20 * np.abs(rounded - exact).max()
        for row in rows:
            row.token_ids.append(token)
    assert check_model(source, NAMES[dtype], "auto", backend.name, backend.device).wrong is None


@pytest.mark.parametrize("backend", BOTH, indirect=True)
def test_a_configuration_alone_runs_with_dummy_weights(backend: Backend, tmp_path: Path) -> None:
    case = REFERENCE / "qwen2-tied"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((case / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["torch_dtype"] == "bfloat16"
    llm = backend.llm(tmp_path, load_format="dummy")
    assert len(llm.generate([[5, 6, 7]], greedy(max_tokens=3))[0].outputs[0].token_ids) == 3

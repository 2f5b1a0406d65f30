"""With batch_invariant a request has the same bits whatever step its tokens are in: each comparison here is of bits.

Tokens are computed alone and among more than 64, as one that decodes and as part of a prompt, in long pieces and short.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rvllm import LLM, SamplingParams
from rvllm.backend.cpu import CpuModel
from rvllm.backend.cuda import products
from rvllm.backend.cuda.check import Checker
from rvllm.backend.cuda.launch import Bucket, Target
from rvllm.backend.cuda.lower import lower, workspace
from rvllm.backend.cuda.matrix_maps import MatrixMaps
from rvllm.backend.cuda.model import CudaModel
from rvllm.engine.request import Sequence
from rvllm.engine.scheduler import Chunk
from rvllm.engine.step import build_step
from rvllm.model.source import weights_for
from rvllm.program.dtype import BF16, E4M3, F32, DType, Float32, Stored, store
from rvllm.program.ops import Add, Fused, Kind, Linear, Tensor
from rvllm.program.program import Program
from tests.fixtures.models import Shape, TinyModel, random_model
from tests.gpu.running import BLOCK, BOTH, REFERENCE, Backend, cpu_model, cuda_model, opened, sequence
from tests.kernels.host_device import HostDevice

PLAIN, SLIDING = "llama-gqa-tied-llama3-rope", "qwen2-upper-layers-slide"
LENGTH, PLACES = 160, 200
TOKENS = np.random.default_rng(47).integers(5, 90, 400).tolist()
EVERYWHERE = pytest.mark.parametrize("backend", ["cpu", *BOTH], indirect=True)

Model = CpuModel | CudaModel


def model_of(backend: Backend, folder: Path = REFERENCE / PLAIN, kv_dtype: DType | None = None) -> Model:
    source = opened(folder)
    if backend.name == "cpu":
        return cpu_model(source, F32, LENGTH, kv_dtype, places=PLACES, batch_invariant=True)
    sizes = {"places": PLACES, "tokens": 224, "kv_dtype": kv_dtype, "batch_invariant": True}
    return cuda_model(source, BF16, backend.device, LENGTH, **sizes)  # type: ignore[arg-type]


def row_of(model: Model, place: int, prompt: int) -> Sequence:
    return sequence(model.program, TOKENS[place:][:prompt], place, LENGTH, places=PLACES)


def logits(model: Model, rows: Items[Sequence], counts: Items[int]) -> list[Float32]:
    """Of all of the next `counts` tokens of each row; those that bring one come first."""
    step = build_step([Chunk(row, count) for row, count in zip(rows, counts)], BLOCK, len(model.program.cache_groups))
    found = model.forward(replace(step, rows=np.arange(sum(counts), dtype=np.int32)))
    for row, count in zip(rows, counts):
        row.computed += count
    return np.split(found, np.cumsum(counts)[:-1])


def in_pieces(model: Model, row: Sequence, size: int) -> Float32:
    """Logits of all that the row has pending, `size` tokens a step."""
    pieces = []
    while row.pending:
        pieces += logits(model, [row], [min(size, row.pending)])
    return np.concatenate(pieces)


@EVERYWHERE
@pytest.mark.parametrize(("case", "kv_dtype"), [(PLAIN, None), (SLIDING, E4M3)], ids=str)
def test_however_a_prompt_is_cut_its_logits_have_the_same_bits(
    backend: Backend, case: str, kv_dtype: DType | None
) -> None:
    """140 tokens: the last see so many keys that decoding cuts them in two. Pieces of one token are steps of decoding."""
    model = model_of(backend, REFERENCE / case, kv_dtype)
    whole = in_pieces(model, row_of(model, 0, 140), 140)
    assert np.isfinite(whole).all()
    for size in (1, 7, 16, 64):
        assert np.array_equal(in_pieces(model, row_of(model, 0, 140), size), whole), size


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """With products of so much depth that kernels for few tokens and for many add up in another order."""
    shape = Shape(hidden=128, intermediate=320, heads=4, kv_heads=2)
    return random_model(tmp_path_factory.mktemp("deep"), shape, std=0.1)


def beside_many(model: Model, many: int = 130) -> None:
    """Assert that tokens among more than 64 have the bits that they have alone: in decoding steps and mixed ones.

    many: tokens of the prompt that is read beside those that decode.
    """
    rows = [row_of(model, place, 2 + place // 30) for place in range(70)]
    prompt = row_of(model, 100, many)
    logits(model, rows, [row.pending - 1 for row in rows])
    mixed = logits(model, [*rows, prompt], [1] * len(rows) + [many])
    for row in rows:
        row.token_ids.append(11)
    decoded = logits(model, rows, [1] * len(rows))
    assert np.array_equal(in_pieces(model, row_of(model, 100, many), 33), mixed[-1])
    for place in (0, 1, 63, 69):
        alone = row_of(model, place, 2 + place // 30)
        alone.token_ids.append(11)
        expected = in_pieces(model, alone, 1)
        assert np.array_equal(expected[-2:], np.concatenate([mixed[place], decoded[place]])), place


@EVERYWHERE
def test_among_more_than_64_a_token_has_the_bits_that_it_has_alone(backend: Backend, deep: TinyModel) -> None:
    beside_many(model_of(backend, deep.folder))


@pytest.mark.parametrize("tier", ["t70", "t90a"])
def test_other_builds_keep_that_promise_too(tier: str, deep: TinyModel) -> None:
    t70 = tier == "t70"  # whose products take long on the host
    model = model_of(Backend("shim", HostDevice(tier)), REFERENCE / PLAIN if t70 else deep.folder)
    beside_many(model, 7 if t70 else 130)
    launched = model._device.launched
    assert any("t90a_bf16_n64" in entry for entry in launched) == (tier == "t90a")
    assert not any("n128" in entry or "n256" in entry or "tile" in entry for entry in launched)


@pytest.mark.parametrize("tier", ["t80", "t90a"])
def test_products_that_are_launched_slice_by_slice_have_the_bits_of_few_tokens(
    tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On t90a slices are of as many tokens as the parts of a deep, narrow weight leave workspace for: here of 64."""
    monkeypatch.setattr(products, "WIDE_MULTIPROCESSORS", 2)
    host, rng = HostDevice(tier), np.random.default_rng(3)
    tokens, rows, depth = 130, 24, 4096

    def put(elements: Float32) -> int:
        stored = store(elements, np.dtype(np.uint16))
        address = host.allocate(stored.nbytes)
        host.write(address, stored)
        return address

    x, y, out = (
        Tensor(name, ("tokens", size), BF16, Kind.ACTIVATION)
        for name, size in (("x", depth), ("y", rows), ("out", rows))
    )
    weight = Tensor("weight", (rows, depth), BF16, Kind.WEIGHT)
    product = Linear(x, (weight,), (), Tensor("product", ("tokens", rows), BF16, Kind.ACTIVATION))
    op = Fused("linear_add", (product, Add(product.out, y, out)))
    program = Program((op,), out, {}, ())
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in
              (("x", (tokens, depth)), ("weight", (rows, depth)), ("y", (tokens, rows)))}  # fmt: skip
    addresses = {name: put(array) for name, array in values.items()}
    partial, counters = workspace(program, 1, tier)
    addresses |= {"workspace": host.allocate(partial), "counters": host.allocate(counters)}
    host.fill(addresses["counters"], 0, counters)

    def computed(count: int, skip: int = 0) -> tuple[Stored, int]:
        """Of `count` tokens, the first of them number `skip`; and by how many launches."""
        places = addresses | {"x": addresses["x"] + 2 * skip * depth, "y": addresses["y"] + 2 * skip * rows}
        places["out"] = host.allocate(2 * count * rows)
        target = Target(places.__getitem__, Bucket(count, 0, 1, True), 1, (1,), 16, places["workspace"],
                        places["counters"], host.multiprocessors, tier, MatrixMaps(host), batch_invariant=True)  # fmt: skip
        launches = lower(op, target)
        for launch in launches:
            host.launch(launch)
        found = np.empty((count, rows), dtype=np.uint16)
        host.read(places["out"], found)
        return found, len(launches)

    whole, launches = computed(tokens)
    assert launches == 3
    for skip in (0, 60, 127):
        assert np.array_equal(computed(3, skip)[0], whole[skip : skip + 3]), skip


def test_every_op_still_equals_its_definition_but_for_roundings() -> None:
    model = model_of(Backend("shim", HostDevice("t80")))
    rows = [row_of(model, place, size) for place, size in ((0, 1), (1, 1), (2, 90))]
    step = build_step([Chunk(row, row.pending) for row in rows], BLOCK, 1)
    checker = Checker(model, weights_for(opened(REFERENCE / PLAIN), model.program))
    assert not [difference for difference in checker.check(step) if difference.wrong]


# --- Through the engine


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    shape = Shape(hidden=64, intermediate=96, heads=2, kv_heads=1)
    return random_model(tmp_path_factory.mktemp("model"), shape, std=0.1)


def prompts(count: int) -> list[list[int]]:
    """Of 33 to 49 tokens, the first 32 of which all share."""
    ids = random.Random(7)
    shared = ids.choices(range(200), k=32)
    return [shared + ids.choices(range(200), k=1 + place % 17) for place in range(count)]


def outputs(llm: LLM, asked: Items[list[int]], tokens: int) -> list[Any]:
    """Tokens and log-probabilities."""
    params = SamplingParams(temperature=0.8, max_tokens=tokens, logprobs=2, ignore_eos=True, seed=3)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(list(asked), params)]


def assert_as_alone(backend: Backend, model: TinyModel, crowded: LLM, count: int, tokens: int) -> None:
    """That requests of a crowd, read in other pieces, and again when the cache has their beginnings, are as alone."""
    asked = prompts(count)
    together = outputs(crowded, asked, tokens)
    single = backend.llm(model.folder, batch_invariant=True, enable_prefix_caching=False)
    for place in (0, count // 2, count - 2, count - 1):
        assert outputs(single, asked[place : place + 1], tokens)[0] == together[place], place
    cached = crowded._engine.load.cached_tokens
    assert outputs(crowded, asked[-3:], tokens) == together[-3:]
    assert crowded._engine.load.cached_tokens > cached


@EVERYWHERE
def test_a_request_among_many_has_the_bits_of_the_request_alone(backend: Backend, small: TinyModel) -> None:
    sizes = {"max_num_seqs": 72, "max_num_batched_tokens": 160, "block_size": 16, "prefill_chunk": 24}
    crowded = backend.llm(small.folder, batch_invariant=True, **sizes)
    assert_as_alone(backend, small, crowded, 70, 3)


@EVERYWHERE
def test_a_request_that_gave_way_has_the_bits_of_one_that_did_not(backend: Backend, small: TinyModel) -> None:
    """What it had drawn is then read as part of its prompt, beside others that decode."""
    sizes = {"block_size": 16, "prefill_chunk": 24, "num_gpu_blocks_override": 14}
    crowded = backend.llm(small.folder, batch_invariant=True, **sizes)
    assert_as_alone(backend, small, crowded, 6, 44)
    assert crowded._engine.load.preemptions > 0

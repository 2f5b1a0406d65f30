"""Whole models on the CUDA backend's own path (loader, lowering, step block, kernels, sampler), run on the host.

The oracle is the CPU backend: in float32 it has transformers' numbers, and on the same program, with the same rounding
points, it says how far roundings to X take a model from them. Sums in another order round the other way here and there,
so kernels are held to that distance, not to the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rvllm.backend.cpu import CpuModel
from rvllm.backend.cuda.check import Checker
from rvllm.backend.cuda.context import Graph
from rvllm.backend.cuda.launch import Launch
from rvllm.backend.cuda.lower import FUSIONS
from rvllm.backend.cuda.matrix_maps import AT_ONCE, MAP_BYTES, MatrixMaps
from rvllm.backend.cuda.model import CudaModel, StepLimits
from rvllm.backend.cuda.slots import slot_bytes
from rvllm.backend.cuda.step_block import padded_sequences, padded_tokens
from rvllm.backend.cuda.tuning import TUNED, Tuning
from rvllm.engine.block_pool import blocks_for
from rvllm.engine.engine import Engine
from rvllm.engine.grammar import Vocabulary
from rvllm.engine.request import Request, Sequence
from rvllm.engine.scheduler import Chunk, Limits
from rvllm.engine.step import build_step
from rvllm.model.files import ModelFiles
from rvllm.model.source import Source, open_source, record, weights_for
from rvllm.program.dtype import BF16, E4M3, F16, F32, DType, Stored
from rvllm.program.fuse import fuse
from rvllm.program.ops import Tensor
from rvllm.program.program import Program, Step
from rvllm.sampling.params import SamplingParams
from rvllm.sampling.sampler import SamplingRow, sample_rows
from rvllm.sampling.structured import StructuredOutputsParams
from tests.kernels.host_device import HostDevice

REFERENCE = Path(__file__).parents[1] / "reference"
CASES = (
    "llama-linear-rope-bias",
    "llama-gqa-tied-llama3-rope",
    "llama-odd-sizes-sharded",
    "mistral-sliding-window",
    "qwen2-upper-layers-slide",
)
BLOCK, LONGEST, PLACES = 16, 64, 3


def opened(case: str) -> Source:
    return open_source(ModelFiles(case, REFERENCE / case), warn=print)


def limits(sequences: int = 8) -> StepLimits:
    return StepLimits(64, sequences, blocks_for(LONGEST, BLOCK))


def blocks(program: Program) -> tuple[int, ...]:
    return (PLACES * blocks_for(LONGEST, BLOCK),) * len(program.cache_groups)


def cuda_model(source: Source, dtype: DType, tier: str, kv_dtype: DType | None = None) -> CudaModel:
    program = fuse(record(source, dtype=dtype, kv_dtype=kv_dtype or dtype, max_length=LONGEST), FUSIONS)
    checkpoint = weights_for(source, program)
    vocab = program.output.sizes({"rows": 1})[1]
    device = HostDevice(tier)
    return CudaModel(
        program, checkpoint, device, limits=limits(), blocks=blocks(program), block_size=BLOCK, vocab_limit=vocab
    )


def cpu_model(source: Source, dtype: DType, kv_dtype: DType | None = None) -> CpuModel:
    program = record(source, dtype=dtype, kv_dtype=kv_dtype or dtype, max_length=LONGEST)
    return CpuModel(program, weights_for(source, program), blocks=blocks(program), block_size=BLOCK)


def sequence(program: Program, prompt: list[int], place: int) -> Sequence:
    """Its blocks lie scattered in the pool, those of places 0, 1 and 2 apart from each other."""
    numbers = [PLACES * i + place for i in range(blocks_for(LONGEST, BLOCK))][::-1]
    request = Request(str(place), tuple(prompt), SamplingParams(), 0)
    return Sequence(request, LONGEST, numbers, list(prompt))


def step_of(rows: list[Sequence], tokens: list[int], groups: int = 1) -> Step:
    chunks = [Chunk(row, count) for row, count in zip(rows, tokens)]
    step = build_step(chunks, BLOCK, groups)
    for chunk in chunks:
        chunk.sequence.computed += chunk.tokens
    return step


def steps(program: Program) -> list[Step]:
    """Prompts together, a mixed step that reads a third one in pieces while two decode, then decoding alone."""
    groups = len(program.cache_groups)
    rng = np.random.default_rng(5)
    rows = [sequence(program, rng.integers(5, 250, size).tolist(), place) for place, size in enumerate((1, 20, 23))]
    made = [step_of(rows[:2], [1, 20], groups)]
    for row in rows[:2]:
        row.token_ids.append(7)
    made.append(step_of(rows, [1, 1, 16], groups))
    made.append(step_of(rows[2:], [7], groups))
    for row in rows:
        row.token_ids.append(9) if row.pending == 0 else None
    decoding = [row for row in rows if row.pending == 1]
    made.append(step_of(decoding, [1] * len(decoding), groups))
    return made


@pytest.mark.parametrize("gpu_tier", ["t70", "t80"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_op_equals_its_definition_but_for_roundings(case: str, dtype: DType, gpu_tier: str) -> None:
    source = opened(case)
    ours = cuda_model(source, dtype, gpu_tier)
    checker = Checker(ours, weights_for(source, ours.program))
    for step in steps(ours.program):
        wrong = [difference for difference in checker.check(step) if difference.wrong]
        assert not wrong, wrong


@pytest.mark.parametrize(("dtype", "gpu_tier"), [(BF16, "t80"), (F16, "t70"), (F16, "t80")], ids=str)
@pytest.mark.parametrize("case", [CASES[2], CASES[4]])  # heads of no multiple of 8; two groups of layers
def test_over_codes_every_op_equals_its_definition_but_for_roundings(case: str, dtype: DType, gpu_tier: str) -> None:
    source = opened(case)
    ours = cuda_model(source, dtype, gpu_tier, E4M3)
    checker = Checker(ours, weights_for(source, ours.program))
    for step in steps(ours.program):
        wrong = [difference for difference in checker.check(step) if difference.wrong]
        assert not wrong, wrong
    device = ours._device
    assert isinstance(device, HostDevice)
    for stem in ("rope_kv_e4m3", "attention_decode_e4m3", "attention_prefill_e4m3"):
        assert any(entry.startswith(stem) for entry in device.launched)


@pytest.mark.parametrize("name", ["cache.0", "cache.0.scales"])
def test_a_code_or_a_scale_that_is_off_by_a_bit_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(CASES[1])
    ours = cuda_model(source, BF16, "t80", E4M3)
    read, device = ours.read, ours._device
    assert isinstance(device, HostDevice)

    def off(tensor: Tensor, step: Step) -> Stored:
        elements = read(tensor, step)
        if tensor.name == name and device.launched[-1].startswith("rope_kv"):
            raw = elements.view(np.uint8)
            raw.flat[np.flatnonzero(raw)[0]] ^= 1
        return elements

    monkeypatch.setattr(ours, "read", off)
    step = step_of([sequence(ours.program, [5], 0)], [1])
    wrong = [d for d in Checker(ours, weights_for(source, ours.program)).check(step) if d.wrong]
    assert [d.kernel for d in wrong] == ["rope_kv"]


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, None), (F16, None), (BF16, E4M3)], ids=str)
def test_logits_are_as_far_from_float32_as_roundings_take_them(dtype: DType, kv_dtype: DType | None) -> None:
    ours, oracle = 0.0, 0.0
    for case in CASES:
        source = opened(case)
        model, rounded = cuda_model(source, dtype, "t80", kv_dtype), cpu_model(source, dtype, kv_dtype)
        exact = cpu_model(source, F32)
        for step in steps(model.program):
            true = exact.forward(step)
            ours += float(np.square(model.forward(step) - true).mean())
            oracle += float(np.square(rounded.forward(step) - true).mean())
    # The same number of roundings in other places; the mean of squares over some 40 rows varies by half.
    assert ours < 2 * oracle


@pytest.mark.parametrize("entry", ["rope_kv_bf16", "linear_act_mul_bf16_m8", "attention_decode_d64_bf16"])
def test_a_kernel_that_is_wrong_is_found_and_named(entry: str) -> None:
    source = opened("llama-gqa-tied-llama3-rope")
    ours = cuda_model(source, BF16, "t80")
    checker = Checker(ours, weights_for(source, ours.program))
    step = step_of([sequence(ours.program, [5], 0)], [1])
    assert not [d for d in checker.check(step) if d.wrong]
    device = ours._device
    assert isinstance(device, HostDevice)
    device.break_entry = entry
    wrong = [d for d in checker.check(step) if d.wrong]
    assert wrong[0].kernel in entry and wrong[0].op.startswith("0."), wrong


def test_a_decoding_row_has_the_same_bits_alone_and_in_a_padded_batch() -> None:
    source = opened("llama-gqa-tied-llama3-rope")
    ours = cuda_model(source, BF16, "t80")
    prompts = [[5, 9, 30, 7], [8] * 20, [100, 3]]

    def decode(*places: int) -> list[np.ndarray]:
        rows = [sequence(ours.program, prompts[place], place) for place in places]
        for row in rows:
            ours.forward(step_of([row], [row.pending]))
            row.token_ids.append(11)
        return list(ours.forward(step_of(rows, [1] * len(rows))))

    together = decode(0, 1, 2)
    for place in range(3):
        assert np.array_equal(decode(place)[0], together[place])


def test_tokens_drawn_on_the_device_are_those_of_the_definition() -> None:
    source = opened("qwen2-tied")
    ours = cuda_model(source, BF16, "t80")
    rows = [sequence(ours.program, [5 + i, 9, 30], i) for i in range(PLACES)]
    chosen = [
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=4, logit_bias={40: 5}, logprobs=0),
        SamplingParams(temperature=1.3, min_p=0.01, repetition_penalty=1.3, allowed_token_ids=range(5, 90)),
    ]
    step = step_of(rows, [3, 3, 3])
    asked = [
        SamplingRow(params, 11 + i, 3, row.request.prompt_ids, row.output_counts, slot=i)
        for i, (params, row) in enumerate(zip(chosen, rows))
    ]
    drawn = ours.finish(ours.start(step, asked))
    for row in rows:
        row.computed = 0
    expected = sample_rows(ours.forward(step), asked, ours.program.output.sizes({"rows": 1})[1])
    assert [s.token_id for s in drawn] == [s.token_id for s in expected]
    assert [[i for i, _ in s.top_logprobs] for s in drawn] == [[i for i, _ in s.top_logprobs] for s in expected]
    for one, other in zip(drawn, expected):
        assert (one.logprob is None) == (other.logprob is None)
        assert one.logprob is None or one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_dummy_weights_are_the_same_on_both_backends() -> None:
    config = json.loads((REFERENCE / "qwen2-tied" / "config.json").read_text())
    assert config["tie_word_embeddings"]
    source = open_source(ModelFiles("dummy", REFERENCE / "qwen2-tied"), load_format="dummy", warn=print)
    source = replace(source, config=replace(source.config, dtype=BF16))
    step = steps(cpu_model(source, BF16).program)[0]
    ours = cuda_model(source, BF16, "t80")
    assert not [d for d in Checker(ours, weights_for(source, ours.program)).check(step) if d.wrong]


def test_a_step_that_runs_ahead_draws_what_one_after_the_other_does() -> None:
    source = opened("llama-gqa-tied-llama3-rope")
    ours = cuda_model(source, BF16, "t80")
    params = SamplingParams(temperature=0.8, top_p=0.95)

    def draw(ahead: bool) -> list[list[int]]:
        rows = [sequence(ours.program, [5 + i, 9, 30], i) for i in range(PLACES)]
        for row in rows:
            ours.forward(step_of([row], [3]))
            row.token_ids.append(17)
        found: list[list[int]] = []
        pending = []
        for count in range(4):
            asked = [SamplingRow(params, 11 + i, 4 + count) for i in range(PLACES)]
            pending.append(ours.start(step_of(rows, [1] * PLACES), asked, follows=ahead and count > 0))
            if not ahead or count > 0:
                found.append([one.token_id for one in ours.finish(pending.pop(0))])
            for place, row in enumerate(rows):
                row.token_ids.append(0 if ahead else found[-1][place])
        return found + [[one.token_id for one in ours.finish(started)] for started in pending]

    assert draw(ahead=True) == draw(ahead=False)


class CountingDevice(HostDevice):
    """One whose graphs take memory, and must be given back."""

    def __init__(self) -> None:
        super().__init__("t80")
        self.free_bytes = 10 << 30
        self.graphs = 0

    def capture(self, launches: Items[Launch]) -> Graph:
        assert launches
        self.free_bytes -= 1 << 20
        self.graphs += 1
        return Graph(self.graphs)

    def forget(self, graph: Graph) -> None:
        self.free_bytes += 1 << 20
        self.graphs -= 1


def test_a_rehearsal_says_what_graphs_take_and_leaves_nothing_behind() -> None:
    """B113. Before there are caches; afterwards the model computes as one that had its caches from the start."""
    source = opened("llama-mha")
    program = fuse(record(source, dtype=BF16, kv_dtype=BF16, max_length=LONGEST), FUSIONS)
    checkpoint = weights_for(source, program)
    sizes = {"limits": limits(), "block_size": BLOCK, "vocab_limit": program.output.sizes({"rows": 1})[1]}
    device = CountingDevice()
    counted = CudaModel(program, checkpoint, device, blocks=None, **sizes)
    before = len(device.launched)
    most, tokens = limits().sequences, limits().tokens
    by_rows = {padded_sequences(count, most) for count in range(1, most + 1)}  # of decoding, and of a mixed step's head
    by_tokens = {padded_tokens(count, tokens) for count in range(1, tokens + 1)}
    drawing = 6 * len(by_rows)  # greedy, drawn, or drawn by all logits once more, into each of two buffers
    graphs, slots = (2 * len(by_rows) + len(by_tokens) + drawing) << 20, most * slot_bytes(sizes["vocab_limit"])
    assert counted.rehearse(lambda: device.free_bytes) == graphs + slots
    assert device.graphs == 0 and device.free_bytes == 10 << 30 and len(device.launched) == before
    ours = CudaModel(program, checkpoint, HostDevice("t80"), blocks=None, **sizes)
    ours.rehearse(lambda: 0)
    ours.allocate_caches(blocks(program))
    step = step_of([sequence(program, [5, 9, 30], 0)], [3])
    usual = CudaModel(program, checkpoint, HostDevice("t80"), blocks=blocks(program), **sizes)
    assert np.array_equal(ours.forward(step), usual.forward(step))


def test_a_copied_block_is_read_as_the_one_it_was_copied_from() -> None:
    source = opened("qwen2-upper-layers-slide")
    ours = cuda_model(source, BF16, "t80")
    groups = len(ours.program.cache_groups)
    row, other = (sequence(ours.program, [5, 9, 30, 7, 8], place) for place in range(2))
    ours.forward(step_of([row], [5], groups))
    ours.copy_blocks([(row.blocks[0], other.blocks[0])])
    other.computed = 5
    for one in (row, other):
        one.token_ids.append(11)
    alone = ours.forward(step_of([row], [1], groups))
    assert np.array_equal(ours.forward(step_of([other], [1], groups)), alone)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_few_tokens_have_the_same_bits_by_rings_and_without(monkeypatch: pytest.MonkeyPatch, dtype: DType) -> None:
    source, logits, entries = opened(CASES[0]), [], []
    for tuning in (Tuning(), Tuning(ring_tokens=0)):
        monkeypatch.setitem(TUNED, "t90a", tuning)
        ours = cuda_model(source, dtype, "t90a")
        logits.append([ours.forward(step) for step in steps(ours.program)])
        entries.append({entry for entry in ours._device.launched if "linear" in entry and "t90a" in entry})
    assert all(np.array_equal(first, second) for first, second in zip(*logits))
    assert len(entries[0]) == 4 and not entries[1]


def test_a_matrix_is_described_once_and_others_beside_it() -> None:
    device = HostDevice("t90a")
    maps = MatrixMaps(device)
    first, other = maps(256, 10, 64, 64), maps(256, 10, 64, 128)
    assert (maps(256, 10, 64, 64), maps(256, 10, 64, 128)) == (first, other) and other == first + MAP_BYTES
    found = np.empty(MAP_BYTES, dtype=np.uint8)
    device.read(first, found)
    assert np.array_equal(found, device.matrix_map(256, 10, 64, 64))
    places = {maps(256, rows, 64, 64) for rows in range(1, 2 * AT_ONCE)}
    assert len(places) == 2 * AT_ONCE - 1 and all(place % 64 == 0 for place in places)


def test_texts_have_their_form_beside_others_that_have_none() -> None:
    source = opened("llama-gqa-tied-llama3-rope")
    model = cuda_model(source, BF16, "t80")
    vocab = source.config.vocab_size
    limits = Limits(
        max_model_len=LONGEST,
        block_size=BLOCK,
        blocks=PLACES * blocks_for(LONGEST, BLOCK),
        max_num_seqs=3,
        max_num_batched_tokens=32,
        prefill_chunk=16,
        vocab_limit=vocab,
        eos_ids=frozenset({2}),
    )
    engine = Engine(model, limits)
    tokens = [b"", b"", b"<end>"] + [bytes([97 + number % 5]) for number in range(vocab - 3)]
    engine.learn(Vocabulary(tuple(tokens), frozenset()))
    choices = ("abc", "abd", "dead", "ace")
    form = SamplingParams(max_tokens=9, temperature=0.9, structured_outputs=StructuredOutputsParams(choice=choices))
    free = SamplingParams(max_tokens=9, temperature=0.9, ignore_eos=True)
    for number in range(8):
        engine.add(Request(str(number), (5, 6, 7 + number), free if number % 4 == 3 else form, number))
    texts: dict[str, bytes] = {}
    while engine.busy:
        for event in engine.step():
            if event.stop_id is None:
                texts[event.request_id] = texts.get(event.request_id, b"") + tokens[event.token_id]
    formed = {texts[str(number)].decode() for number in range(8) if number % 4 != 3}
    assert formed <= set(choices) and len(formed) > 1
    assert all(texts[name].decode() not in choices for name in ("3", "7"))

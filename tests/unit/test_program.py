"""Recording, fusing, planning and costing: facts about data, no backend."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.model.config import ModelConfig, model_config
from rvllm.model.llama import record_llama
from rvllm.program.cost import DEVICES, Load, Traffic, cost, tensor_bytes
from rvllm.program.dtype import BF16, E4M3, F32, Q8_0, DType
from rvllm.program.fuse import ALL_KERNELS, fuse, hidden
from rvllm.program.ops import Fused, Kind, Tensor, kernel_stem, parts, reads
from rvllm.program.plan import ALIGNMENT_BYTES, Lifetime, lifetimes, plan
from rvllm.program.program import Program, unfused
from rvllm.program.recorder import Recorder

QWEN_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def recorded(config: ModelConfig, kv_dtype: DType = BF16) -> Program:
    recorder = Recorder(BF16, kv_dtype, {}, weight_dtype=config.dtype)
    return record_llama(recorder, config, tied=config.tied, max_length=4096)


@pytest.fixture(scope="module")
def program() -> Program:
    return recorded(model_config(QWEN_1_5B))


def test_a_layer_becomes_five_kernels(program: Program) -> None:
    kernels = Counter(kernel_stem(op) for op in fuse(program, ALL_KERNELS).ops)
    layers = QWEN_1_5B["num_hidden_layers"]
    assert kernels == {
        "norm_linear_rope_kv": layers,
        "attention": layers,
        "linear_add": 2 * layers,
        "norm_linear_act_mul": layers,
        "embedding": 1,
        "rope_angles": 1,
        "select_rows": 1,
        "norm_linear": 1,
    }


def test_taking_a_fused_program_apart_gives_the_recorded_one(program: Program) -> None:
    for kernels in ([], ["linear_add"], ["add_norm", "norm_linear"], ALL_KERNELS):
        assert unfused(fuse(program, kernels)).ops == program.ops


def test_only_the_kernels_a_device_has_are_used(program: Program) -> None:
    fused = fuse(program, {"add_norm"})
    assert {op.kernel for op in fused.ops if isinstance(op, Fused)} == {"add_norm"}
    # The first norm follows the embedding and the last one a selection: the 2 x 28 - 1 between follow a sum.
    assert sum(isinstance(op, Fused) for op in fused.ops) == 2 * 28 - 1


def test_a_value_that_is_read_again_is_not_hidden_by_a_fusion() -> None:
    recorder = Recorder(F32, F32, {}, weight_dtype=F32)
    x = recorder.embedding(recorder.weight("table", 64, 32))
    normed = recorder.norm("normed", x, recorder.weight("norm", 32), 1e-5)
    once = recorder.linear("once", normed, [recorder.weight("w", 32, 32)])
    both = recorder.add("both", once, normed)
    last = recorder.select_rows("last", both)
    program = recorder.finish(recorder.linear("logits", last, [recorder.weight("head", 64, 32)]))
    fused = fuse(program, ALL_KERNELS)
    assert [kernel_stem(op) for op in fused.ops] == ["embedding", "norm", "linear_add", "select_rows", "linear"]
    assert hidden(fused) == {"once"}


def test_a_fused_sum_stays_visible_to_the_residual_stream(program: Program) -> None:
    fused = fuse(program, {"add_norm"})
    assert not any(name.endswith("residual") for name in hidden(fused))


@pytest.mark.parametrize("kernels", [(), ("linear_add",), tuple(ALL_KERNELS)], ids=["plain", "one", "all"])
def test_no_two_living_values_share_memory(program: Program, kernels: tuple[str, ...]) -> None:
    fused = fuse(program, kernels)
    sizes = {"tokens": 7, "rows": 3}
    check_plan(fused, lambda tensor: tensor.dtype.nbytes(math.prod(tensor.sizes(sizes))))


@given(st.data())
def test_no_two_living_values_share_memory_whatever_their_sizes(data: st.DataObject) -> None:
    program = recorded(model_config(QWEN_1_5B | {"num_hidden_layers": 2}))
    kernels = data.draw(st.sets(st.sampled_from(sorted(ALL_KERNELS))))
    sizes: dict[str, int] = {}

    def nbytes(tensor: Tensor) -> int:
        if tensor.name not in sizes:
            sizes[tensor.name] = data.draw(st.integers(1, 5000))
        return sizes[tensor.name]

    check_plan(fuse(program, kernels), nbytes)


def check_plan(program: Program, nbytes) -> None:  # type: ignore[no-untyped-def]
    memory = plan(program, nbytes)
    lives = lifetimes(program)
    for life in lives:
        begin = memory.offsets[life.tensor.name]
        assert begin % ALIGNMENT_BYTES == 0 and begin + nbytes(life.tensor) <= memory.nbytes
    for index, one in enumerate(lives):
        for other in lives[index + 1 :]:
            if one.first <= other.last and other.first <= one.last:
                assert apart(one, other, memory.offsets, nbytes), (one, other)


def apart(one: Lifetime, other: Lifetime, offsets, nbytes) -> bool:  # type: ignore[no-untyped-def]
    a, b = offsets[one.tensor.name], offsets[other.tensor.name]
    return a + nbytes(one.tensor) <= b or b + nbytes(other.tensor) <= a


def test_the_arena_is_much_smaller_than_all_values_together(program: Program) -> None:
    def nbytes(tensor: Tensor) -> int:
        return tensor.dtype.nbytes(math.prod(tensor.sizes({"tokens": 512, "rows": 1})))

    fused = fuse(program, ALL_KERNELS)
    memory = plan(fused, nbytes)
    assert memory.nbytes < sum(nbytes(life.tensor) for life in lifetimes(fused)) / 20


def test_weight_bytes_of_a_decode_step_are_those_of_the_checkpoint(program: Program) -> None:
    costs = cost(fuse(program, ALL_KERNELS), Load(tokens=1, sequences=1, context=512))
    parameters = sum(math.prod(tensor.sizes({})) for tensor in program.weights.values())
    assert parameters == 1_543_714_304  # the published count of Qwen2.5-1.5B
    # Of the embedding one row is looked up, but as the tied head it is read whole.
    assert sum(c.weight_bytes for c in costs) == 2 * parameters + 2 * 1536


def test_the_limit_of_qwen_1_5b_on_an_h200_is_what_its_bytes_say(program: Program) -> None:
    device = DEVICES["h200"]
    costs = cost(fuse(program, ALL_KERNELS), Load(tokens=1, sequences=1, context=512))
    seconds = sum(device.seconds(c.nbytes, c.flops) for c in costs)
    assert 1 / seconds == pytest.approx(1509, rel=0.01)  # 3.09 GB and 14 MB of cache at 4.68 TB/s


def test_what_steps_must_read_is_the_weights_and_the_cached_tokens(program: Program) -> None:
    traffic = Traffic.of(fuse(program, ALL_KERNELS), "NVIDIA H200", 4096)
    assert traffic.weight_bytes == 2 * (1_543_714_304 + 1536)
    assert traffic.token_bytes == pytest.approx(28 * 2 * 2 * 128 * 2, rel=1e-3)  # layers, k and v, heads, dim, bf16
    assert traffic.bytes_per_s == DEVICES["h200"].bytes_per_s
    assert Traffic.of(program, "cpu", 100).bytes_per_s is None


def test_flops_of_a_prompt_are_two_a_weight_and_token(program: Program) -> None:
    costs = cost(program, Load(tokens=1000, sequences=1, context=1000))
    linear = sum(c.flops for c in costs if c.kernel.startswith("linear") and c.out.name != "logits")
    layers = sum(
        math.prod(weight.sizes({}))
        for op in program.ops
        for tensor in [parts(op)[0]]
        for weight in reads(tensor)
        if weight.kind is Kind.WEIGHT and "proj.weight" in weight.name
    )
    assert linear == 2 * 1000 * layers
    attention = sum(c.flops for c in costs if c.kernel.startswith("attention"))
    assert attention == 28 * 4 * 1536 * (1000 * 1001 // 2)


def test_a_window_bounds_what_attention_reads() -> None:
    config = model_config(QWEN_1_5B | {"architectures": ["MistralForCausalLM"], "sliding_window": 100})
    window = cost(recorded(config), Load(tokens=4, sequences=4, context=3000))
    nbytes = next(c.nbytes for c in window if c.kernel.startswith("attention"))
    cached = 4 * 100 * 2 * 2 * 128 * 2  # sequences, window, k and v, kv heads, head_dim, bytes
    assert cached < nbytes < cached * 1.1


def test_a_cache_of_codes_has_a_scale_a_row_and_counts_both() -> None:
    config = model_config(QWEN_1_5B)
    plain, codes = recorded(config), recorded(config, E4M3)
    assert [str(tensor) for tensor in list(codes.caches.values())[:2]] == [
        "cache.0[2,blocks.0,2,block,128]:e4m3",
        "cache.0.scales[2,blocks.0,2,block]:f32",
    ]
    assert len(codes.caches) == 2 * len(plain.caches) == 2 * 28
    (group,) = codes.cache_groups
    assert group.token_bytes() == 28 * 2 * 2 * (128 + 4) == plain.cache_groups[0].token_bytes() * 132 // 256
    known = {"blocks.0": 3, "block": 16}
    assert sum(tensor_bytes(tensor, known) for tensor in codes.caches.values()) == 3 * 16 * group.token_bytes()


@pytest.mark.parametrize("kernels", [frozenset(), ALL_KERNELS], ids=["plain", "fused"])
def test_codes_move_half_the_bytes_of_the_cache(kernels: frozenset[str]) -> None:
    config = model_config(QWEN_1_5B)
    load = Load(tokens=8, sequences=8, context=2000)
    plain, codes = (
        Counter({c.kernel: c.nbytes for c in cost(fuse(recorded(config, kv_dtype), kernels), load)})
        for kv_dtype in (BF16, E4M3)
    )
    saved = plain - codes
    writes = next(kernel for kernel in saved if "rope_kv" in kernel)
    assert saved == {"attention_bf16": 8 * 2000 * 2 * 2 * (256 - 132), writes: 8 * 2 * 2 * (256 - 132)}


def test_weights_count_in_the_format_the_file_stores_them_in() -> None:
    config = model_config(QWEN_1_5B | {"num_hidden_layers": 1})
    names = recorded(config).weights
    recorder = Recorder(BF16, BF16, dict.fromkeys(names, Q8_0), weight_dtype=BF16)
    program = record_llama(recorder, config, tied=True, max_length=4096)
    plain, packed = (sum(c.weight_bytes for c in cost(p, Load(1, 1, 16))) for p in (recorded(config), program))
    assert packed == plain * 34 // 64

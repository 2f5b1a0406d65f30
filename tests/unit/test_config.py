"""Reading config.json: every spelling means the same, and what we do not do is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rvllm.errors import ConfigError
from rvllm.model.config import model_config
from rvllm.model.rope import RopeScaling
from rvllm.program.dtype import BF16, F16

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}


def test_absent_keys_mean_what_transformers_takes_them_for() -> None:
    config = model_config(LLAMA)
    assert (config.kv_heads, config.head_dim, config.rope_theta, config.tied) == (4, 16, 10000.0, False)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (False, False, False)
    assert config.windows == (None, None, None) and config.activation == "silu"


@pytest.mark.parametrize(
    "key", ["head_dim", "num_key_value_heads", "rope_scaling", "quantization_config", "sliding_window"]
)
def test_null_means_the_same_as_the_neutral_value(key: str) -> None:
    assert model_config(LLAMA | {key: None}) == model_config(LLAMA)


def test_dtype_and_torch_dtype_are_two_names_of_one_key() -> None:
    new = {key: value for key, value in LLAMA.items() if key != "torch_dtype"} | {"dtype": "float16"}
    assert model_config(new).dtype is F16 and model_config(LLAMA).dtype is BF16


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}},
    ],
)
def test_every_spelling_of_rope_scaling_means_the_same(scaling: dict[str, Any]) -> None:
    config = model_config(LLAMA | scaling)
    assert config.rope_scaling == RopeScaling("linear", 2.0) and config.rope_theta == 10000.0
    assert config.max_position == 512  # the context is stretched


def test_an_unknown_rope_scaling_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'foo' is not supported"):
        model_config(LLAMA | {"rope_scaling": {"type": "foo", "factor": 2.0}})


def test_a_rope_scaling_without_its_factor_is_refused() -> None:
    with pytest.raises(ConfigError, match="no factor"):
        model_config(LLAMA | {"rope_scaling": {"type": "linear"}})


@pytest.mark.parametrize("factor", ["2", True, 0, -1, 0.5, float("nan")])
def test_a_rope_factor_that_is_no_factor_is_refused(factor: object) -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling\.factor"):
        model_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": factor}})


def test_yarn_derives_its_attention_factor_unless_it_is_given() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    derived = model_config(LLAMA | {"rope_scaling": yarn}).rope_scaling
    assert derived.attention_factor == pytest.approx(1.2079441541679836)  # 0.1 ln 8 + 1
    given = model_config(LLAMA | {"rope_scaling": yarn | {"attention_factor": 0.5}}).rope_scaling
    assert given.attention_factor == 0.5
    equal = model_config(LLAMA | {"rope_scaling": yarn | {"mscale": 0.7, "mscale_all_dim": 0.7}}).rope_scaling
    assert equal.attention_factor == 1.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "awq"}),
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("num_local_experts", 8),
        ("hidden_act", "relu"),
        ("torch_dtype", "float8_e4m3fn"),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key.replace("torch_", "")):
        model_config(LLAMA | {key: value})


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None, "LlamaForCausalLM"])
def test_an_unknown_architecture_is_refused_with_those_we_know(names: object) -> None:
    with pytest.raises(ConfigError, match="supported are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"):
        model_config(LLAMA | {"architectures": names})


@pytest.mark.parametrize("value", [0, -4, 1.5, "4", True, [4]])
def test_a_size_that_is_no_size_is_refused_with_its_key(value: object) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads"):
        model_config(LLAMA | {"num_attention_heads": value})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ConfigError, match="no hidden_size"):
        model_config({key: value for key, value in LLAMA.items() if key != "hidden_size"})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of num_key_value_heads"):
        model_config(LLAMA | {"num_key_value_heads": 3})
    with pytest.raises(ConfigError, match="not a multiple of 5 heads"):
        model_config(LLAMA | {"num_attention_heads": 5})
    with pytest.raises(ConfigError, match="head_dim 15 is odd"):
        model_config(LLAMA | {"head_dim": 15})


def test_mistral_slides_in_every_layer_and_a_null_window_switches_it_off() -> None:
    assert model_config(MISTRAL | {"sliding_window": 16}).windows == (16, 16, 16)
    assert model_config(MISTRAL | {"sliding_window": None}).windows == (None, None, None)
    assert model_config(MISTRAL).windows == (4096, 4096, 4096)  # transformers' default


def test_qwen2_slides_only_when_told_and_only_in_its_upper_layers() -> None:
    window = {"sliding_window": 16, "max_window_layers": 1}
    assert model_config(QWEN | window).windows == (None, None, None)
    assert model_config(QWEN | window | {"use_sliding_window": True}).windows == (None, 16, 16)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert model_config(QWEN | window | {"use_sliding_window": True, "layer_types": kinds}).windows == (None, 16, None)


def test_qwen2_has_biases_on_q_k_v_alone() -> None:
    config = model_config(QWEN)
    assert (config.qkv_bias, config.out_bias) == (True, False)
    both = model_config(LLAMA | {"attention_bias": True})
    assert (both.qkv_bias, both.out_bias) == (True, True)


def test_eos_is_the_union_of_both_files() -> None:
    config = model_config(LLAMA | {"eos_token_id": [2, 3]}, {"eos_token_id": [3, 9]})
    assert config.eos_ids == {2, 3, 9}
    assert model_config(LLAMA | {"eos_token_id": 0}).eos_ids == {0}
    with pytest.raises(ConfigError, match="eos_token_id"):
        model_config(LLAMA | {"eos_token_id": "</s>"})

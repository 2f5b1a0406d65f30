"""What the reference set covers: one small checkpoint per variant of the three families. Data only; makes nothing.

Every config is in the spelling that published checkpoints use (transformers 4); `make.py` adds the newer one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint. `lengths` are the prompts' lengths in tokens; `shard_size` is a size as transformers spells it."""

    note: str
    config: Config
    tokenizer: str = "bytelevel"
    lengths: tuple[int, ...] = (1, 9, 40)
    shard_size: str | None = None
    messy: bool = False
    absent: tuple[str, ...] = field(default=())

    def published_config(self) -> dict[str, Any]:
        """config.json in the old spelling, without the keys that this checkpoint lacks."""
        return {key: value for key, value in self.config.items() if key not in self.absent}


def _config(base: Config, **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


_COMMON: Config = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "vocab_size": 288,
}
_LLAMA = _config(_COMMON, architectures=["LlamaForCausalLM"], model_type="llama")
_MISTRAL = _config(_COMMON, architectures=["MistralForCausalLM"], model_type="mistral", head_dim=None)
_QWEN2 = _config(
    _COMMON,
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    max_window_layers=2,
    sliding_window=16,
    use_sliding_window=False,
)
_LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}

CASES: Mapping[str, Case] = {
    "llama-mha": Case(
        "Llama 2: no grouped heads, no rope_theta (10000 is meant), SentencePiece-style tokenizer with a BOS",
        _config(_LLAMA, num_key_value_heads=4, pretraining_tp=1, rope_scaling=None, vocab_size=320),
        tokenizer="spm",
        absent=("rope_theta",),
    ),
    "llama-no-kv-key": Case(
        "Llama 1: num_key_value_heads absent (num_attention_heads is meant); float16 weights",
        _config(_LLAMA, torch_dtype="float16"),
        absent=("num_key_value_heads",),
    ),
    "llama-gqa-tied-llama3-rope": Case(
        "Llama 3.2: tied, head_dim 16 where hidden / heads is 8, llama3 rope, several EOS ids",
        _config(
            _LLAMA,
            head_dim=16,
            tie_word_embeddings=True,
            rope_theta=500000.0,
            max_position_embeddings=512,
            eos_token_id=[2, 0],
            attention_bias=False,
            mlp_bias=False,
            rope_scaling=_LLAMA3_ROPE,
        ),
    ),
    "llama-linear-rope-bias": Case(
        "linear rope in the old spelling 'type'; biases on q, k, v, o and in the MLP",
        _config(_LLAMA, attention_bias=True, mlp_bias=True, rope_scaling={"type": "linear", "factor": 4.0}),
    ),
    "llama-dynamic-rope": Case(
        "dynamic NTK: the base follows the length of each forward pass, keys already cached keep theirs; the prompt "
        "of 28 crosses the original length of 32 while decoding. greedy_recompute_i: without a cache",
        _config(
            _LLAMA,
            num_key_value_heads=1,
            max_position_embeddings=32,
            rope_scaling={"type": "dynamic", "factor": 2.0},
        ),
        lengths=(9, 28, 60),
    ),
    "llama-yarn": Case(
        "YaRN with every default; the longest prompt passes the original length",
        _config(_LLAMA, rope_scaling=_YARN),
        lengths=(1, 9, 60),
    ),
    "llama-yarn-attention-factor": Case(
        "YaRN with its attention factor and ramp given",
        _config(_LLAMA, rope_scaling={**_YARN, "attention_factor": 1.5, "beta_fast": 4.0, "beta_slow": 0.5}),
        lengths=(9, 40),
    ),
    "llama-yarn-mscale": Case(
        "YaRN whose attention factor is the ratio of mscale to mscale_all_dim; the ramp is not truncated",
        _config(_LLAMA, rope_scaling={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.25, "truncate": False}),
        lengths=(9, 40),
    ),
    "llama-messy-checkpoint": Case(
        "tensors to be ignored (inv_freq buffers, a layer beyond the last), lm_head given though tied, head_dim "
        "null, an integer rope_theta, keys of no meaning",
        _config(
            _LLAMA,
            tie_word_embeddings=True,
            head_dim=None,
            rope_theta=10000,
            rope_scaling=None,
            quantization_config=None,
            _name_or_path="somebody/finetune",
            auto_map={"AutoModelForCausalLM": "modeling_x.X"},
        ),
        messy=True,
    ),
    "llama-odd-sizes-sharded": Case(
        "sizes that no tile divides, vocabulary larger than the tokenizer's, float32, three layers in shards",
        _config(
            _LLAMA,
            hidden_size=36,
            head_dim=10,
            num_attention_heads=3,
            num_key_value_heads=1,
            intermediate_size=50,
            num_hidden_layers=3,
            vocab_size=293,
            torch_dtype="float32",
        ),
        shard_size="80KB",
    ),
    "mistral-sliding-window": Case(
        "Mistral 0.1: every layer sees the last 16 positions, the query's own included",
        _config(_MISTRAL, sliding_window=16, vocab_size=320),
        tokenizer="spm",
    ),
    "mistral-nemo": Case(
        "head_dim 16 times 4 heads exceeds the hidden size of 40, so q_proj is (64, 40) and o_proj (40, 64)",
        _config(_MISTRAL, hidden_size=40, head_dim=16, rope_theta=1000000.0, sliding_window=None),
    ),
    "qwen2-tied": Case(
        "biases on q, k, v and none on o; a sliding_window that is given and switched off",
        _config(_QWEN2, tie_word_embeddings=True),
    ),
    "qwen2-odd-heads": Case(
        "seven heads over one key-value head",
        _config(_QWEN2, hidden_size=42, head_dim=None, num_attention_heads=7, num_key_value_heads=1),
        absent=("head_dim",),
    ),
    "qwen2-upper-layers-slide": Case(
        "layers from max_window_layers upwards slide",
        _config(_QWEN2, num_hidden_layers=3, use_sliding_window=True, max_window_layers=1),
    ),
    "qwen2-yarn": Case(
        "YaRN in the old spelling 'type', as Qwen 2.5 asks for long inputs",
        _config(_QWEN2, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        lengths=(9, 60),
    ),
}

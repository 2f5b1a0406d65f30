"""Llama, Mistral and Qwen2: one decoder, told apart by flags. Records the program; knows no device and no file."""

from __future__ import annotations

import math

from rvllm.model.config import ModelConfig
from rvllm.model.rope import rope_table
from rvllm.program.dtype import F32
from rvllm.program.ops import Tensor
from rvllm.program.program import Program
from rvllm.program.recorder import Recorder


def record_llama(r: Recorder, config: ModelConfig, *, tied: bool, max_length: int) -> Program:
    """Record the whole model for contexts up to `max_length` tokens; `tied`: the output head is the embedding."""
    table = r.weight("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    rope = rope_table(config.rope_theta, config.head_dim, config.rope_scaling, max_length)
    angles = r.rope_angles("rope", rope.inv_freq, rope.threshold, rope.scale)
    x = r.embedding(table)
    for layer in range(config.layers):
        x = _attention_block(r, config, layer, x, angles)
        x = _mlp_block(r, config, layer, x)
    x = r.select_rows("last", x)
    x = r.norm("final_norm", x, r.weight("model.norm.weight", config.hidden_size), config.norm_epsilon)
    head = table if tied else r.weight("lm_head.weight", config.vocab_size, config.hidden_size)
    return r.finish(r.linear("logits", x, [head], dtype=F32))


def _attention_block(r: Recorder, config: ModelConfig, layer: int, x: Tensor, angles: Tensor) -> Tensor:
    name = f"model.layers.{layer}.self_attn"
    width, kv_width, hidden = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
        config.hidden_size,
    )
    rows = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
    window = config.windows[layer]
    cache, group = r.cache(layer, window=window, kv_heads=config.kv_heads, head_dim=config.head_dim)
    scale = 1 / math.sqrt(config.head_dim)

    norm_weight = r.weight(f"model.layers.{layer}.input_layernorm.weight", hidden)
    normed = r.norm(f"{layer}.attention_norm", x, norm_weight, config.norm_epsilon)
    weights = [r.weight(f"{name}.{part}.weight", count, hidden) for part, count in rows.items()]
    biases = [r.weight(f"{name}.{part}.bias", count) for part, count in rows.items()] if config.qkv_bias else []
    qkv = r.linear(f"{layer}.qkv", normed, weights, biases)
    q = r.rope_kv(f"{layer}.q", qkv, angles, cache, group, config.heads)
    mixed = r.attention(f"{layer}.attention", q, cache, group, heads=config.heads, scale=scale, window=window)
    out_bias = [r.weight(f"{name}.o_proj.bias", hidden)] if config.out_bias else []
    out = r.linear(f"{layer}.attention_out", mixed, [r.weight(f"{name}.o_proj.weight", hidden, width)], out_bias)
    return r.add(f"{layer}.attention_residual", x, out)


def _mlp_block(r: Recorder, config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    name = f"model.layers.{layer}.mlp"
    width, hidden = config.intermediate_size, config.hidden_size

    def bias(part: str, count: int) -> list[Tensor]:
        return [r.weight(f"{name}.{part}.bias", count)] if config.mlp_bias else []

    norm_weight = r.weight(f"model.layers.{layer}.post_attention_layernorm.weight", hidden)
    normed = r.norm(f"{layer}.mlp_norm", x, norm_weight, config.norm_epsilon)
    weights = [r.weight(f"{name}.{part}.weight", width, hidden) for part in ("gate_proj", "up_proj")]
    gate_up = r.linear(f"{layer}.gate_up", normed, weights, bias("gate_proj", width) + bias("up_proj", width))
    activated = r.act_mul(f"{layer}.act_mul", gate_up, config.activation)
    down = r.weight(f"{name}.down_proj.weight", hidden, width)
    out = r.linear(f"{layer}.mlp_out", activated, [down], bias("down_proj", hidden))
    return r.add(f"{layer}.mlp_residual", x, out)

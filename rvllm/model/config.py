"""config.json, in every spelling met in the field, to one frozen ModelConfig. Refuses by name what we do not do.

Knows Hugging Face's keys and defaults; not what a model does with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rvllm.errors import ConfigError
from rvllm.model.rope import RopeScaling
from rvllm.program.dtype import BF16, F16, F32, DType

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything a model function needs to know. Sizes are counts of elements, lengths of tokens."""

    architecture: str
    dtype: DType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    activation: str
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    rope_theta: float
    rope_scaling: RopeScaling
    windows: tuple[int | None, ...]  # of each layer; None sees everything
    max_position: int  # the context the model is made for, its rope scaling included
    eos_ids: frozenset[int]
    bos_id: int | None


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture's transformers class takes for granted when config.json is silent."""

    kv_heads: int | None  # None: as many as heads
    window: int | None
    max_position: int
    qkv_bias: bool | None  # None: config.json's attention_bias decides, for q, k, v and o alike


FAMILIES = {
    "LlamaForCausalLM": Family(None, None, 2048, None),
    "MistralForCausalLM": Family(8, 4096, 131072, False),
    "Qwen2ForCausalLM": Family(32, 4096, 32768, True),
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_DTYPES = {"float32": F32, "float16": F16, "bfloat16": BF16}
# Keys that change what the layers compute: each must be absent or have its neutral value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "qk_layernorm": (None, False),
    "use_qk_norm": (None, False),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "attention_sinks": (None, False),
    "alibi": (None, False),
    "is_encoder_decoder": (None, False),
}


def model_config(json: Json, generation: Json | None = None) -> ModelConfig:
    """Read config.json (old or new spelling) and, for its EOS ids, generation_config.json. Raises ConfigError."""
    reader = _Reader(json)
    architecture = reader.architecture()
    family = FAMILIES[architecture]
    reader.refuse_what_we_do_not_do()
    heads = reader.number("num_attention_heads")
    hidden = reader.number("hidden_size")
    layers = reader.number("num_hidden_layers")
    head_dim = reader.number("head_dim", 0) or reader.divided(hidden, heads)
    kv_heads = reader.number(
        "num_key_value_heads", heads if _is_null(json, "num_key_value_heads") else family.kv_heads or heads
    )
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    theta, scaling, max_position = reader.rope(family.max_position)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd: its dimensions cannot be rotated in pairs")
    attention_bias = reader.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        dtype=reader.dtype(),
        vocab_size=reader.number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.number("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_epsilon=reader.real("rms_norm_eps", 1e-6),
        activation=reader.activation(),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=reader.flag("mlp_bias"),
        tied=reader.flag("tie_word_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        windows=reader.windows(architecture, family, layers),
        max_position=max_position,
        eos_ids=_ids(json, "eos_token_id") | _ids(generation or {}, "eos_token_id"),
        bos_id=next(iter(_ids(json, "bos_token_id")), None),
    )


def _is_null(json: Json, key: str) -> bool:
    return key in json and json[key] is None


def _ids(json: Json, key: str) -> frozenset[int]:
    """An id or a list of ids; absent and null mean none."""
    value = json.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in found):
        raise ConfigError(f"{key} must be a token id or a list of them, not {value!r}")
    return frozenset(found)


class _Reader:
    """Typed access to config.json, with errors that name the key."""

    def __init__(self, json: Json) -> None:
        self._json = json

    def architecture(self) -> str:
        names = self._json.get("architectures")
        if isinstance(names, list) and names and names[0] in FAMILIES:
            return str(names[0])
        named = names[0] if isinstance(names, list) and names else self._json.get("model_type", "none")
        known = ", ".join(FAMILIES)
        raise ConfigError(f"the model's architecture is {named}, which is not supported", hint=f"supported are {known}")

    def number(self, key: str, default: int | None = None) -> int:
        value = self._json.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"config.json has no {key}")
            return default
        if type(value) is not int or value <= 0:
            raise ConfigError(f"config.json: {key} must be a positive whole number, not {value!r}")
        return value

    def real(self, key: str, default: float) -> float:
        value = self._json.get(key)
        return default if value is None else _real(key, value)

    def flag(self, key: str) -> bool:
        value = self._json.get(key)
        if value is not None and type(value) is not bool:
            raise ConfigError(f"config.json: {key} must be true or false, not {value!r}")
        return bool(value)

    def divided(self, hidden: int, heads: int) -> int:
        if hidden % heads:
            raise ConfigError(
                f"config.json has no head_dim, and hidden_size {hidden} is not a multiple of {heads} heads"
            )
        return hidden // heads

    def dtype(self) -> DType:
        name = self._json.get("dtype") or self._json.get("torch_dtype") or "float16"
        if name not in _DTYPES:
            raise ConfigError(
                f"config.json: dtype {name!r} is not supported", hint=f"supported are {', '.join(_DTYPES)}"
            )
        return _DTYPES[name]

    def activation(self) -> str:
        name = self._json.get("hidden_act", "silu")
        if name not in _ACTIVATIONS:
            raise ConfigError(
                f"config.json: hidden_act {name!r} is not supported",
                hint=f"supported are {', '.join(_ACTIVATIONS)}",
            )
        return _ACTIVATIONS[name]

    def refuse_what_we_do_not_do(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self._json.get(key)
            if not any(value is fine or (value == fine and type(value) is type(fine)) for fine in neutral):
                shown = value.get("quant_method", value) if isinstance(value, dict) else value
                raise ConfigError(f"config.json: {key} = {shown!r} is not supported for this architecture")

    def rope(self, default_position: int) -> tuple[float, RopeScaling, int]:
        """(theta, scaling, context length). New `rope_parameters`, or old `rope_theta` with `rope_scaling`."""
        given = self._json.get("rope_parameters") or self._json.get("rope_scaling") or {}
        if not isinstance(given, dict):
            raise ConfigError(f"config.json: rope_scaling must be an object, not {given!r}")
        theta = _real("rope_theta", given.get("rope_theta", self._json.get("rope_theta") or 10000.0))
        position = self.number("max_position_embeddings", default_position)
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _ROPE_KINDS:
            raise ConfigError(
                f"config.json: rope scaling {kind!r} is not supported",
                hint=f"supported are {', '.join(_ROPE_KINDS)}",
            )
        partial = given.get("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise ConfigError(
                f"config.json: partial_rotary_factor = {partial!r} is not supported for this architecture"
            )
        trained = (
            self._json.get("original_max_position_embeddings")
            or given.get("original_max_position_embeddings")
            or position
        )
        scaling = _ROPE_KINDS[kind](given, int(_real("original_max_position_embeddings", trained)))
        factors = tuple(float(factor) for factor in self._json.get("rope_factors", ()))
        if factors:
            scaling = RopeScaling(kind="default", frequency_factors=factors)
        return theta, scaling, _context(position, scaling)

    def windows(self, architecture: str, family: Family, layers: int) -> tuple[int | None, ...]:
        """Each layer's sliding window: an explicit `layer_types` list, else the family's rule."""
        if architecture == "LlamaForCausalLM":
            return (None,) * layers
        window = self._json.get("sliding_window", family.window)
        if window is not None and (type(window) is not int or window <= 0):
            raise ConfigError(f"config.json: sliding_window must be a positive whole number or null, not {window!r}")
        if architecture == "Qwen2ForCausalLM" and not self.flag("use_sliding_window"):
            return (None,) * layers
        kinds = self._json.get("layer_types")
        if kinds is None:
            first = self._json.get("max_window_layers", 28) if architecture == "Qwen2ForCausalLM" else 0
            return tuple(window if layer >= first else None for layer in range(layers))
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) < layers:
            raise ConfigError(
                f"config.json: layer_types of {len(kinds)} entries, unknown {sorted(unknown)}, for {layers} layers"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def _real(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def _context(position: int, scaling: RopeScaling) -> int:
    """vLLM's rule: these scalings stretch the trained length; llama3's max_position_embeddings is stretched already."""
    if scaling.kind == "yarn":
        return max(position, int(scaling.original_length * scaling.factor))
    if scaling.kind in ("linear", "dynamic"):
        return int(position * scaling.factor)
    return position


def _default_rope(given: Json, trained: int) -> RopeScaling:
    return RopeScaling()


def _linear_rope(given: Json, trained: int) -> RopeScaling:
    return RopeScaling("linear", _factor(given))


def _dynamic_rope(given: Json, trained: int) -> RopeScaling:
    return RopeScaling("dynamic", _factor(given), original_length=trained)


def _llama3_rope(given: Json, trained: int) -> RopeScaling:
    low = _real("rope_scaling.low_freq_factor", given.get("low_freq_factor"))
    high = _real("rope_scaling.high_freq_factor", given.get("high_freq_factor"))
    if high <= low:
        raise ConfigError(f"config.json: rope_scaling.high_freq_factor {high} must exceed low_freq_factor {low}")
    return RopeScaling("llama3", _factor(given), original_length=trained, low_freq_factor=low, high_freq_factor=high)


def _yarn_rope(given: Json, trained: int) -> RopeScaling:
    factor = _factor(given)
    return RopeScaling(
        "yarn",
        factor,
        original_length=trained,
        beta_fast=_real("rope_scaling.beta_fast", given.get("beta_fast") or 32),
        beta_slow=_real("rope_scaling.beta_slow", given.get("beta_slow") or 1),
        attention_factor=_yarn_attention_factor(given, factor),
        truncate=bool(given.get("truncate", True)),
    )


def _yarn_attention_factor(given: Json, factor: float) -> float:
    """What multiplies cos and sin: as given, or 0.1 ln(factor) + 1, or the ratio of two such given both mscales."""
    if given.get("attention_factor") is not None:
        return _real("rope_scaling.attention_factor", given["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
    return mscale(1.0)


def _factor(given: Json) -> float:
    if given.get("factor") is None:
        raise ConfigError("config.json: rope_scaling has no factor")
    factor = _real("rope_scaling.factor", given["factor"])
    if factor < 1:
        raise ConfigError(f"config.json: rope_scaling.factor must be at least 1, not {factor}")
    return factor


_ROPE_KINDS = {
    "default": _default_rope,
    "linear": _linear_rope,
    "dynamic": _dynamic_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
}

"""What a GGUF file's names and keys are in Hugging Face's terms, for the llama and qwen2 families.

Knows how llama.cpp's converter renames tensors, permutes rows and spells sizes; not the bytes of the container.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from rvllm.errors import CheckpointError, ConfigError
from rvllm.model.checkpoint import FileCheckpoint, TensorInfo, no_reasons
from rvllm.model.gguf import GgufFile
from rvllm.program.dtype import BF16, F32

# GGUF's stems to Hugging Face's.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# "llama" is also what Mistral's files say: without a sliding window the two are one decoder.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def open_gguf(path: Path) -> FileCheckpoint:
    """The tensors of a llama- or qwen2-family GGUF file under Hugging Face's names.

    Raises CheckpointError for a broken file, one part of a split file, an unsupported tensor type, or a tensor
    that these families do not have; ConfigError for another architecture.
    """
    file = GgufFile.open(path)
    name, keys = _family(file.metadata)
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {file.metadata['split.count']} parts of a split GGUF file",
            hint="join them with `llama-gguf-split --merge FIRST_PART OUTPUT`",
        )
    tensors = {}
    for info in file.tensors.values():
        if info.name != _ROPE_FACTORS:  # frequencies, not a weight: hf_config gives them out
            renamed = replace(info, name=_hf_name(path, info.name))
            if name == "llama":
                renamed = replace(renamed, rotary_heads=_rotary_heads(info, keys))
            tensors[renamed.name] = renamed
    return FileCheckpoint(str(path), tensors, no_reasons(), {path: file.data})


def hf_config(metadata: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
    """config.json's object, in Hugging Face's spelling, that says what a GGUF file's metadata says.

    `metadata` and `tensors` are GgufFile's. Llama 3's frequency divisors, a tensor in GGUF, are given as the list
    `rope_factors`, one for each rotary pair. Raises ConfigError: other architectures, missing keys, and keys
    of the architecture that change the computation in a way that we do not know.
    """
    name, keys = _family(metadata)
    heads = keys.number("attention.head_count")
    hidden = keys.number("embedding_length")
    head_dim = keys.number("attention.key_length", hidden // max(heads, 1))
    if keys.number("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"GGUF: {name}.attention.value_length differs from the key length {head_dim}")
    if "token_embd.weight" not in tensors:
        raise ConfigError("GGUF: the file has no tensor token_embd.weight")
    vocab_size = tensors["token_embd.weight"].shape[0]
    config: dict[str, object] = {
        "architectures": [_ARCHITECTURES[name]],
        "model_type": name,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": keys.number("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in tensors,
        **_token_ids(metadata),
    }
    if (rotary := keys.number("rope.dimension_count", head_dim)) != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if name == "llama" and "blk.0.attn_q.bias" in tensors:
        config["attention_bias"] = True
    if "blk.0.ffn_gate.bias" in tensors:
        config["mlp_bias"] = True
    if any(info.dtype is BF16 for info in tensors.values()):
        config["torch_dtype"] = "bfloat16"
    if factors := tensors.get(_ROPE_FACTORS):
        config["rope_factors"] = _rope_factors(factors, rotary // 2)
    keys.refuse_unknown()
    return config


def _hf_name(path: Path, name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if leaf in ("weight", "bias"):
        if stem in _TOP:
            return f"{_TOP[stem]}.{leaf}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem, re.ASCII)
        if match and match[2] in _IN_LAYER:
            return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{leaf}"
    raise CheckpointError(f"{path}: tensor {name} is none that the llama and qwen2 families have")


def _rotary_heads(info: TensorInfo, keys: _Keys) -> int:
    """For how many heads the converter permuted this tensor's rows: those of the query and key projections."""
    projection = info.name.split(".")[-2]
    if projection not in ("attn_q", "attn_k"):
        return 0
    heads = keys.number("attention.head_count")
    if projection == "attn_k":
        heads = keys.number("attention.head_count_kv", heads)
    if heads == 0 or info.shape[0] % (2 * heads):
        raise CheckpointError(f"{info.file}: tensor {info.name} has {info.shape[0]} rows, no pairs for {heads} heads")
    return heads


class _Keys:
    """The metadata keys of one architecture, without its prefix; remembers which were asked for."""

    # Said in other ways too, or of no effect on the computation.
    _HARMLESS = frozenset(
        (
            "vocab_size",
            "rope.scaling.finetuned",
            "attention.causal",
            "tensor_data_layout",
            "expert_weights_scale",
        )
    )

    def __init__(self, name: str, metadata: Mapping[str, object]) -> None:
        self._name = name
        self._values = {key[len(name) + 1 :]: value for key, value in metadata.items() if key.startswith(name + ".")}
        self._asked: set[str] = set()

    def get(self, key: str) -> object:
        self._asked.add(key)
        return self._values.get(key)

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one number for each layer, all the same
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 0:
            raise ConfigError(f"GGUF: {self._name}.{key} must be a whole number, it is {_shown(value)}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float):
            raise ConfigError(f"GGUF: {self._name}.{key} must be a number, it is {_shown(value)}")
        assert isinstance(value, (int, float))
        # GGUF stores float32: its shortest decimal is the 1e-05 that config.json had.
        return float(str(np.float32(value)))

    def refuse_unknown(self) -> None:
        """Raise ConfigError for a set key that nobody asked for: what it changes would be ignored."""
        for key, value in self._values.items():
            if value and key not in self._asked and key not in self._HARMLESS:
                raise ConfigError(f"GGUF: {self._name}.{key} = {_shown(value)} is not supported")


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:80]


def _family(metadata: Mapping[str, object]) -> tuple[str, _Keys]:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ConfigError(
            f"GGUF: general.architecture is {_shown(name)}, which is not supported",
            hint=f"supported are {', '.join(_ARCHITECTURES)}",
        )
    return name, _Keys(name, metadata)


def _rope_scaling(keys: _Keys) -> dict[str, object] | None:
    kind = keys.get("rope.scaling.type")
    if kind is None and keys.get("rope.scale_linear") is not None:  # how the first files said it
        kind, factor = "linear", keys.real("rope.scale_linear")
    elif kind in (None, "none"):
        return None
    else:
        factor = keys.real("rope.scaling.factor")
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"GGUF: rope.scaling.type {kind!r} is not supported", hint="supported are linear and yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = keys.number("rope.scaling.original_context_length", keys.number("context_length"))
        scaling["original_max_position_embeddings"] = original
    return scaling


def _token_ids(metadata: Mapping[str, object]) -> dict[str, object]:
    """bos_token_id and eos_token_id where given; the end of a turn (eot) also ends generation."""
    found: dict[str, object] = {}
    if isinstance(bos := metadata.get("tokenizer.ggml.bos_token_id"), int):
        found["bos_token_id"] = bos
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ends = dict.fromkeys(value for key in keys if isinstance(value := metadata.get(key), int))
    if ends:
        found["eos_token_id"] = list(ends) if len(ends) > 1 else next(iter(ends))
    return found


def _rope_factors(info: TensorInfo, pairs: int) -> list[float]:
    """The frequency divisors, read from the file: a few hundred bytes."""
    if info.shape != (pairs,) or info.dtype is not F32 or info.file is None:
        raise ConfigError(
            f"GGUF: tensor {info.name} has shape {list(info.shape)} and dtype {info.dtype}, not [{pairs}] and f32"
        )
    factors: list[float] = np.fromfile(info.file, "<f4", pairs, offset=info.offset).tolist()
    return factors

"""A model as far as it can be known without reading a weight: configuration, tensor list, program. Knows no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rvllm.config import KV_CACHE_DTYPES, REFUSED_KV_CACHE_DTYPES
from rvllm.errors import ConfigError, StartError
from rvllm.model.checkpoint import Checkpoint, check, head_is_tied, open_checkpoint
from rvllm.model.config import ModelConfig, model_config
from rvllm.model.dummy import DummyCheckpoint
from rvllm.model.files import ModelFiles, read_json
from rvllm.model.gguf import GgufFile
from rvllm.model.gguf_model import hf_config
from rvllm.model.llama import record_llama
from rvllm.program.dtype import BF16, E4M3, F16, F32, FLOATS, DType
from rvllm.program.program import Program
from rvllm.program.recorder import Recorder

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Source:
    """An opened model. `checkpoint` is None for dummy weights, which are made once a program says what it wants."""

    files: ModelFiles
    config: ModelConfig
    generation: Mapping[str, Any]  # generation_config.json, empty when there is none
    checkpoint: Checkpoint | None
    tied: bool


def open_source(files: ModelFiles, *, load_format: str = "auto", warn: Warn) -> Source:
    """Read the configuration and the weight files' headers, and check them. Raises ConfigError, CheckpointError.

    load_format: "auto" | "safetensors" | "gguf" | "dummy"; with "dummy" no weight file need be there.
    """
    found = "gguf" if files.is_gguf else "safetensors"
    if load_format not in ("auto", "dummy", found):
        raise ConfigError(f"--load-format is {load_format}, but {files.root} is {found}", hint="leave it out")
    if files.is_gguf:
        gguf = GgufFile.open(files.root)
        json, generation = hf_config(gguf.metadata, gguf.tensors), {}
    else:
        json = read_json(files.root / "config.json")
        generation = _optional_json(files.root / "generation_config.json")
    config = model_config(json, generation)
    if load_format == "dummy":
        return Source(files, config, generation, None, config.tied)
    checkpoint = open_checkpoint(files)
    return Source(files, config, generation, checkpoint, head_is_tied(checkpoint, config.tied, warn))


def _optional_json(path: Path) -> dict[str, object]:
    return read_json(path) if path.exists() or path.is_symlink() else {}


def record(source: Source, *, dtype: DType, kv_dtype: DType, max_length: int) -> Program:
    """The model's program; activations in `dtype`, weights in the formats their file has, checked to be all there."""
    stored = source.checkpoint.tensors if source.checkpoint else {}
    formats = {name: info.dtype for name, info in stored.items()}
    recorder = Recorder(dtype, kv_dtype, formats, weight_dtype=source.config.dtype)
    program = record_llama(recorder, source.config, tied=source.tied, max_length=max_length)
    if source.checkpoint:
        check(source.checkpoint, {name: tensor.sizes({}) for name, tensor in program.weights.items()})
    return program


def cache_dtype(asked: str, activations: DType) -> DType:
    """The key/value cache's format for EngineConfig's name of it. Raises StartError.

    Kernels have 16-bit caches in the activations' own format only; with float32, that is on a CPU, all are there.
    """
    if asked == "auto":
        return activations
    if asked not in KV_CACHE_DTYPES:
        why = REFUSED_KV_CACHE_DTYPES.get(asked, "it is not known")
        raise StartError(f"--kv-cache-dtype {asked}: {why}", hint=f"use one of {', '.join(KV_CACHE_DTYPES)}")
    found = {"bfloat16": BF16, "float16": F16}.get(asked, E4M3)
    if found not in (E4M3, activations) and activations is not F32:
        raise StartError(
            f"--kv-cache-dtype {asked} does not go with activations in {activations}: a 16-bit cache has their format",
            hint="leave it out, or use fp8",
        )
    return found


def weights_for(source: Source, program: Program) -> Checkpoint:
    """The source's own weights, or dummy ones of the shapes that the program wants."""
    if source.checkpoint:
        return source.checkpoint
    assert source.config.dtype in FLOATS, source.config
    return DummyCheckpoint({name: tensor.sizes({}) for name, tensor in program.weights.items()}, source.config.dtype)


def context_length(config: ModelConfig, asked: int | None) -> int:
    """The context to plan for: `asked`, which must not exceed what the model is made for, or all of it."""
    if asked is not None and asked > config.max_position:
        raise ConfigError(
            f"--max-model-len {asked:,} is more than the model's context of {config.max_position:,} tokens",
            hint="lower it, or give the model's config.json the rope_scaling that stretches it",
        )
    return asked or config.max_position

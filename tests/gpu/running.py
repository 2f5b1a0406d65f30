"""What the whole-model tests share: models on both backends, and how far roundings take logits. Asserts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rvllm import LLM
from rvllm.backend.cpu import CpuModel
from rvllm.backend.cuda.kernels import Device
from rvllm.backend.cuda.lower import FUSIONS
from rvllm.backend.cuda.model import CudaModel, StepLimits
from rvllm.engine.block_pool import blocks_for
from rvllm.engine.request import Request, Sequence
from rvllm.engine.scheduler import Chunk
from rvllm.engine.step import build_step
from rvllm.model.files import ModelFiles
from rvllm.model.source import Source, open_source, record, weights_for
from rvllm.program.dtype import DType, Float32
from rvllm.program.fuse import fuse
from rvllm.program.program import Program
from rvllm.sampling.params import SamplingParams

REFERENCE = Path(__file__).parents[1] / "reference"
CASES = sorted(folder.name for folder in REFERENCE.iterdir() if (folder / "reference.npz").exists())
BOTH = ["shim", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK, PLACES = 16, 8

MARGIN = 4.0
"""Two ways of rounding the same sums are each about as far from float32 as the other, so up to twice that apart; and
of two tokens' logits one may move up and the other down."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A device with its name, "shim" | "cuda", or "cpu" without one, and the Python API on it."""

    name: str
    device: Device

    def llm(self, folder: Path, **settings: Any) -> LLM:
        """A model with small steps, so that prompts are read in pieces."""
        sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "prefill_chunk": 32, "kv_cache_memory_bytes": 4 << 20}
        device = "cpu" if self.name == "cpu" else "cuda"
        return LLM(str(folder), device=device, warn=lambda message: None, **(sizes | settings))


def on_devices(cases: list[str], on_host: list[str]) -> list[Any]:
    """(backend, case) pairs: all cases on a GPU, some on the host, where kernels take seconds."""
    gpu = [pytest.param("cuda", case, marks=pytest.mark.gpu) for case in cases]
    return [*(("shim", case) for case in on_host), *gpu]


def opened(path: Path) -> Source:
    """A folder or a GGUF file, opened."""
    return open_source(ModelFiles(path.name, path), warn=lambda message: None)


def prompts(case: str) -> list[list[int]]:
    with np.load(REFERENCE / case / "reference.npz") as stored:
        return [stored[name].tolist() for name in sorted(stored) if name.startswith("prompt_")]


def cuda_model(
    source: Source,
    dtype: DType,
    device: Device,
    length: int = 64,
    *,
    eager: bool = False,
    places: int = PLACES,
    kv_dtype: DType | None = None,
    tokens: int = 128,
    batch_invariant: bool = False,
    guessed_length: int = 0,
) -> CudaModel:
    program = fuse(record(source, dtype=dtype, kv_dtype=kv_dtype or dtype, max_length=length), FUSIONS)
    return CudaModel(
        program,
        weights_for(source, program),
        device,
        limits=StepLimits(tokens, places, blocks_for(length, BLOCK)),
        blocks=(places * blocks_for(length, BLOCK),) * len(program.cache_groups),
        block_size=BLOCK,
        vocab_limit=source.config.vocab_size,
        eager=eager,
        batch_invariant=batch_invariant,
        guessed_length=guessed_length,
    )


def cpu_model(
    source: Source,
    dtype: DType,
    length: int = 64,
    kv_dtype: DType | None = None,
    *,
    places: int = PLACES,
    batch_invariant: bool = False,
) -> CpuModel:
    program = record(source, dtype=dtype, kv_dtype=kv_dtype or dtype, max_length=length)
    blocks = (places * blocks_for(length, BLOCK),) * len(program.cache_groups)
    weights = weights_for(source, program)
    return CpuModel(program, weights, blocks=blocks, block_size=BLOCK, batch_invariant=batch_invariant)


def sequence(
    program: Program, prompt: list[int], place: int = 0, length: int = 64, *, places: int = PLACES
) -> Sequence:
    """Its blocks lie scattered in the pool, apart from those of other places."""
    numbers = [places * page + place for page in reversed(range(blocks_for(length, BLOCK)))]
    request = Request(str(place), tuple(prompt), SamplingParams(), 0)
    return Sequence(request, length, numbers, list(prompt))


def forward(model: CudaModel | CpuModel, *rows: Sequence) -> Float32:
    """Logits after everything that the rows have pending, one row each."""
    chunks = sorted((Chunk(row, row.pending) for row in rows), key=lambda chunk: chunk.tokens > 1)
    logits = model.forward(build_step(chunks, BLOCK, len(model.program.cache_groups)))
    for chunk in chunks:
        chunk.sequence.computed += chunk.tokens
    return logits


def cpu_logits(
    source: Source, dtype: DType, prompt: list[int], output: list[int], length: int, kv_dtype: DType | None = None
) -> Float32:
    """(len(output), vocab): the logits from which each token of `output` was to be drawn, given those before it."""
    model = cpu_model(source, dtype, length, kv_dtype)
    row = sequence(model.program, prompt, length=length)
    found = []
    for token in output:
        found.append(forward(model, row)[0])
        row.token_ids.append(token)
    return np.stack(found)

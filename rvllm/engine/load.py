"""From an opened model to a running engine: choose the device and the sizes, load, connect. Knows no text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rvllm.backend.cpu import CpuModel
from rvllm.config import CPU_CACHE_BYTES, EngineConfig
from rvllm.engine.block_pool import blocks_for, pool_blocks
from rvllm.engine.device import choose_device
from rvllm.engine.engine import Engine, Limits, Model
from rvllm.errors import StartError
from rvllm.model.source import Source, cache_dtype, context_length, record, weights_for
from rvllm.program.dtype import BF16, F16, F32, DType
from rvllm.program.fuse import ALL_KERNELS, fuse
from rvllm.program.program import Program

if TYPE_CHECKING:
    from rvllm.backend.cuda.model import StepLimits

Progress = Callable[[str, int, int], None]
Warn = Callable[[str], None]

RUNTIME_BYTES = 600 << 20
"""A CUDA context with its kernels and graphs: an estimate."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Blocks of every cache group, and the longest sequence they are meant for."""

    blocks: int
    max_model_len: int


def load_engine(
    source: Source,
    config: EngineConfig,
    *,
    vocab_limit: int,
    eos_ids: frozenset[int],
    progress: Progress | None,
    warn: Warn,
) -> Engine:
    """Load the model's weights and make an engine. Raises StartError when device, memory or files do not allow it."""
    vocab_limit = min(vocab_limit, source.config.vocab_size)
    make = _on_cpu if choose_device(config.device, warn) == "cpu" else _on_gpu
    model, size = make(source, config, vocab_limit, progress, warn)
    limits = Limits(
        max_model_len=size.max_model_len,
        block_size=config.block_size,
        blocks=size.blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk=config.prefill_chunk,
        eos_ids=eos_ids | source.config.eos_ids,
        vocab_limit=vocab_limit,
    )
    return Engine(model, limits)


def _on_cpu(
    source: Source, config: EngineConfig, vocab_limit: int, progress: Progress | None, warn: Warn
) -> tuple[Model, CacheSize]:
    if config.dtype not in ("auto", "float32", "float"):
        raise StartError(
            f"--dtype {config.dtype} is not available on the CPU, which computes in float32", hint="leave it out"
        )
    length, kv_dtype = context_length(source.config, config.max_model_len), cache_dtype(config.kv_cache_dtype, F32)
    program = fuse(record(source, dtype=F32, kv_dtype=kv_dtype, max_length=length), ALL_KERNELS)
    memory = CPU_CACHE_BYTES if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
    size = cache_size(program, source.config.max_position, config, memory, warn)
    model = CpuModel(
        program,
        weights_for(source, program),
        blocks=(size.blocks,) * len(program.cache_groups),
        block_size=config.block_size,
        vocab_limit=vocab_limit,
        progress=progress,
    )
    return model, size


def _on_gpu(
    source: Source, config: EngineConfig, vocab_limit: int, progress: Progress | None, warn: Warn
) -> tuple[Model, CacheSize]:
    from rvllm.backend.cuda.kernels import Gpu
    from rvllm.backend.cuda.lower import FUSIONS
    from rvllm.backend.cuda.model import CudaModel, memory_bytes

    dtype = gpu_dtype(config.dtype, source.config.dtype)
    length = context_length(source.config, config.max_model_len)
    kv_dtype = cache_dtype(config.kv_cache_dtype, dtype)
    program = fuse(record(source, dtype=dtype, kv_dtype=kv_dtype, max_length=length), FUSIONS)
    gpu = Gpu(0, warn)
    limits = step_limits(config, length)
    memory = config.kv_cache_memory_bytes
    if memory is None:
        used = gpu.gpu.total_bytes - gpu.free_bytes()
        memory = int(gpu.gpu.total_bytes * config.gpu_memory_utilization) - used
        memory -= memory_bytes(program, limits) + RUNTIME_BYTES
    size = cache_size(program, source.config.max_position, config, max(memory, 0), warn)
    model = CudaModel(
        program,
        weights_for(source, program),
        gpu,
        limits=replace(limits, max_blocks=blocks_for(size.max_model_len, config.block_size)),
        blocks=(size.blocks,) * len(program.cache_groups),
        block_size=config.block_size,
        vocab_limit=vocab_limit,
        eager=config.enforce_eager,
        progress=progress,
    )
    model.prepare()
    return model, size


def step_limits(config: EngineConfig, length: int) -> StepLimits:
    """The largest step on a GPU with sequences of up to `length` tokens: the scheduler may go beyond its budget by a
    chunk."""
    from rvllm.backend.cuda.model import StepLimits

    tokens = config.max_num_batched_tokens + config.max_num_seqs + config.prefill_chunk
    return StepLimits(tokens, config.max_num_seqs, blocks_for(length, config.block_size))


def gpu_dtype(asked: str, stored: DType) -> DType:
    """The activations' dtype on a GPU: the checkpoint's own, but float16 for one in float32. Raises StartError."""
    if asked == "auto":
        return F16 if stored is F32 else stored
    if asked in ("float32", "float"):
        raise StartError("--dtype float32 is not available on a GPU", hint="use bfloat16 or float16, or --device cpu")
    return BF16 if asked == "bfloat16" else F16


def cache_size(program: Program, max_position: int, config: EngineConfig, memory_bytes: int, warn: Warn) -> CacheSize:
    """As many blocks as all sequences at full length need, or as `memory_bytes` hold.

    Where not even one fits, the context is shortened with a warning, or refused if it was asked for by number.
    """
    asked = config.max_model_len
    wanted = asked or max_position
    room = pool_blocks(program.cache_groups, config.block_size, memory_bytes)
    one = blocks_for(wanted, config.block_size)
    if room >= one:
        return CacheSize(min(room, one * config.max_num_seqs), wanted)
    fits = room * config.block_size
    memory = f"{memory_bytes:,} bytes of key/value cache hold {fits:,} tokens"
    if asked is not None or not fits:
        raise StartError(
            f"--max-model-len {wanted:,} does not fit: {memory}",
            hint=f"set --max-model-len to at most {fits:,}, or raise --kv-cache-memory-bytes",
        )
    warn(f"the context is shortened from {wanted:,} to {fits:,} tokens: {memory}")
    return CacheSize(room, fits)

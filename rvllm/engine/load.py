"""From an opened model to a running engine: choose the device and the sizes, load, connect. Knows no text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rvllm.backend.cpu import CpuModel
from rvllm.config import EngineConfig
from rvllm.engine.block_pool import blocks_for, pool_blocks
from rvllm.engine.device import choose_device
from rvllm.engine.engine import Engine, Limits
from rvllm.errors import StartError
from rvllm.model.source import Source, context_length, record, weights_for
from rvllm.program.dtype import F32
from rvllm.program.fuse import ALL_KERNELS, fuse
from rvllm.program.program import Program

Progress = Callable[[str, int, int], None]
Warn = Callable[[str], None]


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
    device = choose_device(config.device, warn)
    assert device == "cpu", device
    if config.dtype not in ("auto", "float32", "float"):
        raise StartError(
            f"--dtype {config.dtype} is not available on the CPU, which computes in float32", hint="leave it out"
        )
    program = record(source, dtype=F32, kv_dtype=F32, max_length=context_length(source.config, config.max_model_len))
    program = fuse(program, ALL_KERNELS)
    size = cache_size(program, source.config.max_position, config, warn)
    model = CpuModel(
        program,
        weights_for(source, program),
        blocks=(size.blocks,) * len(program.cache_groups),
        block_size=config.block_size,
        progress=progress,
    )
    limits = Limits(
        max_model_len=size.max_model_len,
        block_size=config.block_size,
        blocks=size.blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk=config.prefill_chunk,
        vocab_limit=min(vocab_limit, source.config.vocab_size),
        eos_ids=eos_ids | source.config.eos_ids,
    )
    return Engine(model, limits)


def cache_size(program: Program, max_position: int, config: EngineConfig, warn: Warn) -> CacheSize:
    """As many blocks as all sequences at full length need, or as the memory holds.

    Where not even one fits, the context is shortened with a warning, or refused if it was asked for by number.
    """
    asked = config.max_model_len
    wanted = asked or max_position
    room = pool_blocks(program.cache_groups, config.block_size, config.kv_cache_memory_bytes)
    one = blocks_for(wanted, config.block_size)
    if room >= one:
        return CacheSize(min(room, one * config.max_num_seqs), wanted)
    fits = room * config.block_size
    memory = f"{config.kv_cache_memory_bytes:,} bytes of key/value cache hold {fits:,} tokens"
    if asked is not None or not fits:
        raise StartError(
            f"--max-model-len {wanted:,} does not fit: {memory}",
            hint=f"set --max-model-len to at most {fits:,}, or raise --kv-cache-memory-bytes",
        )
    warn(f"the context is shortened from {wanted:,} to {fits:,} tokens: {memory}")
    return CacheSize(room, fits)

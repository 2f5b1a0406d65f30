"""From an opened model to a running engine: choose the device and the sizes, load, connect. Knows no text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rvllm.backend.cpu import CpuModel
from rvllm.config import BLOCK_SIZES, CPU_CACHE_BYTES, POLICIES, EngineConfig
from rvllm.engine.block_pool import block_bytes, blocks_for
from rvllm.engine.device import choose_device
from rvllm.engine.engine import Engine
from rvllm.engine.model import Model
from rvllm.engine.scheduler import Limits, guessed_rows
from rvllm.errors import StartError
from rvllm.model.source import Source, cache_dtype, context_length, record, weights_for
from rvllm.program.dtype import BF16, F16, F32, DType
from rvllm.program.fuse import ALL_KERNELS, fuse
from rvllm.program.program import Program

if TYPE_CHECKING:
    from rvllm.backend.cuda.model import StepLimits

Progress = Callable[[str, int, int], None]
Warn = Callable[[str], None]

SPARE_BYTES = 256 << 20
"""Of a GPU's memory, for what the driver and later launches take when all else is in place."""
SCORE_CHUNK = 64  # tokens of a prompt with log-probabilities in one step: each needs a row of logits


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
    check_settings(config)
    vocab_limit = min(vocab_limit, source.config.vocab_size)
    chunk = prompt_chunk(config)
    make = _on_cpu if choose_device(config.device, warn) == "cpu" else _on_gpu
    model, size = make(source, config, vocab_limit, progress, warn)
    limits = Limits(
        max_model_len=size.max_model_len,
        block_size=config.block_size,
        blocks=size.blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk=chunk,
        score_chunk=SCORE_CHUNK,
        eos_ids=eos_ids | source.config.eos_ids,
        vocab_limit=vocab_limit,
        by_priority=config.scheduling_policy == "priority",
        prefix_caching=config.enable_prefix_caching,
        speculation=config.speculative_config,
    )
    return Engine(model, limits)


def check_settings(config: EngineConfig) -> None:
    """Raise StartError for settings that the command line would not have let through."""
    wrong = {
        "scheduling_policy": (config.scheduling_policy not in POLICIES, f"one of {', '.join(POLICIES)}"),
        "block_size": (config.block_size not in BLOCK_SIZES, f"one of {', '.join(map(str, BLOCK_SIZES))}"),
        "gpu_memory_utilization": (not 0 < config.gpu_memory_utilization <= 1, "above 0 and at most 1"),
        "num_gpu_blocks_override": ((config.num_gpu_blocks_override or 1) < 1, "at least 1"),
        "max_num_seqs": (config.max_num_seqs < 1, "at least 1"),
        "prefill_chunk": (config.prefill_chunk < 1, "at least 1"),
    }
    for name, (is_wrong, limit) in wrong.items():
        if is_wrong:
            raise StartError(f"{name} is {getattr(config, name)!r}, it has to be {limit}")


def prompt_chunk(config: EngineConfig) -> int:
    """Tokens of a prompt in one step: what is configured, or what a step has left when all others take one.

    Raises StartError where that is not even one.
    """
    left = config.max_num_batched_tokens - config.max_num_seqs + 1
    if left < 1:
        raise StartError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens:,} is less than "
            f"--max-num-seqs {config.max_num_seqs:,}, so not all sequences could go on in one step",
            hint=f"set --max-num-batched-tokens to at least {config.max_num_seqs + 15:,}, or lower --max-num-seqs",
        )
    return min(config.prefill_chunk, left)


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
    # Never more than all sequences can use: what is kept beyond that would make a small model big.
    most = blocks_for(length, config.block_size) * config.max_num_seqs
    size = cache_size(program, length, config, memory, warn, most=most)
    model = CpuModel(
        program,
        weights_for(source, program),
        blocks=(size.blocks,) * len(program.cache_groups),
        block_size=config.block_size,
        vocab_limit=vocab_limit,
        batch_invariant=config.batch_invariant,
        progress=progress,
    )
    return model, size


def _on_gpu(
    source: Source, config: EngineConfig, vocab_limit: int, progress: Progress | None, warn: Warn
) -> tuple[Model, CacheSize]:
    """All else comes first; the caches take what is then left. A graph holds addresses, so the graphs come last."""
    from rvllm.backend.cuda.kernels import Gpu
    from rvllm.backend.cuda.lower import FUSIONS
    from rvllm.backend.cuda.model import CudaModel
    from rvllm.backend.cuda.sampling import MOST_LOGPROBS

    if config.max_logprobs > MOST_LOGPROBS:
        raise StartError(
            f"max_logprobs is {config.max_logprobs}, a GPU lists at most {MOST_LOGPROBS} tokens",
            hint="lower it, or use the CPU, which lists as many as there are",
        )
    dtype = gpu_dtype(config.dtype, source.config.dtype)
    length = context_length(source.config, config.max_model_len)
    kv_dtype = cache_dtype(config.kv_cache_dtype, dtype)
    program = fuse(record(source, dtype=dtype, kv_dtype=kv_dtype, max_length=length), FUSIONS)
    gpu = Gpu(0, warn)
    model = CudaModel(
        program,
        weights_for(source, program),
        gpu,
        limits=step_limits(config, length),
        blocks=None,
        block_size=config.block_size,
        vocab_limit=vocab_limit,
        eager=config.enforce_eager,
        batch_invariant=config.batch_invariant,
        guessed_length=length if config.speculative_config is not None else 0,
        progress=progress,
    )
    memory = config.kv_cache_memory_bytes
    if memory is None:
        memory = left_for_caches(gpu.gpu.total_bytes, gpu.free_bytes, model.rehearse, config.gpu_memory_utilization)
    size = cache_size(program, length, config, memory, warn)
    model.allocate_caches((size.blocks,) * len(program.cache_groups))
    model.prepare()
    return model, size


def step_limits(config: EngineConfig, length: int) -> StepLimits:
    """The largest step on a GPU with sequences of up to `length` tokens."""
    from rvllm.backend.cuda.model import StepLimits

    rows = config.max_num_seqs + min(SCORE_CHUNK, prompt_chunk(config)) - 1
    rows = max(rows, guessed_rows(config.max_num_seqs, config.speculative_config))
    return StepLimits(max(config.max_num_batched_tokens, rows), rows, blocks_for(length, config.block_size))


def left_for_caches(
    total_bytes: int, free_bytes: Callable[[], int], rehearse: Callable[[Callable[[], int]], int], share: float
) -> int:
    """Bytes of a GPU that caches may take: what `share` of it leaves beside all that is in use, by whomever.

    `rehearse` says what graphs will need. Memory that others take or give back meanwhile is seen here once; if it is
    gone when the caches are allocated, that fails with its own numbers.
    """
    graphs = rehearse(free_bytes)
    free = free_bytes()
    allowed = int(total_bytes * share) - (total_bytes - free)
    return max(0, min(allowed, free) - graphs - SPARE_BYTES)


def gpu_dtype(asked: str, stored: DType) -> DType:
    """The activations' dtype on a GPU: the checkpoint's own, but float16 for one in float32. Raises StartError."""
    if asked == "auto":
        return F16 if stored is F32 else stored
    if asked in ("float32", "float"):
        raise StartError("--dtype float32 is not available on a GPU", hint="use bfloat16 or float16, or --device cpu")
    return BF16 if asked == "bfloat16" else F16


def cache_size(
    program: Program, wanted: int, config: EngineConfig, memory_bytes: int, warn: Warn, *, most: int | None = None
) -> CacheSize:
    """As many blocks as `memory_bytes` hold, up to `most`, or as many as were asked for by number.

    Where one sequence of `wanted` tokens does not fit, the context is shortened with a warning, or refused if it was
    asked for by number.
    """
    size = config.block_size
    one = block_bytes(program.cache_groups, size)
    blocks = memory_bytes // one if config.num_gpu_blocks_override is None else config.num_gpu_blocks_override
    if blocks >= blocks_for(wanted, size):
        return CacheSize(blocks if most is None or config.num_gpu_blocks_override else min(blocks, most), wanted)
    fits = blocks * size
    if config.num_gpu_blocks_override is not None:
        room, more = f"{blocks:,} blocks of {size} tokens hold {fits:,} tokens", "--num-gpu-blocks-override"
    else:
        room, more = f"{memory_bytes:,} bytes of key/value cache hold {fits:,} tokens", "--kv-cache-memory-bytes"
        if config.kv_cache_memory_bytes is None:
            more = "--gpu-memory-utilization"
    if not blocks:
        raise StartError(
            f"there is no room for a key/value cache: {memory_bytes:,} bytes are left for it, one block of {size} "
            f"tokens takes {one:,}",
            hint=f"raise {more}, use a smaller model, or end what else uses the GPU (see `nvidia-smi`)",
        )
    if config.max_model_len is not None:
        raise StartError(
            f"--max-model-len {wanted:,} does not fit: {room}",
            hint=f"set --max-model-len to at most {fits:,}, or raise {more}",
        )
    warn(f"the context is shortened from {wanted:,} to {fits:,} tokens: {room}")
    return CacheSize(blocks, fits)

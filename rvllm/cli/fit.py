"""Whether a model fits a memory, and how much context then does. Arithmetic on sizes; asks no device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rvllm.cli.model import OpenedModel
from rvllm.config import CPU_CACHE_BYTES, EngineConfig
from rvllm.engine.block_pool import blocks_for, pool_blocks
from rvllm.engine.load import step_limits
from rvllm.program.fuse import ALL_KERNELS, fuse
from rvllm.program.ops import Tensor
from rvllm.program.plan import plan

CONTEXTS = (4096, 1024)
FLOAT32_BYTES = 4
RUNTIME_BYTES = 600 << 20
"""A CUDA context with its kernels and graphs: an estimate."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What a memory of `usable_bytes` leaves for the key/value cache, and what that holds.

    `concurrency`: sequences that run at once at each context length in tokens, the model's full one first.
    """

    usable_bytes: int
    weight_bytes: int
    workspace_bytes: int
    kv_token_bytes: int
    cache_bytes: int
    largest_context: int
    concurrency: dict[int, int]

    @property
    def fits(self) -> bool:
        """Whether at least one block of cache is left."""
        return self.largest_context > 0


def on_gpu(opened: OpenedModel, memory_bytes: int) -> Fit:
    """The model on a card with `memory_bytes` in all, weights in the formats their file has."""
    from rvllm.backend.cuda.lower import FUSIONS
    from rvllm.backend.cuda.model import step_bytes
    from rvllm.backend.cuda.slots import slot_bytes

    limits = step_limits(EngineConfig(), opened.max_length)
    step = step_bytes(fuse(opened.program, FUSIONS), limits)
    step += limits.sequences * slot_bytes(opened.program.output.sizes({"rows": 1})[1])
    weights = sum(opened.weight_bytes.values())
    return _fit(opened, int(memory_bytes * EngineConfig().gpu_memory_utilization), weights, step + RUNTIME_BYTES)


def on_cpu(opened: OpenedModel, memory_bytes: int) -> Fit:
    """The model in `memory_bytes` of free memory: all in float32, the cache no larger than its default."""
    program = fuse(opened.program, ALL_KERNELS)
    config = EngineConfig()
    sizes = {"tokens": config.max_num_batched_tokens, "rows": config.max_num_seqs}

    def nbytes(tensor: Tensor) -> int:
        return math.prod(tensor.sizes(sizes)) * FLOAT32_BYTES

    weights = sum(nbytes(tensor) for tensor in program.weights.values())
    return _fit(opened, memory_bytes, weights, plan(program, nbytes).nbytes, CPU_CACHE_BYTES)


def _fit(opened: OpenedModel, usable: int, weights: int, workspace: int, most_cache: int | None = None) -> Fit:
    cache = max(0, usable - weights - workspace)
    if most_cache is not None:
        cache = min(cache, most_cache)
    block_size = EngineConfig().block_size
    blocks = pool_blocks(opened.program.cache_groups, block_size, cache)
    full = opened.max_length
    return Fit(
        usable_bytes=usable,
        weight_bytes=weights,
        workspace_bytes=workspace,
        kv_token_bytes=opened.kv_token_bytes,
        cache_bytes=cache,
        largest_context=min(full, blocks * block_size),
        concurrency={
            tokens: blocks // blocks_for(tokens, block_size)
            for tokens in (full, *(context for context in CONTEXTS if context < full))
        },
    )

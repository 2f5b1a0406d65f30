"""A model opened for looking at: its program and sizes, no weight read. Shared by explain and doctor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rvllm.model.files import Progress, locate
from rvllm.model.source import Source, cache_dtype, context_length, open_source, record
from rvllm.program.cost import tensor_bytes
from rvllm.program.dtype import BF16, F16, F32
from rvllm.program.program import Program

_DTYPES = {"float32": F32, "float": F32, "float16": F16, "half": F16, "bfloat16": BF16}


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """`program` has its ops unfused; `max_length` is the context it was recorded for, in tokens."""

    source: Source
    program: Program
    max_length: int

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of all weights by element format, the largest first."""
        total: Counter[str] = Counter()
        for tensor in self.program.weights.values():
            total[tensor.dtype.name] += tensor_bytes(tensor, {})
        return dict(total.most_common())

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of key/value cache that one token takes."""
        return sum(group.token_bytes() for group in self.program.cache_groups)


def open_model(
    name: str,
    *,
    dtype: str,
    kv_cache_dtype: str,
    load_format: str,
    max_model_len: int | None,
    offline: bool,
    progress: Progress | None,
    warn: Callable[[str], None],
) -> OpenedModel:
    """Find a model and record its program as a GPU would run it. Raises StartError.

    `dtype`, `kv_cache_dtype` and `load_format` are EngineConfig's; for "auto" activations are in the model's own dtype,
    and the cache in theirs.
    """
    files = locate(name, offline=offline, progress=progress)
    source = open_source(files, load_format=load_format, warn=warn)
    activations = source.config.dtype if dtype == "auto" else _DTYPES[dtype]
    length = context_length(source.config, max_model_len)
    kv_dtype = cache_dtype(kv_cache_dtype, activations)
    program = record(source, dtype=activations, kv_dtype=kv_dtype, max_length=length)
    return OpenedModel(source, program, length)

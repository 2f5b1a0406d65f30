"""rvllm: LLM inference from one file. Importing it imports nothing heavy; the names below load on first use."""

from __future__ import annotations

from rvllm.version import VERSION as __version__

TYPE_CHECKING = False  # typing's own costs 5 ms of every start
if TYPE_CHECKING:
    from rvllm.llm import LLM, RequestOutput
    from rvllm.sampling.api import Sampler, SamplerOutput, sample_batch
    from rvllm.sampling.params import SamplingParams
    from rvllm.sampling.structured import StructuredOutputsParams
    from rvllm.text.tokenizer import Tokenizer

_HOMES = {
    "LLM": "rvllm.llm",
    "RequestOutput": "rvllm.llm",
    "Sampler": "rvllm.sampling.api",
    "SamplerOutput": "rvllm.sampling.api",
    "SamplingParams": "rvllm.sampling.params",
    "StructuredOutputsParams": "rvllm.sampling.structured",
    "Tokenizer": "rvllm.text.tokenizer",
    "sample_batch": "rvllm.sampling.api",
}
__all__ = [
    "LLM",
    "RequestOutput",
    "Sampler",
    "SamplerOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "Tokenizer",
    "__version__",
    "sample_batch",
]


def __getattr__(name: str) -> object:
    """PEP 562: import the module that holds `name` when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rvllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

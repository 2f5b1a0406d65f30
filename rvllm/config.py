"""Every default, in one place: the command line, the Python API and the docs read them from here."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2"
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "float16", "bfloat16", "half", "float")
POLICIES = ("fcfs", "priority")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "bfloat16", "float16")
REFUSED_KV_CACHE_DTYPES = {
    "fp8_e5m2": "it has a digit less than fp8_e4m3, whose rows have scales and so need no wider range"
}
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
BLOCK_SIZES = (16, 32, 64)
CPU_CACHE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is loaded and served. Names are vLLM's where vLLM has the setting.

    dtype                    activations; "auto": float32 on a CPU, the checkpoint's own on a GPU
    kv_cache_dtype           of keys and values; "auto": the activations'; "fp8", which is "fp8_e4m3": half of 16 bits
    max_model_len            tokens of prompt and output together; None: what the model is made for, or what fits
    block_size               tokens of a cache block
    gpu_memory_utilization   share of a GPU's memory that may be used in all
    kv_cache_memory_bytes    memory for the key/value cache; None: on a GPU what is left of its share, on a CPU 4 GiB,
                             which are only used where tokens are
    num_gpu_blocks_override  blocks of the cache, on any device, whatever its memory would hold
    enable_prefix_caching    keep what a prompt leaves in the cache, for prompts that begin alike
    scheduling_policy        who begins first: "fcfs" who came first, "priority" whose number is lower
    enforce_eager            launch kernels one by one instead of replaying graphs: the same bits, for debugging
    batch_invariant          a request's bits do not depend on what else runs, how its prompt is cut, what of it is
                             cached or whether it gave way: slower. Else only steps that decode up to 64 rows promise it
    max_num_seqs             sequences that run at once; more wait
    max_num_batched_tokens   tokens of one step; those that run get one each, the rest are for prompts
    prefill_chunk            prompts are read in pieces of this many tokens
    load_format              "dummy": random weights of the right shapes, no file read but the configuration
    max_logprobs             log-probabilities of one token that a request may ask for
    seed                     of requests that bring none: request i gets a seed derived from it; None: from the system
    """

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    block_size: int = 32
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    enforce_eager: bool = False
    batch_invariant: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 512
    chat_template: str | None = None
    generation_config: str = "auto"
    max_logprobs: int = 20
    seed: int | None = None
    offline: bool = False

"""vLLM's environment variables, and what becomes of each here. Knows names and values; not who reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

HONOURED: Mapping[str, str] = {
    "VLLM_API_KEY": "--api-key",
    "VLLM_BATCH_INVARIANT": "--batch-invariant",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "--keep-alive-timeout",
}
"""Variables that stand for an option where neither the command line nor a file gives it."""

AS_EVER: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "nothing is ever sent anywhere",
    "VLLM_DO_NOT_TRACK": "nothing is ever sent anywhere",
    "VLLM_USAGE_SOURCE": "nothing is ever sent anywhere",
    "VLLM_USE_V1": "there is one engine",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "a server's engine always has a process of its own",
    "VLLM_WORKER_MULTIPROC_METHOD": "the engine's process is started with spawn's meaning",
    "VLLM_TARGET_DEVICE": "one build runs on CPUs and GPUs; --device chooses",
    "VLLM_USE_RUST_FRONTEND": "there is one front end",
}
"""Variables that no word is lost about, by the reason: it is so anyway, or there is nothing to choose."""

OURS: Mapping[str, str] = {
    "RVLLM_DEBUG": "1: print a traceback with an error, as --debug does",
    "RVLLM_CACHE": "the folder for what is fetched, unpacked and compiled (else rvllm in XDG_CACHE_HOME or ~/.cache)",
    "RVLLM_TIER": "take kernels of that tier, such as t70, where the GPU can run them: for tests",
    "HF_HUB_CACHE, HF_HOME": "where models named by their hub name are found",
    "HF_HUB_OFFLINE": "1: never fetch the default model, as --offline does",
    "CUDA_VISIBLE_DEVICES": "which GPU is the first",
}
"""Variables that rvllm and what is below it read, for the page."""

_HOSTS = "addresses of vLLM's own processes: the server listens on --host and --port"
_KERNELS = "kernels are rvllm's own, chosen by GPU and shape"
_COMPILE = "kernels are compiled ahead of time, there is nothing to compile or cache but cubins (RVLLM_CACHE)"
_ONE_GPU = "one GPU computes"

WARNED: Mapping[str, str] = {
    "VLLM_HOST_IP": _HOSTS,
    "VLLM_PORT": _HOSTS,
    "VLLM_ATTENTION_BACKEND": _KERNELS,
    "VLLM_FLASH_ATTN_VERSION": _KERNELS,
    "VLLM_USE_FLASHINFER_SAMPLER": _KERNELS,
    "VLLM_USE_TRITON_FLASH_ATTN": _KERNELS,
    "VLLM_USE_DEEP_GEMM": _KERNELS,
    "VLLM_FLOAT32_MATMUL_PRECISION": "products of float32 are float32's",
    "VLLM_CACHE_ROOT": _COMPILE,
    "VLLM_DISABLE_COMPILE_CACHE": _COMPILE,
    "VLLM_SKIP_P2P_CHECK": _ONE_GPU,
    "VLLM_NCCL_SO_PATH": _ONE_GPU,
    "VLLM_CPU_KVCACHE_SPACE": "say --kv-cache-memory-bytes, as in 8GiB",
    "VLLM_CPU_OMP_THREADS_BIND": "run the command under taskset or numactl",
    "VLLM_LOGGING_LEVEL": "say --verbose, --quiet or --log-format",
    "VLLM_CONFIGURE_LOGGING": "logs go to stderr",
    "VLLM_LOGGING_CONFIG_PATH": "logs go to stderr",
    "VLLM_LOG_STATS_INTERVAL": "read /metrics",
    "VLLM_USE_MODELSCOPE": "models are found in Hugging Face's cache or by their path",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "a length beyond what the model is made for is refused",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "there are no adapters",
    "VLLM_SERVER_DEV_MODE": "there are no routes for development",
    "VLLM_TORCH_PROFILER_DIR": "there is no profiler inside; run the command under nsys",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "the server ends with its engine",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "an engine that ends is known at once",
    "VLLM_RPC_TIMEOUT": "an engine that ends is known at once",
    "VLLM_PLUGINS": "no code is loaded but rvllm's own",
}
"""Variables that get a warning where they are set, by its reason."""

_KUBERNETES = re.compile(r"VLLM_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP)\w*)")


def warnings(environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that is set to something and changes nothing here; one line for all unknown ones."""
    unknown = []
    for name in sorted(environment):
        value = environment[name]
        if not name.startswith("VLLM_") or value in ("", "0") or name in HONOURED or name in AS_EVER:
            continue
        if _KUBERNETES.fullmatch(name) or (name == "VLLM_PORT" and "://" in value):
            continue  # what Kubernetes tells of a service that is called vllm
        if name in WARNED:
            yield f"{name} changes nothing here: {WARNED[name]}"
        else:
            unknown.append(name)
    if unknown:
        yield f"{', '.join(unknown)} {'changes' if len(unknown) == 1 else 'change'} nothing here: not known"

"""Every default, in one place: the command line, the Python API and the docs read them from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rvllm.errors import StartError

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
MOST_DRAFTS, LONGEST_LOOKUP = 31, 32


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are guessed: by prompt lookup, from where a sequence's last tokens stood before in it.

    num_speculative_tokens                 drafts of one sequence in one step, at the most
    prompt_lookup_min, prompt_lookup_max   of so many last tokens, the most that are found again
    """

    num_speculative_tokens: int
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5

    def __post_init__(self) -> None:
        limits = {
            "num_speculative_tokens": (1, MOST_DRAFTS),
            "prompt_lookup_min": (1, LONGEST_LOOKUP),
            "prompt_lookup_max": (self.prompt_lookup_min, LONGEST_LOOKUP),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise StartError(
                    f"speculative_config's {name} is {value!r}, it has to be a whole number from {least} to {most}"
                )

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Speculation:
        """From vLLM's --speculative-config: {"method": "ngram", "num_speculative_tokens": ...}. Raises StartError.

        Where one of prompt_lookup_min and prompt_lookup_max is given, it is both, as in vLLM.
        """
        values = dict(given)
        method = values.pop("method", None)
        if method != "ngram":
            raise StartError(
                f'speculative_config\'s method is {method!r}, there is "ngram" alone: no draft model is run'
            )
        unknown = sorted(set(values) - set(cls.__slots__))
        if unknown:
            raise StartError(
                f"speculative_config has {', '.join(map(repr, unknown))}, which is not done",
                hint=f"it may have method, {', '.join(cls.__slots__)}",
            )
        if "num_speculative_tokens" not in values:
            raise StartError("speculative_config has no num_speculative_tokens", hint='such as 7, in {"method": ...}')
        ends = ("prompt_lookup_min", "prompt_lookup_max")
        given_ends = [values[name] for name in ends if name in values]
        if len(given_ends) == 1:
            values |= dict.fromkeys(ends, given_ends[0])
        return cls(**values)


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
    speculative_config       guess tokens and compute several at once: the same tokens, sooner where they repeat, as
                             long as no more than 32 sequences run
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
    speculative_config: Speculation | None = None
    seed: int | None = None
    offline: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How `rvllm serve` is reached. Names are vLLM's where vLLM has the setting.

    host, port          where to listen; port 0: one that is free
    uds                 a unix socket's path to listen at instead
    root_path           the path at which a proxy has the server; it may take it away before it passes a request on
    ssl_keyfile, ssl_certfile, ssl_ca_certs, ssl_cert_reqs, ssl_ciphers  TLS: our key and certificates; clients' CAs,
                        whether they need a certificate (0 no, 1 may, 2 must); ciphers, as OpenSSL has them
    enable_ssl_refresh  read our key and certificates again when their files change
    api_key             keys of which a request must bring one; none: anybody may ask
    served_model_name   what clients call the model; none: as it was named to us
    tool_call_parser    how the model writes calls of tools; None: as its chat template does
    enable_auto_tool_choice   calls are read wherever there are tools: this changes nothing
    exclude_tools_when_tool_choice_none   the template sees no tools where none may be called
    reasoning_parser    how the model marks what it thinks; "": thoughts are text like any other
    structured_outputs_config   of vLLM's, disable_any_whitespace and disable_additional_properties: what texts that
                        must have a form have where their requests do not say
    shutdown_timeout    seconds that requests may go on after SIGTERM or Ctrl-C (vLLM: 0)
    api_server_count    processes that read requests and write answers, before one engine
    max_body_bytes      of a request's body
    h11_max_incomplete_event_size, h11_max_header_count  bytes of a request's line and headers (vLLM: 4 MiB); how many
    max_num_queued_reqs     completions that are answered or wait; more are told to come again; None: no limit
    max_num_queued_tokens   of prompts not read yet, from which on more requests are told so; None: no limit
    max_requests_per_key    at a time; None: no limit
    request_timeout     seconds that a request for text may take; None: as long as it takes
    client_timeout      seconds in which a request has to come in, or what is sent be read
    sse_keep_alive_interval  seconds without an event after which a stream has a comment; 0: none (vLLM's default)
    keep_alive_timeout  seconds that a connection may be idle between two requests
    allowed_origins, allowed_methods, allowed_headers, allow_credentials  of web pages elsewhere: CORS; none: no page
    disable_web_page    no page at / to chat with the model and look at its figures
    return_tokens_as_token_ids   show single tokens as token_id:ID where a request does not say how
    enable_force_include_usage   tell the usage of streams where a request does not say whether
    default_chat_template_kwargs arguments of the chat template that a request does not bring
    response_role       the role in answers to chats
    trust_request_chat_template     a request may bring its own chat template, which runs in the sandbox
    chat_template_content_format    of messages as the template sees them: "string", "openai" (lists of parts), or
                        "auto": as the template seems to want it
    enable_per_request_metrics      tell in replies how long they took
    enable_tokenizer_info_endpoint  tell at /tokenizer_info of the tokenizer, chat template and all
    fingerprint_mode    of system_fingerprint: "full": rvllm, its version and a hash of the settings; "hash": that
                        alone; "custom": fingerprint_value; "none"
    disable_fastapi_docs    no /openapi.json, /docs and /redoc
    enable_offline_docs     they need no net anyway: this changes nothing
    stream_interval     tokens of one event of a stream, but for its first and its last
    log_format          of what is said on stderr: "text", or "json" objects
    disable_uvicorn_access_log         no line for every reply (vLLM: there is one)
    disable_access_log_for_endpoints   nor for those of these routes
    enable_log_requests     a line for every request for text, with its lengths; never a text
    log_error_stack         the traceback of faults of ours, which may hold anything
    """

    host: str = "0.0.0.0"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    enable_ssl_refresh: bool = False
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str = ""
    structured_outputs_config: Mapping[str, Any] | None = None
    shutdown_timeout: int = 30
    api_server_count: int = 1
    max_body_bytes: int = 32 << 20
    h11_max_incomplete_event_size: int = 64 << 10
    h11_max_header_count: int = 256
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_requests_per_key: int | None = None
    request_timeout: float | None = None
    client_timeout: float = 60.0
    sse_keep_alive_interval: float = 15.0
    keep_alive_timeout: int = 5
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    disable_web_page: bool = False
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    default_chat_template_kwargs: dict[str, Any] | None = None
    response_role: str = "assistant"
    trust_request_chat_template: bool = False
    chat_template_content_format: str = "auto"
    enable_per_request_metrics: bool = False
    enable_tokenizer_info_endpoint: bool = False
    fingerprint_mode: str = "full"
    fingerprint_value: str | None = None
    disable_fastapi_docs: bool = False
    enable_offline_docs: bool = False
    stream_interval: int = 1
    log_format: str = "text"
    disable_uvicorn_access_log: bool = True
    disable_access_log_for_endpoints: tuple[str, ...] = ()
    enable_log_requests: bool = False
    log_error_stack: bool = False

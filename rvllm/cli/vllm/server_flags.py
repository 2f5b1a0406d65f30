"""Flags of `vllm serve` about HTTP, chat and logs. Data only; a line is read by `flag.read`.

What is honoured is so where `rvllm serve` declares the option; a command that does not refuses it as not done.
"""

from __future__ import annotations

from rvllm.cli.vllm.flag import Flag, accepted, honoured, refused

SERVER: tuple[Flag, ...] = (
    *honoured("""
        --host = None
        --port = 8000
        --uds = None
        --root-path = None
        --api-key LIST = None
        --served-model-name LIST = None
        --ssl-keyfile = None
        --ssl-certfile = None
        --ssl-ca-certs = None
        --ssl-cert-reqs = 0
        --ssl-ciphers = None
        --enable-ssl-refresh/--disable-ssl-refresh = False
        --allowed-origins = []
        --allowed-methods = ['*'] | ["*"]
        --allowed-headers = ['*'] | ["*"]
        --allow-credentials/--no-allow-credentials = False
        --chat-template-content-format = auto
        --trust-request-chat-template/--no-trust-request-chat-template = False
        --default-chat-template-kwargs = None
        --response-role = assistant
        --return-tokens-as-token-ids/--no-return-tokens-as-token-ids = False
        --enable-auto-tool-choice/--disable-auto-tool-choice = False
        --exclude-tools-when-tool-choice-none/--no-exclude-tools-when-tool-choice-none = False
        --tool-call-parser = None
        --reasoning-parser = ''
        --structured-outputs-config = None
        --max-num-queued-reqs = None
        --max-num-queued-tokens = None
        --stream-interval = 1
        --sse-keep-alive-interval = 0
        --shutdown-timeout = 0
        --api-server-count -asc = None
        --enable-per-request-metrics/--disable-per-request-metrics = False
        --enable-force-include-usage/--disable-force-include-usage = False
        --enable-tokenizer-info-endpoint/--disable-tokenizer-info-endpoint = False
        --enable-log-requests/--disable-log-requests = False
        --disable-uvicorn-access-log/--enable-uvicorn-access-log = False
        --disable-access-log-for-endpoints = None
        --log-error-stack/--no-log-error-stack = False
        --disable-fastapi-docs/--enable-fastapi-docs = False
        --enable-offline-docs/--disable-offline-docs = False
        --fingerprint-mode = full
        --fingerprint-value = None
        --h11-max-incomplete-event-size = 4194304
        --h11-max-header-count = 256
    """, server=True),
    *refused("no code is loaded but rvllm's own", """
        --tool-parser-plugin = ''
        --middleware = []
    """, "put a proxy before the server", server=True),
    *refused("there are no adapters", """
        --lora-modules LIST = None
    """, "merge the adapter into the weights", server=True),
    *refused("there is HTTP alone", """
        --grpc/ = False
        --grpc-port = None
    """, server=True),
    *refused("engine and server start together", """
        --headless/ = False
        --enable-scale-out/--disable-scale-out = False
        --tokens-only/--no-tokens-only = False
    """, server=True),
    *refused("tools are called by clients, not by the server", """
        --tool-server = None
    """, server=True),
    *refused("it is not done", """
        --tool-strict-level = None
        --reasoning-effort-map = None
        --anthropic-disabled-thinking-effort = auto
    """, server=True),
    *refused("unknown VLLM_ variables are told in a warning, they stop nothing", """
        --fail-on-environ-validation/--no-fail-on-environ-validation = False
    """, server=True),
    *refused("logs go to stderr, there is nothing to configure in a file", """
        --logging-config = None
        --log-config-file = None
    """, "redirect stderr", server=True),
    *accepted("one process reads requests and writes answers, the engine runs beside it", """
        --renderer-num-workers = 1
        --aggregate-engine-logging/ = False
        --disable-frontend-multiprocessing/ = False
    """, server=True),
    *accepted("every reply has its X-Request-Id, a client's own where it brought one", """
        --enable-request-id-headers/--disable-request-id-headers = True
    """, server=True),
    *accepted("usage always tells the prompt's cached tokens", """
        --enable-prompt-tokens-details/--disable-prompt-tokens-details = True
    """, server=True),
    *accepted("/load always counts", """
        --enable-server-load-tracking/--disable-server-load-tracking = True
    """, server=True),
    *refused("what is asked and answered is never logged", """
        --enable-log-outputs/--disable-log-outputs = False
    """, "log in a proxy before the server", server=True),
    *accepted("what is asked and answered is never logged", """
        --enable-log-deltas/--disable-log-deltas = True
        --max-log-len = None
    """, server=True),
    *accepted("figures are told at /metrics, and nothing of them is logged", """
        --disable-log-stats/ = True
    """, server=True),
    *accepted("what is logged is said by --verbose, --quiet, --enable-log-requests and --enable-uvicorn-access-log", """
        --log-level = None | INFO
        --uvicorn-log-level = info
    """, server=True),
    *accepted("one GPU computes, so there is nothing to supervise", """
        --data-parallel-supervisor-port = 9256
        --dp-supervisor-probe-interval-s = 5.0
        --dp-supervisor-probe-timeout-s = 5.0
        --dp-supervisor-probe-failure-threshold = 3
    """, server=True),
    *accepted("only text is read: a request with images or sound is refused", """
        --trust-request-mm-kwargs/--no-trust-request-mm-kwargs = False
    """, server=True),
    *accepted("Cohere's formats and pooling models are not done", """
        --cohere-is-reasoning-model/--no-cohere-is-reasoning-model = True
        --cohere-format = cmd4
        --enable-flash-late-interaction/--disable-flash-late-interaction = True
    """, server=True),
    *accepted("grammars have one implementation, rvllm's own", """
        --guided-decoding-backend = auto
    """, server=True),
    *accepted("--reasoning-parser alone switches it on", """
        --enable-reasoning/ = False
    """, server=True),
    *accepted("nothing is ever sent anywhere", """
        --disable-telemetry/ = True
    """, server=True),
)  # fmt: skip
"""Flags that need a server."""

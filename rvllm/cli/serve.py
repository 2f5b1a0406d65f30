"""`rvllm serve`: an OpenAI-compatible server. Nothing on stdout; what happens is told on stderr."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import click

from rvllm.cli.options import Size, chain, json_object, long_talk_options, model_settings, setting
from rvllm.cli.talk import Talk
from rvllm.cli.vllm.command import VllmCommand
from rvllm.cli.vllm.engine_flags import ENGINE
from rvllm.cli.vllm.server_flags import SERVER
from rvllm.config import ServerConfig
from rvllm.errors import RvllmError, StartError

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(ServerConfig)}

_PACKAGES = ("uvicorn", "httptools", "prometheus_client")
MOST_FRONTS = 64
KEY_VARIABLES = ["RVLLM_API_KEY", "VLLM_API_KEY"]


def server_option(spelt: str, **how: Any) -> Any:
    """An option for ServerConfig's field of that name, with its default."""
    name = spelt.partition("/")[0].strip("-").replace("-", "_")
    return click.option(spelt, name, **{"default": DEFAULTS[name], **how})


def words(context: click.Context, parameter: click.Parameter, text: str | tuple[str, ...]) -> tuple[str, ...]:
    """A JSON list of words, as vLLM takes them, or words between commas."""
    if not isinstance(text, str):
        return text
    if not text.lstrip().startswith("["):
        return tuple(word.strip() for word in text.split(",") if word.strip())
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise click.BadParameter(f"""{text!r} is no list of words such as ["GET", "POST"]""")
    return tuple(found)


def mounted(context: click.Context, parameter: click.Parameter, path: str) -> str:
    path = path.rstrip("/")
    if path and not path.startswith("/"):
        raise click.BadParameter(f"{path!r} does not begin with a /")
    return path


fronts_option = chain(
    server_option(
        "--api-server-count",
        type=click.IntRange(1, MOST_FRONTS),
        show_default=True,
        help="Processes that read requests and write answers, before one engine.",
    )
)

limits = chain(
    server_option("--max-body-bytes", type=Size(), help="Of a request's body.  [default: 32 MiB]"),
    server_option(
        "--h11-max-incomplete-event-size", type=Size(), help="Of a request's line and headers.  [default: 64 KiB]"
    ),
    server_option("--h11-max-header-count", type=click.IntRange(1), show_default=True, help="Headers of a request."),
    server_option(
        "--max-num-queued-reqs",
        type=click.IntRange(1),
        help="Completions that are answered or wait; more are refused, 429.  [default: no limit]",
    ),
    server_option(
        "--max-num-queued-tokens",
        type=Size(),
        help="Of prompts not yet read; from there on requests are refused, 429.  [default: no limit]",
    ),
    server_option(
        "--max-requests-per-key", type=click.IntRange(1), help="Of one key at a time; more: 429.  [default: no limit]"
    ),
    server_option(
        "--request-timeout",
        type=click.FloatRange(0, min_open=True),
        help="Seconds that a request for text may take; then it ends with an error.  [default: no limit]",
    ),
    server_option(
        "--client-timeout",
        type=click.FloatRange(0, min_open=True),
        show_default=True,
        help="Seconds in which a request has to come in, or what is sent be read.",
    ),
    server_option(
        "--sse-keep-alive-interval",
        type=click.FloatRange(0),
        show_default=True,
        help="Seconds without a token after which a stream has a comment; 0: none.",
    ),
    server_option(
        "--keep-alive-timeout",
        type=click.IntRange(1),
        show_default=True,
        help="Seconds that a connection may be idle between two requests.",
    ),
)
"""What clients may ask of a server."""

tls = chain(
    server_option(
        "--root-path",
        metavar="PATH",
        callback=mounted,
        help="Where a proxy has the server, such as /llm.  [default: /]",
    ),
    server_option("--ssl-keyfile", metavar="FILE", help="TLS: our key."),
    server_option("--ssl-certfile", metavar="FILE", help="TLS: our certificate, and those between it and its root's."),
    server_option("--ssl-ca-certs", metavar="FILE", help="TLS: who signs clients' certificates."),
    server_option(
        "--ssl-cert-reqs",
        type=click.IntRange(0, 2),
        help="TLS: clients 0: need no certificate, 1: may, 2: must have one.",
    ),
    server_option("--ssl-ciphers", metavar="LIST", help="TLS: as OpenSSL has them."),
    server_option("--enable-ssl-refresh/--disable-ssl-refresh", help="TLS: read files again that change."),
)
"""How it is reached beside host and port."""

habits = chain(
    server_option(
        "--return-tokens-as-token-ids/--no-return-tokens-as-token-ids",
        help="Show single tokens as token_id:ID where log-probabilities are told.",
    ),
    server_option(
        "--stream-interval", type=click.IntRange(1), show_default=True, help="Tokens of one event, but for the first."
    ),
    server_option("--enable-force-include-usage/--disable-force-include-usage", help="Tell every stream's usage."),
    server_option(
        "--trust-request-chat-template/--no-trust-request-chat-template",
        help="A chat may bring its own chat_template, which runs in the sandbox.",
    ),
    server_option(
        "--chat-template-content-format",
        type=click.Choice(["auto", "string", "openai"]),
        show_default=True,
        help="Of messages as the template sees them; openai: lists of parts.",
    ),
    server_option(
        "--default-chat-template-kwargs",
        metavar="JSON",
        callback=json_object,
        help="Arguments of the chat template, as in '{\"enable_thinking\": false}'.",
    ),
)
"""Of requests that say nothing of it."""

told = chain(
    server_option("--response-role", metavar="ROLE", show_default=True, help="In answers to chats."),
    server_option(
        "--enable-per-request-metrics/--disable-per-request-metrics", help="Tell in replies how long they took."
    ),
    server_option(
        "--fingerprint-mode",
        type=click.Choice(["full", "hash", "custom", "none"]),
        show_default=True,
        help="Of system_fingerprint; full: version and settings.",
    ),
    server_option("--fingerprint-value", metavar="TEXT", help="With --fingerprint-mode custom."),
    server_option(
        "--enable-tokenizer-info-endpoint/--disable-tokenizer-info-endpoint",
        help="GET /tokenizer_info: special tokens and chat template.",
    ),
    server_option("--disable-fastapi-docs/--enable-fastapi-docs", help="No /docs and no /openapi.json."),
    server_option("--enable-offline-docs/--disable-offline-docs", help="Changes nothing: /docs needs no net."),
)
"""What the server tells of itself."""

# As text, click would make words of how Python writes a default.
_LIST: dict[str, Any] = {"metavar": "LIST", "callback": words, "type": click.UNPROCESSED}

pages = chain(
    server_option("--allowed-origins", **_LIST, help="Whose web pages may ask, as in '[\"*\"]'.  [default: nobody's]"),
    server_option("--allowed-methods", **_LIST, help="By which methods.  [default: all]"),
    server_option("--allowed-headers", **_LIST, help="With which headers.  [default: all]"),
    server_option("--allow-credentials/--no-allow-credentials", help="With cookies."),
    server_option("--disable-web-page/--enable-web-page", help="Our own page at /.  [default: there is one]"),
)
"""CORS, and the page that we have ourselves."""

logs = chain(
    server_option(
        "--log-format", type=click.Choice(["text", "json"]), show_default=True, help="Of what is said on stderr."
    ),
    server_option(
        "--disable-uvicorn-access-log/--enable-uvicorn-access-log", help="A line for every reply.  [default: none]"
    ),
    server_option("--disable-access-log-for-endpoints", **_LIST, help="But for those of these paths."),
    server_option(
        "--enable-log-requests/--disable-log-requests",
        help="A line for every request for text, with its lengths; texts are never logged.",
    ),
    server_option("--log-error-stack/--no-log-error-stack", help="Log the traceback of a fault, whatever it holds."),
)
"""What is said while serving."""


def structured_outputs_config(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> dict[str, Any] | None:
    """vLLM's settings, of which the library's name and what is the default anyway change nothing."""
    given = json_object(context, parameter, text)
    if given is None:
        return None
    names = ("disable_any_whitespace", "disable_additional_properties")
    known: dict[str, Any] = {name: given.pop(name) for name in names if name in given}
    if any(not isinstance(value, bool) for value in known.values()):
        raise click.BadParameter(f"{' and '.join(known)} must be true or false")
    if given.pop("enable_in_reasoning", False):
        raise click.BadParameter("enable_in_reasoning is not done: a form begins behind thoughts")
    if given.pop("reasoning_parser", ""):
        raise click.BadParameter("reasoning_parser is an option of its own. hint: --reasoning-parser")
    given.pop("backend", None)  # grammars have one implementation
    given.pop("disable_fallback", None)
    if given:
        raise click.BadParameter(f"{', '.join(given)} is not known")
    return known


@click.command(cls=VllmCommand, flags=(*ENGINE, *SERVER))
@click.argument("model_argument", metavar="[MODEL]", required=False)
@click.option("--host", default=DEFAULTS["host"], show_default=True, help="Where to listen.")
@click.option(
    "--port",
    default=DEFAULTS["port"],
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Where to listen; 0: at a port that is free.",
)
@click.option("--uds", metavar="PATH", help="Listen at a unix socket instead.")
@click.option(
    "--api-key",
    multiple=True,
    metavar="KEY",
    envvar=KEY_VARIABLES,
    help="Answer only requests that bring this key, but for /health and /ping; may be repeated.  "
    "[default: the words of RVLLM_API_KEY or VLLM_API_KEY, which no list of processes shows]",
)
@click.option(
    "--served-model-name",
    multiple=True,
    metavar="NAME",
    help="What clients call the model; may be repeated.  [default: as MODEL]",
)
@click.option(
    "--tool-call-parser",
    metavar="NAME",
    help="How the model writes calls of tools: hermes, llama3_json, mistral, ...  [default: as its chat template does]",
)
@click.option(
    "--enable-auto-tool-choice", is_flag=True, help="Changes nothing: a model may call whatever tools it has."
)
@click.option(
    "--exclude-tools-when-tool-choice-none",
    is_flag=True,
    help="Where no tool may be called, show the model none.",
)
@click.option(
    "--reasoning-parser",
    default=DEFAULTS["reasoning_parser"],
    metavar="NAME",
    help="Tell thoughts apart from answers: qwen3, deepseek_r1, ...  [default: they are text like any other]",
)
@click.option(
    "--structured-outputs-config",
    metavar="JSON",
    callback=structured_outputs_config,
    help="Of texts that must have a form: '{\"disable_any_whitespace\": true}', disable_additional_properties.",
)
@click.option(
    "--shutdown-timeout",
    default=DEFAULTS["shutdown_timeout"],
    show_default=True,
    type=click.IntRange(min=0),
    help="Seconds that requests may go on after SIGTERM or Ctrl-C.",
)
@fronts_option
@tls
@limits
@habits
@told
@pages
@logs
@setting("seed", type=int, help="Of requests that bring none.  [default: from the system]")
@model_settings
@long_talk_options
def serve(model_argument: str | None, quiet: bool, verbose: bool, **options: Any) -> None:
    """Serve MODEL to OpenAI's clients, until SIGTERM or Ctrl-C; a second one ends at once.

    Answers GET /, a page to chat with the model, /health, /ping, /version, /v1/models, /metrics, /load, /docs,
    /openapi.json and POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /tokenize, /detokenize.
    The port is open at once, and /health is 503 until the model is loaded.
    """
    from rvllm.config import EngineConfig

    given = {name: options.pop(name) for name in DEFAULTS}
    if any(not key.strip() for key in given["api_key"]):
        raise click.UsageError("--api-key is empty")
    if given["max_requests_per_key"] is not None and not given["api_key"]:
        raise click.UsageError("--max-requests-per-key is for a server with keys: there is no --api-key")
    if (given["fingerprint_mode"] == "custom") != bool(given["fingerprint_value"]):
        raise click.UsageError(
            "--fingerprint-value is the value of --fingerprint-mode custom, and each needs the other"
        )
    if model_argument is not None:
        options["model"] = model_argument
    with Talk(quiet=quiet, verbose=verbose) as talk:
        run = _server()
        try:
            run(EngineConfig(**options), ServerConfig(**given), note=talk.note, progress=talk.progress)
        except RvllmError as error:
            if given["log_format"] != "json":
                raise
            from rvllm.api.log import json_line

            click.echo(json_line("error", str(error)), err=True)
            raise click.exceptions.Exit(1) from None


def _server() -> Any:
    """Raises StartError where there is no HTTP server."""
    try:
        from rvllm.api.serve import serve as run
    except ModuleNotFoundError as cause:
        if cause.name not in _PACKAGES:
            raise
        raise StartError(
            f"serve needs {cause.name}, which is not installed here",
            hint="python -m pip install uvicorn httptools uvloop prometheus-client",
        ) from None
    return run

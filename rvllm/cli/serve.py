"""`rvllm serve`: an OpenAI-compatible server. Nothing on stdout; what happens is told on stderr."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from rvllm.cli.options import long_talk_options, model_settings, setting
from rvllm.cli.talk import Talk
from rvllm.cli.vllm.command import VllmCommand
from rvllm.cli.vllm.engine_flags import ENGINE
from rvllm.cli.vllm.server_flags import SERVER
from rvllm.config import ServerConfig
from rvllm.errors import StartError

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(ServerConfig)}

KEY_VARIABLES = ["RVLLM_API_KEY", "VLLM_API_KEY"]


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
    "--shutdown-timeout",
    default=DEFAULTS["shutdown_timeout"],
    show_default=True,
    type=click.IntRange(min=0),
    help="Seconds that requests may go on after SIGTERM or Ctrl-C.",
)
@setting("seed", type=int, help="Of requests that bring none.  [default: from the system]")
@model_settings
@long_talk_options
def serve(model_argument: str | None, quiet: bool, verbose: bool, **options: Any) -> None:
    """Serve MODEL to OpenAI's clients, until SIGTERM or Ctrl-C; a second one ends at once.

    Answers GET /health, /ping, /version, /v1/models and POST /v1/completions, /v1/chat/completions, /v1/responses,
    /v1/messages, /tokenize, /detokenize. The port is open at once, and /health is 503 until the model is loaded.
    """
    from rvllm.config import EngineConfig

    given = {name: options.pop(name) for name in DEFAULTS}
    if any(not key.strip() for key in given["api_key"]):
        raise click.UsageError("--api-key is empty")
    if model_argument is not None:
        options["model"] = model_argument
    with Talk(quiet=quiet, verbose=verbose) as talk:
        run = _server()
        run(EngineConfig(**options), ServerConfig(**given), note=talk.note, progress=talk.progress)


def _server() -> Any:
    """Raises StartError where there is no HTTP server."""
    try:
        from rvllm.api.serve import serve as run
    except ModuleNotFoundError as cause:
        if cause.name != "uvicorn":
            raise
        raise StartError(
            "serve needs uvicorn, which is not installed here",
            hint="python -m pip install uvicorn httptools uvloop",
        ) from None
    return run

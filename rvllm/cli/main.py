"""The group of commands. Knows their names and one line on each; imports a command's file when it is called."""

from __future__ import annotations

from importlib import import_module

import click

from rvllm.version import VERSION

COMMANDS = {
    "generate": "Complete one prompt and print the text as it comes.",
    "chat": "Talk with a model in the terminal.",
    "serve": "Serve a model to OpenAI's clients over HTTP.",
    "benchmark": "Measure the engine: decode speed beside the device's limit, throughput, latency.",
    "explain": "Show what each op of a model moves and computes, and the time a GPU needs at the least.",
    "doctor": "Show what this machine offers, and whether a model fits it.",
}
"""Each is the function of its name in rvllm.cli.NAME; the line is what `rvllm --help` shows."""


class LazyCommands(click.Group):
    """A group that shows its help without importing a command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"rvllm.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command), cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"there is no command {name!r}{did_you_mean(name)}", ctx)
        return super().resolve_command(ctx, args)


def did_you_mean(name: str) -> str:
    """The commands that a misspelt one may have meant, as the end of a sentence."""
    from difflib import get_close_matches

    close = get_close_matches(name, COMMANDS)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(COMMANDS)}"


def set_debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Switch tracebacks on at once, so that a later option's error has one too."""
    if value:
        context.find_root().obj.on = True


debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=set_debug,
    help="Print a traceback with an error (or set RVLLM_DEBUG=1).",
)


@click.group(
    cls=LazyCommands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.version_option(VERSION, message="rvllm %(version)s")
@debug_option
@click.pass_context
def commands(context: click.Context) -> None:
    """LLM inference from one file: no torch, no CUDA toolkit, no compiler, no network.

    \b
    rvllm generate "The capital of France is" --max-tokens 8
    rvllm generate --model FOLDER --json < prompt.txt
    rvllm chat --model FOLDER

    Models are folders in Hugging Face's layout with safetensors, or GGUF files. Options may be spelled with - or
    with _. `rvllm COMMAND --help` shows a command's options.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)

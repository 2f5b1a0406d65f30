"""What a failed command says, in a few lines, and its exit code. Knows errors; not the commands that raise them."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import click

from rvllm.errors import RvllmError

MOST_LINES = 10
_LONGEST_LINE = 2000  # characters


class Refused(click.UsageError):
    """An option of another engine's that is not done here; `hint` is the way out, where there is one."""

    def __init__(self, message: str, ctx: click.Context | None = None, *, hint: str | None = None) -> None:
        super().__init__(message, ctx)
        self.hint = hint


@dataclass(slots=True)
class Debug:
    """Whether to print tracebacks: RVLLM_DEBUG=1 says so, or --debug once it has been parsed."""

    on: bool


def leaving(error: Exception) -> int | None:
    """The exit code where `error` is only click's way of leaving, as after --help; None where it is an error."""
    return error.exit_code if isinstance(error, click.exceptions.Exit) else None


def report(error: Exception, debug: Debug) -> int:
    """Print why the command failed on stderr; the exit code: 2 for wrong usage, 1 for the rest."""
    if debug.on and not isinstance(error, click.UsageError):
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    message, hint = explain(error)
    click.echo("\n".join(lines(message, hint)), err=True)
    return error.exit_code if isinstance(error, click.ClickException) else 1


def lines(message: str, hint: str | None) -> list[str]:
    """The lines to print: at most ten, whatever others' text an error quotes."""
    said = f"error: {message}".splitlines()
    hinted = f"hint: {hint}".splitlines() if hint else []
    room = MOST_LINES - len(hinted)
    if len(said) > room:
        said = [*said[: room - 1], "..."]
    return [line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + " ..." for line in said + hinted]


def explain(error: Exception) -> tuple[str, str | None]:
    """(what is wrong, the way out)."""
    if isinstance(error, RvllmError):
        return error.message, error.hint
    if isinstance(error, Refused):
        return _one_line(error.format_message()), error.hint
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "rvllm"
        return _one_line(error.format_message()), f"see `{command} --help`"
    if isinstance(error, click.ClickException):
        return _one_line(error.format_message()), None
    if isinstance(error, MemoryError):
        return (
            f"there is not enough memory: {error or 'an allocation failed'}",
            "lower --max-model-len or --kv-cache-memory-bytes, or take a smaller model",
        )
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror or error}", "--debug shows where"
    return (
        f"unexpected {type(error).__name__}: {error}",
        "this is a fault of rvllm; run it again with --debug and report what that shows",
    )


def _one_line(message: str) -> str:
    """click's sentences without their full stop, joined."""
    return " ".join(message.split()).rstrip(".")

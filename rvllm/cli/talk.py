"""What a command says on stderr while it works: notes and progress. Never writes a byte of data."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

import click

PATIENCE_S = 1.0
"""Work that takes longer than this gets a progress bar."""


class Talk:
    """Notes and progress bars on stderr; bars only on a terminal. A context manager: no bar stays half drawn."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self._bars = not quiet and sys.stderr.isatty()
        self._label: str | None = None
        self._started_s = 0.0
        self._bar: Any = None

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._finish()

    def note(self, message: str) -> None:
        """One line that the user should know of, unless they asked for quiet."""
        if not self._quiet:
            self._finish()
            click.echo(f"note: {message}", err=True)

    def detail(self, message: str) -> None:
        """One line for those who asked to hear more."""
        if self._verbose:
            self.note(message)

    def progress(self, label: str, done: int, total: int) -> None:
        """Draw how far `label` has come; to be called often, with rising `done`."""
        if not self._bars:
            return
        if label != self._label:
            self._finish()
            self._label, self._started_s = label, time.monotonic()
        if self._bar is None and done < total and time.monotonic() - self._started_s >= PATIENCE_S:
            self._bar = click.progressbar(length=total, label=label, file=sys.stderr)
            self._bar.__enter__()
        if self._bar is not None:
            self._bar.update(done - self._bar.pos)
        if done >= total:
            self._finish()

    def _finish(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
        self._bar = self._label = None

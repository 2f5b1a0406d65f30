"""From the shell to a command and back: exit codes, interrupts, closed pipes. Knows no command and imports little.

Exit codes: 0 done, 1 an error, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from rvllm.version import VERSION

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 130


def main() -> int:
    """Run the command line in sys.argv; the exit code. For a process of its own: it changes signal handlers."""
    interrupts = Interrupts()
    try:
        interrupts.watch()
        open_closed_streams()
        code = run(sys.argv[1:], interrupts) or flushed()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # nobody reads any more, as after `| head`: not worth a word
        code = 1
    silence_stdout()
    # From here on Python only tidies up; an interrupt may end that without a word.
    interrupts.release()
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code


def run(arguments: list[str], interrupts: Interrupts) -> int:
    """Run one command line; the exit code. Errors are reported on stderr; raises KeyboardInterrupt, BrokenPipeError."""
    if arguments == ["--version"]:  # answered without click, which is the slower half of a start
        print(f"rvllm {VERSION}")
        return 0
    from rvllm.cli.failure import Debug, leaving, report

    debug = Debug(os.environ.get("RVLLM_DEBUG", "") not in ("", "0"))
    try:
        from rvllm.cli.main import commands

        # Not commands.main: that writes an empty line at an interrupt, and takes a closed pipe for itself.
        with commands.make_context("rvllm", list(arguments), obj=debug) as context:
            commands.invoke(context)
        return 0
    except BrokenPipeError:
        raise
    except Exception as error:
        # Code of others can turn an interrupt into an error of its own: an import that fails, say.
        if interrupts.seen:
            raise KeyboardInterrupt from None
        code = leaving(error)
        return report(error, debug) if code is None else code


class Interrupts:
    """Ctrl-C: the first raises KeyboardInterrupt, so that files and children are tidied up; the second ends at once."""

    def __init__(self) -> None:
        self.seen = False

    def watch(self) -> None:
        """Take over SIGINT, unless the parent had us ignore it, as for a job in the background."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._first)
            sys.unraisablehook = self._unraisable

    def release(self) -> None:
        """Give SIGINT back to the system, which ends the process."""
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, self._second)
        raise KeyboardInterrupt

    def _second(self, number: int, frame: FrameType | None) -> None:
        os._exit(INTERRUPTED)

    def _unraisable(self, unraisable: UnraisableHookArgs) -> None:
        """An interrupt that fell into a finalizer would be printed and forgotten: end here instead."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        sys.__unraisablehook__(unraisable)


def open_closed_streams() -> None:
    """Give a stream that the parent closed somewhere to write to, and no character that its encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  (lives on)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def flushed() -> int:
    """Write out what is buffered, while an error can still be told; the exit code."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def silence_stdout() -> None:
    """Let the interpreter's own last flush go nowhere if the first one failed."""
    if sys.__stdout__ is not None:
        try:
            sys.__stdout__.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())


if __name__ == "__main__":
    sys.exit(main())

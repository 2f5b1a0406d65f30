"""The parent's side of the engine process: start it, know where it listens and how it ended. Knows one message.

The child is a new Python with this one's sys.path, never a fork: the parent may have used a GPU, and has threads. That
works alike from a checkout, from an installed package and from what the one file unpacked.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import rvllm
from rvllm.config import EngineConfig
from rvllm.errors import StartError
from rvllm.link.messages import Start, frame

LOADER = "rvllm.link.child:load"
EXIT_WAIT_S = 1.0
"""From the end of its link to the end of the process."""

_LONGEST_ADDRESS = 107  # of a unix socket, in bytes
_ENTER = (
    "import sys; sys.path[:] = sys.argv[4:]; from rvllm.link.child import main;"
    " sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))"
)


class EngineProcess:
    """A process for an engine, which it loads when told to. It ends when `link` is closed, or when this process ends.

    link      the parent's own link, to be given to a client; whoever holds a copy of it keeps the engine alive
    address   the path of a unix socket at which more fronts may link up, for this user only; a link made there may
              also be handed down to the process that is to use it
    """

    def __init__(self, loader: str = LOADER) -> None:
        """Start it: it imports what it needs while the parent finds out what to `load`. Raises StartError."""
        command = [*python(), "-c", _ENTER, loader]
        listener, self.address = _listen()
        self.link, its_link = socket.socketpair()
        with listener, its_link:
            descriptors = (its_link.fileno(), listener.fileno())
            try:
                self._process = subprocess.Popen(
                    [*command, *map(str, descriptors), *paths()],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # which is for data
                    start_new_session=True,  # Ctrl-C in a terminal is ours to act on
                )
            except OSError as cause:
                self.link.close()
                remove_address(self.address)
                raise StartError(f"the engine process cannot be started: {cause}") from None

    def load(self, config: EngineConfig, *, vocab_limit: int, eos_ids: frozenset[int]) -> None:
        """Have it load a model, without waiting for that. vocab_limit, eos_ids: the tokenizer's."""
        with suppress(OSError):  # it has ended already, which a client tells better
            self.link.sendall(frame(Start(config, vocab_limit, eos_ids)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; below 0: the signal that killed it."""
        return self._process.poll()

    def end(self) -> str:
        """How it ended, in words; to be asked when its link has. Waits a moment for it."""
        try:
            code = self._process.wait(EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            return "the engine process has closed its link but goes on"
        if code >= 0:
            return f"the engine process ended with exit code {code}"
        return f"the engine process was killed by {signal_name(-code)}"

    def stop(self, timeout_s: float = EXIT_WAIT_S) -> int:
        """Close the link and see the process end, by force after `timeout_s`; its exit code."""
        self.link.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        remove_address(self.address)  # it did so itself, unless it was killed
        return self._process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def remove_address(address: Path) -> None:
    """Remove an engine's socket and the folder made for it. Parent and engine both do: either may be killed."""
    address.unlink(missing_ok=True)
    with suppress(OSError):  # the other was first
        address.parent.rmdir()


def _listen() -> tuple[socket.socket, Path]:
    """A socket in a new folder; both are this user's only."""
    folder = Path(tempfile.mkdtemp(prefix="rvllm-"))
    address = folder / "engine"
    if len(os.fsencode(address)) > _LONGEST_ADDRESS:
        folder.rmdir()
        raise StartError(
            f"{folder} is too long a name for a socket, the limit is {_LONGEST_ADDRESS} bytes",
            hint="set TMPDIR to a folder with a shorter name",
        )
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(address))
    address.chmod(0o600)
    listener.listen()
    return listener, address


def python() -> Iterator[str]:
    """This interpreter, as this process was started, but without site: what that found is in sys.path already.

    What .pth files of installed packages import could else come before, and mix with, what the one file brings.
    """
    if not sys.executable:
        raise StartError("the engine process cannot be started: this Python does not know its own program")
    yield from (sys.executable, "-S")
    if sys.flags.isolated:
        yield "-I"
    if sys.flags.ignore_environment:
        yield "-E"
    if sys.flags.dont_write_bytecode:
        yield "-B"


def paths() -> list[str]:
    """sys.path, with the folder that we come from where an import hook, or the working folder, led to it."""
    home = str(Path(rvllm.__file__).parents[1])
    return sys.path if home in sys.path else [home, *sys.path]


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

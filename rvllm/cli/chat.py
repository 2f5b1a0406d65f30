"""`rvllm chat`: a conversation in the terminal, or one user's turn a line through a pipe."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import click

from rvllm.cli.generate import from_stdin, require_template, write
from rvllm.cli.options import model_settings, sampling_options, system_option, talk_options
from rvllm.cli.session import complete, load, parameters, split
from rvllm.cli.talk import Talk
from rvllm.cli.vllm.command import VllmCommand
from rvllm.errors import BadRequest, PromptTooLong
from rvllm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from rvllm.llm import LLM

PROMPT = "> "
HELP = "/clear: start anew · /system TEXT: set the system message · /exit or Ctrl-D: leave · Ctrl-C: stop a reply"
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


@click.command(cls=VllmCommand)
@system_option
@sampling_options
@model_settings
@talk_options
def chat(system: str | None, quiet: bool, verbose: bool, **options: Any) -> None:
    """Talk with a model; it remembers what was said.

    \b
    /clear         forget the conversation
    /system TEXT   set the system message; without TEXT, remove it
    /help, /exit   a reminder of these; leave, as Ctrl-D does
    Ctrl-C         stop the reply and keep what there is of it; at the prompt, leave

    Without a terminal each line of standard input is one turn, and the first error ends the conversation. Sampling
    defaults are the model's own; where it has none, the likeliest token is taken.
    """
    given, settings = split(options)
    settings["seed"] = given.pop("seed", None)  # the engine's: each turn draws from a seed of its own
    with Talk(quiet=quiet, verbose=verbose) as talk:
        llm = load(settings, talk)
        require_template(llm)
        conversation = Conversation(llm, parameters(llm, given), talk, system)
        if sys.stdin.isatty():
            converse(conversation, talk)
        else:
            for line in sys.stdin.buffer:
                if not conversation.take(from_stdin(line)):
                    break


def converse(conversation: Conversation, talk: Talk) -> None:
    """Ask for lines until the user leaves; what one turn does wrong is said, and the conversation goes on."""
    talk.note(HELP)
    for line in terminal_lines():
        try:
            if not conversation.take(line):
                return
        except BadRequest as error:
            click.echo(f"error: {error}", err=True)


def terminal_lines() -> Iterator[str]:
    """Lines as they are typed, until Ctrl-D or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and remembers them)
    while True:
        try:
            if sys.stdout.isatty():
                line = input(PROMPT)
            else:
                click.echo(PROMPT, err=True, nl=False)
                line = input()
        except (EOFError, KeyboardInterrupt):
            click.echo(err=True)
            return
        yield line


class Conversation:
    """What was said so far. A turn that fails leaves no trace in it."""

    def __init__(self, llm: LLM, params: SamplingParams, talk: Talk, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._talk = talk
        self._system = system
        self._turns: list[dict[str, str]] = []

    def take(self, line: str) -> bool:
        """Do what a line says, or answer it; whether the conversation goes on. Raises BadRequest."""
        command = _COMMAND.fullmatch(line)
        if command:
            return self._command(command[1], (command[2] or "").strip())
        if line.strip():
            self._answer(line)
        return True

    def _command(self, name: str, text: str) -> bool:
        match name:
            case "exit" | "quit":
                return False
            case "clear":
                self._turns.clear()
                self._talk.note("the conversation is forgotten")
            case "system":
                self._system = text or None
                self._talk.note("the system message is set" if text else "there is no system message now")
            case "help":
                self._talk.note(HELP)
            case _:
                raise BadRequest(f"there is no command /{name}", hint="/help lists them; a space before / sends it")
        return True

    def _answer(self, text: str) -> None:
        turns = [*self._turns, {"role": "user", "content": text}]
        ids = self._encode(turns)
        with Stoppable(sys.stdin.isatty()) as reply:
            result = complete(self._llm, ids, self._params, write, lambda: reply.stopped)
        write("" if result.text.endswith("\n") else "\n")
        self._turns = [*turns, {"role": "assistant", "content": result.text}]
        if reply.stopped:
            self._talk.note("stopped; the reply so far is kept")
        elif result.finish_reason == "length":
            self._talk.note("the reply was cut: it reached --max-tokens or the end of the context")
        self._talk.detail(result.summary())

    def _encode(self, turns: list[dict[str, str]]) -> list[int]:
        """Ids of the whole conversation. Raises PromptTooLong where it leaves no room for a reply."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        ids = self._llm.encode_chat([*system, *turns])
        if len(ids) >= self._llm.max_model_len:
            raise PromptTooLong(
                f"the conversation has {len(ids):,} tokens with this turn, the context is {self._llm.max_model_len:,}",
                hint="/clear starts anew, a shorter message may fit, or start with a larger --max-model-len",
            )
        return ids


class Stoppable:
    """While entered, the first Ctrl-C only sets `stopped`, so that no step is torn; a second one raises.

    `active` false leaves Ctrl-C as it is.
    """

    def __init__(self, active: bool) -> None:
        self.stopped = False
        self._active = active

    def __enter__(self) -> Stoppable:
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True

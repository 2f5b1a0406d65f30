"""A thread that makes grammars ready while the engine steps. Knows requests and grammars; no front and no step.

Jobs are done one after another. What is done is taken by the engine's own thread, which `ready` wakes.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from rvllm.engine.engine import Engine
from rvllm.engine.grammar import Vocabulary
from rvllm.engine.request import Request
from rvllm.errors import BadRequest, RvllmError

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Compiled(Generic[Owner]):
    """Completions of one prompt, whose grammar is compiled now, or could not be: `error`."""

    owner: Owner
    requests: list[Request]
    error: RvllmError | None


class Compiler(Generic[Owner]):
    """Compiles the grammars of one engine. `ready`: a socket with something to read when there is something to take."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: SimpleQueue[Vocabulary | tuple[Owner, list[Request]]] = SimpleQueue()
        self._done: deque[Compiled[Owner]] = deque()
        self._thread: threading.Thread | None = None
        self._refusal: RvllmError = BadRequest("the tokens' texts have not been told", param="structured_outputs")
        self.ready, self._end = socket.socketpair()
        self.ready.setblocking(False)
        self._end.setblocking(False)

    def learn(self, vocabulary: Vocabulary) -> None:
        """What tokens stand for; has to come before the first grammar."""
        self._put(vocabulary)

    def compile(self, owner: Owner, requests: list[Request]) -> None:
        """Have the grammar compiled that these have in common."""
        self._put((owner, requests))

    def take(self) -> list[Compiled[Owner]]:
        """What was done since it was asked last."""
        with suppress(BlockingIOError):
            self.ready.recv(1 << 12)
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        self.ready.close()

    def _put(self, job: Vocabulary | tuple[Owner, list[Request]]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, Vocabulary):
                try:
                    self._engine.learn(job)
                except BaseException as cause:  # a panic of the library's is no Exception
                    self._refusal = cause if isinstance(cause, BadRequest) else _fault(cause)
                continue
            self._done.append(Compiled(*job, self._error(job[1])))
            with suppress(OSError):  # full: it wakes anyway; closed: nobody waits any more
                self._end.send(b"\0")

    def _error(self, requests: list[Request]) -> RvllmError | None:
        asked, grammars = requests[0].params.structured_outputs, self._engine.grammars
        assert asked is not None, requests
        if grammars is None:
            return self._refusal
        try:
            grammars.compile(asked)
        except RvllmError as cause:
            return cause
        except BaseException as cause:  # a panic of the library's is no Exception, and must not end this thread
            return _fault(cause)
        return None


def _fault(cause: BaseException) -> BadRequest:
    return BadRequest(f"the grammar cannot be compiled: {type(cause).__name__}", param="structured_outputs")

"""One thread that steps the engine and talks with its fronts. Knows ids and sockets; not how either came to be.

While requests run, sockets are looked at once between two steps, without waiting; while none runs, the thread sleeps
until something comes. A front that reads slowly never holds up the engine: what it has not read is kept, up to
MOST_UNREAD bytes, and beyond that its link is closed, which is what happens to one that died. Either way its requests
are aborted and nobody else's are touched.
"""

from __future__ import annotations

import gc
import selectors
import socket
import time
from contextlib import suppress
from itertools import groupby

from rvllm.engine.engine import Engine
from rvllm.engine.request import Request, TokenEvent, check_request
from rvllm.engine.tally import Histogram
from rvllm.errors import BadRequest, EngineError, RvllmError
from rvllm.link.compiling import Compiler
from rvllm.link.messages import (
    Abort,
    AskStats,
    Facts,
    Failed,
    Frames,
    FromFront,
    Learn,
    Malformed,
    Message,
    Note,
    Ready,
    Shutdown,
    Stats,
    Stopping,
    Submit,
    Tokens,
    failure_of,
    fatal,
    frame,
    from_front,
)

MOST_UNREAD = 64 << 20
"""Bytes that are kept for a front that does not read: half a million tokens and more."""

RECEIVE_BYTES = 1 << 18
LAST_WORDS_S = 1.0
"""How long the last messages may take to be read."""

TERMINATE_DRAIN_S = 30.0
"""How long requests may go on after SIGTERM."""

IDLE_BEFORE_COLLECT_S = 0.05
STEPS_BEFORE_COLLECT = 10_000

STEP_S = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's
PAUSE_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
"""Bounds of what is counted for those who watch."""


def _shared(request: Request) -> tuple[object, ...]:
    """Neighbours of which this is the same are completions of one prompt, which is then read once.

    Not where the prompt's own log-probabilities are wanted: those are told of the request that reads it. The form of
    the text is part of it: a grammar is compiled for all of them.
    """
    alone = request.id if request.params.prompt_logprobs is not None else None
    return request.prompt_ids, request.cache_salt, request.priority, alone, request.params.structured_outputs


class Front:
    """A link to a front: the requests that are its own, and what is still to be written."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self.frames: Frames[FromFront] = Frames(from_front)
        self.held: set[str] = set()
        self.unread = bytearray()
        self.closed = False

    def send(self, message: Message) -> None:
        """Write what the socket takes and keep the rest. Raises OSError when the front is gone."""
        self.unread += frame(message)
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError):
            del self.unread[: self.link.send(self.unread)]

    def close(self, patience_s: float = 0.0) -> None:
        """Close the link, after `patience_s` at the most in which the front may read what is kept for it."""
        self.closed = True
        try:
            if self.unread and patience_s > 0:
                self.link.settimeout(patience_s)
                self.link.sendall(self.unread)
        except OSError:
            pass  # it is gone, or does not read: there is nobody to tell
        self.link.close()


class Server:
    """Serves one engine to a parent, whose link's end is the engine's end, and to the fronts that come to `listener`.

    terminate: something to read there means that no more requests are to be taken.
    """

    def __init__(
        self,
        engine: Engine,
        facts: Facts,
        *,
        parent: Front,
        listener: socket.socket,
        terminate: socket.socket,
    ) -> None:
        self._engine, self._facts = engine, facts
        self._parent, self._listener, self._terminate = parent, listener, terminate
        self._owners: dict[str, Front] = {}  # of every request in the engine, or with the compiler
        self._compiler: Compiler[Front] = Compiler(engine)
        self._compiling: dict[str, Request] = {}  # those that wait for it
        self._fronts = {parent}
        self._steps = 0
        self._uncollected_steps = 0
        self._computed_tokens = 0
        self._step_s, self._step_tokens = Histogram.empty(STEP_S), Histogram.empty(STEP_TOKENS)
        self._gc_s = Histogram.empty(PAUSE_S)
        self._stop_at_s: float | None = None  # on the monotonic clock
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(terminate, selectors.EVENT_READ, self._end_soon)
        self._selector.register(self._compiler.ready, selectors.EVENT_READ, self._add_compiled)

    def run(self) -> None:
        """Serve until the parent is gone or has said Shutdown. Raises whatever the engine raises, its words sent."""
        try:
            self._welcome(self._parent)
            while not self._ended():
                if self._engine.busy:
                    self._attend(0)
                    self._step()
                else:
                    self._rest()
            self._end_rest()
        except BaseException as error:
            self._say_last(fatal(error))
            raise

    def close(self) -> None:
        """Close all links, once what is kept for them is read, or LAST_WORDS_S have passed."""
        end_s = time.monotonic() + LAST_WORDS_S
        for front in self._parent_last():
            front.close(max(end_s - time.monotonic(), 0.0))
        self._selector.close()
        self._compiler.close()

    # --- The engine

    def _step(self) -> None:
        if not self._engine.busy:  # a front may just have taken its requests away
            return
        begin_s = time.monotonic()
        events = self._engine.step()
        self._count_step(time.monotonic() - begin_s)
        self._uncollected_steps += 1
        self.publish(events)
        if self._uncollected_steps >= STEPS_BEFORE_COLLECT:
            self._collect()

    def _count_step(self, seconds: float) -> None:
        computed = self._engine.counts.computed_tokens
        self._step_s.add(seconds)
        self._step_tokens.add(computed - self._computed_tokens)
        self._computed_tokens = computed
        self._steps += 1

    def publish(self, events: list[TokenEvent]) -> None:
        """Send each front what a step made for it, in one message."""
        batches: dict[Front, list[TokenEvent]] = {}
        for event in events:
            front = self._owners[event.request_id]
            batches.setdefault(front, []).append(event)
            if event.finish_reason is not None:
                self._forget(event.request_id)
        for front, batch in batches.items():
            self._send(front, Tokens(batch))

    def _rest(self) -> None:
        """Sleep until something comes. If it does not come at once, there is time to collect garbage first."""
        if self._uncollected_steps and not self._attend(IDLE_BEFORE_COLLECT_S):
            self._collect()
        if not self._uncollected_steps and not self._engine.busy:
            self._attend(None)

    def _collect(self) -> None:
        begin_s = time.monotonic()
        gc.collect()
        self._gc_s.add(time.monotonic() - begin_s)
        self._uncollected_steps = 0

    def _submit(self, front: Front, requests: tuple[Request, ...]) -> None:
        """Queue those that can be run, those for one prompt together, and say of the others why not."""
        good: dict[str, Request] = {}
        for request in requests:
            try:
                self._check(request)
                if request.id in good:
                    raise _running_already(request)
            except RvllmError as cause:
                self._send(front, Failed(request.id, failure_of(cause)))
            else:
                good[request.id] = request
        for _, same in groupby(good.values(), _shared):
            group = list(same)
            if front.closed:  # gone since it sent this
                return
            for request in group:
                self._owners[request.id] = front
                front.held.add(request.id)
            if group[0].params.structured_outputs is None:
                self._add(front, group)
            else:
                self._compiling |= {request.id: request for request in group}
                self._compiler.compile(front, group)

    def _add(self, front: Front, group: list[Request], error: RvllmError | None = None) -> None:
        """Put requests into the engine that are a front's, unless there is an error: then say so."""
        try:
            if error is not None:
                raise error
            self._engine.add(*group)
        except RvllmError as cause:
            for request in group:
                self._forget(request.id)
                self._send(front, Failed(request.id, failure_of(cause)))

    def _add_compiled(self) -> None:
        """Put those into the engine whose grammars are compiled, and who are still wanted."""
        for done in self._compiler.take():
            wanted = [one for one in done.requests if self._compiling.get(one.id) is one]
            for request in wanted:
                del self._compiling[request.id]
            if wanted:
                self._add(done.owner, wanted, done.error)

    def _check(self, request: Request) -> None:
        """Raises BadRequest for what cannot be run, and EngineError while the engine is stopping."""
        if self._stop_at_s is not None:
            raise EngineError("the engine is being shut down", hint="send the request again to another one, or later")
        if request.id in self._owners:
            raise _running_already(request)
        if request.params.max_tokens == 0:
            raise BadRequest("max_tokens is 0, an engine makes at least one token", param="max_tokens")
        limits = self._facts.limits
        check_request(
            request.prompt_ids,
            request.params,
            vocab_limit=limits.vocab_limit,
            max_logprobs=self._facts.max_logprobs,
        )

    def _forget(self, request_id: str) -> None:
        self._owners.pop(request_id).held.remove(request_id)
        self._compiling.pop(request_id, None)

    def _abort(self, request_id: str) -> None:
        self._forget(request_id)
        self._engine.abort(request_id)

    # --- The fronts

    def _attend(self, timeout_s: float | None) -> bool:
        """Do what the sockets are ready for, waiting for the first; whether there was anything."""
        ready = self._selector.select(timeout_s)
        for key, mask in ready:
            if isinstance(key.data, Front):
                self._serve(key.data, mask)
            else:
                key.data()
        return bool(ready)

    def _accept(self) -> None:
        with suppress(OSError):  # there is no other, or no descriptor left for it
            while True:
                link, _ = self._listener.accept()
                self._welcome(Front(link))

    def _welcome(self, front: Front) -> None:
        self._fronts.add(front)
        self._selector.register(front.link, selectors.EVENT_READ, front)
        self._send(front, Ready(self._facts))

    def _serve(self, front: Front, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and not front.closed:
            self._send(front, None)
        if mask & selectors.EVENT_READ and not front.closed:
            self._receive(front)

    def _receive(self, front: Front) -> None:
        try:
            data = front.link.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(front)
            return
        try:
            for message in front.frames.feed(data):
                self._handle(front, message)
                if front.closed:
                    return
        except Malformed as cause:
            self._cast_out(front, f"it sent what is no message: {cause}")

    def _handle(self, front: Front, message: FromFront) -> None:
        if isinstance(message, Submit):
            self._submit(front, message.requests)
        elif isinstance(message, Learn):
            self._compiler.learn(message.vocabulary)
        elif isinstance(message, Abort):
            for request_id in message.ids:
                if request_id in front.held:
                    self._abort(request_id)
        elif isinstance(message, AskStats):
            load = self._engine.load
            self._send(front, Stats(load, self._steps, self._step_s, self._step_tokens, self._gc_s))
        elif isinstance(message, Shutdown) and front is self._parent:
            self._stop(message.drain_s)
        else:
            raise Malformed(f"{type(message).__name__} is not for this link at this time")

    def _send(self, front: Front, message: Message | None) -> None:
        """Send a message, or what is kept; close the link of a front that is gone or has let too much lie."""
        if front.closed:
            return
        try:
            if message is None:
                front.flush()
            else:
                front.send(message)
        except OSError:
            self._close(front)
            return
        if len(front.unread) > MOST_UNREAD:
            self._cast_out(front, f"it has left {len(front.unread):,} bytes unread")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if front.unread else 0)
        if self._selector.get_key(front.link).events != wanted:
            self._selector.modify(front.link, wanted, front)

    def _close(self, front: Front) -> None:
        """End a front's link and all that runs for it."""
        if front.closed:
            return
        self._selector.unregister(front.link)
        front.close()
        self._fronts.remove(front)
        for request_id in list(front.held):
            self._abort(request_id)

    def _cast_out(self, front: Front, why: str) -> None:
        self._close(front)
        self._send(self._parent, Note(f"a front's link is closed, {why}"))

    # --- The end

    def _ended(self) -> bool:
        if self._parent.closed:
            return True
        busy = self._engine.busy or self._compiling
        return self._stop_at_s is not None and (not busy or time.monotonic() >= self._stop_at_s)

    def _stop(self, drain_s: float) -> None:
        """Take no more requests; end when those there are through, or `drain_s` seconds from now."""
        first = self._stop_at_s is None
        self._stop_at_s = min(self._stop_at_s or float("inf"), time.monotonic() + drain_s)
        if first:
            for front in list(self._fronts):
                self._send(front, Stopping())

    def _end_soon(self) -> None:
        self._terminate.recv(RECEIVE_BYTES)
        self._stop(TERMINATE_DRAIN_S)

    def _end_rest(self) -> None:
        """Tell the fronts which requests were not through in time."""
        cut = EngineError("the engine was shut down before the request was through")
        for request_id, front in list(self._owners.items()):
            if request_id not in self._owners:  # its front was found gone on the way
                continue
            self._abort(request_id)
            self._send(front, Failed(request_id, failure_of(cut)))

    def _parent_last(self) -> list[Front]:
        """The fronts in the order of their end: once the parent has closed its link, this process is over."""
        return sorted(self._fronts, key=lambda front: front is self._parent)

    def _say_last(self, message: Message) -> None:
        """To every front, with no look at what it holds: the engine is not to be touched any more."""
        for front in self._parent_last():
            with suppress(OSError):  # it is gone, too
                front.send(message)


def _running_already(request: Request) -> BadRequest:
    return BadRequest(f"a request with the id {request.id!r} is running already", param="request_id")

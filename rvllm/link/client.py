"""A front's end of a link: requests go in, each one's tokens come out. Knows ids; no text, no HTTP, no process.

`EngineClient` waits for the link itself; `AsyncEngineClient` is fed by an event loop. When the engine ends, all that
waits for it raises EngineDied with the engine's own words, and so does all that is asked of it later.
"""

from __future__ import annotations

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rvllm.engine.grammar import Vocabulary
from rvllm.engine.request import Request, TokenEvent
from rvllm.errors import EngineDied, RvllmError
from rvllm.link.messages import (
    Abort,
    AskStats,
    EngineTrace,
    Facts,
    Failed,
    Fatal,
    Frames,
    FromEngine,
    Learn,
    Malformed,
    Message,
    Note,
    Progress,
    Ready,
    Shutdown,
    Stats,
    Stopping,
    Submit,
    Tokens,
    error_of,
    frame,
    from_engine,
)

RECEIVE_BYTES = 1 << 18


def _ignore(*told: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Parent:
    """What a front that started the engine process can add to its link.

    death: says how the process ended; asked when the link ends without a word.
    progress, note: are told how loading goes, and what a user should know.
    """

    death: Callable[[], str] = lambda: "the engine process is gone"
    progress: Callable[[str, int, int], None] = _ignore
    note: Callable[[str], None] = _ignore


class Stream:
    """One request's tokens as they come: `take` what is there, or iterate with `async for`.

    It ends with the token that has a finish reason, or when it is aborted; either way of reading raises the error that
    ended it. What nobody reads is kept: no more than the tokens that the request may have.

    times_s: when each of the tokens last taken came, on the monotonic clock.
    taker: takes a token as it comes, in place of whoever waits, who sleeps on; False: it is kept, and he is woken. It
    is asked only while somebody waits, for no last token, and not where more tokens are there: he takes all at once.
    """

    __slots__ = ("_came_s", "_error", "_events", "_waiter", "ended", "request_id", "taker", "times_s")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ended = False
        self.times_s: list[float] = []
        self._events: list[TokenEvent] = []
        self._came_s: list[float] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.taker: Callable[[TokenEvent, float], bool] | None = None

    def take(self) -> list[TokenEvent]:
        """What came since it was asked last, perhaps nothing. Raises what ended the request, once all is taken."""
        if not self._events and self._error is not None:
            raise self._error.with_traceback(None)  # many raise it, and each adds to its traceback
        events, self._events = self._events, []
        self.times_s, self._came_s = self._came_s, []
        return events

    async def wait(self) -> None:
        """Until there is something to take, or it has ended. For one task at a time."""
        await news((self,))

    @property
    def stirred(self) -> bool:
        """Whether there is something to take, or it has ended."""
        return bool(self._events) or self.ended

    def wake_with(self, waiter: asyncio.Future[None]) -> None:
        """Settle `waiter`, in place of an earlier one, when that is so."""
        self._waiter = waiter

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TokenEvent:
        await self.wait()
        if self._events:
            del self._came_s[0]
            return self._events.pop(0)
        if self._error is not None:
            raise self._error.with_traceback(None)
        raise StopAsyncIteration

    def put(self, event: TokenEvent, came_s: float, *, more: bool = False) -> None:
        taker, waiter, last = self.taker, self._waiter, event.finish_reason is not None
        if taker is not None and not (last or more or waiter is None or waiter.done()) and taker(event, came_s):
            return
        self._events.append(event)
        self._came_s.append(came_s)
        self.ended = self.ended or last
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        self.ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def news(streams: Iterable[Stream]) -> None:
    """Until one of them has something to take, or has ended. For one task at a time."""
    while True:
        for stream in streams:
            if stream.stirred:
                return
        waiter = asyncio.get_running_loop().create_future()
        for stream in streams:
            stream.wake_with(waiter)
        await waiter


def link_to(address: Path) -> socket.socket:
    """A further front's link, to an EngineProcess's address. Raises EngineDied."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(str(address))
    except OSError as cause:
        link.close()
        raise EngineDied(f"there is no engine at {address}: {cause.strerror}") from None
    return link


class Client(ABC):
    """What both clients share: what was asked, and what the engine has said so far."""

    def __init__(self, parent: Parent) -> None:
        self.facts: Facts | None = None  # once it is ready
        self.taught = False  # whether it knows what its tokens stand for
        self.stopping = False  # it takes no more requests, and its end will be no failure
        self.error: Exception | None = None  # what ended the link
        self._parent = parent
        self._frames: Frames[FromEngine] = Frames(from_engine)
        self._streams: dict[str, Stream] = {}
        self._stats: deque[Stats] = deque()

    def submit(self, requests: Sequence[Request]) -> list[Stream]:
        """Run these. Their ids must be unlike all that any front has in the engine. Raises EngineDied, BadRequest."""
        streams = {request.id: Stream(request.id) for request in requests}
        assert len(streams) == len(requests) and not streams.keys() & self._streams.keys(), streams.keys()
        self._write(Submit(tuple(requests)))
        self._streams.update(streams)
        return list(streams.values())

    def teach(self, vocabulary: Vocabulary) -> None:
        """Tell what tokens stand for, before the first request with structured_outputs. Raises EngineDied."""
        self._write(Learn(vocabulary))
        self.taught = True

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests, whatever has become of them, and end their streams."""
        known = [self._streams.pop(request_id) for request_id in request_ids if request_id in self._streams]
        for stream in known:
            stream.end()
        if known and self.error is None:
            self._write(Abort(tuple(stream.request_id for stream in known)))

    def shutdown(self, drain_s: float) -> None:
        """The parent's: have the engine end when all is through, after `drain_s` at the latest. Keep the link open."""
        self._write(Shutdown(drain_s))

    def _write(self, message: Message) -> None:
        """Raises EngineDied when the link has ended."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        self._send(frame(message))

    @abstractmethod
    def _send(self, data: bytes) -> None: ...

    def _take(self, data: bytes) -> None:
        """Sort what came by the link; nothing means that it has ended."""
        if not data:
            self._end(EngineDied("the engine was shut down" if self.stopping else self._parent.death()))
            return
        try:
            for message in self._frames.feed(data):
                self._handle(message)
        except Malformed as cause:
            self._end(EngineDied(f"the engine said what is no message: {cause}"))

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Tokens):
            came_s, more = time.monotonic(), self._frames.more
            for event in message.events:
                stream = self._streams.get(event.request_id)
                if stream is None:
                    continue  # aborted while this was on its way
                stream.put(event, came_s, more=more)
                if stream.ended:
                    del self._streams[event.request_id]
        elif isinstance(message, Failed):
            if (failed := self._streams.pop(message.request_id, None)) is not None:
                failed.end(error_of(message.failure))
        elif isinstance(message, Stats):
            self._stats.append(message)
        elif isinstance(message, Ready):
            self.facts = message.facts
        elif isinstance(message, Progress):
            self._parent.progress(message.label, message.done, message.total)
        elif isinstance(message, Note):
            self._parent.note(message.text)
        elif isinstance(message, Stopping):
            self.stopping = True
        else:
            self._end(self._last_words(message))

    def _last_words(self, message: Fatal) -> Exception:
        """Before it is ready the error is what it would be in this process; afterwards the engine's death."""
        error = error_of(message.failure)
        if self.facts is not None:
            hint = error.hint if isinstance(error, RvllmError) else None
            error = EngineDied(error.message if isinstance(error, RvllmError) else str(error), hint=hint)
        error.__cause__ = EngineTrace(message.trace)
        return error

    def _end(self, error: Exception) -> None:
        if self.error is not None:
            return
        self.error = error
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.end(error)


class EngineClient(Client):
    """A link that is waited for, and closed when it ends. Not thread-safe: one thread asks and receives."""

    def __init__(self, link: socket.socket, parent: Parent = Parent()) -> None:
        super().__init__(parent)
        self._link = link

    def ready(self) -> Facts:
        """Wait until it is ready. Raises StartError and what else LLM does where it cannot be, and EngineDied."""
        while self.facts is None:
            self.receive()
        return self.facts

    def receive(self) -> None:
        """Wait until something comes and sort it. Raises what ended the link."""
        if self.error is not None:
            raise self.error
        try:
            self._take(self._link.recv(RECEIVE_BYTES))
        except ConnectionResetError:
            self._take(b"")

    def stream(self, request: Request) -> Iterator[TokenEvent]:
        """One request's tokens. Closing the iterator aborts it."""
        (stream,) = self.submit([request])
        try:
            while True:
                events = stream.take()
                yield from events
                if stream.ended and not events:
                    return
                if not events:
                    self.receive()
        finally:
            self.abort([request.id])

    def stats(self) -> Stats:
        self._write(AskStats())
        while not self._stats:
            self.receive()
        return self._stats.popleft()

    def wait(self) -> Exception:
        """Receive until the link ends; what ended it."""
        while self.error is None:
            self.receive()
        return self.error

    def close(self) -> None:
        self._end(EngineDied("the link was closed"))

    def _end(self, error: Exception) -> None:
        super()._end(error)
        self._link.close()

    def _send(self, data: bytes) -> None:
        try:
            self._link.sendall(data)
        except OSError:  # it is gone; what it said before is still there to be read
            raise self.wait() from None


class AsyncEngineClient(Client):
    """A link that an event loop listens to, and closes when it ends. For the loop's own thread."""

    def __init__(self, parent: Parent = Parent()) -> None:
        super().__init__(parent)
        self._transport: asyncio.WriteTransport | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @classmethod
    async def over(cls, link: socket.socket, parent: Parent = Parent()) -> AsyncEngineClient:
        """A client that listens to `link` from now on."""
        client = cls(parent)
        loop = asyncio.get_running_loop()
        client._transport, _ = await loop.create_unix_connection(lambda: _Listener(client._take), sock=link)
        return client

    async def ready(self) -> Facts:
        """Wait until it is ready. Raises StartError and what else LLM does where it cannot be, and EngineDied."""
        while self.facts is None:
            await self._news()
        return self.facts

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """One request's tokens. Closing the iterator aborts it."""
        (stream,) = self.submit([request])
        try:
            async for event in stream:
                yield event
        finally:
            self.abort([request.id])

    async def stats(self) -> Stats:
        self._write(AskStats())
        while not self._stats:
            await self._news()
        return self._stats.popleft()

    async def wait(self) -> Exception:
        """Until the link ends; what ended it."""
        while self.error is None:
            await self._news()
        return self.error

    def close(self) -> None:
        self._end(EngineDied("the link was closed"))

    async def _news(self) -> None:
        """Until something comes but tokens. Raises what ended the link."""
        if self.error is not None:
            raise self.error
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _handle(self, message: FromEngine) -> None:
        super()._handle(message)
        if not isinstance(message, Tokens):
            self._wake()

    def _end(self, error: Exception) -> None:
        super()._end(error)
        if self._transport is not None:
            self._transport.close()
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _send(self, data: bytes) -> None:
        assert self._transport is not None, "made without `over`"
        self._transport.write(data)


class _Listener(asyncio.Protocol):
    """Hands on what the loop reads; nothing at the end, however the link ended."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take

    def data_received(self, data: bytes) -> None:
        self._take(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._take(b"")

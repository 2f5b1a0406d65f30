"""HTTP as far as an ASGI server leaves it to us: routes, keys, bodies, JSON and event streams. Knows no model.

A client that goes away while its request is worked on cancels that work.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rvllm.api.errors import NO_HEADERS, HttpError, http_error

MOST_BODY_BYTES = 32 << 20
DONE = b"data: [DONE]\n\n"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Gone(Exception):
    """The client went away before it had sent its request: there is nobody to tell."""


@dataclass(slots=True)
class Exchange:
    """One request and its reply. `begun`: the status is on its way, so that an error can no longer be one.

    name: what follows the route, where it ends in a /. came_s: when it came, on the monotonic clock.
    """

    scope: Scope
    receive: Receive
    send: Send
    name: str = ""
    begun: bool = False
    status: int = 0
    route: str = "none"
    came_s: float = field(default_factory=time.monotonic)
    headers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in self.scope["headers"]}

    async def body(self) -> bytes:
        """The request's body. Raises HttpError: 413 as soon as it is known to be too large, 415 where it is no JSON."""
        kind = self.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A web page can have a browser send any other kind to a server that it should not reach.
            raise HttpError(415, f"the content type is {kind}, the body must be application/json")
        length = self.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BODY_BYTES:
            raise _too_large()
        data = bytearray()
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            data += message.get("body", b"")
            if len(data) > MOST_BODY_BYTES:
                raise _too_large()
            if not message.get("more_body", False):
                return bytes(data)

    async def reply(self, data: bytes, status: int = 200, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """The whole reply; JSON unless it is empty."""
        await self._begin(status, {**(_JSON if data else {}), "content-length": str(len(data)), **headers})
        await self.send({"type": "http.response.body", "body": data})

    async def reply_json(self, value: object) -> None:
        await self.reply(msgspec.json.encode(value))

    async def begin_events(self) -> None:
        """Begin a stream of events: the status goes out now, however long the first event takes."""
        await self._begin(200, _EVENTS)

    async def events(self, data: bytes) -> None:
        """Events, whole ones."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """The last events of a stream."""
        await self.send({"type": "http.response.body", "body": data})

    async def refuse(self, error: HttpError) -> None:
        """Reply with an error, or end a stream that has begun with one."""
        if self.begun:
            await self.end(b"data: " + error.body() + b"\n\n")
        else:
            # What is left of a body that nobody reads would be taken for the next request.
            close = {"connection": "close"} if error.status in (413, 415) else {}
            await self.reply(error.body(), error.status, {**error.headers, **close})

    async def gone(self) -> None:
        """Until the client has gone away. For after the body."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.begun, self.status = True, status
        raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})


Handler = Callable[[Exchange], Awaitable[None]]
Ended = Callable[[Exchange], None]
Routes = Mapping[str, Mapping[str, Handler]]
"""path -> method -> handler. A path that ends in / takes all that begin with it."""


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class App:
    """The ASGI application: finds a request's handler, tells its errors. `keys` open all but `open_routes`.

    ended: is told of every exchange when it is over; its status is 0 where the client was gone first.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        keys: Iterable[str] = (),
        open_routes: Iterable[str] = (),
        ended: Ended = lambda exchange: None,
    ) -> None:
        self._routes = routes
        self._prefixes = [path for path in routes if path.endswith("/")]
        self._keys = [_digest(key.encode()) for key in keys]
        self._open = frozenset(open_routes)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            self._check_key(exchange)
            await self._handler(exchange)(exchange)
        except Gone:
            pass
        except Exception as error:
            told = http_error(error)
            if told.status == 500:
                traceback.print_exception(error, file=sys.stderr)
            await exchange.refuse(told)
        finally:
            self._ended(exchange)

    def _handler(self, exchange: Exchange) -> Handler:
        path = exchange.scope["path"]
        methods = None if path in self._prefixes else self._routes.get(path)
        exchange.route = path if methods is not None else "none"
        for prefix in self._prefixes:
            if methods is None and path.startswith(prefix) and path != prefix:
                methods, exchange.route, exchange.name = self._routes[prefix], prefix, path.removeprefix(prefix)
        if methods is None:
            raise HttpError(404, "there is nothing at this path", code="not_found")
        method = exchange.scope["method"]
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(methods)
            raise HttpError(405, f"the method is {method}, this path takes {allowed}", headers={"allow": allowed})
        return handler

    def _check_key(self, exchange: Exchange) -> None:
        """Raises HttpError, 401. All keys are compared, each in constant time: time must not tell a key."""
        if not self._keys or exchange.scope["path"] in self._open:
            return
        scheme, _, key = exchange.headers.get("authorization", "").partition(" ")
        given = _digest(key.encode("latin-1"))
        known = [hmac.compare_digest(given, digest) for digest in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise HttpError(
                401,
                "the API key is missing or wrong. hint: send the header Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


async def while_connected(exchange: Exchange, work: Awaitable[None]) -> None:
    """Do the work; cancel it when the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(exchange.gone())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _too_large() -> HttpError:
    return HttpError(413, f"the body is too large, the limit is {MOST_BODY_BYTES:,} bytes", code="body_too_large")

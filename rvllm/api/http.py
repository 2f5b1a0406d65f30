"""HTTP as far as an ASGI server leaves it to us: routes, keys, bodies, JSON and event streams. Knows no model.

A client that goes away while its request is worked on cancels that work.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from rvllm.api.cors import Cors
from rvllm.api.errors import NO_HEADERS, HttpError, http_error

CHECK_S = 5.0
"""How often it is looked whether a client still reads, at the most."""

REQUEST_ID = re.compile(r"[!-~]{1,128}")
LINK = "rvllm.connection"
"""An extension of ASGI's scope. abort: ends the connection at once, with what is written to it and not yet read;
unread: how many bytes that are; write: writes more of a reply's body, where that needs no waiting.
"""

DONE = b"data: [DONE]\n\n"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


NO_PAGES = Cors(())


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every request. client_s: how long a client may leave unread what is sent to it.

    request_s: how long a request for text may take; None: as long as it takes.
    silence_s: after that long without an event a stream has a comment, lest it is taken for dead; 0: never.
    """

    body_bytes: int = 32 << 20
    client_s: float = 60.0
    request_s: float | None = None
    silence_s: float = 0.0
    cors: Cors = NO_PAGES


class Link(Protocol):
    """What a server can do with a request's connection beside ASGI: `scope["extensions"][LINK]`."""

    def write(self, data: bytes) -> bool:
        """A chunk of the reply, at once; False where none goes out, or its client has not read all there is."""

    def unread(self) -> int:
        """Bytes that the other end has not taken."""

    def abort(self) -> None:
        """End the connection, with what is written to it and not yet read."""


class Gone(Exception):
    """The client went away before it had sent its request: there is nobody to tell."""


@dataclass(slots=True)
class Exchange:
    """One request and its reply. `begun`: the status is on its way, so that an error can no longer be one.

    name: what follows the route, where it ends in a /. came_s: when it came, on the monotonic clock.
    path: without what the server is mounted at. request_id: the client's, where it brought one that can be told.
    key: the number of the key it brought. shared: headers of whatever the reply is. told: of a request for text, for
    the log. waits_s: since when the client has left unread what is sent to it; unread: bytes of it at the last look.
    spoke_s: of the last event.
    shape: an error's bytes, as a body or as a stream's last event. length: the body's, once it is read.
    """

    scope: Scope
    receive: Receive
    send: Send
    rules: Rules
    name: str = ""
    begun: bool = False
    shape: Callable[[HttpError, bool], bytes] = field(default_factory=lambda: openai_error)
    status: int = 0
    route: str = "none"
    key: int | None = None
    told: dict[str, Any] = field(default_factory=dict)
    length: int = 0
    waits_s: float | None = None
    unread: int = 0
    spoke_s: float | None = None
    came_s: float = field(default_factory=time.monotonic)
    headers: dict[str, str] = field(init=False)
    path: str = field(init=False)
    request_id: str = field(init=False)
    shared: dict[str, str] = field(init=False)
    link: Link | None = field(init=False)

    def __post_init__(self) -> None:
        self.headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in self.scope["headers"]}
        # Whether a proxy takes the prefix away or not: uvicorn puts one before every path.
        root, self.path = self.scope.get("root_path", ""), self.scope["path"]
        for _ in range(2):
            if root and self.path.startswith(f"{root}/"):
                self.path = self.path.removeprefix(root)
        given = self.headers.get("x-request-id", "")
        self.request_id = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        self.shared = {"x-request-id": self.request_id, **self.rules.cors.told(self.headers)}
        self.link = self.scope.get("extensions", {}).get(LINK)

    @property
    def client(self) -> str:
        """The other end's address, or nothing at a unix socket."""
        return str((self.scope.get("client") or ("",))[0])

    async def body(self) -> bytes:
        """The request's body. Raises HttpError: 413 as soon as it is known to be too large, 415 where it is no JSON."""
        kind = self.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A web page can have a browser send any other kind to a server that it should not reach.
            raise HttpError(415, f"the content type is {kind}, the body must be application/json")
        length = self.headers.get("content-length", "0")
        most = self.rules.body_bytes
        if not length.isdecimal() or int(length) > most:
            raise _too_large(most)
        data = bytearray()
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            data += message.get("body", b"")
            if len(data) > most:
                raise _too_large(most)
            if not message.get("more_body", False):
                self.length = len(data)
                return bytes(data)

    async def reply(self, data: bytes, status: int = 200, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """The whole reply; JSON unless it is empty."""
        await self._begin(status, {**(_JSON if data else {}), "content-length": str(len(data)), **headers})
        await self.send({"type": "http.response.body", "body": data})

    async def reply_json(self, value: object) -> None:
        await self.reply(encode_json(value))

    async def begin_events(self) -> None:
        """Begin a stream of events: the status goes out now, however long the first event takes."""
        await self._begin(200, _EVENTS)
        self.spoke_s = time.monotonic()

    async def events(self, data: bytes) -> None:
        """Events, whole ones; waits for a client that is slow to read."""
        self.waits_s, self.unread = time.monotonic(), 0
        self.spoke_s = self.waits_s
        await self.send({"type": "http.response.body", "body": data, "more_body": True})
        self.waits_s = None

    def write(self, data: bytes, now_s: float) -> bool:
        """Events as in `events`, at once; False where that cannot be without waiting. now_s: on the monotonic clock."""
        if self.waits_s is not None or self.link is None or not self.link.write(data):
            return False
        self.spoke_s = now_s
        return True

    async def end(self, data: bytes = b"") -> None:
        """The last events of a stream."""
        self.waits_s, self.unread = time.monotonic(), 0
        await self.send({"type": "http.response.body", "body": data})

    async def refuse(self, error: HttpError) -> None:
        """Reply with an error, or end a stream that has begun with one."""
        if self.begun:
            await self.end(self.shape(error, True))
        else:
            # What is left of a body that nobody reads would be taken for the next request.
            close = {"connection": "close"} if error.status in (413, 415) else {}
            await self.reply(self.shape(error, False), error.status, {**error.headers, **close})

    def silent_for(self, now_s: float) -> float:
        """How long a stream has had no event; 0 where that is the client's doing, or there is no stream."""
        return 0.0 if self.spoke_s is None or self.waits_s is not None else now_s - self.spoke_s

    def abandoned(self) -> bool:
        """Whether the client has read nothing for so long that it is taken for gone; then its connection is."""
        if self.waits_s is None:
            return False
        before, self.unread = self.unread, self.link.unread() if self.link is not None else 0
        if self.unread < before:
            self.waits_s = time.monotonic()
        if time.monotonic() - self.waits_s < self.rules.client_s:
            return False
        self.drop()
        return True

    def drop(self) -> None:
        """End the connection, with what is written to it and not yet read."""
        if self.link is not None:
            self.link.abort()

    async def gone(self) -> None:
        """Until the client has gone away. For after the body."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.begun, self.status = True, status
        every = {**headers, **self.shared}
        raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in every.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})


Handler = Callable[[Exchange], Awaitable[None]]
Ended = Callable[[Exchange], None]
Fault = Callable[[BaseException, Exchange], None]


def openai_error(error: HttpError, in_stream: bool) -> bytes:
    """An error's bytes, as OpenAI's clients read them."""
    return b"data: " + error.body() + b"\n\n" if in_stream else error.body()


@dataclass(frozen=True, slots=True)
class Route:
    """What a path does by one method; what of it is for OpenAPI's document alone has a default.

    summary: a few words. body: what the handler decodes. reply: the type of a 200's JSON, or media types of what else
    it may be; None: it has no body; NoReturn: there is no 200. streams: or events come, where the body asks for them.
    errors: the statuses that may come beside those that any route's may. shape: as in Exchange.
    """

    handler: Handler
    summary: str = ""
    body: type[msgspec.Struct] | None = None
    reply: Any = None
    streams: bool = False
    errors: tuple[int, ...] = ()
    shape: Callable[[HttpError, bool], bytes] = openai_error


Routes = Mapping[str, Mapping[str, Route]]
"""path -> method -> route. A path that ends in / takes all that begin with it, but for / itself."""


encode_json = msgspec.json.Encoder().encode
"""The one that every reply is written with."""


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


class App:
    """The ASGI application: finds a request's handler, tells its errors. `keys` open all but `open_routes`.

    ended: is told of every exchange when it is over; its status is 0 where the client was gone first.
    fault: is told of errors that are faults of ours.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        keys: Iterable[str] = (),
        open_routes: Iterable[str] = (),
        rules: Rules = Rules(),
        ended: Ended = lambda exchange: None,
        fault: Fault = lambda error, exchange: None,
    ) -> None:
        self._routes = routes
        self._prefixes = [path for path in routes if path.endswith("/") and path != "/"]
        self._keys = [_digest(key.encode()) for key in keys]
        self._open = frozenset(open_routes)
        self._rules, self._ended, self._fault = rules, ended, fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._rules)
        try:
            allowed = self._rules.cors.preflight(scope["method"], exchange.headers)
            if allowed is not None:
                await exchange.reply(b"", headers=allowed)
            else:
                methods = self._methods(exchange)
                self._check_key(exchange)
                await self._route(exchange, methods).handler(exchange)
        except Gone:
            pass
        except Exception as error:
            told = http_error(error)
            if told.status == 500:
                self._fault(error, exchange)
            await exchange.refuse(told)
        finally:
            self._ended(exchange)

    def _methods(self, exchange: Exchange) -> Mapping[str, Route] | None:
        """What the path takes; the exchange learns its route, and how its errors look."""
        path = exchange.path
        methods = None if path in self._prefixes else self._routes.get(path)
        exchange.route = path if methods is not None else "none"
        for prefix in self._prefixes:
            if methods is None and path.startswith(prefix) and path != prefix:
                methods, exchange.route, exchange.name = self._routes[prefix], prefix, path.removeprefix(prefix)
        if methods is not None:
            exchange.shape = next(iter(methods.values())).shape
        return methods

    def _route(self, exchange: Exchange, methods: Mapping[str, Route] | None) -> Route:
        if methods is None:
            raise HttpError(404, "there is nothing at this path", code="not_found")
        method = exchange.scope["method"]
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(methods)
            raise HttpError(405, f"the method is {method}, this path takes {allowed}", headers={"allow": allowed})
        return route

    def _check_key(self, exchange: Exchange) -> None:
        """Raises HttpError, 401. All keys are compared, each in constant time: time must not tell a key."""
        if not self._keys or exchange.path in self._open:
            return
        scheme, _, key = exchange.headers.get("authorization", "").partition(" ")
        if not scheme and "x-api-key" in exchange.headers:  # as Anthropic's clients send it
            scheme, key = "bearer", exchange.headers["x-api-key"]
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
        exchange.key = known.index(True)


async def while_connected(exchange: Exchange, work: Awaitable[None]) -> None:
    """Do the work; cancel it when the client goes away first, or reads nothing. Raises HttpError when it is late."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(exchange.gone())
    rules = exchange.rules
    end_s = exchange.came_s + (float("inf") if rules.request_s is None else rules.request_s)
    silence_s = rules.silence_s or float("inf")
    try:
        while True:
            now_s = time.monotonic()
            if exchange.silent_for(now_s) >= silence_s and not await _breathe(exchange):
                break
            patience_s = min(CHECK_S, rules.client_s / 4, silence_s / 4, max(end_s - now_s, 0.0))
            done, _ = await asyncio.wait((task, gone), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if done or exchange.abandoned():
                break
            if time.monotonic() >= end_s:
                if exchange.waits_s is not None:  # it would not read the error either
                    exchange.drop()
                    break
                raise HttpError(
                    504,
                    f"the request took longer than {rules.request_s:g} s",
                    kind="timeout_error",
                    code="timeout",
                )
        if task.done():
            task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _breathe(exchange: Exchange) -> bool:
    """Send a comment; False where the client has not read for so long that it is taken for gone."""
    try:
        await asyncio.wait_for(exchange.events(b": nothing yet\n\n"), exchange.rules.client_s)
    except asyncio.TimeoutError:
        exchange.drop()
        return False
    return True


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _too_large(most: int) -> HttpError:
    return HttpError(413, f"the body is too large, the limit is {most:,} bytes", code="body_too_large")

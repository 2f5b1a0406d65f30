"""An HTTP client for many event streams at once. Knows HTTP/1.1 and events' borders; not what is in them.

httptools parses (it is there for the server), asyncio reads. httpx and aiohttp would be further packages in the archive
that build a response, a stream reader and awaits for every chunk; here a chunk costs one call.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

from rvllm.errors import EngineError, StartError

OnData = Callable[[bytes, float], None]
CONNECT_TIMEOUT_S = 30.0


class Wire(asyncio.Protocol):
    """A connection, one request on it at a time: its status, and its body to `on_data` with the time of arrival."""

    def __init__(self) -> None:
        self.closed = False
        self.reusable = False
        self._reading = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def begin(self, request: bytes, on_data: OnData) -> asyncio.Future[int]:
        """Send a request; the future is its status once the whole answer was read."""
        # http_parser keeps where it stands between two answers: a new one needs no care.
        self._parser = httptools.HttpResponseParser(self)
        self._on_data, self._arrived_s, self.status = on_data, 0.0, 0
        self._reading, self.reusable = True, False
        self.answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.answered

    def data_received(self, data: bytes) -> None:
        if not self._reading:
            return self.transport.close()  # bytes that nobody asked for
        self._arrived_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as cause:
            self._fail(f"the server's answer is no HTTP: {cause.__context__ or cause}")

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._fail(f"the connection was closed before the answer's end{f': {error}' if error else ''}")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._on_data(body, self._arrived_s)

    def on_message_complete(self) -> None:
        self.reusable, self._reading = self._parser.should_keep_alive(), False
        if not self.answered.done():
            self.answered.set_result(self.status)

    def _fail(self, message: str) -> None:
        if self._reading and not self.answered.done():
            self._reading = False
            self.answered.set_exception(EngineError(message))
        self.transport.close()


class Client:
    """Requests to one server over connections that are kept. To be closed."""

    def __init__(self, base_url: str, headers: Mapping[str, str], *, insecure: bool = False) -> None:
        """Raises StartError where the URL is none. insecure: any certificate will do."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise StartError(f"{base_url} is no http:// or https:// URL")
        self.base_url = base_url.rstrip("/")
        self._path = url.path.rstrip("/")
        self._host, self._port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self._tls: ssl.SSLContext | None = None
        if url.scheme == "https":
            self._tls = ssl._create_unverified_context() if insecure else ssl.create_default_context()
        self._head = "".join(
            f"{name}: {value}\r\n" for name, value in {"host": url.netloc.rpartition("@")[2], **headers}.items()
        )
        self._idle: list[Wire] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        parts: list[bytes] = []
        status = await self._send("GET", path, b"", {}, lambda data, _: parts.append(data))
        return status, b"".join(parts)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str], on_data: OnData) -> int:
        """POST JSON; the status, once the body has all gone to `on_data`. Raises EngineError, OSError."""
        return await self._send("POST", path, body, {"content-type": "application/json", **headers}, on_data)

    async def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str], on_data: OnData) -> int:
        own = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{own}content-length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        while True:
            wire, used = await self._connection()
            try:
                status = await wire.begin(request, on_data)
            except EngineError:
                if used and not wire.status:  # the server gave up an idle connection while the request was under way
                    continue
                raise
            finally:
                if not wire.reusable:
                    wire.transport.close()
            if wire.reusable and not wire.closed:
                self._idle.append(wire)
            return status

    async def _connection(self) -> tuple[Wire, bool]:
        """A connection, and whether it has been used before."""
        while self._idle:
            wire = self._idle.pop()
            if not wire.closed and not wire.transport.is_closing():
                return wire, True
        opening = asyncio.get_running_loop().create_connection(Wire, self._host, self._port, ssl=self._tls)
        _, wire = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
        return wire, False

    def close(self) -> None:
        for wire in self._idle:
            wire.transport.close()
        self._idle.clear()


class Events:
    """Whole events of a stream from its pieces: the text behind `data:`, the other fields and comments left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete with `data`; of several lines, joined."""
        text = (self._rest + data if self._rest else data).replace(b"\r\n", b"\n")
        *whole, self._rest = text.split(b"\n\n")
        found = []
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found

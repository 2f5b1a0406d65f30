"""One client's connection: uvicorn's protocol on httptools, with limits on what a client may send and how slowly.

Errors before there is a request have OpenAI's error object as all others. Knows no route.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rvllm.api.errors import HttpError
from rvllm.api.http import LINK


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a request's head: bytes of its line and headers, and how many these are.

    client_s: seconds in which a request has to be there, and what is written has to be read in the end.
    """

    head_bytes: int
    headers: int
    client_s: float


class Connection(HttpToolsProtocol):
    """`limited` makes them."""

    def __init__(self, *args: Any, bounds: Bounds, **how: Any) -> None:
        super().__init__(*args, **how)
        self._bounds = bounds
        self._head_bytes: int | None = 0  # None: the head is complete
        self._late: asyncio.TimerHandle | None = None
        self._wrong = HttpError(400, "this is no HTTP request", code="invalid_http")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes:  # perhaps nothing but an empty line, which is no beginning of a message
            self._expect()
        if self._head_bytes is not None and self._head_bytes > self._bounds.head_bytes:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._bounds.head_bytes or len(self.headers) > self._bounds.headers:
            self._wrong = self._too_large()
            raise self._wrong  # the parser's end, which calls for send_400_response
        self._head_bytes = None
        super().on_headers_complete()
        self.scope["extensions"] = {LINK: _Turn(self, self.cycle)}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._expect_no_more()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._wrong)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_in_time()

    def _refuse(self, error: HttpError) -> None:
        """Tell it, unless a reply is under way, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = error.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
        self._end_in_time()

    def _end_in_time(self, before: int | None = None) -> None:
        """What is left to be read at the end is kept as long as some of it is read. before: bytes at the last look."""
        if not self.transport.get_write_buffer_size():
            return
        left = self.unread()
        if before is not None and left >= before:
            self.transport.abort()
        else:
            self.loop.call_later(self._bounds.client_s, self._end_in_time, left)

    def unread(self) -> int:
        """Bytes that the other end has not taken, here and in the kernel, where it tells."""
        queued = b"\0" * 4
        with suppress(OSError, ValueError, AttributeError):  # closed meanwhile, or a kernel that does not tell
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", queued)[0])

    def _too_large(self) -> HttpError:
        bounds = self._bounds
        return HttpError(
            431,
            f"the request's head is too large, the limit is {bounds.head_bytes:,} bytes and {bounds.headers:,} headers",
            code="head_too_large",
        )

    # --- Slow clients

    def _expect(self) -> None:
        """From now on the rest of a request has to come in time."""
        if self._late is None:
            self._late = self.loop.call_later(self._bounds.client_s, self._be_late)

    def _expect_no_more(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _be_late(self) -> None:
        self._late = None
        answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if answering or self.flow.read_paused:  # it is not the client who is slow
            self._expect()
        elif self.cycle is None or self.cycle.response_complete:
            self._refuse(HttpError(408, "the request did not come in time", code="request_timeout"))
        else:
            self.transport.close()


class _Turn:
    """A request's turn on its connection: what an application may do with that (http.Link)."""

    __slots__ = ("_cycle", "_transport", "abort", "unread")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, connection.transport
        self.abort, self.unread = connection.transport.abort, connection.unread

    def write(self, data: bytes) -> bool:
        """As the cycle's own `send` writes a chunk."""
        cycle, transport = self._cycle, self._transport
        if not cycle.chunked_encoding or cycle.response_complete:
            return False
        if transport.is_closing() or transport.get_write_buffer_size():
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


def limited(bounds: Bounds) -> type[asyncio.Protocol]:
    """What uvicorn takes as its protocol."""
    return partial(Connection, bounds=bounds)  # type: ignore[return-value]

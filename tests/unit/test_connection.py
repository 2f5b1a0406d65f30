"""Chunks that are written past a request's task, over real sockets: all arrive once and in order, or are refused."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from rvllm.api.connection import Bounds, Connection
from rvllm.api.http import LINK, Link

BOUNDS = Bounds(head_bytes=1 << 12, headers=20, client_s=60.0)
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = b"x" * (1 << 16)
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
Scope = dict[str, Any]


@dataclass
class Asked:
    """A request that is being answered, until `done`."""

    link: Link
    send: Callable[[Scope], Awaitable[None]]
    receive: Callable[[], Awaitable[Scope]]
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def begin(self) -> None:
        await self.send({"type": "http.response.start", "status": 200, "headers": []})

    async def chunk(self, data: bytes, *, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})


@asynccontextmanager
async def asked(times: int = 1) -> AsyncIterator[tuple[list[Asked], socket.socket]]:
    """Requests that came together over one connection, as they are answered, and their client's end."""
    came: list[Asked] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        came.append(Asked(scope["extensions"][LINK], send, receive))
        await came[-1].done.wait()

    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False)  # type: ignore[arg-type]
    config.load()
    loop = asyncio.get_running_loop()
    ours, theirs = tcp_pair()
    made = Connection(config=config, server_state=ServerState(), app_state={}, bounds=BOUNDS)
    transport, _ = await loop.connect_accepted_socket(lambda: made, ours)
    try:
        await loop.sock_sendall(theirs, ASK * times)
        while not came:
            await asyncio.sleep(0.001)
        yield came, theirs
    finally:
        for one in came:
            one.done.set()
        transport.abort()
        theirs.close()
        await asyncio.sleep(0.01)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection that holds little."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


async def read_to_end(end: socket.socket) -> tuple[bytes, bytes]:
    """A whole reply in chunks: its head, and its body put together again."""
    loop, data = asyncio.get_running_loop(), b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        got = await loop.sock_recv(end, 1 << 16)
        assert got, data[-100:]
        data += got
    head, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return head, body


def run(new_loop: Callable[[], asyncio.AbstractEventLoop], work: Any) -> None:
    loop = new_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(work, 20))
    finally:
        loop.close()


@LOOPS
def test_chunks_past_the_task_and_those_of_the_task_arrive_in_order(new_loop: Any) -> None:
    async def main() -> None:
        async with asked() as ((one,), theirs):
            assert not one.link.write(b"too early")
            await one.begin()
            await one.chunk(b"a")
            assert one.link.write(b"b") and one.link.write(b"c" * 20)
            await one.chunk(b"d")
            assert one.link.write(b"e")
            await one.chunk(b"f", last=True)
            assert not one.link.write(b"too late")
            assert (await read_to_end(theirs))[1] == b"ab" + b"c" * 20 + b"def"

    run(new_loop, main())


@LOOPS
def test_a_client_that_reads_late_gets_all_and_nothing_twice(new_loop: Any) -> None:
    """A chunk of which the system takes a part is kept, and refused is what comes behind it until that is read."""

    async def main() -> None:
        async with asked() as ((one,), theirs):
            await one.begin()
            sent = b""
            for number in range(1000):
                data = b"%d:" % number + LARGE
                if not one.link.write(data):
                    break
                sent += data
            else:
                raise AssertionError("there was room for all of it")
            assert sent and one.link.unread() > 0 and not one.link.write(b"no")
            reading = asyncio.ensure_future(read_to_end(theirs))
            while not one.link.write(b"again"):
                await asyncio.sleep(0.001)
            await one.chunk(b"end", last=True)
            assert (await reading)[1] == sent + b"again" + b"end"

    run(new_loop, main())


@LOOPS
def test_a_client_that_is_gone_is_a_refusal_and_a_disconnect_as_ever(new_loop: Any) -> None:
    async def main() -> None:
        async with asked() as ((one,), theirs):
            await one.begin()
            assert (await one.receive())["type"] == "http.request"
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()  # a reset: what is written next fails
            assert not all(one.link.write(b"x") for _ in range(1000))
            assert (await one.receive())["type"] == "http.disconnect"
            assert not one.link.write(b"x")
            await one.chunk(b"x", last=True)  # is thrown away

    run(new_loop, main())


@LOOPS
def test_a_request_that_waits_behind_another_writes_nothing_before_its_turn(new_loop: Any) -> None:
    async def main() -> None:
        async with asked(times=2) as (came, theirs):
            first = came[0]
            await first.begin()
            assert len(came) == 1 and first.link.write(b"first")
            await first.chunk(b"", last=True)
            first.done.set()
            while len(came) < 2:
                await asyncio.sleep(0.001)
            second = came[1]
            assert not first.link.write(b"no") and not second.link.write(b"no")
            assert (await read_to_end(theirs))[1] == b"first"
            await second.begin()
            assert second.link.write(b"second") and not first.link.write(b"no")
            await second.chunk(b"", last=True)
            assert (await read_to_end(theirs))[1] == b"second"

    run(new_loop, main())

"""A front in a process of its own, from its first line to its exit code. Knows its parent's link, not its brothers.

It ends when its parent does, in whatever state either is. An interrupt from a terminal is the parent's to act on; at
SIGTERM it takes nothing on and ends when its connections are through.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import select
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress

import msgspec

from rvllm.api.serving import Serving, in_thread, log_of, open_text, run
from rvllm.config import EngineConfig, ServerConfig
from rvllm.errors import RvllmError
from rvllm.link.client import AsyncEngineClient

READY = b"R"
SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that names the folder in which fronts' figures lie: prometheus-client's own."""


class Orders(msgspec.Struct, frozen=True):
    """What a front is told at its beginning: settings, and its number among all fronts."""

    config: EngineConfig
    server: ServerConfig
    place: int


def encoded(orders: Orders) -> bytes:
    return msgspec.msgpack.encode(orders)


def main(parent_fd: int, listener_fd: int, link_fd: int, cells_fd: int) -> int:
    """Run the process; its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = socket.socket(fileno=parent_fd)
    orders = msgspec.msgpack.decode(_received(parent), type=Orders)
    threading.Thread(target=_follow, args=(parent.fileno(),), daemon=True).start()
    log = log_of(orders.server, _note)
    cells = memoryview(mmap.mmap(cells_fd, 0)).cast("q")
    serving = Serving(orders.config, orders.server, log, place=orders.place, cells=cells)
    life = _Life(orders.config, serving, parent)
    run(life.lead(socket.socket(fileno=listener_fd), socket.socket(fileno=link_fd)))
    return life.code


class _Life:
    def __init__(self, config: EngineConfig, serving: Serving, parent: socket.socket) -> None:
        self._config, self._serving, self._parent = config, serving, parent
        self.code = 0

    async def lead(self, listener: socket.socket, link: socket.socket) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._serving.stop)
        engine = asyncio.create_task(self._follow_engine(link))
        engine.add_done_callback(lambda task: self._serving.break_off())
        try:
            await self._serving.serve(listener)
        finally:
            engine.cancel()
            await asyncio.wait((engine,))
        error = None if engine.cancelled() else engine.exception()
        if error is not None and not isinstance(error, RvllmError):
            sys.stderr.write(f"error: a front ends by an unexpected {type(error).__name__}\n")
        if not self._serving.front.stopping:
            self.code = 1  # the parent finds the same error, or knows why the engine is gone

    async def _follow_engine(self, link: socket.socket) -> None:
        text = await in_thread(lambda: open_text(self._config, lambda label, done, total: None))
        client = await AsyncEngineClient.over(link)
        facts = await client.ready()
        self._serving.begin(text, facts, client)
        with suppress(OSError):
            self._parent.send(READY)
        await client.wait()


def _received(parent: socket.socket) -> bytes:
    """The parent's one message: its length in eight bytes, and so many."""
    with parent.makefile("rb") as stream:
        return stream.read(int.from_bytes(stream.read(8), "big"))


def _follow(parent_fd: int) -> None:
    """Sleep until the parent has closed its link, or is dead, and end the process."""
    hangup = select.poll()
    hangup.register(parent_fd, 0)
    hangup.poll()
    shutil.rmtree(os.environ[SHARED], ignore_errors=True)  # which the parent would have done
    os._exit(1)


def _note(message: str) -> None:
    sys.stderr.write(f"note: {message}\n")

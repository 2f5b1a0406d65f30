"""Several fronts: one process each, at one port, with a link of its own to one engine. Knows processes and signals.

This process serves nothing itself: it loads the model, starts the fronts, puts another in the place of one that died,
and ends them all. A front that dies takes only its own connections along; the engine drops what ran for it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from rvllm.api.admission import CELL_BYTES, cells_each
from rvllm.api.front_process import READY, SHARED, Orders, encoded
from rvllm.api.log import Log
from rvllm.api.serving import LAST_WORDS_S, NO_TEMPLATE, in_thread, open_text, ready_words
from rvllm.config import EngineConfig, ServerConfig
from rvllm.errors import EngineError
from rvllm.link.client import AsyncEngineClient, Parent, link_to
from rvllm.link.process import EngineProcess, paths, python, signal_name
from rvllm.model.files import Progress

AFTER_ENGINE_S = 0.5
"""When a front has ended, so long is waited for the engine's words: it may have been the reason."""

_ENTER = (
    "import sys; sys.path[:] = sys.argv[5:]; from rvllm.api.front_process import main;"
    " sys.exit(main(*map(int, sys.argv[1:5])))"
)


class Leader:
    """The process that leads the fronts. A context manager: none of them outlives it, nor what they share."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        child: EngineProcess,
        listeners: Sequence[socket.socket],
        log: Log,
        progress: Progress,
    ) -> None:
        self._config, self._server, self._child, self._listeners = config, server, child, listeners
        self._log, self._progress = log, progress
        self._figures = tempfile.mkdtemp(prefix="rvllm-")
        self._cells = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this
        self._cells.truncate(len(listeners) * cells_each(len(server.api_key)) * CELL_BYTES)
        self._fronts: list[_Front] = []
        self._ready = [asyncio.Event() for _ in listeners]
        self._client: AsyncEngineClient | None = None
        self._stopping = self._interrupted = False

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, *error: object) -> None:
        for front in self._fronts:
            front.process.kill()
            front.process.wait()
            front.link.close()
        self._cells.close()
        shutil.rmtree(self._figures, ignore_errors=True)

    async def lead(self) -> None:
        """Serve until a signal, or until the engine dies. Raises what ended it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        for place in range(len(self._listeners)):
            self._fronts.append(self._start(place))
        # Both end when the server is being stopped, or with an error.
        engine = asyncio.create_task(self._follow_engine())
        fronts = asyncio.ensure_future(asyncio.gather(*(self._follow(place) for place in range(len(self._fronts)))))
        try:
            await asyncio.wait((engine, fronts), return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                if self._client is not None:  # fronts have last words to say to their clients
                    await asyncio.wait((fronts,), timeout=2 * LAST_WORDS_S)
                engine.result()
            if fronts.done():
                fronts.result()
            if self._interrupted:
                raise KeyboardInterrupt
        finally:
            engine.cancel()
            fronts.cancel()
            await asyncio.gather(engine, fronts, return_exceptions=True)

    async def _follow_engine(self) -> None:
        """Have the model loaded, and wait for the engine's end. Raises what it ended with, but after a signal."""
        text = await in_thread(lambda: open_text(self._config, self._progress))
        tokenizer = text[0]
        self._child.load(self._config, vocab_limit=tokenizer.vocab_size, eos_ids=frozenset(tokenizer.eos_token_ids))
        told = Parent(death=self._child.end, progress=self._progress, note=self._log.note)
        client = await AsyncEngineClient.over(self._child.link, told)
        facts = await client.ready()
        if self._stopping:
            return
        self._client = client
        if tokenizer.chat_template is None:
            self._log.note(NO_TEMPLATE)
        del text, tokenizer
        await asyncio.gather(*(ready.wait() for ready in self._ready))
        names = self._server.served_model_name or (self._config.model,)
        self._log.note(f"{ready_words(names, facts)}, {len(self._fronts)} fronts")
        error = await client.wait()
        if not self._stopping:
            raise error

    async def _follow(self, place: int) -> None:
        """See one front end, and start another in its place, until the server is being stopped."""
        while True:
            front = self._fronts[place]
            await front.ended(self._ready[place])
            if not self._stopping:
                await asyncio.sleep(AFTER_ENGINE_S)
            if self._stopping or (self._client is not None and self._client.error is not None):
                return
            front.link.close()
            mark_process_dead(front.process.pid, self._figures)  # type: ignore[no-untyped-call]
            self._forget(place)
            how = front.words()
            if not front.ready:  # the next one would do so too
                raise EngineError(f"front {place} {how} before it was ready")
            self._log.note(f"front {place} {how}: its connections are gone, another one is started")
            self._fronts[place] = self._start(place)

    def _start(self, place: int) -> _Front:
        ours, its = socket.socketpair()
        with its, link_to(self._child.address) as engine:
            descriptors = (its.fileno(), self._listeners[place].fileno(), engine.fileno(), self._cells.fileno())
            process = subprocess.Popen(
                [*python(), "-c", _ENTER, *map(str, descriptors), *paths()],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is ours to act on
                env={**os.environ, SHARED: self._figures},
            )
        orders = encoded(Orders(self._config, self._server, place))
        ours.sendall(len(orders).to_bytes(8, "big") + orders)
        return _Front(process, ours)

    def _forget(self, place: int) -> None:
        """What a front counted that is dead runs no more."""
        size = cells_each(len(self._server.api_key)) * CELL_BYTES
        os.pwrite(self._cells.fileno(), bytes(size), place * size)

    def _end(self, number: int) -> None:
        """At the first signal no more is taken on; at the second all ends at once."""
        if self._stopping:
            for front in self._fronts:
                front.process.kill()
            self._child.stop(0.0)
            shutil.rmtree(self._figures, ignore_errors=True)
            if self._server.uds is not None:
                Path(self._server.uds).unlink(missing_ok=True)
            os._exit(128 + number)
        self._stopping = True
        for listener in self._listeners:  # with those of the fronts: who comes now is refused, not kept waiting
            listener.close()
        limit_s = self._server.shutdown_timeout
        for front in self._fronts:
            front.process.terminate()
        if self._client is not None and self._client.error is None:
            self._log.note(f"stopping: requests may go on for {limit_s} s; another signal ends them")
            self._client.shutdown(limit_s)
        else:
            self._interrupted = number == signal.SIGINT


class _Front:
    """One front's process. `link`: its own end of it is what it lives by."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.process, self.link = process, link
        self.ready = False

    async def ended(self, ready: asyncio.Event) -> None:
        """Wait for its word that it is ready, and for its end."""
        self.link.setblocking(False)
        loop = asyncio.get_running_loop()
        while data := await _read(loop, self.link):
            if data == READY:
                self.ready = True
                ready.set()
        await in_thread(lambda: self.process.wait(LAST_WORDS_S))

    def words(self) -> str:
        code = self.process.returncode
        if code is None:
            return "closed its link"
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


async def _read(loop: asyncio.AbstractEventLoop, link: socket.socket) -> bytes:
    try:
        return await loop.sock_recv(link, 16)
    except OSError:
        return b""

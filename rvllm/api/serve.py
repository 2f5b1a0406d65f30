"""The server from its first line to its end: a socket, an engine process, one front. Knows processes and signals.

The socket is there before the model, so that whoever comes early is told to wait. SIGTERM or an interrupt lets requests
run out, for so long; a second one ends all at once. When the engine dies, the server ends with its words.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from rvllm.api.listen import check_tls, listening, own_machine
from rvllm.api.serving import NO_TEMPLATE, Serving, in_thread, log_of, open_text, ready_words, run
from rvllm.config import EngineConfig, ServerConfig
from rvllm.link.client import AsyncEngineClient, Parent
from rvllm.link.process import EngineProcess
from rvllm.model.files import Progress
from rvllm.text.answer import Families


def serve(
    config: EngineConfig,
    server: ServerConfig,
    *,
    note: Callable[[str], None],
    progress: Progress,
) -> None:
    """Serve until a signal. `note` is told what a user should know. Raises StartError, EngineDied, EngineError."""
    check_tls(server)
    Families.check(server.tool_call_parser, server.reasoning_parser)
    log = log_of(server, note)
    with listening(server) as (listeners, address), EngineProcess() as child:
        log.note(f"listening at {address}, loading {config.model}")
        if server.uds is None and not server.api_key and not own_machine(listeners[0]):
            log.note("whoever reaches the port may ask: there is no key. hint: --api-key KEY, or --host 127.0.0.1")
        if server.api_server_count > 1:
            from rvllm.api.fronts import Leader

            with Leader(config, server, child, listeners, log, progress) as leader:
                run(leader.lead())
        else:
            run(Life(config, server, child, Serving(config, server, log), log.note, progress).lead(listeners[0]))


class Life:
    """One server's life: what waits for what, and how it ends."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        child: EngineProcess,
        serving: Serving,
        note: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._config, self._server, self._child, self._serving = config, server, child, serving
        self._note, self._progress = note, progress
        self._interrupted = False  # before the model was ready

    async def lead(self, listener: socket.socket) -> None:
        """Serve until a signal, or until the engine dies. Raises what ended the engine."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        engine = asyncio.create_task(self._follow_engine())
        engine.add_done_callback(lambda task: self._serving.break_off())
        try:
            await self._serving.serve(listener)
            if engine.done():
                engine.result()
            if self._interrupted:
                raise KeyboardInterrupt
        finally:
            engine.cancel()
            await asyncio.wait((engine,))

    async def _follow_engine(self) -> None:
        """Have the model loaded, and wait for the engine's end. Raises what it ended with, but after a signal."""
        text = await in_thread(lambda: open_text(self._config, self._tell_progress))
        tokenizer, front = text[0], self._serving.front
        self._child.load(self._config, vocab_limit=tokenizer.vocab_size, eos_ids=frozenset(tokenizer.eos_token_ids))
        told = Parent(death=self._child.end, progress=self._tell_progress, note=self._note)
        client = await AsyncEngineClient.over(self._child.link, told)
        facts = await client.ready()
        if tokenizer.chat_template is None:
            self._note(NO_TEMPLATE)
        self._serving.begin(text, facts, client)
        self._note(ready_words(tuple(front.names), facts))
        error = await client.wait()
        if not front.stopping:
            raise error

    def _tell_progress(self, label: str, done: int, total: int) -> None:
        share = f" {100 * done // total} %" if total else ""
        self._serving.front.loading = f"the model is being loaded: {label}{share}"
        self._progress(label, done, total)

    def _end(self, number: int) -> None:
        """At the first signal no more is taken on; at the second all ends at once."""
        front = self._serving.front
        if front.stopping:
            self._child.stop(0.0)
            if self._server.uds is not None:
                Path(self._server.uds).unlink(missing_ok=True)
            os._exit(128 + number)
        self._serving.stop()
        limit_s = self._server.shutdown_timeout
        if front.served is not None and front.served.client.error is None:
            self._note(f"stopping: requests may go on for {limit_s} s; another signal ends them")
            front.served.client.shutdown(limit_s)
        else:
            self._interrupted = number == signal.SIGINT

"""One front's HTTP: from settings to an application under uvicorn, and the loop they run in. Knows no process."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from rvllm.api.admission import Admission, Bars
from rvllm.api.connection import Bounds, limited
from rvllm.api.cors import Cors
from rvllm.api.errors import HttpError
from rvllm.api.front import Front, Served
from rvllm.api.http import App, Exchange, Rules
from rvllm.api.listen import BACKLOG, follow_certificates
from rvllm.api.log import Log
from rvllm.api.metrics import Metrics
from rvllm.api.routes import OPEN_ROUTES, routes
from rvllm.config import EngineConfig, ServerConfig
from rvllm.errors import EngineError
from rvllm.link.client import AsyncEngineClient
from rvllm.link.messages import Facts
from rvllm.model.files import Progress, locate
from rvllm.model.source import open_source
from rvllm.text.answer import Families
from rvllm.text.completion import default_params, open_tokenizer
from rvllm.text.token_text import TokenTexts
from rvllm.text.tokenizer import Tokenizer
from rvllm.version import VERSION

LAST_WORDS_S = 5
"""From the end of the time that requests may go on to the end of their connections."""

CIPHERS = "TLSv1"
"""uvicorn's: what OpenSSL has from there on; old protocols are off anyway."""

REQUESTS_EACH = 1 << 32
"""By which the numbers of fronts' requests differ, from which their seeds are derived."""

WORKERS = 4
"""Threads of a front in which long bodies are read and encoded: more would wait for each other."""

NO_TEMPLATE = "the model has no chat template: chats are refused. hint: give one with --chat-template"

Result = TypeVar("Result")


class Serving:
    """A front that answers by HTTP: 503 until it is told of a model by `begin`.

    place: its number among the server's; cells: what they count together, None: it is the only one.
    """

    def __init__(
        self, config: EngineConfig, server: ServerConfig, log: Log, *, place: int = 0, cells: memoryview | None = None
    ) -> None:
        bars = Bars(server.max_num_queued_reqs, server.max_num_queued_tokens, server.max_requests_per_key)
        self.front = Front(
            server.served_model_name or (config.model,),
            config.model,
            int(time.time()),
            begun=place * REQUESTS_EACH,
            admission=Admission(bars, keys=len(server.api_key), cells=cells, place=place),
            habits=server,
        )
        self._config, self._server, self._log, self._seed = config, server, log, config.seed
        self._listening_s = process_age_s()
        app = App(
            routes(self.front),
            keys=server.api_key,
            open_routes=OPEN_ROUTES,
            rules=_rules(server),
            ended=self._ended,
            fault=log.fault,
        )
        self._http = _Uvicorn(_uvicorn_config(app, server))

    async def serve(self, listener: socket.socket) -> None:
        """Until `stop`, and until the connections there are through."""
        fresh = asyncio.create_task(follow_certificates(self._http.config)) if self._server.enable_ssl_refresh else None
        try:
            await self._http.serve(sockets=[listener])
        finally:
            if fresh is not None:
                fresh.cancel()

    def begin(self, text: Text, facts: Facts, client: AsyncEngineClient) -> None:
        """Answer requests from now on."""
        metrics = Metrics(self.front.names[0], facts.limits.max_model_len, self._log.error)
        metrics.engine.facts = facts
        stages = {"listening": self._listening_s, **dict(facts.startup_s), "ready": process_age_s()}
        metrics.engine.stages = stages
        metrics.pauses.watch()
        # All that is here now stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        kwargs = self._server.default_chat_template_kwargs or {}
        tokenizer, _, defaults = text
        self.front.admission.rejected = metrics.rejected
        self.front.metrics = metrics
        families = Families.of(tokenizer, self._server.tool_call_parser, self._server.reasoning_parser)
        texts = TokenTexts(tokenizer)
        content_format = self._server.chat_template_content_format
        self.front.fingerprint = fingerprint(self._config, self._server, facts)
        self.front.served = Served(
            tokenizer, texts, defaults, self._seed, facts, client, families, kwargs, content_format
        )
        if self._server.structured_outputs_config is not None:
            self._teaching = asyncio.ensure_future(self._teach())

    async def _teach(self) -> None:
        """Do before the first text that must have a form what else would be done with it."""
        with suppress(HttpError, EngineError):  # the server is ending: there will be none
            await self.front.teach()

    def stop(self) -> None:
        """Take nothing on any more."""
        self.front.stopping = True
        self._http.stop()

    def break_off(self) -> None:
        """Take no more connections: there is nobody to answer."""
        self._http.stop()

    def _ended(self, exchange: Exchange) -> None:
        self._log.ended(exchange)
        if self.front.metrics is not None:
            method, seconds = exchange.scope["method"], time.monotonic() - exchange.came_s
            self.front.metrics.replied(exchange.route, method, exchange.status, seconds)


Text = tuple[Tokenizer, int, dict[str, Any]]
"""A model's tokenizer, its vocabulary's size, and its defaults of sampling."""


def open_text(config: EngineConfig, progress: Progress) -> Text:
    """May take long: it may fetch the default model. Raises StartError."""
    # A front encodes one text at a time, for which the library would have a pool of a thread for each core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    files = locate(config.model, offline=config.offline, progress=progress)
    # The engine opens the model too, and warns.
    source = open_source(files, load_format=config.load_format, warn=lambda said: None)
    tokenizer = open_tokenizer(config, files, progress)
    tokenizer.check_fits(source.config.vocab_size)
    return tokenizer, source.config.vocab_size, default_params(config, source.generation)


def fingerprint(config: EngineConfig, server: ServerConfig, facts: Facts) -> str | None:
    """Of what texts may depend on beside their requests: replies tell it as system_fingerprint."""
    settings = hashlib.sha256(f"{VERSION} {facts.device} {facts.cache} {config}".encode()).hexdigest()[:8]
    return {
        "full": f"rvllm-{VERSION}-{settings}",
        "hash": settings,
        "custom": server.fingerprint_value,
        "none": None,
    }[server.fingerprint_mode]


def ready_words(names: tuple[str, ...], facts: Facts) -> str:
    limits = facts.limits
    return (
        f"ready: {', '.join(names)} on {facts.device}, a context of {limits.max_model_len:,} "
        f"tokens, a cache of {limits.blocks * limits.block_size:,}"
    )


def log_of(server: ServerConfig, note: Callable[[str], None]) -> Log:
    return Log(
        note,
        as_json=server.log_format == "json",
        access=not server.disable_uvicorn_access_log,
        quiet_routes=server.disable_access_log_for_endpoints,
        requests=server.enable_log_requests,
        stacks=server.log_error_stack,
    )


class _Uvicorn(uvicorn.Server):
    """Without its own signal handlers."""

    def stop(self) -> None:
        """Take no more connections, and end when those there are through."""
        self.should_exit = True

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _rules(server: ServerConfig) -> Rules:
    cors = Cors(server.allowed_origins, server.allowed_methods, server.allowed_headers, server.allow_credentials)
    silence_s = server.sse_keep_alive_interval
    return Rules(server.max_body_bytes, server.client_timeout, server.request_timeout, silence_s, cors)


def _uvicorn_config(app: App, server: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited(Bounds(server.h11_max_incomplete_event_size, server.h11_max_header_count, server.client_timeout)),
        root_path=server.root_path,
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=server.ssl_cert_reqs,
        ssl_ciphers=server.ssl_ciphers or CIPHERS,
        timeout_keep_alive=server.keep_alive_timeout,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=server.shutdown_timeout + LAST_WORDS_S,
    )


def run(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run on uvloop where that is installed, which does not wait for threads that may never end."""
    try:
        loop = _new_loop()
    except BaseException:  # an interrupt: it is not to be said that nobody awaited it
        main.close()
        raise
    try:
        loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    if find_spec("uvloop"):
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(WORKERS))
    return loop


def process_age_s() -> float:
    """Since this process began to be; 0 where there is no /proc."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


async def in_thread(work: Callable[[], Result]) -> Result:
    """The work's result; its thread does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as cause:
            result, error = None, cause
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await done

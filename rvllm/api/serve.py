"""The server from its first line to its end: a socket, an engine process, one front. Knows processes and signals.

The socket is there before the model, so that whoever comes early is told to wait. SIGTERM or an interrupt lets requests
run out, for so long; a second one ends all at once. When the engine dies, the server ends with its words.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from rvllm.api.admission import Admission
from rvllm.api.connection import Bounds, limited
from rvllm.api.cors import Cors
from rvllm.api.front import Front, Served
from rvllm.api.http import App, Exchange, Rules
from rvllm.api.log import Log
from rvllm.api.metrics import Metrics
from rvllm.api.routes import OPEN_ROUTES, routes
from rvllm.config import EngineConfig, ServerConfig
from rvllm.errors import StartError
from rvllm.link.client import AsyncEngineClient, Parent
from rvllm.link.process import EngineProcess
from rvllm.model.files import Progress, locate
from rvllm.model.source import open_source
from rvllm.text.completion import default_params, open_tokenizer
from rvllm.text.token_text import TokenTexts

BACKLOG = 2048
LAST_WORDS_S = 5
"""From the end of the time that requests may go on to the end of their connections."""

CIPHERS = "TLSv1"
"""uvicorn's: what OpenSSL has from there on; old protocols are off anyway."""

REFRESH_S = 5.0
"""How often it is looked whether certificates are new."""

Result = TypeVar("Result")


def serve(
    config: EngineConfig,
    server: ServerConfig,
    *,
    note: Callable[[str], None],
    progress: Progress,
) -> None:
    """Serve until a signal. `note` is told what a user should know. Raises StartError, EngineDied."""
    check_tls(server)
    with listening(server) as (listener, address), EngineProcess() as child:
        life = Life(config, server, child, note, progress)
        life.note(f"listening at {address}, loading {config.model}")
        _run(life.lead(listener))


class Life:
    """One server's life: what waits for what, and how it ends."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        child: EngineProcess,
        note: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._config, self._server, self._child = config, server, child
        log = Log(
            note,
            as_json=server.log_format == "json",
            access=not server.disable_uvicorn_access_log,
            quiet_routes=server.disable_access_log_for_endpoints,
            requests=server.enable_log_requests,
            stacks=server.log_error_stack,
        )
        self._log, self.note, self._progress = log, log.note, progress
        names = server.served_model_name or (config.model,)
        admission = Admission(server.max_num_queued_reqs, server.max_num_queued_tokens, server.max_requests_per_key)
        self._front = Front(names, config.model, int(time.time()), admission=admission, habits=server)
        self._interrupted = False  # before the model was ready
        app = App(
            routes(self._front),
            keys=server.api_key,
            open_routes=OPEN_ROUTES,
            rules=_rules(server),
            ended=self._ended,
            fault=log.fault,
        )
        self._http = _Uvicorn(_uvicorn_config(app, server))

    async def lead(self, listener: socket.socket) -> None:
        """Serve until a signal, or until the engine dies. Raises what ended the engine."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        engine = asyncio.create_task(self._follow_engine())
        engine.add_done_callback(lambda task: self._http.stop())
        fresh = asyncio.create_task(follow_certificates(self._http.config)) if self._server.enable_ssl_refresh else None
        try:
            await self._http.serve(sockets=[listener])
            if engine.done():
                engine.result()
            if self._interrupted:
                raise KeyboardInterrupt
        finally:
            engine.cancel()
            if fresh is not None:
                fresh.cancel()
            await asyncio.wait((engine,))

    async def _follow_engine(self) -> None:
        """Have the model loaded, and wait for the engine's end. Raises what it ended with, but after a signal."""
        listening_s = process_age_s()
        served = await self._load()
        limits = served.facts.limits
        metrics = Metrics(self._front.names[0], limits.max_model_len)
        metrics.engine.facts = served.facts
        stages = {"listening": listening_s, **dict(served.facts.startup_s), "ready": process_age_s()}
        metrics.engine.stages = stages
        metrics.watch_garbage()
        # All that is here now stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self._front.admission.rejected = metrics.rejected
        self._front.served, self._front.metrics = served, metrics
        self.note(
            f"ready: {', '.join(self._front.names)} on {served.facts.device}, a context of {limits.max_model_len:,} "
            f"tokens, a cache of {limits.blocks * limits.block_size:,}"
        )
        error = await served.client.wait()
        if not self._front.stopping:
            raise error

    async def _load(self) -> Served:
        """Raises StartError, EngineDied."""
        tokenizer, vocab_size, defaults = await _in_thread(self._open)
        tokenizer.check_fits(vocab_size)
        self._child.load(self._config, vocab_limit=tokenizer.vocab_size, eos_ids=frozenset(tokenizer.eos_token_ids))
        told = Parent(death=self._child.end, progress=self._tell_progress, note=self.note)
        client = await AsyncEngineClient.over(self._child.link, told)
        facts = await client.ready()
        if tokenizer.chat_template is None:
            self.note("the model has no chat template: chats are refused. hint: give one with --chat-template")
        kwargs = self._server.default_chat_template_kwargs or {}
        return Served(tokenizer, TokenTexts(tokenizer), defaults, self._config.seed, facts, client, kwargs)

    def _open(self) -> tuple[Any, int, dict[str, Any]]:
        """(tokenizer, the model's vocabulary, sampling defaults). May take long: it may fetch the default model."""
        files = locate(self._config.model, offline=self._config.offline, progress=self._tell_progress)
        # The engine opens the model too, and warns.
        source = open_source(files, load_format=self._config.load_format, warn=lambda said: None)
        tokenizer = open_tokenizer(self._config, files, self._tell_progress)
        return tokenizer, source.config.vocab_size, default_params(self._config, source.generation)

    def _ended(self, exchange: Exchange) -> None:
        self._log.ended(exchange)
        if self._front.metrics is not None:
            method, seconds = exchange.scope["method"], time.monotonic() - exchange.came_s
            self._front.metrics.replied(exchange.route, method, exchange.status, seconds)

    def _tell_progress(self, label: str, done: int, total: int) -> None:
        share = f" {100 * done // total} %" if total else ""
        self._front.loading = f"the model is being loaded: {label}{share}"
        self._progress(label, done, total)

    def _end(self, number: int) -> None:
        """At the first signal no more is taken on; at the second all ends at once."""
        if self._front.stopping:
            self._child.stop(0.0)
            if self._server.uds is not None:
                Path(self._server.uds).unlink(missing_ok=True)
            os._exit(128 + number)
        self._front.stopping = True
        limit_s = self._server.shutdown_timeout
        if self._front.served is not None and self._front.served.client.error is None:
            self.note(f"stopping: requests may go on for {limit_s} s; another signal ends them")
            self._front.served.client.shutdown(limit_s)
        else:
            self._interrupted = number == signal.SIGINT
        self._http.stop()


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


def _run(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run on uvloop where that is installed, which does not wait for threads that may never end."""
    if find_spec("uvloop"):
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def process_age_s() -> float:
    """Since this process began to be; 0 where there is no /proc."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


async def _in_thread(work: Callable[[], Result]) -> Result:
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


# --- TLS


def check_tls(server: ServerConfig) -> None:
    """Raise StartError for keys and certificates that cannot be used."""
    if server.ssl_certfile is None:
        if any((server.ssl_keyfile, server.ssl_ca_certs, server.ssl_ciphers, server.enable_ssl_refresh)):
            raise StartError("there is no TLS without --ssl-certfile")
        return
    for option, path in (
        ("--ssl-certfile", server.ssl_certfile),
        ("--ssl-keyfile", server.ssl_keyfile),
        ("--ssl-ca-certs", server.ssl_ca_certs),
    ):
        if path is not None and not os.access(path, os.R_OK):
            raise StartError(f"{option} {path} is no file that can be read")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password="")
        if server.ssl_ca_certs is not None:
            context.load_verify_locations(server.ssl_ca_certs)
        if server.ssl_ciphers is not None:
            context.set_ciphers(server.ssl_ciphers)
    except (ssl.SSLError, ValueError) as cause:
        reason = getattr(cause, "reason", None) or cause
        raise StartError(
            f"TLS cannot be had from these files and ciphers: {reason}",
            hint="give the key that belongs to --ssl-certfile, without a password, as --ssl-keyfile",
        ) from None


async def follow_certificates(config: uvicorn.Config) -> None:
    """Read key and certificates again when their files change; what cannot be read is left as it was."""
    files = [Path(path) for path in (config.ssl_certfile, config.ssl_keyfile) if path is not None]
    seen = [path.stat().st_mtime_ns for path in files]
    while True:
        await asyncio.sleep(REFRESH_S)
        with suppress(OSError):  # SSLError is one: a file that is being written
            now = [path.stat().st_mtime_ns for path in files]
            if now != seen and isinstance(config.ssl, ssl.SSLContext) and config.ssl_certfile is not None:
                config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
                seen = now


# --- The socket


@contextmanager
def listening(server: ServerConfig) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and its address in words; a unix socket's path is removed at the end. Raises StartError."""
    if server.uds is None:
        with _tcp(server.host, server.port) as listener:
            yield listener, _url(listener, "http" if server.ssl_certfile is None else "https")
        return
    path = Path(server.uds)
    with _unix(path) as listener:
        try:
            yield listener, f"unix socket {path}"
        finally:
            path.unlink(missing_ok=True)


def _tcp(host: str, port: int) -> socket.socket:
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as cause:
        raise StartError(f"{where} is no place to listen at: {cause.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as cause:
        listener.close()
        raise StartError(f"{where}: {cause.strerror}", hint="choose another --port, or --port 0") from None
    return listener


def _unix(path: Path) -> socket.socket:
    """A socket at `path`, in place of one that nobody listens at any more."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        before = os.umask(0o117)  # this user and group only
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
    except OSError as cause:
        listener.close()
        raise StartError(f"--uds {path}: {cause.strerror or cause}", hint="choose another path") from None
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
        return True


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

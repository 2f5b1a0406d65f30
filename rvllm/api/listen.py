"""Where a server listens: TCP or a unix socket, one socket or several at one port, and TLS. Knows sockets and files."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from rvllm.config import ServerConfig
from rvllm.errors import StartError

BACKLOG = 2048
REFRESH_S = 5.0
"""How often it is looked whether certificates are new."""


@contextmanager
def listening(server: ServerConfig) -> Iterator[tuple[list[socket.socket], str]]:
    """A socket for every front and their address in words; a unix socket's path is removed at the end.

    Those of several fronts are at one port, and the kernel spreads connections over them (SO_REUSEPORT); what has not
    been accepted when a front dies waits for the next one. A unix socket is shared. Raises StartError.
    """
    count = server.api_server_count
    if server.uds is None:
        with ExitStack() as stack:
            first = stack.enter_context(_tcp(server.host, server.port))
            port, listeners = first.getsockname()[1], [first]
            if count > 1:
                # It was alone at the port, so no other server is there. With the option all need it.
                first.close()
                listeners = [stack.enter_context(_tcp(server.host, port, shared=True)) for _ in range(count)]
            yield listeners, _url(listeners[0], "http" if server.ssl_certfile is None else "https")
        return
    path = Path(server.uds)
    with _unix(path) as listener:
        try:
            yield [listener] * count, f"unix socket {path}"
        finally:
            path.unlink(missing_ok=True)


def _tcp(host: str, port: int, shared: bool = False) -> socket.socket:
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
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as cause:
        listener.close()
        barred = "only root may listen at low ports: choose a --port from 1024 on"
        hint = barred if isinstance(cause, PermissionError) else "choose another --port, or --port 0"
        raise StartError(f"{where}: {cause.strerror}", hint=hint) from None
    return listener


def own_machine(listener: socket.socket) -> bool:
    """Whether only this machine reaches a TCP socket."""
    return ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


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


# --- TLS


def check_tls(server: ServerConfig) -> None:
    """Raise StartError for keys and certificates that cannot be used."""
    if server.ssl_certfile is None:
        others = (server.ssl_keyfile, server.ssl_ca_certs, server.ssl_ciphers, server.enable_ssl_refresh)
        if any(others) or server.ssl_cert_reqs:
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

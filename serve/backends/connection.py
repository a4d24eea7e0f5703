"""Holds an idle connection, whose end shows that the server, or its host, is gone.

When a server is killed, its kernel closes the connections, which is detected at once. A host that
vanishes closes nothing: the kernel's keepalive probes, one a second, detect it in GONE_AFTER_S.
"""

import asyncio
import errno
import functools
import os
import socket
import ssl
from collections.abc import Callable
from typing import Literal

from octet.errors import BackendUnavailable

__all__ = ["hold_open", "kept_alive", "reason_of"]

GONE_AFTER_S = 3
# A server that only closes idle connections keeps this one open for at least so long.
IDLE_S = 1.0
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # nothing is acknowledged


def kept_alive(address: tuple[int, int, int, str, object]) -> socket.socket:
    """Makes a socket that detects a vanished server host, however long a request waits."""
    created = socket.socket(*address[:3])
    created.setblocking(False)
    _keep_alive(created)
    return created


def _keep_alive(connection: socket.socket) -> None:
    """Makes the kernel detect within GONE_AFTER_S that the peer's host no longer answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),  # seconds
        ("TCP_KEEPINTVL", 1),  # seconds
        ("TCP_KEEPCNT", GONE_AFTER_S - 1),
    ):
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def hold_open(
    name: str,
    host: str,
    port: int,
    *,
    tls: bool,
    timeout_s: float,
    reopened: Callable[[], None] = lambda: None,
) -> bool:
    """Waits until the server is gone. Returns True if its whole host is: data in flight is lost.

    Raises BackendUnavailable if it cannot be reached at all. If it only closed an idle connection,
    opens the next one at once. A server that shut down in order and was replaced at once looks the
    same, so `reopened` is called before each new connection.
    """
    loop = asyncio.get_running_loop()
    reader, writer = await _open(name, host, port, tls, timeout_s)
    while True:
        opened = loop.time()
        try:
            end = await _until_its_end(reader)
        finally:
            writer.transport.abort()
        if end != "in order" or loop.time() - opened < IDLE_S:
            return end == "silent"
        reopened()
        try:
            reader, writer = await _open(name, host, port, tls, timeout_s)
        except BackendUnavailable:
            return False  # the server may still finish the requests it has begun


@functools.cache
def _tls() -> ssl.SSLContext:
    """Returns the TLS context, made once: reading the system's certificates takes 15 ms."""
    return ssl.create_default_context()


async def _open(
    name: str, host: str, port: int, tls: bool, timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=_tls() if tls else None)
    except OSError as error:  # TimeoutError is one
        raise BackendUnavailable(f"{name}: cannot be reached ({reason_of(error)})") from error
    _keep_alive(writer.get_extra_info("socket"))
    return reader, writer


def reason_of(error: OSError) -> str:
    """Describes `error` in a few words. Never uses `str(error)`, which contains the address."""
    if isinstance(error, ssl.SSLCertVerificationError):
        # For a certificate of other hosts, OpenSSL's message goes on with the requested host.
        words = getattr(error, "verify_message", "").partition(",")[0]
        return f"TLS: {words.lower() or 'the certificate is not valid'}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or 'the handshake failed').replace('_', ' ').lower()}"
    if isinstance(error, socket.gaierror):
        return error.strerror or "its name is not known"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return os.strerror(error.errno) if error.errno and error.errno > 0 else "the connection failed"


async def _until_its_end(reader: asyncio.StreamReader) -> Literal["in order", "reset", "silent"]:
    """Waits for the connection to end and returns how it did; discards what comes over it."""
    try:
        while await reader.read(4096):
            pass
    except OSError as error:
        return "silent" if error.errno in _SILENT else "reset"
    return "in order"

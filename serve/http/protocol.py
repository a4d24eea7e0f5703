"""Uvicorn's HTTP protocol, with limits on what a connection may cost before it is a request.

It refuses headers over the limit (431), bytes that are not HTTP (400), clients that send too slowly
(408), and connections over the limit (503). Every refusal is an OpenAI error object, closes the
connection, and is counted. If a client reads nothing, its connection is cut, which the application
sees as a disconnect.

A request that arrives in one piece costs no timer and no reading of the clock: one sweep per second
checks all connections.
"""

import asyncio
import logging
import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octet.errors import RequestError
from serve.api.errors import error_bytes
from serve.config import Limits

__all__ = ["GuardedProtocol", "guarded_protocol", "most_files"]

SWEEP_EVERY_S = 1.0
# A body may take longer than the timeout if it arrives at least this fast, as with `MinRate` of
# Apache's mod_reqtimeout: a large body over a slow line is no attack.
LEAST_BYTES_PER_S = 64 * 1024
# If closed at once, a refused client that still sends would get a reset and lose the answer. Its
# bytes are read and discarded for this long, or until it closes (RFC 9112, section 9.6).
LINGER_S = 1.0
MOST_LINGERING = 256  # further connections are closed at once
SLICE = 4096  # bytes that are parsed before pipelined requests are counted; 230 requests at most
MOST_PIPELINED = 64  # requests that wait for the answer before them; later ones are not parsed yet
FEW_FILES = 64  # descriptors that are left
WARN_EVERY_S = 60.0

_IDLE, _HEADERS, _BODY = range(3)
_log = logging.getLogger(__name__)


class Guard:
    """State that the connections of one listening address share: limits, the count, the sweep."""

    def __init__(self, limits: Callable[[], Limits], count: Callable[[str], None]) -> None:
        self.limits = limits
        self.count = count
        self.connections: set[GuardedProtocol] = set()
        self.refused = 0  # of the connections, those that are being turned away
        self._most_files = most_files()
        self._warned_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: "GuardedProtocol", limits: Limits) -> None:
        self.connections.add(connection)
        if self._timer is None:
            shortest_s = min(limits.read_timeout_s, limits.write_timeout_s, LINGER_S)
            self._sweep(connection.loop, min(SWEEP_EVERY_S, shortest_s / 4))

    def watch_files(self, descriptor: int, now: float) -> None:
        """Warns if few descriptors are left: the lowest free one is `descriptor`.

        Nothing else would be logged: the kernel keeps further connections waiting.
        """
        if descriptor >= self._most_files - FEW_FILES and now >= self._warned_at + WARN_EVERY_S:
            self._warned_at = now
            _log.warning(
                "the process has nearly all of its %d open files: new connections will wait; raise "
                "the limit (ulimit -n), or lower limits.max_connections",
                self._most_files,
            )

    def remove(self, connection: "GuardedProtocol") -> None:
        self.connections.discard(connection)
        if not self.connections and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self, loop: asyncio.AbstractEventLoop, every_s: float) -> None:
        self._timer = loop.call_later(every_s, self._sweep, loop, every_s)
        limits, now = self.limits(), loop.time()
        for connection in list(self.connections):
            connection.check(limits, now)


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Made by `guarded_protocol`."""

    guard: ClassVar[Guard]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _IDLE  # of the message that is arriving
        self._timed = _HEADERS  # the phase that `_since` belongs to
        self._since: float | None = None  # when the wait for the client began
        self._chunk = 0  # bytes that just arrived
        self._arrived = 0  # bytes of the current message, less those that came with an earlier one
        self._bodyless = 0  # bytes in the body's phase that hold none of the body: trailers
        self._muted = False  # while a new parser is fed what the old one has read
        self._most_header_bytes = 0
        self._turned_away_at: float | None = None
        self._lingers = False  # answered, but its client still sends the body
        self._unwanted = False  # over the limit of connections: refused when it sends
        self._pending = 0  # bytes that waited to be sent, at the last sweep
        self._drained = False  # since then, fell below the mark at which the application resumes
        self._stalled_at = 0.0
        self._unparsed = bytearray()  # while many pipelined requests wait

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        guard = self.guard
        limits = guard.limits()
        self._most_header_bytes = limits.max_header_bytes
        self._since = self.loop.time()
        guard.add(self, limits)
        self._polite = _PoliteTransport(transport, self._close_politely)
        if (connection := transport.get_extra_info("socket")) is not None:
            guard.watch_files(connection.fileno(), self._since)
        if len(guard.connections) - guard.refused > limits.max_connections:
            self._unwanted = True
            self._turn_away()

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.remove(self)
        if self._turned_away_at is not None:
            self.guard.refused -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._turned_away_at is not None:
            if self._unwanted:
                self._unwanted = False
                self._refuse(503, "too_many_connections", "too many connections")
            return
        self._unset_keepalive_if_required()
        if len(data) <= SLICE and not self._unparsed:
            self._take(data)
        else:
            self._unparsed += data
            self._take_more()

    def _take_more(self) -> None:
        """Parses what has arrived until enough requests wait; `on_response_complete` goes on."""
        while self._unparsed and self._turned_away_at is None:
            if len(self.pipeline) >= MOST_PIPELINED:
                self.flow.pause_reading()
                return
            data = bytes(self._unparsed[:SLICE])
            del self._unparsed[:SLICE]
            self._take(data)

    def _take(self, data: bytes) -> None:
        self._chunk = len(data)
        self._arrived = self._chunk if self._phase == _IDLE else self._arrived + self._chunk
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if self._turned_away_at is None:
                self._refuse(400, "malformed_http", "this is not HTTP/1.1")
            return
        if self._phase != self._timed:
            self._timed = self._phase
            self._since = self.loop.time() if self._phase else None
        if self._phase == _BODY:
            self._bodyless += self._chunk
        endless = self._arrived if self._phase == _HEADERS else self._bodyless
        if endless > self._most_header_bytes:
            self._refuse_headers()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._ignore_upgrade()
                data = data[upgrade.args[0] :]
            else:
                return

    def _ignore_upgrade(self) -> None:
        """Handles a request for another protocol (`Upgrade`) in the current one.

        RFC 9110, section 7.8, allows that, and Java's client requests HTTP/2 with each first
        request. But httptools then treats the request as complete, and the bytes after its headers
        as the other protocol. A new parser gets headers that declare the same body, and reads it.
        """
        self.parser = httptools.HttpRequestParser(self)
        fields = (b"content-length", b"transfer-encoding")
        framing = [b"%s: %s\r\n" % field for field in self.headers if field[0] in fields]
        if not framing:
            return
        begun = self.url, self.headers
        self._muted = True
        self.url, self.headers = b"", []
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        self.url, self.headers = begun
        self._muted = False

    def on_message_begin(self) -> None:
        if self._muted:
            return
        super().on_message_begin()
        self._phase = _HEADERS
        self._timed = _IDLE
        self._since = None
        self._bodyless = 0

    def on_headers_complete(self) -> None:
        if self._muted:  # httptools called the message complete at the end of its headers
            self._phase = _BODY
            self.cycle.more_body = True
            return
        # A cheap bound first: both counts may include other messages or a part of the body.
        if self._arrived + self._chunk > self._most_header_bytes:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._most_header_bytes:
                self._refuse_headers()
                raise httptools.HttpParserError  # stops reading this message
        if self.parser.get_http_version() not in ("1.1", "1.0"):  # 0.9 has no headers
            raise httptools.HttpParserError
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, self._polite)
        self._phase = _BODY

    def on_body(self, body: bytes) -> None:
        self._bodyless = -self._chunk
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = _IDLE
        self._arrived = self._bodyless = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._turned_away_at is not None and not (self.pipeline or self._lingers):
            self.transport.close()  # what came after this request was refused
        super().on_response_complete()
        if self._unparsed:
            self.loop.call_soon(self._take_more)

    def _close_politely(self) -> None:
        """Closes after an answer; if a part of the body is still to come, discards that first."""
        few = self.guard.refused <= MOST_LINGERING and self.transport.can_write_eof()
        if self.cycle.more_body and self._turned_away_at is None and few:
            self._lingers = True
            self._turn_away()
            self.transport.write_eof()
        else:
            self.transport.close()

    def resume_writing(self) -> None:
        self._drained = True
        super().resume_writing()

    def shutdown(self) -> None:
        if self._turned_away_at is not None and not self._is_answering():
            self.transport.close()
        else:
            super().shutdown()

    def check(self, limits: Limits, now: float) -> None:
        """Checks this connection; called by the sweep."""
        self._check_reader(limits, now)
        if self._turned_away_at is not None:
            if now - self._turned_away_at > LINGER_S and not self._is_answering():
                self.transport.close()
        elif self._since is not None:
            self._check_sender(limits, now, self._since)

    def _check_reader(self, limits: Limits, now: float) -> None:
        """Cuts the connection of a client that has read nothing of what waits for it."""
        pending = self.transport.get_write_buffer_size()
        # While the application is held back, the buffer can only shrink; when it resumes, the
        # client has read much. A slow client fills the buffer in the end, and so holds it back.
        if self._drained or pending < self._pending or not self._pending:
            self._stalled_at = now
            self._drained = False
        elif now - self._stalled_at > limits.write_timeout_s:
            self.guard.count("client_stalled")
            self.transport.abort()
        self._pending = pending

    def _check_sender(self, limits: Limits, now: float, since: float) -> None:
        """Refuses a client that sends its headers or its body too slowly."""
        if self.flow.read_paused:  # the gateway itself does not read
            self._since = now
            return
        allowed_s = limits.read_timeout_s
        if self._phase == _BODY and self._is_answering():
            allowed_s += self._arrived / LEAST_BYTES_PER_S
        if now - since <= allowed_s:
            return
        if self._phase == _IDLE:  # connected, but has sent nothing
            self.transport.close()
            return
        what = "headers" if self._phase == _HEADERS else "body"
        self._refuse(408, "request_timeout", f"the {what} did not arrive within {allowed_s:.3g} s")

    def _refuse_headers(self) -> None:
        limit = self._most_header_bytes
        message = f"the headers are larger than the limit of {limit} bytes"
        self._refuse(431, "headers_too_large", message)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Sends an error and closes. An answer to an earlier request goes first."""
        self.guard.count(code)
        if self._turned_away_at is None:
            self._turn_away()
        own = self._phase == _BODY  # the refused message is already a request
        if self.pipeline or (self._is_answering() and not own):
            if own:
                self.pipeline.popleft()  # it will never be complete
            self.cycle.keep_alive = False
            return  # on_response_complete closes
        if own:
            cycle = self.cycle
            if cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True  # to the application, the client has gone
            cycle.message_event.set()
        self._write_refusal(status, code, message)
        if self.guard.refused > MOST_LINGERING or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()

    def _write_refusal(self, status: int, code: str, message: str) -> None:
        unavailable = status == 503
        kind = "service_unavailable_error" if unavailable else "invalid_request_error"
        body = error_bytes(RequestError(message, status=status, code=code, kind=kind))
        lines = [STATUS_LINE[status]]
        for name, value in self.server_state.default_headers:
            lines += [name, b": ", value, b"\r\n"]
        if unavailable:
            lines.append(b"retry-after: 1\r\n")
        lines.append(b"content-type: application/json\r\nconnection: close\r\n")
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        self.transport.write(b"".join([*lines, body]))

    def _turn_away(self) -> None:
        self._turned_away_at = self.loop.time()
        self.guard.refused += 1


class _PoliteTransport:
    """The transport that uvicorn writes an answer to; replaces how it is closed."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def most_files() -> int:
    """Returns how many files this process may have open, connections included."""
    try:
        import resource
    except ModuleNotFoundError:  # not Unix
        return sys.maxsize
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def guarded_protocol(
    limits: Callable[[], Limits], count: Callable[[str], None]
) -> type[GuardedProtocol]:
    """Creates the class for `uvicorn.Config(http=...)` of one listening address.

    `limits` is called for each connection, so that a reload applies; `count` gets the error code of
    each refusal.
    """
    return type("GuardedProtocol", (GuardedProtocol,), {"guard": Guard(limits, count)})

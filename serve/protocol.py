"""Uvicorn's HTTP protocol, with limits on what a connection may cost before it is a request.

An endless header (431), what is not HTTP (400), a client that is slow to send (408), more
connections than there is room for (503), and a client that takes nothing: its connection is cut,
which the application sees as a disconnect. Every refusal is an OpenAI error object, closes the
connection, and is counted.

Nothing here costs a timer per request: one sweep a second looks at all connections.
"""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octet.errors import RequestError
from serve.api.errors import error_bytes
from serve.config import Limits

__all__ = ["GuardedProtocol", "guarded_protocol"]

SWEEP_EVERY_S = 1.0
# A body may take longer than the timeout if it comes at least this fast, as Apache's
# mod_reqtimeout has it: a large body over a slow line is no attack.
LEAST_BYTES_PER_S = 64 * 1024
# A refused client that still sends would get a reset, and lose the answer: what it sends is read
# and thrown away for so long, or until it closes (RFC 9112, section 9.6).
LINGER_S = 1.0
MOST_LINGERING = 256  # beyond so many, they are closed at once

_IDLE, _HEADERS, _BODY = range(3)


class Guard:
    """What the connections of one listening address share: limits, the count, the sweep."""

    def __init__(self, limits: Callable[[], Limits], count: Callable[[str], None]) -> None:
        self.limits = limits
        self.count = count
        self.connections: set[GuardedProtocol] = set()
        self.refused = 0  # of them, those that are being turned away
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: "GuardedProtocol", loop: asyncio.AbstractEventLoop) -> None:
        self.connections.add(connection)
        if self._timer is None:
            limits = self.limits()
            shortest = min(limits.read_timeout_s, limits.write_timeout_s, LINGER_S)
            every_s = min(SWEEP_EVERY_S, shortest / 4)
            self._timer = loop.call_later(every_s, self._sweep, loop, every_s)

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
    """One connection."""

    guard: ClassVar[Guard]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _IDLE  # of the message that is arriving
        self._timed = _HEADERS  # the phase that `_since` is about
        self._since: float | None = None  # when the client began to keep us waiting
        self._chunk = 0  # bytes of what just arrived
        self._arrived = 0  # bytes of the current message, at most
        self._most_header_bytes = 0
        self._turned_away_at: float | None = None
        self._unwanted = False  # over the limit of connections: refused when it asks
        self._pending = 0  # bytes that wait to be sent, at the last sweep
        self._stalled_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        guard = self.guard
        limits = guard.limits()
        self._most_header_bytes = limits.max_header_bytes
        self._since = self.loop.time()
        guard.add(self, self.loop)
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
                self._refuse(503, "too_many_connections", "too many connections", retry_after_s=1)
            return
        self._chunk = len(data)
        self._arrived += self._chunk
        super().data_received(data)
        phase = self._phase
        if phase != self._timed:
            self._timed = phase
            self._since = self.loop.time() if phase else None
        if phase == _HEADERS and self._arrived > self._most_header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _HEADERS
        self._timed = _IDLE
        self._arrived = self._chunk

    def on_headers_complete(self) -> None:
        if self._arrived > self._most_header_bytes:  # maybe: a part of that may be the body
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._most_header_bytes:
                self._refuse_headers()
                raise httptools.HttpParserError  # nothing of this message is read any more
        self._phase = _BODY
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._phase = _IDLE
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._turned_away_at is not None:  # what the client sent meanwhile was refused
            self.transport.close()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser has given up."""
        if self._turned_away_at is None:
            self._refuse(400, "malformed_http", "this is not HTTP/1.1")

    def shutdown(self) -> None:
        if self._turned_away_at is not None and not self._is_answering():
            self.transport.abort()
        else:
            super().shutdown()

    def check(self, limits: Limits, now: float) -> None:
        """The sweep's look at this connection."""
        self._check_reader(limits, now)
        if self._turned_away_at is not None:
            if now - self._turned_away_at > LINGER_S and not self._is_answering():
                self.transport.abort()
        elif self._since is not None:
            self._check_sender(limits, now, self._since)

    def _check_reader(self, limits: Limits, now: float) -> None:
        """Cuts a client that has taken nothing of what waits for it."""
        pending = self.transport.get_write_buffer_size()
        if not pending or pending < self._pending or not self._pending:
            self._stalled_at = now
        elif now - self._stalled_at > limits.write_timeout_s:
            self.guard.count("client_stalled")
            self.transport.abort()
        self._pending = pending

    def _check_sender(self, limits: Limits, now: float, since: float) -> None:
        """Refuses a client that is too slow with its headers or its body."""
        if self.flow.read_paused:  # it is we who do not read
            self._since = now
            return
        allowed_s = limits.read_timeout_s
        if self._phase == _BODY:
            allowed_s += self._arrived / LEAST_BYTES_PER_S
        if now - since <= allowed_s:
            return
        if self._phase == _IDLE:  # connected, and never said a word
            self.transport.close()
            return
        what = "headers" if self._phase == _HEADERS else "body"
        self._refuse(408, "request_timeout", f"the {what} did not arrive within {allowed_s:g} s")

    def _refuse_headers(self) -> None:
        limit = self._most_header_bytes
        message = f"the headers are larger than the limit of {limit} bytes"
        self._refuse(431, "headers_too_large", message)

    def _is_answering(self) -> bool:
        """Whether a response is under way to a request that has arrived whole."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(
        self, status: int, code: str, message: str, *, retry_after_s: int | None = None
    ) -> None:
        """Answers what cannot be taken, and closes. An answer under way is finished first."""
        self.guard.count(code)
        cycle = self.cycle
        own = self._phase == _BODY and cycle is not None  # the message refused is a request already
        if self._turned_away_at is None:
            self._turn_away()
        if self._is_answering() and not own:
            cycle.keep_alive = False
            return
        if own:
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
            cycle.disconnected = True  # for the application, its client has gone
            cycle.message_event.set()
        error = RequestError(message, status=status, code=code)
        body = error_bytes(error)
        lines = [STATUS_LINE[status]]
        for name, value in self.server_state.default_headers:
            lines += [name, b": ", value, b"\r\n"]
        if retry_after_s is not None:
            lines.append(b"retry-after: %d\r\n" % retry_after_s)
        lines.append(b"content-type: application/json\r\n")
        lines.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join([*lines, body]))
        if self.guard.refused > MOST_LINGERING or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()

    def _turn_away(self) -> None:
        self._turned_away_at = self.loop.time()
        self.guard.refused += 1


def guarded_protocol(
    limits: Callable[[], Limits], count: Callable[[str], None]
) -> type[GuardedProtocol]:
    """The class for `uvicorn.Config(http=...)`.

    `limits` is asked for each connection, so that a reload applies; `count` gets the error code of
    each refusal.
    """
    return type("GuardedProtocol", (GuardedProtocol,), {"guard": Guard(limits, count)})

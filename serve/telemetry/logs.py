"""Log lines on standard error, as text or as JSON, each with the id of its request.

A thread writes them. A slow reader (a full pipe, a terminal) therefore cannot block the event loop,
and one that reads nothing cannot prevent the end of the process.
"""

import contextlib
import json
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from typing import Any, TextIO

from octet.errors import printable
from serve.config.gateway import Logs
from serve.telemetry.observation import current

__all__ = ["logging_to", "say"]

# Of what waits to be written; further lines are dropped, and their number is logged.
MOST_WAITING = 10_000  # lines
MOST_WAITING_BYTES = 16 * 1024 * 1024
LAST_LINES_S = 2.0  # how long the end of the process waits for the last lines to be written
_AT_ONCE = 4096  # bytes that a pipe with room takes without blocking: POSIX's PIPE_BUF, on Linux

_writing: "_Handler | None" = None  # while `logging_to` runs


@contextmanager
def logging_to(
    config: Logs, stream: TextIO | None = None, *, worker: int | None = None
) -> Iterator[None]:
    """Writes everything logged at INFO and above to `stream` (standard error), from a thread.

    Every line names the `worker`, if several processes write to the same place.
    Lines that still wait at the end are written before this returns, if that takes no longer than
    `LAST_LINES_S`.
    """
    global _writing
    writer = _Writer(stream or sys.stderr)
    writer.setFormatter(_Json() if config.format == "json" else _Text())
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread = threading.Thread(target=_write_all, args=(waiting, writer), name="log", daemon=True)
    handler = _Handler(waiting, writer, worker)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    thread.start()
    before, _writing = _writing, handler
    try:
        yield
    finally:
        _writing = before
        root.removeHandler(handler)
        root.setLevel(level)
        writer.give_up_at = time.monotonic() + LAST_LINES_S
        waiting.put(None)
        thread.join(LAST_LINES_S + 0.5)


def say(line: str, logs: Logs, level: int = logging.INFO) -> None:
    """Writes `line` on standard error in the log's format, whatever the log's level.

    A line of text stands alone, without time and level.
    """
    record = logging.LogRecord("octet", level, "", 0, line, None, None)
    record.alone = True
    if _writing is not None:
        _writing.handle(record)
    else:
        formatter = _Json() if logs.format == "json" else _Text()
        print(formatter.format(record), file=sys.stderr, flush=True)


def _write_all(waiting: "queue.SimpleQueue[logging.LogRecord | None]", writer: "_Writer") -> None:
    while (record := waiting.get()) is not None:
        writer.handle(record)
        writer.written += _size(record)


def _size(record: logging.LogRecord) -> int:
    """Returns about as many bytes as the line of `record` takes."""
    fields = getattr(record, "fields", {})
    texts = (record.msg, record.exc_text, fields.get("prompt"), fields.get("path"))
    return 200 + sum(len(text) for text in texts if text)


class _Writer(logging.Handler):
    """Writes lines to a stream; to a file descriptor only as much as it takes without blocking."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.written = 0  # bytes of lines, about
        self.give_up_at = float("inf")  # by the monotonic clock
        self._stream = stream
        try:
            self._descriptor: int | None = stream.fileno()
        except (OSError, AttributeError):  # a stream in memory
            self._descriptor = None

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed: nowhere to report it
            line = f"{self.format(record)}\n"
            if self._descriptor is None:
                self._stream.write(line)
                self._stream.flush()
            else:
                self._write(self._descriptor, line.encode(errors="backslashreplace"))

    def _write(self, descriptor: int, line: bytes) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while line:
            while not poll.poll(100):  # ms
                if time.monotonic() > self.give_up_at:
                    return
            line = line[os.write(descriptor, line[:_AT_ONCE]) :]


class _Handler(QueueHandler):
    """Hands records, with the request's id, to the writing thread; never waits."""

    def __init__(
        self,
        waiting: "queue.SimpleQueue[logging.LogRecord]",
        writer: _Writer,
        worker: int | None,
    ) -> None:
        super().__init__(waiting)
        self._worker = worker
        self.waiting = waiting
        self.dropped = 0
        self._writer = writer
        self._put = 0  # bytes of lines, about

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Formats the text here: the arguments may change, or go, before the record is written.

        A traceback would also keep everything that its frames hold.
        """
        observation = current.get()
        record.request_id = "" if observation is None else observation.id
        if self._worker is not None:
            record.fields = {"worker": self._worker} | getattr(record, "fields", {})
        record.message = record.msg = record.getMessage()
        record.args = None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        bytes_waiting = self._put - self._writer.written
        if self.waiting.qsize() >= MOST_WAITING or bytes_waiting >= MOST_WAITING_BYTES:
            self.dropped += 1
            return
        if self.dropped:
            record.msg = f"{record.msg} ({self.dropped} lines before this one were dropped)"
            self.dropped = 0
        self._put += _size(record)
        self.waiting.put_nowait(record)


class _Json(logging.Formatter):
    """One object per line: time (RFC 3339, UTC), level, logger, message, request_id, fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_text:
            line["exception"] = record.exc_text
        return json.dumps(line, default=str)


class _Text(logging.Formatter):
    """`time LEVEL logger: message request_id=... more=...`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        if request_id := getattr(record, "request_id", ""):
            fields = {"request_id": request_id} | fields
        pairs = [f" {name}={_quoted(value)}" for name, value in fields.items()]
        message = printable(record.getMessage())
        if getattr(record, "alone", False):
            return f"worker {fields['worker']}: {message}" if "worker" in fields else message
        line = f"{_time(record)} {record.levelname} {record.name}: {message}{''.join(pairs)}"
        trace = map(printable, (record.exc_text or "").splitlines())
        return "\n".join([line, *trace])


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _quoted(value: Any) -> str:
    text = str(value)
    plain = text and text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if plain else json.dumps(text)

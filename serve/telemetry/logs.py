"""Log lines on standard error, as text or as JSON, each with the id of its request."""

import json
import logging
import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

from serve.config.gateway import Logs
from serve.telemetry.observation import current

__all__ = ["json_line", "logging_to"]

MOST_WAITING = 10_000  # lines; further ones are dropped, and their number is logged


@contextmanager
def logging_to(config: Logs, stream: TextIO | None = None) -> Iterator[None]:
    """Writes everything logged at INFO and above to `stream` (standard error), from a thread.

    A slow reader (a full pipe, a terminal) therefore cannot block the event loop. Lines that still
    wait at the end are written before this returns.
    """
    writer = logging.StreamHandler(stream or sys.stderr)
    writer.setFormatter(_Json() if config.format == "json" else _Text())
    waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    listener = QueueListener(waiting, writer)
    handler = _Handler(waiting)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        listener.stop()


class _Handler(QueueHandler):
    """Hands records, with the request's id, to the writing thread; never waits."""

    def __init__(self, waiting: "queue.SimpleQueue[logging.LogRecord]") -> None:
        super().__init__(waiting)
        self.waiting = waiting
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Formats the text here: the arguments may change, or go, before the record is written."""
        observation = current.get()
        record.request_id = "" if observation is None else observation.id
        record.message = record.msg = record.getMessage()
        record.args = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.waiting.qsize() >= MOST_WAITING:
            self.dropped += 1
            return
        if self.dropped:
            record.msg = f"{record.msg} ({self.dropped} lines before this one were dropped)"
            self.dropped = 0
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
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def json_line(message: str, level: int) -> str:
    """Formats `message` like a line of the log, for use before logging starts or beside it."""
    line = logging.LogRecord("octet", level, "", 0, message, None, None)
    return _Json().format(line)


class _Text(logging.Formatter):
    """`time LEVEL logger: message request_id=... more=...`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        if request_id := getattr(record, "request_id", ""):
            fields = {"request_id": request_id} | fields
        pairs = [f" {name}={_quoted(value)}" for name, value in fields.items()]
        message = record.getMessage()
        if not message.isprintable():  # no message may end the line or control the terminal
            message = json.dumps(message)[1:-1]
        line = f"{_time(record)} {record.levelname} {record.name}: {message}{''.join(pairs)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _quoted(value: Any) -> str:
    text = str(value)
    plain = text and text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if plain else json.dumps(text)

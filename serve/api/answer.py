"""A backend's answer on its way to the client.

An `Answer` is opened, and its first event read, before anything is sent to the client. A backend
that cannot be reached, or dies before its first token, therefore costs the client only time.

The functions at the end count events in a piece of a stream without parsing it. A piece holds one
event or many.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from octet.errors import OctetError

__all__ = [
    "DONE",
    "EVENT_STREAM",
    "JSON",
    "Answer",
    "Tally",
    "close",
    "ended_in",
    "events_in",
    "is_comment",
]

_log = logging.getLogger(__name__)

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
CLOSE_S = 5.0  # limit for closing a stream that did not end by itself
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Tally:
    """The tokens of one answer; None until its backend reports them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ended: bool = False  # everything useful is sent or being sent: see EventReader
    failed: OctetError | None = None  # the error that the backend reported inside a stream


@dataclass(slots=True)
class Answer:
    """An answer for the client. `first` is the whole body if `rest` is None.

    Closing `rest` cancels the request at the backend.
    """

    status: int
    headers: dict[str, str]
    first: bytes
    rest: AsyncGenerator[bytes, None] | None = None
    tally: Tally = field(default_factory=Tally)


async def close(rest: AsyncGenerator[bytes, None]) -> None:
    """Closes `rest`, which frees the backend.

    Only logs a failure, so that the caller goes on to release everything else it holds.
    """
    try:
        async with asyncio.timeout(CLOSE_S):
            await rest.aclose()
    except Exception as error:
        _log.warning("an answer could not be closed: %r", error)


_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')


def is_comment(piece: bytes) -> bool:
    """Decides whether `piece` holds no data: servers send comments to keep a connection open."""
    return piece.startswith(b":") and b"\ndata:" not in piece


def ended_in(piece: bytes) -> int:
    """Counts the choices that have a finish reason."""
    return len(_FINISHED.findall(piece))


def events_in(piece: bytes) -> int:
    """Counts the events with tokens: neither `[DONE]` nor the usage."""
    events = piece.count(b"\n\n") or piece.count(b"\r\n\r\n")
    if b"[DONE]" in piece[-20:]:
        events -= 1
    if b'"choices":[]' in piece:
        events -= 1
    return max(events, 0)

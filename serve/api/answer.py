"""What a backend's answer is, on its way to the client.

An `Answer` is opened before anything is sent to the client, its first event included. So a backend
that cannot be reached, or dies before its first token, costs the client nothing but time.

What the pieces of a stream tell without being parsed: they may be one event, or many.
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
CLOSE_S = 5.0  # for a backend to let go of a stream that did not end by itself
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Tally:
    """The tokens of one answer, once its backend has said; None until then."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ended: bool = False  # all that is of use is with the client, or on its way: see EventReader
    failed: OctetError | None = None  # what the backend itself reported inside of a stream


@dataclass(slots=True)
class Answer:
    """What goes to the client: `first` is the whole body where `rest` is None.

    Closing `rest` cancels the request at the backend.
    """

    status: int
    headers: dict[str, str]
    first: bytes
    rest: AsyncGenerator[bytes, None] | None = None
    tally: Tally = field(default_factory=Tally)


async def close(rest: AsyncGenerator[bytes, None]) -> None:
    """Frees the backend. That it fails to be freed is no reason to keep what else is held."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await rest.aclose()
    except Exception as error:
        _log.warning("an answer could not be closed: %r", error)


_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')


def is_comment(piece: bytes) -> bool:
    """Whether there are no data in it: servers write comments to keep a connection open."""
    return piece.startswith(b":") and b"\ndata:" not in piece


def ended_in(piece: bytes) -> int:
    """Choices that say how they ended."""
    return len(_FINISHED.findall(piece))


def events_in(piece: bytes) -> int:
    """Events with tokens: neither `[DONE]` nor the usage."""
    events = piece.count(b"\n\n") or piece.count(b"\r\n\r\n")
    if b"[DONE]" in piece[-20:]:
        events -= 1
    if b'"choices":[]' in piece:
        events -= 1
    return max(events, 0)

"""What a backend's answer is, on its way to the client.

An `Answer` is opened before anything is sent to the client, its first event included. So a backend
that cannot be reached, or dies before its first token, costs the client nothing but time.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from octet.errors import OctetError

__all__ = ["DONE", "EVENT_STREAM", "JSON", "Answer", "Tally", "close"]

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

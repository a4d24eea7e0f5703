"""The interface of an operation, which answers one POST path: a `Call` in, an `Answer` out.

An `Answer` is opened, and its first event read, before anything is sent to the client. If a backend
cannot be reached, or dies before its first token, another one can therefore still answer.
`events_in`, `ended_in` and `is_comment` inspect a piece of a stream, one event or many, without
parsing it.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from octet.errors import OctetError, RequestError
from serve.backends.base import Backend
from serve.config.gateway import MAX_ANSWER
from serve.routing.route import Route

__all__ = [
    "DONE",
    "EVENT_STREAM",
    "JSON",
    "Answer",
    "Call",
    "Operation",
    "Tally",
    "close",
    "ended_in",
    "events_in",
    "is_comment",
    "joined",
    "too_long",
]

_log = logging.getLogger(__name__)

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
CLOSE_S = 5.0  # limit for closing a stream that did not end by itself
DONE = b"data: [DONE]\n\n"
MANY = 32  # pieces, of up to about 64 KB each, from which on a thread joins them


@dataclass(slots=True)
class Tally:
    """The token counts and the end of one answer, filled while it is read.

    Counts are None until the backend reports them.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ended: bool = False  # the last event, such as [DONE], was read
    events: int = 0  # events read so far, if they have names: see NamedEventReader
    failed: OctetError | None = None  # the error that the backend reported inside a stream


async def joined(pieces: list[bytes]) -> bytes:
    """Joins `pieces`; many of them on a thread.

    32 MB take 20 ms, in which the event loop can run: the interpreter lock is not held.
    """
    if len(pieces) == 1:
        return pieces[0]
    if len(pieces) < MANY:
        return b"".join(pieces)
    return await asyncio.to_thread(b"".join, pieces)


async def close(rest: AsyncGenerator[bytes, None]) -> None:
    """Closes `rest`, which frees the backend.

    Only logs a failure, so that the caller goes on to release everything else it holds.
    """
    try:
        async with asyncio.timeout(CLOSE_S):
            await rest.aclose()
    except Exception as error:
        _log.warning("an answer could not be closed: %r", error)


def too_long(backend: str, limit: int) -> RequestError:
    """Returns the error for an answer over `limits.max_answer_bytes`. It is not retried."""
    return RequestError(
        f"{backend}: the answer has more than {limit} bytes (limits.max_answer_bytes); request "
        "fewer choices or log-probabilities, or stream: true",
        status=502,
        code="answer_too_large",
        kind="backend_error",
    )


_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')


def is_comment(piece: bytes) -> bool:
    """Decides whether `piece` only keeps the connection open: a comment, or Anthropic's `ping`."""
    if piece.startswith(b"event: ping\n"):
        return piece.count(b"\n\n") == 1
    return piece.startswith(b":") and b"\ndata:" not in piece


def ended_in(piece: bytes) -> int:
    """Counts the choices that end in `piece`, which have a finish reason."""
    return len(_FINISHED.findall(piece))


def events_in(piece: bytes) -> int:
    """Counts the events in `piece` that have tokens: all but `[DONE]` and the usage."""
    events = piece.count(b"\n\n") or piece.count(b"\r\n\r\n")
    if b"[DONE]" in piece[-20:]:
        events -= 1
    if b'"choices":[]' in piece:
        events -= 1
    return max(events, 0)


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
    events_in: Callable[[bytes], int] = events_in  # counts events with tokens


@dataclass(frozen=True, slots=True)
class Call:
    """A request that passed all checks: the bytes `raw`, decoded as `data`, validated as `body`."""

    id: str
    path: str
    raw: bytes
    data: dict[str, Any]
    body: Any
    route: Route
    headers: dict[str, str] = field(default_factory=dict)  # to forward: request id, traceparent
    streamed: bool = False  # the client requested events, and the operation has them
    max_answer_bytes: int = MAX_ANSWER  # limit of an answer that is not streamed

    @property
    def model(self) -> str:
        """The name that the client used: a request for an alias is answered with the alias."""
        model: str = self.data.get("model") or self.route.name
        return model


class Operation(Protocol):
    """One POST path. Instances hold no state of a request."""

    @property
    def name(self) -> str:
        """OpenTelemetry's `gen_ai.operation.name`."""

    @property
    def path(self) -> str: ...

    @property
    def runs_model(self) -> bool:
        """True if the model computes the answer, so that an answer proves that it works."""

    @property
    def schema(self) -> type[BaseModel]:
        """The schema of the body; its `model` field names the requested model."""

    def cost(self, body: Any, unlimited: int) -> tuple[int, int]:
        """Returns the estimated tokens of the prompt, and the most that all choices may have.

        A choice whose length the body does not limit counts `unlimited` tokens.
        """

    async def open(self, backend: Backend, call: Call) -> Answer:
        """Sends the request, and waits for the first event, or for the whole body if not streamed.

        Raises BackendError if the backend fails before that, UnsupportedField if another backend
        may accept the request, RequestError if none would. If it raises or is cancelled, it closes
        everything that it opened.
        """

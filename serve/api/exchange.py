"""One request's way through: an answer opened on a backend, sent on, cancelled if nobody waits.

An `Answer` is opened before anything is sent to the client, its first piece included. So a backend
that cannot be reached, or dies before its first byte, costs the client nothing but time.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octet.errors import BackendUnavailable
from serve.api.errors import sse_error
from serve.api.fields import UnsupportedField
from serve.backends.base import Backend
from serve.gateway import Gateway
from serve.pool import Pool

__all__ = ["DONE", "EVENT_STREAM", "JSON", "Answer", "Exchange", "Open", "Tally"]

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Tally:
    """The tokens of one answer, once its backend has said; None until then."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(slots=True)
class Answer:
    """What goes to the client: `first` is the whole body where `rest` is None."""

    status: int
    headers: dict[str, str]
    first: bytes
    rest: AsyncGenerator[bytes, None] | None = None
    tally: Tally = field(default_factory=Tally)


Open = Callable[[Backend], Awaitable[Answer]]


class Exchange(Response):
    """The response to a completion request: opens the answer, and sends it piece by piece.

    Its maker has counted it in `gateway.running`; here it is taken off again.
    """

    def __init__(self, gateway: Gateway, pool: Pool, open_on: Open, operation: str) -> None:
        self.gateway = gateway
        self.pool = pool
        self.open_on = open_on
        self.operation = operation
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs until the answer is complete or the client has gone, whichever is first."""
        complete = False

        async def watched(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        work = asyncio.create_task(self._answer(scope["octet"]["started"], watched))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            # The server reports a disconnect after the last byte too: that one is no loss.
            if not work.done() and complete:
                await asyncio.wait((work,))
            if work.done():
                work.result()
            else:
                scope["octet"]["gone"] = True
        finally:
            work.cancel()
            gone.cancel()
            try:
                await asyncio.gather(work, gone, return_exceptions=True)
            finally:
                self.gateway.running -= 1

    async def _answer(self, started: float, send: Send) -> None:
        answer = await self._open()
        if answer.rest is None:
            await _start(send, answer, len(answer.first))
            await send({"type": "http.response.body", "body": answer.first})
        else:
            await self._stream(answer, answer.rest, started, send)
        if answer.status == 200:
            self._count(answer, time.perf_counter() - started)

    async def _open(self) -> Answer:
        """The answer of the first backend that takes the request, in the pool's order.

        Raises the RequestError of a backend that refuses it, BackendUnavailable if none can be
        reached.
        """
        refusal: Exception | None = None
        for backend in self.pool.order():
            try:
                return await self.open_on(backend)
            except BackendUnavailable as error:
                self.pool.failed(backend)
                self.gateway.metrics.failovers.labels(self.pool.name, backend.name).inc()
                _log.warning("model %s: %s", self.pool.name, error)
                refusal = error
            except UnsupportedField as error:  # another backend of the pool may take the field
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    async def _stream(
        self, answer: Answer, rest: AsyncGenerator[bytes, None], started: float, send: Send
    ) -> None:
        """Sends every piece as it comes; a failure on the way becomes an error event."""
        metrics, model = self.gateway.metrics, self.pool.name
        inter_token = metrics.inter_token.labels(model)
        async with aclosing(rest):
            await _start(send, answer, None)
            await send({"type": "http.response.body", "body": answer.first, "more_body": True})
            first_at = last_at = time.perf_counter()
            metrics.first_token.labels(model).observe(first_at - started)
            try:
                async for piece in rest:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    now = time.perf_counter()
                    inter_token.observe((now - last_at) / (piece.count(b"\n\n") or 1))
                    last_at = now
            except Exception as error:
                tail = sse_error(error)
                _log.warning("model %s: a stream broke: %s", model, error)
                metrics.broken.labels(model).inc()
            else:
                tail = b""
                tokens = answer.tally.completion_tokens or 0
                if tokens > 1:
                    metrics.per_token.labels(model).observe((last_at - first_at) / (tokens - 1))
            await send({"type": "http.response.body", "body": tail})

    def _count(self, answer: Answer, duration_s: float) -> None:
        metrics, model, tally = self.gateway.metrics, self.pool.name, answer.tally
        metrics.duration.labels(self.operation, model).observe(duration_s)
        if tally.prompt_tokens is None:
            if answer.rest is not None:
                metrics.uncounted.labels(model).inc()
            return
        metrics.tokens.labels(model, "input").inc(tally.prompt_tokens)
        metrics.tokens.labels(model, "output").inc(tally.completion_tokens or 0)


async def _start(send: Send, answer: Answer, length: int | None) -> None:
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

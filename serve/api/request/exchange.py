"""Handles one POST: rights, body, route, admission, attempts, answer; then releases everything.

Runs in the task that the server made for the request. One other task waits for the client to go
away, and cancels this one if it does.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from octet.errors import BackendError, OctetError, RequestError
from serve.access.keys import Principal, authorization_in
from serve.api.errors import (
    code_of,
    error_bytes,
    error_headers,
    errors_of,
    forget_frames,
    status_of,
)
from serve.api.operation import (
    JSON,
    Answer,
    Call,
    Operation,
    close,
    ended_in,
    is_comment,
    joined,
)
from serve.api.relay import AnsweredFailure
from serve.api.request.attempts import Attempts
from serve.api.request.counts import longest_answer, reported, written
from serve.api.request.deadlines import Deadlines, requested_timeout_s
from serve.api.request.judge import judge_copy
from serve.api.request.samples import READERS
from serve.api.request.shadow import cast_shadow
from serve.api.schemas import parse_body, require_json
from serve.api.text import TextOperation
from serve.gateway.capture import Taken
from serve.gateway.state import Epoch, Gateway, shutting_down
from serve.members.member import Member
from serve.routing.pool import Pool
from serve.routing.tiers import ModelTier
from serve.telemetry.observation import Observation

__all__ = ["Exchange", "provenance", "read_body", "requested_tier"]

MAX_LOGGED = 16 * 1024  # characters of a prompt
SEND_BYTES = 256 * 1024  # of a whole answer, sent before other requests get a turn
_TIER = b"x-octet-tier"
_IDENTITY_DIGITS = 12  # hex digits that distinguish the artifacts that one gateway serves
_log = logging.getLogger(__name__)


class Exchange:
    """One request and its answer. Call `run` once."""

    __slots__ = (
        *("attempts", "deadlines", "errors", "fields", "gateway", "headers", "observation"),
        *("operation", "principal", "receive", "send", "taken", "tokens"),
    )

    def __init__(
        self, gateway: Gateway, operation: Operation, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.gateway = gateway
        self.operation = operation
        self.errors = errors_of(operation.path)
        self.fields: list[tuple[bytes, bytes]] = scope["headers"]
        self.headers: dict[bytes, bytes] = dict(self.fields)
        self.receive = receive
        self.send = send
        self.observation: Observation = scope["octet"]
        self.principal: Principal | None = None
        self.deadlines: Deadlines | None = None
        self.attempts: Attempts | None = None
        self.taken: Taken | None = None  # a copy of the answer, for the model's capture
        self.tokens = 0  # events with tokens that were sent to the client

    async def run(self) -> None:
        """Runs until the answer is complete or the client has gone, whichever comes first."""
        try:
            epoch = self.gateway.enter()
        except RequestError as error:
            await self._send_whole(self._refusal(error))
            return
        try:
            answer = await self._answer(epoch)
            if answer is not None:
                await self._send_whole(answer)
        finally:
            epoch.leave()

    async def _answer(self, epoch: Epoch) -> Answer | None:
        """Returns the answer if it is to be sent in one piece; None if nothing is left to send."""
        watch: asyncio.Task[None] | None = None
        try:
            attempts = await self._checked(epoch)
            watch = asyncio.create_task(_watch(self.receive, attempts.deadlines))
            answer = await attempts.open()
            member = None if attempts.lease is None else attempts.lease.member
            answer.headers.update(provenance(attempts.pool, attempts.tier, member))
            if self.principal is not None and not self.principal.private:
                self._copy(attempts.call, answer.status)
            if self.taken is not None:
                self.taken.add(answer.first)
            if answer.rest is None:
                if answer.status != 200:
                    answer.first = self.errors.refusal(answer.first, answer.status)
                self._complete(answer)
                return answer
            await self._stream(attempts, answer, answer.rest)
            return None
        except ClientDisconnect:
            self.observation.gone = True
            return None
        except (Exception, asyncio.CancelledError) as failure:
            try:
                error = self._ended_by(failure)
                return None if error is None else self._refusal(error)
            finally:
                forget_frames(failure)
        finally:
            if watch is not None:
                watch.cancel()
            if self.deadlines is not None:
                self.deadlines.close()
            if self.attempts is not None:
                self.attempts.release()
            if self.taken is not None:
                self.taken.drop("incomplete")

    def _copy(self, call: Call, status: int) -> None:
        """Copies the request to a shadow pool, a judge and a capture, if it is drawn for them.

        A judge and a capture get only requests that were answered with status 200.
        """
        if call.route.config.shadow is not None:
            cast_shadow(self.gateway, self.operation, call)
        if status == 200 and isinstance(self.operation, TextOperation):
            judge_copy(self.gateway, self.operation, call)
        capture = self.gateway.captures.get(call.route.name)
        if status == 200 and capture is not None and call.path in READERS:
            self.taken = capture.take(len(call.raw))

    async def _checked(self, epoch: Epoch) -> Attempts:
        """Checks the request and prepares its attempts. Raises RequestError to refuse it."""
        observation, operation, limits = self.observation, self.operation, epoch.config.limits
        authorization = authorization_in(self.fields, x_api_key=self.errors.takes_x_api_key)
        self.principal = epoch.keys.authenticate(authorization)
        observation.authenticated(self.principal.name)
        require_json(self.headers.get(b"content-type"))
        timeout_s = requested_timeout_s(self.headers)
        with self.gateway.admission.upload() as count:
            raw = await read_body(self.receive, self.headers, limits.max_body_bytes, count)
            body, data = await parse_body(operation.schema, raw, limits)
        route = epoch.routes.resolve(data["model"], self.principal.may_use)
        tier = route.tier(data["model"], requested_tier(self.headers, self.fields))
        self.principal.require_model(route, tier.name if tier is not None else None)
        observation.routed(route.name, _choices(body), tier.name if tier is not None else "")
        if epoch.config.logs.prompts:
            prompt = data.get("messages") or data.get("prompt") or ""
            if operation.name == "chat":  # /v1/responses has its prompt in `input`
                prompt = prompt or data.get("input")
            observation.prompt = str(prompt)[:MAX_LOGGED]
        headers = {"content-type": JSON, **observation.headers_out()}
        streamed = bool(data.get("stream")) and "stream" in operation.schema.model_fields
        call = Call(
            *(observation.id, operation.path, raw, data, body, route, headers, streamed),
            limits.max_answer_bytes,
        )
        pools = route.pools(tier)
        total_s = min(pools[0].config.timeouts.total_s, timeout_s)
        elapsed_s = time.perf_counter() - observation.started
        self.deadlines = Deadlines(total_s, elapsed_s)
        self.attempts = Attempts(
            operation,
            call,
            pools,
            self.principal,
            self.gateway.admission,
            observation,
            self.deadlines,
            self.headers,
            tier,
        )
        return self.attempts

    async def _stream(
        self, attempts: Attempts, answer: Answer, rest: AsyncGenerator[bytes, None]
    ) -> None:
        """Sends every piece as it comes; a failure on the way becomes an error event."""
        send, observation, deadlines = self.send, self.observation, attempts.deadlines
        assert attempts.lease is not None
        progressed, several = attempts.lease.progressed, observation.choices > 1
        error: Exception | None = None
        whole = False
        try:
            progressed()  # first: if this was a breaker's trial request, others wait for its end
            deadlines.within("inter_token", attempts.inter_token_s)
            deadlines.sending()
            await self._send_start(answer)
            await send({"type": "http.response.body", "body": answer.first, "more_body": True})
            deadlines.sent()
            self.tokens = answer.events_in(answer.first)
            observation.first_token(self.tokens)
            async for piece in rest:
                deadlines.sending()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if self.taken is not None:
                    self.taken.add(piece)
                if is_comment(piece):  # shows that the server runs, not that its model does
                    deadlines.sent(heard=False)
                    continue
                deadlines.sent()
                events = answer.events_in(piece)
                self.tokens += events
                observation.streamed(events, ended_in(piece) if several else 0)
                progressed()
            whole = True
        except (Exception, asyncio.CancelledError) as failure:
            # After the last event, or an error event of the backend, a further failure is ignored.
            reported = answer.tally.ended or answer.tally.failed is not None
            if not (reported and (deadlines.caught() or isinstance(failure, BackendError))):
                error = self._ended_by(failure)
                if error is None:
                    return
            if isinstance(error, OctetError):  # the traceback of any other is logged below
                forget_frames(failure)
        finally:
            deadlines.close()  # a second interruption would cut off the handling of the first
            if not whole:
                await close(rest)
        # Releases the backend before the last send, which waits for the client.
        tail = self._error_event(error, answer.tally.events) if error is not None else b""
        if error is not None:
            forget_frames(error)
        self._complete(answer, error)
        attempts.release()
        await send({"type": "http.response.body", "body": tail})

    def _complete(self, answer: Answer, error: Exception | None = None) -> None:
        """Records the result of an answer, and charges its tokens; `error` ended it early."""
        attempts, tally = self.attempts, answer.tally
        assert attempts is not None
        if answer.status != 200:  # does not show whether the model works
            self.observation.refused("refused_by_backend")
            attempts.settle(0, 0)
            return
        if error is None and tally.failed is not None:  # the backend's own error was forwarded
            if isinstance(tally.failed, BackendError):  # otherwise the request was at fault
                attempts.failed(tally.failed)
            self.observation.broken(code_of(tally.failed))
        elif error is None:
            attempts.succeeded()
            if self.taken is not None:
                self.taken.end(partial(READERS[attempts.call.path], attempts.call.data))
        choices, context = self.observation.choices, attempts.context_length
        counts = reported(attempts.call, tally, choices, context)
        if counts is not None:
            self.observation.finished(*counts)
            attempts.settle(*counts)
        elif answer.rest is not None:
            self._settle_estimate(attempts)

    def _settle_estimate(self, attempts: Attempts) -> None:
        """Charges the key for the estimated prompt, and for the events that were sent."""
        call, choices = attempts.call, self.observation.choices
        most = longest_answer(call, choices, attempts.context_length)
        attempts.settle(attempts.prompt_tokens, min(written(call, self.tokens, choices), most))

    def _ended_by(self, failure: Exception | asyncio.CancelledError) -> Exception | None:
        """Returns the error that really ended the request, or None if its client went away.

        A cancellation by `deadlines` may come out of a backend's clean-up as another exception. Any
        other cancellation is raised again.
        """
        attempts, deadlines = self.attempts, self.deadlines
        if attempts is None or deadlines is None or not deadlines.caught():
            if isinstance(failure, Exception):
                return failure
            raise failure
        self._settle_estimate(attempts)
        if deadlines.gone:
            self.observation.gone = True
            return None
        return attempts.expired(self.tokens)

    def _refusal(self, error: Exception) -> Answer:
        """Returns the answer to a request that failed before its first token."""
        if self.attempts is not None:
            if isinstance(error, BackendError) and error.kind == "timeout":
                error = self.attempts.too_late(str(error))
            late = status_of(error) == 504  # a backend has computed something
            self.attempts.settle(self.attempts.prompt_tokens if late else 0, 0)
        if not isinstance(error, OctetError):
            _log.error("a request failed", exc_info=error)
        self.observation.refused(code_of(error))
        headers = error_headers(error)
        status, body = status_of(error), b""
        if isinstance(error, AnsweredFailure):
            status, body = error.answer.status, error.answer.first
            headers |= error.answer.headers
        body = self.errors.refusal(body or error_bytes(error), status)
        return Answer(status, headers, body)

    def _error_event(self, error: Exception, events: int) -> bytes:
        """Records that a stream failed; returns its last event, after `events` named ones."""
        assert self.attempts is not None
        if self.attempts.closing:
            error = shutting_down()
        elif isinstance(error, BackendError):
            self.attempts.failed(error)
        _log.warning("a stream broke: %s", error)
        self.observation.broken(code_of(error))
        return self.errors.event(error, events)

    async def _send_start(self, answer: Answer) -> None:
        headers = answer.headers
        if self.principal is not None:
            headers = headers | self.principal.headers()
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        if answer.rest is None:
            encoded.append((b"content-length", b"%d" % len(answer.first)))
        if self.gateway.draining:
            encoded.append((b"connection", b"close"))
        await self.send(
            {"type": "http.response.start", "status": answer.status, "headers": encoded}
        )

    async def _send_whole(self, answer: Answer) -> None:
        await self._send_start(answer)
        body = answer.first
        last = max(len(body) - 1, 0) // SEND_BYTES * SEND_BYTES
        for at in range(0, last, SEND_BYTES):
            part = body[at : at + SEND_BYTES]
            await self.send({"type": "http.response.body", "body": part, "more_body": True})
        await self.send({"type": "http.response.body", "body": body[last:]})


async def _watch(receive: Receive, deadlines: Deadlines) -> None:
    """Waits until the client has gone or has its whole answer, then interrupts the request.

    Call it after the body is read.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    deadlines.disconnected()


def _choices(body: Any) -> int:
    """Counts the choices that the request will get: prompts times n."""
    if "n" not in type(body).model_fields:  # outside the schema, `n` is not checked
        return 1
    prompts = getattr(body, "prompt", None)
    return (body.n or 1) * (len(prompts) if isinstance(prompts, tuple) else 1)


async def read_body(
    receive: Receive,
    headers: Mapping[bytes, bytes],
    limit: int,
    count: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Returns the whole body. Raises RequestError (413) if it is larger than `limit` bytes.

    `count` is called with the size of each piece, in bytes, and may raise an error. A
    Content-Length above the limit is refused before anything is read; a chunked body, which has
    none, once it exceeds the limit. Raises ClientDisconnect if the client goes away meanwhile.
    """
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    received = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(piece := message.get("body", b""))
        received += len(piece)
        if received > limit:
            raise _too_large(limit)
        count(len(piece))
        if not message.get("more_body"):
            return await joined(pieces)


def _too_large(limit: int) -> RequestError:
    message = f"the body is larger than the limit of {limit} bytes"
    return RequestError(message, status=413, code="request_too_large")


def requested_tier(
    headers: Mapping[bytes, bytes], fields: Sequence[tuple[bytes, bytes]]
) -> str | None:
    """Returns the client's X-Octet-Tier, or None without one. `fields` are its headers as sent.

    Raises RequestError (400) if the header is there twice.
    """
    value = headers.get(_TIER)
    if value is None:
        return None
    if len(fields) > len(headers) and sum(name == _TIER for name, _ in fields) > 1:
        raise RequestError(
            "X-Octet-Tier is there twice: name one tier",
            param="X-Octet-Tier",
            code="invalid_tier",
        )
    return value.decode("latin-1")


def provenance(
    pool: Pool | None, tier: ModelTier | None, member: Member | None = None
) -> dict[str, str]:
    """Returns the backend, tier, precision and artifact of an answer of `member`, as headers.

    There is a tier only if the client requested one: that tier or, if it allows less exact answers,
    the most exact tier that the pool fits. The artifact is the one that `member` has proven: other
    members of the pool may serve another. The divergence is the pool's upper bound, in nats.
    """
    headers: dict[str, str] = {}
    if pool is None:
        return headers
    if member is not None:
        headers["x-octet-backend"] = f"{pool.name}/{member.name}"
    if tier is not None and (kept := tier.kept_by(pool)) is not None:
        headers["x-octet-tier"] = kept
    if pool.instead_of:
        headers["x-octet-fallback"] = f"{pool.name}; {pool.instead_of}"
    if pool.precision is not None:
        headers["x-octet-precision"] = pool.precision
    proof = None if member is None else member.proof
    if proof is not None and proof.state == "proven":
        headers["x-octet-artifact"] = proof.identity[:_IDENTITY_DIGITS]
    if (kl := pool.proven.kl) is not None:
        headers["x-octet-divergence"] = f"{kl:.4g}"
    return headers

"""Pure ASGI middleware: a request's id, its figures, and the limit on its body."""

import json
import re
import sys
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octet.errors import RequestError
from serve.api.errors import CLIENT_CLOSED_REQUEST
from serve.metrics import Metrics

__all__ = ["BodyLimit", "Observe"]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/health",
    "/ready",
    "/metrics",
)


class Observe:
    """Gives each request its id (`X-Request-Id`, echoed) and counts it until it has ended.

    What the endpoint learns on the way goes into `scope["octet"]`: the model's public name, and
    whether the client went away.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, access_log: bool = False) -> None:
        self.app = app
        self.metrics = metrics
        self.access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        facts = {"id": request_id, "model": "", "started": started, "gone": False}
        scope["octet"] = facts
        endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"
        status = 500

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        in_flight = self.metrics.in_flight.labels(endpoint)
        in_flight.inc()
        try:
            await self.app(scope, receive, observed)
        finally:
            in_flight.dec()
            if facts["gone"]:
                status = CLIENT_CLOSED_REQUEST
                self.metrics.disconnects.labels(endpoint).inc()
            self.metrics.requests.labels(endpoint, facts["model"], status).inc()
            if self.access_log:
                _log(scope, facts, status)


class BodyLimit:
    """Refuses a request body above `limit` bytes (413), counting what arrives.

    A Content-Length above the limit is refused before anything is read; a chunked body, which has
    none, as soon as it has grown past it.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"")
        received = 0

        async def counted() -> Message:
            nonlocal received
            if declared.isdigit() and int(declared) > self.limit:
                raise self._too_large()
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self.limit:
                    raise self._too_large()
            return message

        await self.app(scope, counted, send)

    def _too_large(self) -> RequestError:
        message = f"the body is larger than the limit of {self.limit} bytes"
        return RequestError(message, status=413, code="request_too_large")


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode())
    return uuid.uuid4().hex


def _log(scope: Scope, facts: dict[str, object], status: int) -> None:
    started = facts["started"]
    assert isinstance(started, float)
    line = {
        "time": time.time(),
        "request_id": facts["id"],
        "method": scope["method"],
        "path": scope["path"],
        "model": facts["model"],
        "status": status,
        "duration_s": round(time.perf_counter() - started, 6),
    }
    print(json.dumps(line), file=sys.stderr, flush=True)

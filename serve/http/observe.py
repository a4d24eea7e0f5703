"""The outermost layer of the application: gives each request its id, and observes it to the end."""

import random
import re
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.errors import CLIENT_CLOSED_REQUEST
from serve.telemetry.logs import log_access
from serve.telemetry.metrics import Metrics
from serve.telemetry.observation import OPERATIONS, Observation, Tracing, current

__all__ = ["Observe"]

ENDPOINTS = frozenset(
    (*OPERATIONS, "/v1/models", "/health", "/ready", "/metrics", "/status", "/admin/reload")
)
_PROBES = frozenset(("/health", "/ready", "/metrics"))  # requested every few seconds
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
# Any version but ff; anything after the flags belongs to future versions.
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,64})?"
)
_TRACESTATE = re.compile(rb"[\x20-\x7e]{1,512}")


class Observe:
    """Puts an `Observation` into `scope["octet"]`; echoes its id as `X-Request-Id`.

    With `access_log`, logs one line per request, but of probes only those that fail.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        access_log: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.access_log = access_log
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        observation = Observation(self.metrics, _endpoint(path), "")
        _read_headers(scope["headers"], observation)
        if not observation.id:
            observation.id = f"{random.getrandbits(128):032x}"
        if self.tracing is not None and observation.operation:
            observation.trace = self.tracing.begin(observation, scope["method"], path)
        scope["octet"] = observation
        request_id = (b"x-request-id", observation.id.encode())

        def observed(message: Message) -> Awaitable[None]:
            """Returns what `send` returns: a coroutine of its own would slow down every chunk."""
            if message["type"] == "http.response.start":
                observation.status = message["status"]
                message["headers"] = [*message.get("headers", ()), request_id]
            return send(message)

        in_flight = self.metrics.in_flight.labels(observation.endpoint)
        in_flight.inc()
        token = current.set(observation)
        try:
            await self.app(scope, receive, observed)
        finally:
            in_flight.dec()
            if observation.gone:
                observation.status = CLIENT_CLOSED_REQUEST
            observation.ended()
            if self.access_log and (path not in _PROBES or observation.status >= 400):
                log_access(scope["method"], path, observation)
            current.reset(token)


def _endpoint(path: str) -> str:
    """Returns the endpoint's label for metrics. Arbitrary paths must not create labels."""
    if path in ENDPOINTS:
        return path
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


def _read_headers(headers: list[tuple[bytes, bytes]], observation: Observation) -> None:
    """Reads the client's request id and trace context, if they are well-formed.

    A trace state without its parent is dropped, as W3C's Trace Context requires.
    """
    state = b""
    for name, value in headers:
        if name == b"x-request-id":
            if _REQUEST_ID.fullmatch(value):
                observation.id = value.decode()
        elif name == b"traceparent":
            if _TRACEPARENT.fullmatch(value):
                observation.propagated["traceparent"] = value.decode()
        elif name == b"tracestate" and _TRACESTATE.fullmatch(value):
            state = value
    if state and observation.propagated:
        observation.propagated["tracestate"] = state.decode()

"""Observes each request: its id, the metrics it adds to, its spans, and its line in the log.

`Observe` is the outermost layer of the application.
"""

import logging
import random
import re
import time
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any, Protocol

from prometheus_client import Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octet.errors import FailureKind
from serve.telemetry.metrics import Metrics, observe_many

__all__ = [
    "CLIENT_CLOSED_REQUEST",
    "Observation",
    "Observe",
    "Trace",
    "Tracing",
    "current",
    "log_access",
]

MOST_HELD = 4096  # rounds of an answer with several choices
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that went away; nobody reads it
_access = logging.getLogger("octet.access")

# The request that the running task works for: log lines carry its id.
current: ContextVar["Observation | None"] = ContextVar("observation", default=None)

_CHAT = "/v1/chat/completions"
OPERATIONS = {  # OpenTelemetry's `gen_ai.operation.name` by path; the last three are not its own
    "/v1/completions": "text_completion",
    _CHAT: "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/messages/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}


class Trace(Protocol):
    """The spans of one request (`spans.py`); an Observation has none if tracing is off."""

    trace_id: str | None  # hexadecimal; None if it is not recorded

    def queued(self, seconds: float) -> None: ...
    def attempt(self, pool: str, backend: str, precision: str) -> None: ...
    def attempt_ended(self, outcome: str) -> None: ...
    def first_token(self) -> None: ...
    def ended(self, observation: "Observation") -> None: ...
    def headers(self) -> dict[str, str]: ...


class Tracing(Protocol):
    """Makes the spans of each request."""

    def begin(self, observation: "Observation", method: str, path: str) -> Trace:
        """Returns the span of a request that has just arrived, within its client's trace if any."""

    def close(self) -> None:
        """Sends the remaining spans. Waits for that, at most a few seconds."""


class Observation:
    """Records what happens to one request. `Observe` puts it into `scope["octet"]`.

    Times are by `time.perf_counter`. Every method may be called in any order, or not at all.
    """

    __slots__ = (
        *("backend", "broke", "choices", "code", "completion_tokens", "endpoint"),
        *("estimated_prompt_tokens", "events", "first_s", "gone", "id", "key", "metrics", "model"),
        *("operation", "pool", "precision", "prompt", "prompt_tokens", "propagated", "queued_s"),
        *("retries", "started", "status", "tier", "trace"),
        *("_first_at", "_gaps", "_held", "_held_s", "_inter_token", "_last_at", "_pending"),
        *("_round_at", "_running", "_skipped"),
    )

    def __init__(self, metrics: Metrics, endpoint: str, request_id: str) -> None:
        self.started = time.perf_counter()
        self.metrics = metrics
        self.endpoint = endpoint
        self.operation = OPERATIONS.get(endpoint, "")
        self.id = request_id
        self.propagated: dict[str, str] = {}  # the client's trace context
        self.trace: Trace | None = None
        self.key = self.model = self.tier = self.pool = self.backend = self.precision = ""
        self.code = ""  # of the error object that was sent
        self.broke = False  # it ended in an error event
        self.status = 500
        self.gone = False  # the client went away before the end of the answer
        self.prompt: str | None = None  # for the log, where the configuration allows it
        self.choices = 1  # number of choices of the answer
        self.retries = 0
        self.queued_s = 0.0
        self.first_s: float | None = None  # from arrival to the first event
        self.events = 0  # with tokens, streamed until now
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.estimated_prompt_tokens = 0  # used if the backend reports no count
        self._first_at = self._round_at = self._last_at = 0.0  # the last: of the latest event
        self._running = 1  # choices that are still being written
        self._skipped = 0  # coming events that are not counted as the end of a gap
        self._pending = 0  # events since `_round_at`
        self._gaps = 0  # between tokens, the held ones included
        # Gaps not yet counted, by rounds: seconds and number of each. One choice holds only the
        # latest round; several hold all, because choices end anywhere in the last rounds.
        self._held: list[tuple[float, int]] = []
        self._inter_token: Histogram | None = None

    def authenticated(self, key: str) -> None:
        self.key = key

    def routed(self, model: str, choices: int = 1, tier: str = "") -> None:
        """Records the model's public name, the number of choices, and the requested tier."""
        self.model = model
        self.choices = choices
        self.tier = tier

    def queued(self, seconds: float) -> None:
        """Records the wait at the gate of `pool`; called once for each pool."""
        self.queued_s += seconds
        self.metrics.queue.labels(self.pool).observe(seconds)
        if self.trace is not None:
            self.trace.queued(seconds)

    def attempt(self, pool: str, backend: str, precision: str) -> None:
        """Records that a backend is sent the request; `backend` is its member's name."""
        self.pool, self.backend, self.precision = pool, backend, precision
        if self.trace is not None:
            self.trace.attempt(pool, backend, precision)

    def retried(self, reason: FailureKind) -> None:
        """Records that the backend of the last `attempt` failed, and another attempt follows."""
        self.retries += 1
        self.metrics.retries.labels(self.pool, reason).inc()
        self.metrics.failovers.labels(self.model, self.backend).inc()
        if self.trace is not None:
            self.trace.attempt_ended(reason)

    def first_token(self, events: int = 1) -> None:
        """Records that the first piece of a streamed answer, of `events` events, is sent."""
        self._first_at = self._round_at = self._last_at = time.perf_counter()
        self.first_s = self._first_at - self.started
        self.events = events
        self._running = self.choices
        # The first token of each choice ends no gap between tokens. In a chat, an event with its
        # role and no token comes before it.
        self._skipped = self.choices * (2 if self.endpoint == _CHAT else 1) - events
        self._gaps = max(-self._skipped, 0)  # tokens that came together: gaps of no length
        self._held = [(0.0, self._gaps)]
        labels = (self.operation, self.model, self.pool)
        self._inter_token = self.metrics.inter_token.labels(*labels)
        if self.trace is not None:
            self.trace.first_token()
        self.metrics.first_token.labels(*labels).observe(self.first_s, self._exemplar)

    def streamed(self, events: int, ended: int = 0) -> None:
        """Records that a piece after the first is sent to the client.

        It has `events` events with tokens (usage alone and `[DONE]` do not count), which end
        `ended` choices. Choices are written in turns: while n run, n events are a round of one
        token each. Gaps are counted from one round to the next.
        """
        if not events or self._inter_token is None:
            return
        self._last_at = now = time.perf_counter()
        self.events += events
        if self._skipped > 0:
            self._skipped -= events
            if self._skipped >= 0:
                self._round_at = now
                return
            events = -self._skipped
        running = self._running
        rounds = events
        if running > 1:
            self._pending += events
            rounds = self._pending // running
            self._pending = 0 if ended else self._pending - rounds * running
            self._running = max(running - ended, 1)
            if not rounds:
                return
        if self.choices == 1 or len(self._held) >= MOST_HELD:
            self._count_gaps()
        self._held.append(((now - self._round_at) / rounds, rounds * running))
        self._gaps += rounds * running
        self._round_at = now

    def _count_gaps(self) -> None:
        if self._inter_token is None:
            return
        for seconds, count in self._held:
            observe_many(self._inter_token, seconds, count)
        self._held.clear()

    def finished(self, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        """Records the backend's counts, if it reports them; also of an answer cut short."""
        self.prompt_tokens, self.completion_tokens = prompt_tokens, completion_tokens
        if completion_tokens is not None:
            # An event that holds only a finish reason came with no token, so it ends no gap.
            excess = self._gaps - max(completion_tokens - self.choices, 0)
            while excess > 0 and self._held:
                seconds, count = self._held.pop()
                if count > excess:
                    self._held.append((seconds, count - excess))
                excess -= count

    def broken(self, kind: str) -> None:
        """Records that a streamed answer ended in an error event.

        `kind` is a FailureKind, or the error's code.
        """
        self.broke = True
        self.metrics.broken.labels(self.model).inc()
        self.refused(kind)

    def refused(self, code: str) -> None:
        """Records that an error object was sent."""
        self.code = code
        self.metrics.refused(code, self.endpoint)

    @property
    def _exemplar(self) -> dict[str, str] | None:
        """The request's trace, as an example behind a metric's value."""
        trace_id = None if self.trace is None else self.trace.trace_id
        return None if trace_id is None else {"trace_id": trace_id}

    def headers_out(self) -> dict[str, str]:
        """Returns the headers for the backend: the request's id and its trace context."""
        context = self.propagated if self.trace is None else self.trace.headers()
        return {"x-request-id": self.id, **context}

    def ended(self) -> None:
        """Adds the request to the totals; called once, by `Observe`."""
        metrics = self.metrics
        self._count_gaps()
        if self.gone:
            metrics.disconnects.labels(self.endpoint).inc()
        metrics.requests.labels(self.endpoint, self.model, str(self.status)).inc()
        if self.tier:
            metrics.tiers.labels(self.model, self.tier, self.pool).inc()
        if self.model and self.operation:
            labels = (self.operation, self.model, self.pool)
            duration = metrics.duration.labels(*labels, self.outcome)
            duration.observe(time.perf_counter() - self.started, self._exemplar)
            if self.outcome == "" and self.per_token_s is not None:
                metrics.per_token.labels(*labels).observe(self.per_token_s)
            self._count_tokens()
        if self.trace is not None:
            self.trace.ended(self)

    @property
    def outcome(self) -> str:
        """Empty for a whole answer; else OpenTelemetry's `error.type`."""
        if self.gone:
            return "client_gone"
        return self.code or ("" if self.status < 400 else str(self.status))

    @property
    def per_token_s(self) -> float | None:
        """Mean time between the tokens of one choice, as the backend counts them."""
        tokens = (self.completion_tokens or 0) - self.choices
        if self.first_s is None or tokens <= 0:
            return None
        return (self._last_at - self._first_at) * self.choices / tokens

    @property
    def tokens(self) -> tuple[int, int, bool] | None:
        """Tokens of the prompt and of the answer, and whether the backend counted them.

        Otherwise they are estimated, one token per event: the answer was cut short, or the backend
        reports no count. None if, as far as is known, no backend worked on the request.
        """
        if self.prompt_tokens is not None:
            return self.prompt_tokens, self.completion_tokens or 0, True
        queried = self.backend and self.operation in ("text_completion", "chat", "embeddings")
        cut_short = ("client_gone", "deadline_exceeded")
        if queried and (self.first_s is not None or self.outcome in ("", *cut_short)):
            roles = self.choices if self.endpoint == _CHAT else 0
            return self.estimated_prompt_tokens, max(self.events - roles, 0), False
        return None

    def _count_tokens(self) -> None:
        tokens = self.tokens
        if tokens is None:
            return
        read, written, exact = tokens
        labels = (self.key, self.model, self.backend, self.precision)
        counted = "backend" if exact else "estimated"
        self.metrics.tokens.labels(*labels, "input", counted).inc(read)
        self.metrics.tokens.labels(*labels, "output", counted).inc(written)
        if self.first_s is not None and not exact:
            self.metrics.uncounted.labels(self.model).inc()


ENDPOINTS = frozenset(
    (
        *(*OPERATIONS, "/v1/models", "/health", "/ready", "/metrics", "/status", "/ui"),
        *("/ui/events", "/admin/reload"),
    )
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


def log_access(method: str, path: str, observation: Observation) -> None:
    """Logs one line for a request that has ended."""
    tokens = observation.tokens
    fields: dict[str, Any] = {
        "method": method,
        "path": path,
        "status": observation.status,
        "key": observation.key,
        "model": observation.model,
        "tier": observation.tier,
        "pool": observation.pool,
        "backend": observation.backend,
        "precision": observation.precision,
        "outcome": observation.outcome,
        "retries": observation.retries or None,
        "prompt_tokens": tokens and tokens[0],
        "completion_tokens": tokens and tokens[1],
        "estimated": True if tokens and not tokens[2] else None,
        "queue_s": round(observation.queued_s, 6) or None,
        "first_token_s": observation.first_s and round(observation.first_s, 6),
        "duration_s": round(time.perf_counter() - observation.started, 6),
        "prompt": observation.prompt,
    }
    fields = {name: value for name, value in fields.items() if value not in (None, "")}
    _access.info("%s %s", method, path, extra={"fields": fields})


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

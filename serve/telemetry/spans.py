"""OpenTelemetry spans over OTLP/HTTP: for the request, for each wait and for each attempt.

A thread of the library sends them in batches, and drops them when its queue is full, so tracing
cannot delay a request. Spans contain neither prompts nor answers.
"""

import time

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from octet import __version__
from serve.telemetry.observation import Observation, Tracing

__all__ = ["RequestTrace", "SpanTracing"]

EXPORT_TIMEOUT_S = 5.0
_context = TraceContextTextMapPropagator()  # W3C's traceparent and tracestate


class SpanTracing(Tracing):
    """Records the fraction `sample` of the requests, unless a client's trace context decides
    whether its own is recorded."""

    def __init__(self, processor: SpanProcessor, sample: float) -> None:
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        resource = Resource({"service.name": "octet", "service.version": __version__}).merge(
            Resource.create()
        )
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octet", __version__)

    @classmethod
    def over_http(cls, endpoint: str, sample: float) -> "SpanTracing":
        """Exports to a collector at `endpoint`, with or without the path /v1/traces."""
        url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        exporter = OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S)
        return cls(BatchSpanProcessor(exporter), sample)

    def begin(self, observation: Observation, method: str, path: str) -> "RequestTrace":
        span = self._tracer.start_span(
            f"{method} {path}",
            context=_context.extract(observation.propagated),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "url.path": path,
                "gen_ai.operation.name": observation.operation,
                "octet.request_id": observation.id,
            },
        )
        return RequestTrace(self._tracer, span)

    def close(self) -> None:
        self._provider.shutdown()


class RequestTrace:
    """The server span of a request, and its children."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._inside: Context = set_span_in_context(span)
        self._attempt: Span | None = None
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}" if context.trace_flags.sampled else None

    def queued(self, seconds: float) -> None:
        now = time.time_ns()
        start = now - int(seconds * 1e9)
        self._tracer.start_span("queue", context=self._inside, start_time=start).end(now)

    def attempt(self, pool: str, backend: str, precision: str) -> None:
        self.attempt_ended("abandoned")
        self._attempt = self._tracer.start_span(
            "attempt",
            context=self._inside,
            kind=SpanKind.CLIENT,
            attributes={
                "octet.pool": pool,
                "octet.backend": backend,
                "octet.precision": precision,
            },
        )

    def attempt_ended(self, outcome: str) -> None:
        """Ends the attempt's span. `outcome` is `ok`, or what went wrong."""
        span, self._attempt = self._attempt, None
        if span is None:
            return
        span.set_attribute("octet.outcome", outcome)
        if outcome != "ok":
            span.set_attribute("error.type", outcome)
            if outcome != "client_gone":
                span.set_status(StatusCode.ERROR)
        span.end()

    def first_token(self) -> None:
        (self._attempt or self._span).add_event("first_token")

    def headers(self) -> dict[str, str]:
        """Returns the trace context for the backend: its spans become children of the attempt."""
        carrier: dict[str, str] = {}
        inside = self._inside if self._attempt is None else set_span_in_context(self._attempt)
        _context.inject(carrier, inside)
        return carrier

    def ended(self, observation: Observation) -> None:
        self.attempt_ended(observation.outcome or "ok")
        if not self._span.is_recording():
            self._span.end()
            return
        if observation.model:
            self._span.update_name(f"{observation.operation} {observation.model}")
        self._span.set_attributes(_attributes(observation))
        if observation.status >= 500 or observation.broke:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def _attributes(observation: Observation) -> dict[str, str | int | float]:
    """Returns the final attributes, under OpenTelemetry's names where its conventions have them."""
    tokens = observation.tokens
    attributes: dict[str, str | int | float | None] = {
        "http.response.status_code": observation.status,
        "gen_ai.request.model": observation.model,
        "gen_ai.response.time_to_first_chunk": observation.first_s,
        "gen_ai.usage.input_tokens": tokens and tokens[0],
        "gen_ai.usage.output_tokens": tokens and tokens[1],
        "error.type": observation.outcome,
        "octet.key": observation.key,
        "octet.tier": observation.tier,
        "octet.pool": observation.pool,
        "octet.backend": observation.backend,
        "octet.precision": observation.precision,
        "octet.retries": observation.retries,
    }
    return {name: value for name, value in attributes.items() if value is not None and value != ""}

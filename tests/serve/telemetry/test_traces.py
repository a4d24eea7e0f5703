"""Traces, as a collector receives them: OTLP over HTTP, protobuf."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from octet.errors import ConfigError
from serve.config.gateway import Traces
from serve.telemetry import spans as span_exporter
from serve.telemetry.observation import Observation
from serve.telemetry.traces import tracing_from
from tests.serve.telemetry.conftest import Figures
from tests.serve.telemetry.test_observe import TRACEPARENT, Inside, ask

NOT_RECORDED = TRACEPARENT.removesuffix("01") + "00"


class Collector:
    """Takes what an exporter sends to /v1/traces."""

    def __init__(self) -> None:
        received: list[ExportTraceServiceRequest] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces", self.path
                received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                pass

        self.received = received
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self) -> list[Span]:
        """In the order of their starts."""
        resources = [resource for message in self.received for resource in message.resource_spans]
        spans = [s for r in resources for scope in r.scope_spans for s in scope.spans]
        return sorted(spans, key=lambda span: span.start_time_unix_nano)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


async def traced(
    figures: Figures, collector: Collector, inside: Inside | None = None, **options: Any
) -> tuple[Observation, list[Span]]:
    """One request, and its spans as they were received."""
    traces = Traces(endpoint=collector.endpoint, sample=options.pop("sample", 1.0))
    tracing = tracing_from(traces)
    assert tracing is not None
    observation, _ = await ask(figures, inside=inside, tracing=tracing, **options)
    tracing.close()
    return observation, collector.spans()


def attributes(span: Span) -> dict[str, Any]:
    kinds = ("string_value", "int_value", "double_value", "bool_value")
    return {
        item.key: getattr(item.value, next(k for k in kinds if item.value.HasField(k)))
        for item in span.attributes
    }


async def test_the_spans_of_a_request(figures: Figures, collector: Collector) -> None:
    sent: list[dict[str, str]] = []

    async def inside(observation: Observation) -> None:
        observation.authenticated("team")
        observation.routed("m")
        observation.pool = "main"
        observation.queued(0.25)
        observation.attempt("main", "gpu-1", "fp8")
        sent.append(observation.headers_out())
        observation.retried("refused")
        observation.attempt("main", "gpu-2", "fp8")
        sent.append(observation.headers_out())
        observation.first_token(2)
        observation.finished(11, 5)

    observation, spans = await traced(figures, collector, inside)
    by_name = {span.name: span for span in spans if span.name != "attempt"}
    assert sorted(by_name) == ["chat m", "queue"]
    server, queue = by_name["chat m"], by_name["queue"]
    first, second = (span for span in spans if span.name == "attempt")
    assert server.kind == Span.SPAN_KIND_SERVER
    assert {span.trace_id for span in spans} == {server.trace_id}
    assert not server.parent_span_id
    assert {span.parent_span_id for span in (queue, first, second)} == {server.span_id}

    seen = attributes(server)
    assert seen["gen_ai.operation.name"] == "chat"
    assert seen["gen_ai.request.model"] == "m"
    assert (seen["gen_ai.usage.input_tokens"], seen["gen_ai.usage.output_tokens"]) == (11, 5)
    assert seen["http.response.status_code"] == 201
    assert seen["octet.request_id"] == observation.id
    assert (seen["octet.backend"], seen["octet.retries"]) == ("gpu-2", 1)
    assert seen["gen_ai.response.time_to_first_chunk"] > 0
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == pytest.approx(0.25e9)
    assert attributes(first) == {
        "octet.pool": "main",
        "octet.backend": "gpu-1",
        "octet.precision": "fp8",
        "octet.outcome": "refused",
        "error.type": "refused",
    }
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert attributes(second)["octet.outcome"] == "ok"
    assert [event.name for event in second.events] == ["first_token"]

    # Each attempt's own span is what its backend continues.
    parents = [headers["traceparent"].split("-") for headers in sent]
    assert [parent[1] for parent in parents] == [server.trace_id.hex()] * 2
    assert [parent[2] for parent in parents] == [first.span_id.hex(), second.span_id.hex()]


async def test_the_clients_trace_goes_on(figures: Figures, collector: Collector) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    observation, (span,) = await traced(figures, collector, headers=headers, sample=0.0)
    _, trace_id, parent_id, _ = TRACEPARENT.split("-")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace_id, parent_id)
    sent = observation.headers_out()
    assert sent["tracestate"] == "vendor=1"
    assert sent["traceparent"].split("-")[1:3] == [trace_id, span.span_id.hex()]


@pytest.mark.parametrize("options", [{"sample": 0.0}, {"headers": {"traceparent": NOT_RECORDED}}])
async def test_what_is_not_sampled_is_not_sent(
    figures: Figures, collector: Collector, options: dict[str, Any]
) -> None:
    observation, spans = await traced(figures, collector, **options)
    assert spans == []
    # The backend is told not to record it either.
    assert int(observation.headers_out()["traceparent"].split("-")[3], 16) & 1 == 0


async def test_a_stream_that_broke_is_an_error(figures: Figures, collector: Collector) -> None:
    async def inside(observation: Observation) -> None:
        observation.routed("m")
        observation.attempt("main", "gpu-1", "fp8")
        observation.first_token(2)
        observation.broken("lost")

    _, spans = await traced(figures, collector, inside)
    for span in spans:
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert attributes(span)["error.type"] == "lost"


async def test_a_client_that_went_away_is_no_error(figures: Figures, collector: Collector) -> None:
    async def inside(observation: Observation) -> None:
        observation.routed("m")
        observation.attempt("main", "gpu-1", "fp8")
        observation.gone = True

    _, spans = await traced(figures, collector, inside)
    assert {span.status.code for span in spans} == {Status.STATUS_CODE_UNSET}
    assert {attributes(span)["error.type"] for span in spans} == {"client_gone"}


async def test_status_pages_are_not_traced(figures: Figures, collector: Collector) -> None:
    _, spans = await traced(figures, collector, path="/metrics")
    assert spans == []


async def test_prompts_are_not_in_traces(figures: Figures, collector: Collector) -> None:
    async def inside(observation: Observation) -> None:
        observation.routed("m")
        observation.prompt = "a secret"

    await traced(figures, collector, inside)
    assert collector.received
    assert not any(b"secret" in message.SerializeToString() for message in collector.received)


async def test_latencies_name_a_trace(figures: Figures, collector: Collector) -> None:
    """OpenMetrics shows it beside the bucket: from a spike in Grafana to what happened."""

    async def inside(observation: Observation) -> None:
        observation.routed("m")
        observation.attempt("main", "gpu-1", "fp8")
        observation.first_token(2)

    _, spans = await traced(figures, collector, inside)
    text, _ = figures.metrics.render("application/openmetrics-text; version=1.0.0")
    marked = [line for line in text.decode().splitlines() if "# {trace_id=" in line]
    assert {line.split("{")[0] for line in marked} == {
        "gen_ai_server_time_to_first_token_seconds_bucket",
        "gen_ai_server_request_duration_seconds_bucket",
    }
    assert all(spans[0].trace_id.hex() in line for line in marked)


async def test_a_collector_that_is_away_costs_a_moment(
    figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_exporter, "EXPORT_TIMEOUT_S", 0.5)
    for _ in range(5):  # the first that is soon: a busy machine only adds to what is measured
        tracing = tracing_from(Traces(endpoint="http://127.0.0.1:9"))
        assert tracing is not None
        await ask(figures, tracing=tracing)
        started = time.perf_counter()
        tracing.close()
        took_s = time.perf_counter() - started
        if took_s < 9:
            break
    assert took_s < 9  # the exporter by itself tries for 10 s


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys\n"
        "import serve.telemetry.observation\n"
        "from serve.config.gateway import Traces\n"
        "from serve.telemetry.traces import tracing_from\n"
        "assert tracing_from(Traces()) is None\n"
        "assert 'opentelemetry.sdk' not in sys.modules\n"
        "assert 'opentelemetry.exporter' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://"])
def test_an_endpoint_that_is_no_url(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"traces\.endpoint"):
        tracing_from(Traces(endpoint=endpoint))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "serve.telemetry.spans", None)
    with pytest.raises(ConfigError, match=r"pip install 'octet-llm\[traces\]'"):
        tracing_from(Traces(endpoint="http://127.0.0.1:4318"))

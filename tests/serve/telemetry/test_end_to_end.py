"""Tests a request's traces in metrics, spans and at the backend, over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve.backends.base import Backend
from tests.fake_servers import FakeOpenAI, FakeTriton, running
from tests.fakes import FakeRunner, fake_backend
from tests.serve.conftest import Served, serving
from tests.serve.openai_clients import relay_to, triton_to
from tests.serve.telemetry.test_observe import TRACEPARENT
from tests.serve.telemetry.test_traces import Collector, attributes, collector

__all__ = ["collector"]  # the fixture

GAPS = "octet_inter_token_latency_seconds_count"
OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}


@asynccontextmanager
async def backend_of(kind: str) -> AsyncIterator[tuple[Backend, FakeOpenAI | FakeTriton | None]]:
    """A backend, and the fake server behind it if it has one."""
    if kind == "embedded":
        yield fake_backend(FakeRunner()), None
    elif kind == "vllm":
        async with running(FakeOpenAI()) as server:
            yield relay_to(server.url), server
    else:
        async with running(FakeTriton()) as triton:
            yield triton_to(triton.url), triton


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    what = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "a"}
    settings = {"model": "fake", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return settings | what | fields


async def counted(served: Served, kind: str, **labels: str) -> float:
    return await served.metric(
        "octet_tokens_total",
        key="anonymous",
        model="fake",
        backend="fake-1",
        precision="",
        type="output",
        counted=kind,
        **labels,
    )


@pytest.mark.parametrize("path", OPERATIONS)
@pytest.mark.parametrize(("kind", "choices"), [("embedded", 1), ("embedded", 3), ("vllm", 1)])
async def test_gaps_are_between_tokens(kind: str, path: str, choices: int) -> None:
    """Of 12 tokens there are 11 gaps, whatever else is in the stream. (Choices that take turns
    are timed by rounds, of which an end may cost one.)"""
    async with backend_of(kind) as (backend, _), serving(("fake", [backend])) as served:
        await served.events(path, body_of(path, n=choices, seed=1))
        operation = OPERATIONS[path]
        labels = {"gen_ai_operation_name": operation, "gen_ai_request_model": "fake"}
        gaps = await served.metric(GAPS, **labels, pool="fake")
        assert 11 * choices - (choices if choices > 1 else 0) <= gaps <= 11 * choices
        assert await counted(served, "backend") == 12 * choices
        assert await counted(served, "estimated") == 0


@pytest.mark.parametrize("kind", ["vllm", "triton"])
async def test_the_backend_continues_the_clients_trace(kind: str, collector: Collector) -> None:
    """In HTTP headers, or in gRPC metadata: its spans hang under the attempt that asked it."""
    traces = {"endpoint": collector.endpoint}
    async with backend_of(kind) as (backend, server):
        async with serving(("fake", [backend]), traces=traces) as served:
            headers = {"traceparent": TRACEPARENT, "x-request-id": "mine-1"}
            path = "/v1/completions"
            async with served.session.post(path, json=body_of(path), headers=headers) as response:
                assert response.status == 200, await response.text()
        assert server is not None
        received = server.headers if isinstance(server, FakeOpenAI) else server.metadata
        (sent,) = [entry for entry in received if "traceparent" in entry]
    spans = {span.name: span for span in collector.spans()}
    trace_id, parent_id = sent["traceparent"].split("-")[1:3]
    assert trace_id == TRACEPARENT.split("-")[1]
    assert parent_id == spans["attempt"].span_id.hex()
    assert spans["attempt"].parent_span_id == spans["text_completion fake"].span_id
    assert spans["text_completion fake"].parent_span_id.hex() == TRACEPARENT.split("-")[2]
    assert attributes(spans["text_completion fake"])["gen_ai.usage.output_tokens"] == 12
    assert sent["x-request-id"] == "mine-1"


async def test_tokens_of_an_answer_that_its_client_left() -> None:
    path = "/v1/completions"
    body = body_of(path, stream=True, max_tokens=400)
    slow = fake_backend(FakeRunner(delay_s=0.01))  # four seconds of tokens
    async with serving(("fake", [slow])) as served:
        async with served.session.post(path, json=body) as response:
            async for _ in response.content:
                break
            response.close()
        assert await counted(served, "estimated") > 0
        assert await counted(served, "backend") == 0

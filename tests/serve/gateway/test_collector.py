"""The gateway's /metrics as a scraper reads it: well-formed, and true at that moment."""

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from octet.errors import BackendError
from serve.backends.base import LoadReport
from serve.gateway.state import Gateway
from serve.routing import Pool
from tests.fakes import FakeRunner, fake_backend
from tests.serve.conftest import Served
from tests.serve.telemetry.gateways import busy_gateway

BACKEND = {"pool": "main", "backend": "main-1"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def value(gateway: Gateway, name: str, **labels: str) -> float | None:
    found: float | None = gateway.metrics.registry.get_sample_value(name, labels)
    return found


def test_a_backend_as_it_stands() -> None:
    gateway = busy_gateway()
    (member,) = gateway.pools["main"].members
    member.report = LoadReport(running=3, waiting=2, kv_usage=0.5, capacity_tokens=1000)
    lease = member.lease(100)
    assert value(gateway, "octet_backend_in_flight", **BACKEND) == 1
    assert value(gateway, "octet_backend_outstanding_tokens", **BACKEND) == 100
    assert value(gateway, "octet_backend_waiting", **BACKEND) == 2
    assert value(gateway, "octet_backend_kv_usage", **BACKEND) == 0.5
    assert value(gateway, "octet_backend_up", **BACKEND) == 1
    lease.failed(BackendError("by hand", kind="dead"))
    lease.release()
    assert value(gateway, "octet_backend_in_flight", **BACKEND) == 0
    assert value(gateway, "octet_backend_up", **BACKEND) == 0
    assert value(gateway, "octet_backend_breaker_state", **BACKEND) == 2
    transition = {**BACKEND, "from": "closed", "to": "open"}
    assert value(gateway, "octet_backend_breaker_transitions_total", **transition) == 1
    assert value(gateway, "octet_backend_ejections_total", **BACKEND) == 1
    assert value(gateway, "octet_ready") == 0


def test_a_backend_that_says_nothing_of_itself_has_no_such_gauges() -> None:
    gateway = busy_gateway()
    assert value(gateway, "octet_backend_kv_usage", **BACKEND) is None
    assert value(gateway, "octet_backend_in_flight", **BACKEND) == 0


def test_a_draining_gateway_is_not_ready() -> None:
    gateway = busy_gateway()
    assert value(gateway, "octet_ready") == 1
    gateway.draining = True
    assert value(gateway, "octet_ready") == 0
    assert value(gateway, "octet_pool_ready", pool="main", precision="fp8") == 1


async def test_a_pool_that_a_reload_took_out_is_gone() -> None:
    gateway = busy_gateway()
    gateway.pools = {"other": Pool.of("other", [fake_backend(FakeRunner())])}
    assert value(gateway, "octet_backend_up", **BACKEND) is None
    assert value(gateway, "octet_backend_up", pool="other", backend="other-1") == 1


async def test_metrics_over_http(embedded: Served) -> None:
    body = {"model": "fake", "prompt": "a", "max_tokens": 4, "temperature": 0}
    await embedded.events("/v1/completions", body)
    _, answer = await embedded.post("/v1/completions", body)
    async with embedded.session.get("/metrics") as response:
        assert response.content_type == "text/plain"
        plain = list(parse_prometheus(await response.text()))
    async with embedded.session.get("/metrics", headers={"accept": OPENMETRICS}) as response:
        assert response.content_type == "application/openmetrics-text"
        text = await response.text()
        strict = list(parse_openmetrics(text))
    assert text.endswith("# EOF\n")
    names = [family.name for family in strict]
    assert len(set(names)) == len(names)
    assert {family.name for family in plain} == set(names)
    # Each series is there once, and buckets are cumulative.
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for family in strict:
        assert family.documentation, family.name
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in seen, key
            seen.add(key)
            assert sample.value >= 0, sample
    tokens = await embedded.metric(
        "octet_tokens_total",
        key="anonymous",
        model="fake",
        backend="fake-1",
        precision="",
        type="output",
        counted="backend",
    )
    assert tokens == 2 * answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("accept", ["", "text/html", "*/*", "application/openmetrics-text; q=x"])
def test_any_accept_header_is_answered(accept: str) -> None:
    content, content_type = busy_gateway().metrics.render(accept)
    assert b"octet_ready" in content
    assert "; charset=utf-8" in content_type

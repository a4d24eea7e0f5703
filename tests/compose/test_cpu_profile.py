"""Starts `docker compose --profile cpu --profile monitoring`, but for Grafana, and uses it."""

import asyncio
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest

from tests.compose import clients
from tests.compose.engine import Engine
from tests.compose.project import Project

PROMETHEUS = "http://127.0.0.1:9090"


def query(expression: str) -> list[float]:
    """The values that Prometheus has of `expression` now."""
    question = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/query?{question}", timeout=10) as answer:
        return [float(row["value"][1]) for row in json.load(answer)["data"]["result"]]


@pytest.fixture(scope="module")
def project(engine: Engine) -> Iterator[Project]:
    project = Project(engine, ["cpu", "monitoring"])
    started = time.monotonic()
    try:
        project.up()
        project.wait_healthy()
        print(f"\nhealthy after {time.monotonic() - started:.1f} s")
        yield project
    finally:
        project.down()


def test_every_container_is_healthy_and_holds_no_capability(project: Project) -> None:
    for service in project.services:
        assert project.health(service) == "healthy"
        status = project.execute(service, "cat /proc/1/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split()[0] != "0", service
        assert all(int(fields[f"Cap{kind}"], 16) == 0 for kind in ("Prm", "Eff", "Bnd")), service
        assert fields["NoNewPrivs"] == "1", service


async def test_a_completion_is_streamed_through_the_published_port(project: Project) -> None:
    async with clients.session() as session:
        request = await clients.stream(session, 64)
    assert request.complete, request.error
    assert len(request.tokens) > 8
    spread = request.tokens[-1] - request.tokens[0]
    print(
        f"\n{len(request.tokens)} events, the first after {request.first_token_s:.2f} s, "
        f"over {spread:.2f} s"
    )
    assert spread > 0


async def test_prometheus_scrapes_what_was_answered(project: Project) -> None:
    expression = 'sum(octet_tokens_total{job="octet",type="output"})'
    async with asyncio.timeout(60):  # it scrapes every 10 s
        while not sum(query(expression)) >= 64:
            await asyncio.sleep(0.5)
    assert query('up{job="octet"}') == [1.0]
    print(f"\nPrometheus has {query(expression)[0]:.0f} output tokens")


async def test_sigterm_drains(project: Project) -> None:
    """A stream that runs ends well, new requests are refused, and the container exits with 0."""
    async with clients.session() as session:
        request = clients.Request()
        streaming = asyncio.create_task(clients.stream(session, 900, request))
        async with asyncio.timeout(30):
            while len(request.tokens) < 5:
                await asyncio.sleep(0.01)
        before = len(request.tokens)
        started = time.monotonic()
        stopping = asyncio.create_task(asyncio.to_thread(project.docker, "stop", "gateway-cpu"))
        refused = await refusal(session, request)
        await streaming
        await stopping
    assert request.complete, request.error
    after = len(request.tokens) - before
    assert after > 0
    assert refused is not None and refused.startswith("503"), refused
    state = project.state("gateway-cpu")
    assert (state["Status"], state["ExitCode"]) == ("exited", 0), project.logs("gateway-cpu")
    print(
        f"\n{after} events after SIGTERM, none lost; the container ended after "
        f"{time.monotonic() - started:.1f} s with code {state['ExitCode']}"
    )


async def refusal(session: clients.aiohttp.ClientSession, running: clients.Request) -> str | None:
    """Asks anew until the gateway refuses, while `running` streams."""
    while not running.ended:
        if (other := await clients.stream(session, 1)).error is not None:
            return other.error
    return None


async def test_everything_ends(project: Project) -> None:
    """Prometheus stops on SIGTERM too, and nothing of the project is left."""
    project.docker("stop", "prometheus")
    assert project.state("prometheus")["ExitCode"] == 0
    project.down()
    for kind in (["ps", "--all"], ["network", "ls"], ["volume", "ls"]):
        left = project.engine.docker(*kind, "--quiet", "--filter", f"name={project.name}")
        assert left == "", kind

"""Breaks the GPU profile as only separate hosts break, under load; prints what each fault cost.

The gateway answers from vLLM, else from Triton (docker-compose.yml). A fault may end the streams
that its container was in the middle of, with an explicit error. It may not cost a request that has
no token yet: another backend must answer that.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import pytest

from tests.compose import clients, images
from tests.compose.costs import HEAD, Cost
from tests.compose.engine import Engine
from tests.compose.gpu_profile import CLOCK, KEY, VARIABLES, breakable, small_disks, without_gpu
from tests.compose.project import COMPOSE, Project
from tests.integration.conftest import require
from tests.integration.fleet import Watch
from tests.integration.servers import layout
from tests.integration.servers.launch import cpu_flags

CLIENTS = 4
TOKENS = 300  # of an answer, which takes seconds: faults come in the middle
HOLD_S = 20.0  # longer than the 10 s after which an unreachable backend counts as lost
OTHERS_S = 12.0  # of other faults; the gateway and Prometheus write to disks every 10 s


@pytest.fixture(scope="module")
def costs() -> Iterator[list[Cost]]:
    """Collects each test's cost, and prints the table at the end."""
    found: list[Cost] = []
    yield found
    print("\n".join(["", HEAD, *(cost.row() for cost in found)]))


@pytest.fixture(scope="module")
def project(engine: Engine) -> Iterator[Project]:
    require(layout.VLLM)
    require(layout.TRITON)
    if "avx512f" not in cpu_flags():
        pytest.skip("vLLM's CPU build keeps an FP8 KV cache only with AVX-512: use such a machine")
    images.build_server_stand_ins(engine, COMPOSE["services"])
    images.build_ours(engine, COMPOSE["services"]["triton"])
    project = Project(engine, ["gpu"], without_gpu, breakable(engine.directory), small_disks)
    started = time.monotonic()
    try:
        project.up(**VARIABLES)
        project.wait_healthy()
        print(f"\nall of the GPU profile healthy after {time.monotonic() - started:.0f} s")
        yield project
    finally:
        project.down()


@pytest.fixture
async def watch(project: Project) -> AsyncIterator[Watch]:
    """Each test begins with both backends proven."""
    watch = Watch(clients.URL)
    for backend in ("vllm", "triton"):
        await watch.until(backend, available=True)
    yield watch
    await watch.close()


@asynccontextmanager
async def load() -> AsyncIterator[clients.Clients]:
    """Four clients, all of which are in the middle of a stream when the block begins."""
    async with clients.session(KEY) as session:
        some = clients.Clients(session, CLIENTS, TOKENS)
        async with some.running():
            yield some


async def next_answer_of(watch: Watch, backend: str) -> float:
    """Seconds until `backend` has answered another request; its tokens are counted then."""
    started, before = time.monotonic(), await watch.answered(backend)
    async with asyncio.timeout(300):
        while await watch.answered(backend) <= before:
            await asyncio.sleep(0.1)
    return time.monotonic() - started


async def suffer(name: str, watch: Watch, fault: Callable[[], Awaitable[None]]) -> Cost:
    """Runs `fault`, which begins and ends in it, under load."""
    async with load() as some:
        await fault()
        next_answer_s = await next_answer_of(watch, "vllm")
    return Cost(name, some.requests, next_answer_s)


def check(cost: Cost, costs: list[Cost], broken: int = 0) -> None:
    costs.append(cost)
    assert cost.lost == []
    assert cost.unexplained == []
    assert cost.broken <= broken
    assert cost.complete > 0


async def test_without_a_fault(watch: Watch, costs: list[Cost]) -> None:
    check(await suffer("none", watch, lambda: asyncio.sleep(OTHERS_S)), costs)


@pytest.mark.parametrize("verbs", [("pause", "unpause"), ("kill", "start")], ids="-".join)
async def test_a_backend_is_stopped_in_the_middle_of_streams(
    project: Project, watch: Watch, costs: list[Cost], verbs: tuple[str, str]
) -> None:
    async def fault() -> None:
        await asyncio.to_thread(project.docker, verbs[0], "vllm")
        await asyncio.sleep(HOLD_S)
        await asyncio.to_thread(project.docker, verbs[1], "vllm")

    name = f"vllm: {verbs[0]}, {verbs[1]} after {HOLD_S:.0f} s"
    check(await suffer(name, watch, fault), costs, broken=CLIENTS)


async def test_a_backend_leaves_its_network_and_returns(
    project: Project, watch: Watch, costs: list[Cost]
) -> None:
    async def fault() -> None:
        await asyncio.to_thread(project.disconnect, "vllm", "back")
        await asyncio.sleep(HOLD_S)
        await asyncio.to_thread(project.connect, "vllm", "back")

    name = f"vllm: disconnect, connect after {HOLD_S:.0f} s"
    check(await suffer(name, watch, fault), costs, broken=CLIENTS)


async def test_the_gateway_is_paused(project: Project, watch: Watch, costs: list[Cost]) -> None:
    """Nobody's request ends: its clients wait."""

    async def fault() -> None:
        await asyncio.to_thread(project.docker, "pause", "gateway-gpu")
        await asyncio.sleep(5)
        await asyncio.to_thread(project.docker, "unpause", "gateway-gpu")

    check(await suffer("gateway: pause, unpause after 5 s", watch, fault), costs)


FULL = {
    ("gateway-gpu", "/state"): "usage.json: not written: No space left on device",
    ("gateway-gpu", "/tmp"): "",  # it writes nothing there
    ("prometheus", "/prometheus"): "no space left on device",
}


@pytest.mark.parametrize(("service", "directory"), FULL, ids=lambda text: text.strip("/"))
async def test_a_disk_is_full(
    project: Project, watch: Watch, costs: list[Cost], service: str, directory: str
) -> None:
    """The gateway keeps the keys' usage in /state, and Prometheus its samples in /prometheus."""

    async def fault() -> None:
        full = f"! dd if=/dev/zero of={directory}/full bs=4k 2>/dev/null"  # fails at the end
        await asyncio.to_thread(project.execute, service, full)
        await asyncio.sleep(OTHERS_S)
        await asyncio.to_thread(project.execute, service, f"rm {directory}/full")

    name = f"{service.removesuffix('-gpu')}: {directory} full for {OTHERS_S:.0f} s"
    check(await suffer(name, watch, fault), costs)
    assert FULL[service, directory] in project.logs(service)
    await asyncio.to_thread(project.wait_healthy, service)


async def test_the_clock_of_the_gateway_jumps(
    project: Project, watch: Watch, costs: list[Cost]
) -> None:
    """Two days ahead and back, as when a host's clock is set; usage is of the right day again."""

    async def fault() -> None:
        await asyncio.to_thread(project.execute, "gateway-gpu", f"echo +2d > {CLOCK}")
        async with asyncio.timeout(60), clients.session(KEY) as session:
            while await clock(session) < time.time() + 86_400:
                await asyncio.sleep(0.2)
        await asyncio.sleep(OTHERS_S)
        await asyncio.to_thread(project.execute, "gateway-gpu", f"echo +0 > {CLOCK}")

    check(await suffer("gateway: clock two days ahead, and back", watch, fault), costs)
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    async with asyncio.timeout(60), clients.session(KEY) as session:
        while f'"day":"{today}"' not in project.execute("gateway-gpu", "cat /state/usage.json"):
            await clients.stream(session, 1)
            await asyncio.sleep(1)


async def clock(session: clients.aiohttp.ClientSession) -> float:
    """Returns the gateway's time."""
    async with session.get(f"{clients.URL}/health") as response:
        return parsedate_to_datetime(response.headers["Date"]).timestamp()

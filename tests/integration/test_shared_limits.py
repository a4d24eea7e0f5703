"""Limits that several gateway processes share through a real Redis, which is killed and comes back.

Needs redis-server (`apt-get install redis-server`); the backend is a fake one. Run:

    python -m pytest -n 0 tests/integration/test_shared_limits.py -rP
"""

import asyncio
import hashlib
import shutil
import signal
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from redis.asyncio import Redis

from tests.fake_servers import FakeOpenAI, running
from tests.integration.servers.launch import GatewayServer, RedisServer
from tests.integration.servers.process import free_port, signal_group
from tests.serve.access.shared_contract import CHECKS, Check, hurry
from tests.serve.waiting import until

GATEWAYS = 4
LIMIT = 300  # per minute
TOKENS = 6000  # per minute, of a key that is limited by tokens
# Of token ids, so that the gateway's estimate is what the backend counts.
PROMPT = {"model": "fake", "prompt": [1] * 8, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on this machine: apt-get install redis-server")
    with RedisServer(log=tmp_path / "redis.log") as server:
        yield server


def kill(server: RedisServer | GatewayServer) -> None:
    assert server.process is not None
    signal_group(server.process.pid, signal.SIGKILL)
    server.process.wait()
    server.stop()


class RealRedis:
    """A real server as the contract needs it."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.url = server.url
        self.client = Redis.from_url(server.url, decode_responses=True)

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def stop(self) -> None:
        await asyncio.to_thread(kill, self.server)

    async def empty(self) -> None:
        if self.server.process is not None:  # a killed one comes back empty
            await self.client.flushall()

    async def set_full(self, full: bool) -> None:
        await self.client.config_set("maxmemory", "1" if full else "0")

    async def set_password(self, password: str) -> None:
        await self.client.config_set("requirepass", password)

    async def put(self, key: str, value: str | dict[str, str]) -> None:
        if isinstance(value, dict):
            await self.client.hset(key, mapping=value)
        else:
            await self.client.set(key, value)

    async def get(self, key: str) -> Any:
        kind = await self.client.type(key)
        return await (self.client.hgetall(key) if kind == "hash" else self.client.get(key))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    redis = RealRedis(server)
    await check(redis)
    await redis.client.aclose()


@dataclass
class Answered:
    """When a request was sent and answered, in seconds of one clock, with what."""

    key: str
    sent: float
    ended: float
    status: int
    tokens: int


@dataclass
class Gateways:
    """Processes behind one fake backend, and a load of ten times the limits on all of them."""

    servers: list[GatewayServer]
    backend: FakeOpenAI
    session: aiohttp.ClientSession
    answers: list[Answered] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def ask(self, gateway: int, key: str, **fields: Any) -> Answered:
        sent = time.monotonic()
        headers = {"authorization": f"Bearer octet-{key}"}
        url = f"{self.servers[gateway].url}/v1/completions"
        async with self.session.post(url, json=PROMPT | fields, headers=headers) as answer:
            body = await answer.json()
        usage = body.get("usage", {"total_tokens": 0})
        return Answered(key, sent, time.monotonic(), answer.status, usage["total_tokens"])

    async def status(self, gateway: int) -> dict[str, Any]:
        async with self.session.get(f"{self.servers[gateway].url}/status") as answer:
            found: dict[str, Any] = (await answer.json())["shared_limits"]
            return found

    async def losses(self) -> int:
        return sum([(await self.status(i))["losses"] for i in range(len(self.servers))])

    async def until(self, state: str) -> None:
        async with asyncio.timeout(60):
            for gateway in range(len(self.servers)):
                while (await self.status(gateway))["state"] != state:
                    await asyncio.sleep(0.05)

    async def load(self, seconds: float) -> None:
        """Asks ten times as often as the limits allow, by the clock."""
        start, number, every = time.monotonic(), 0, 60 / LIMIT / 10
        while (now := time.monotonic()) < start + seconds:
            while number * every < now - start:
                for key in ("requests", "tokens"):
                    task = asyncio.create_task(self._asked(number % len(self.servers), key))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                number += 1
            await asyncio.sleep(0.01)
        await asyncio.gather(*self._tasks)

    async def _asked(self, gateway: int, key: str) -> None:
        self.answers.append(await self.ask(gateway, key))

    def most(self, key: str, seconds: float = 60.0) -> tuple[int, int]:
        """The most requests and tokens that began and ended within any 60 seconds."""
        given = sorted(
            (a for a in self.answers if a.key == key and a.status == 200), key=lambda a: a.ended
        )
        ends = [a.ended for a in given]
        windows = [
            [a for a in given[: bisect_right(ends, first.sent + seconds)] if a.sent >= first.sent]
            for first in given
        ]
        return max(map(len, windows)), max(sum(a.tokens for a in window) for window in windows)


@pytest.fixture
async def gateways(
    server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Gateways]:
    names = {
        "requests": {"requests_per_minute": LIMIT},
        "tokens": {"tokens_per_minute": TOKENS},
        "quota": {"tokens_per_day": 1000},
    }
    access = {
        "shared": {"url": server.url, **request.param},
        "keys": [
            {"name": name, "sha256": hashlib.sha256(f"octet-{name}".encode()).hexdigest()} | limits
            for name, limits in names.items()
        ],
    }
    async with running(FakeOpenAI()) as backend, aiohttp.ClientSession() as session:
        servers = []
        for i in range(GATEWAYS):
            port, config = free_port(), tmp_path / f"gateway-{i}.yaml"
            content = {
                "listen": {"port": port},
                "access": access,
                "models": {"fake": {"pool": {"backends": [{"type": "vllm", "url": backend.url}]}}},
            }
            config.write_text(yaml.safe_dump(content))
            log = tmp_path / f"gateway-{i}.log"
            servers.append(GatewayServer(config=config, port=port, log=log))
        with ExitStack() as stack:
            # In threads: they are ready when the backend is, which runs in this event loop.
            await asyncio.gather(*(asyncio.to_thread(stack.enter_context, s) for s in servers))
            yield Gateways(servers, backend, session)


@pytest.mark.parametrize("gateways", [{}], indirect=True, ids=["refuse"])
async def test_ten_times_the_limit_is_exceeded_by_no_more_than_2_percent(
    gateways: Gateways,
) -> None:
    for _ in range(3):  # without a round trip that a busy machine holds up: that is a loss of Redis
        await gateways.until("shared")
        gateways.answers.clear()
        before = await gateways.losses()
        await gateways.load(100)
        if await gateways.losses() == before:
            break
    assert (await gateways.status(0))["gateways"] == GATEWAYS
    statuses = {answer.status for answer in gateways.answers}
    requests, _ = gateways.most("requests")
    _, tokens = gateways.most("tokens")
    asked = len(gateways.answers) / 2
    print(f"{asked:.0f} requests of each key in 100 s, of {LIMIT} a minute; in any minute at most")
    print(f"{requests} requests of {LIMIT}, and {tokens} tokens of {TOKENS}")
    assert statuses == {200, 429}
    assert 0.9 * LIMIT < requests <= 1.02 * LIMIT
    assert 0.9 * TOKENS < tokens <= 1.02 * TOKENS


@pytest.mark.parametrize(
    "gateways", [{"when_lost": "share", "replicas": GATEWAYS}], indirect=True, ids=["share"]
)
async def test_the_limit_holds_while_redis_is_killed_and_comes_back(
    gateways: Gateways, server: RedisServer
) -> None:
    await gateways.until("shared")
    load = asyncio.create_task(gateways.load(100))
    await asyncio.sleep(25)
    await asyncio.to_thread(kill, server)
    await gateways.until("lost")
    await asyncio.sleep(25)
    await asyncio.to_thread(server.start)  # empty
    await gateways.until("shared")
    await load
    requests, _ = gateways.most("requests")
    _, tokens = gateways.most("tokens")
    print(f"in any minute at most {requests} requests of {LIMIT}, and {tokens} tokens of {TOKENS}")
    assert {answer.status for answer in gateways.answers} == {200, 429}
    assert requests <= 1.02 * LIMIT and tokens <= 1.02 * TOKENS
    for gateway in range(GATEWAYS):
        status = await gateways.status(gateway)
        log = gateways.servers[gateway].log.read_text()
        # A machine that holds up a round trip for a second makes a loss of its own.
        assert 1 <= status["losses"] <= 1 + log.count(" does not answer within ")
        assert status["requests_decided_alone"] > 0
        assert "get 1/4 of their limits" in log and "counted by Redis" in log


@pytest.mark.parametrize("gateways", [{}], indirect=True, ids=["refuse"])
async def test_a_killed_gateway_takes_no_quota_with_it(gateways: Gateways) -> None:
    await gateways.until("shared")
    spent = (await gateways.ask(0, "quota")).tokens
    assert spent > 0
    waiting = asyncio.create_task(  # it is never answered
        gateways.ask(0, "quota", prompt="!wait", max_tokens=900)
    )
    await until(lambda: gateways.backend.running)
    assert (await gateways.ask(1, "quota", max_tokens=300)).status == 429
    await asyncio.to_thread(kill, gateways.servers[0])
    with pytest.raises(aiohttp.ClientError):
        await waiting
    killed = time.monotonic()
    async with asyncio.timeout(30):
        while (answer := await gateways.ask(1, "quota", max_tokens=300)).status != 200:
            assert answer.status == 429
            await asyncio.sleep(0.5)
    print(f"the quota was back {time.monotonic() - killed:.0f} s after the kill")

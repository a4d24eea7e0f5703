"""Tests limits that gateways share: the contract on a fake Redis, and what takes a clock."""

import asyncio
import copy
import hashlib
import logging
import random
import sys
from bisect import bisect_right
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from octet.errors import ConfigError, RequestError
from serve.access.shared import SharedLimits
from serve.config import KeyConfig, SharedConfig
from serve.gateway.reload import reload_from
from serve.http.status_page import problems_of
from tests.serve.access.fake_redis import FakeRedis
from tests.serve.access.shared_contract import (
    CHECKS,
    Check,
    Replica,
    gateway,
    hurry,
    key,
    replicas,
)
from tests.serve.clock import Clock
from tests.serve.conftest import configured, serving, serving_gateway
from tests.serve.upstreams import Scripted, whole
from tests.serve.waiting import until

NOON = datetime(2027, 3, 1, 12, tzinfo=UTC).timestamp()


@pytest.fixture
async def redis(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeRedis]:
    """By the test's own clock: neither a busy machine nor midnight ends what is held."""
    hurry(monkeypatch)
    now = asyncio.get_running_loop().time
    started = now()
    async with FakeRedis(lambda: NOON + now() - started) as redis:
        yield redis


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, redis: FakeRedis) -> None:
    await check(redis)


async def clocked(redis: FakeRedis, clock: Clock, team: KeyConfig, count: int) -> list[Replica]:
    """Gateways whose clocks have nothing in common with the server's but their pace."""
    found = []
    for i in range(count):
        own = Clock(clock.now * (i + 1))
        start = own.now - clock.now
        limits = SharedLimits(
            SharedConfig(url=redis.url), clock=lambda start=start: clock.now + start, wall=Clock(7)
        )
        await limits.start()
        found.append(Replica(limits, team))
    return found


async def test_no_minute_has_more_than_the_limit_and_none_goes_to_waste() -> None:
    chance, clock = random.Random(5), Clock(NOON + 0.3)
    async with FakeRedis(clock) as redis:
        found = await clocked(redis, clock, key(requests_per_minute=300), 4)
        times: list[float] = []
        for _ in range(900):
            clock.now += chance.uniform(0, 0.4)
            for replica in chance.sample(found, chance.randint(1, 4)):
                taken = await replica.taken(chance.randint(0, 8))
                times += [clock.now] * taken
        for replica in found:
            await replica.limits.close()
    most = max(bisect_right(times, t + 59.999) - i for i, t in enumerate(times))
    assert most == 300
    assert len(times) / (times[-1] - NOON) > 0.95 * 300 / 60


async def test_a_day_ends_at_the_servers_midnight() -> None:
    clock = Clock(NOON)
    async with FakeRedis(clock) as redis:
        one, other = await clocked(redis, clock, key(tokens_per_day=1000), 2)
        (await one.take(1000)).release()
        error = await other.refusal(1)
        assert error.retry_after_s == pytest.approx(12 * 3600, abs=2)
        clock.now += 12 * 3600 + 1
        await other.until_taken(1000)
        assert (await one.refusal(1)).code == "insufficient_quota"
        for replica in (one, other):
            await replica.limits.close()


async def test_a_local_clock_that_is_ahead_gives_no_more_quota() -> None:
    clock = Clock(NOON)
    async with FakeRedis(clock) as redis:
        limits = SharedLimits(
            SharedConfig(url=redis.url), clock=clock, wall=lambda: clock.now + 13 * 3600
        )
        await limits.start()
        replica = Replica(limits, key(tokens_per_day=1000))
        (await replica.take(600)).release()
        assert "400 of today's 1000" in str(await replica.refusal(600))
        clock.now += 12 * 3600 + 1
        await replica.until_taken(1000)
        await limits.close()


async def test_closing_during_a_call_ends_and_keeps_no_lease(redis: FakeRedis) -> None:
    """Wherever the call is: in Python 3.11, `asyncio.wait_for` can lose a cancellation."""
    team = key(requests_per_minute=2560, max_in_flight=100)
    for steps in range(30):
        async with replicas(redis, 1, team) as (replica,):
            await replica.take()
            request = asyncio.create_task(replica.take())  # needs a call
            for _ in range(steps):
                await asyncio.sleep(0)
            async with asyncio.timeout(20):
                await replica.limits.close()
            await asyncio.gather(request, return_exceptions=True)
    async with replicas(redis, 1, team) as (replica,):
        await replica.take()
        remaining = replica.rates.headers(team)["x-ratelimit-remaining-requests"]
        assert int(remaining) >= 2560 - 61


async def test_a_lease_that_was_granted_but_never_arrived_is_not_lost(
    redis: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.access.shared.TIMEOUT_S", 0.3)
    async with replicas(redis, 1, key(requests_per_minute=10)) as (replica,):
        redis.silent = True
        assert (await replica.refusal()).status == 503
        assert "does not answer within 0.3 s" in replica.limits.reason
        redis.silent = False
        await replica.until_state("shared")
        assert await replica.taken(20) == 10


async def test_a_redis_with_old_data_hears_what_was_used_since(redis: FakeRedis) -> None:
    async with replicas(redis, 2, key(requests_per_minute=100)) as (one, other):
        assert await one.taken(20) == 20
        snapshot = copy.deepcopy(redis.data)
        assert await other.taken(50) == 50
        await redis.stop()
        redis.data = snapshot
        await redis.start()
        await until(lambda: one.limits.losses and other.limits.losses)
        for replica in (one, other):
            await replica.until_state("shared")
        assert await one.taken(60) == 30


async def test_processes_that_ended_cost_no_call_anything_and_the_day_keeps_their_tokens() -> None:
    clock = Clock(NOON)
    team = key(tokens_per_day=1000)
    async with FakeRedis(clock) as redis:
        for _ in range(40):  # a worker that is restarted again and again
            (replica,) = await clocked(redis, clock, team, 1)
            (await replica.take(10)).release()
            await replica.limits.close()
        idle, other = await clocked(redis, clock, team, 2)
        (await idle.take(100)).release()
        clock.now += 1
        await until(lambda: redis.data["octet:limits:team"][idle.limits._id].split()[3] == "100")
        clock.now += 75
        await other.take(1)
        clock.now += 75
        assert "499 of today's 1000" in str(await other.refusal(500))
        assert len(redis.data["octet:limits:team"]) == 1
        assert redis.data["octet:quiet:team"]["all"] == "500"
        assert "499 of today's 1000" in str(await idle.refusal(500))  # it is counted once
        assert redis.data["octet:quiet:team"]["all"] == "400"
        clock.now += 12 * 3600
        await other.until_taken(999)
        assert "octet:quiet:team" not in redis.data
        for replica in (idle, other):
            await replica.limits.close()


async def test_a_reload_forgets_keys_that_are_gone(redis: FakeRedis) -> None:
    async with replicas(redis, 1, key(requests_per_minute=100)) as (replica,):
        limits = replica.limits
        for n in range(100):
            limits.rates(key(requests_per_minute=9).model_copy(update={"name": f"key-{n}"}))
            limits.retain({"team"})
        assert list(limits._rates) == ["team"]
        charge = await replica.take()
        limits.retain(set())
        assert limits.rates(replica.team) is replica.rates  # its minute still counts
        charge.release()


async def test_refused_requests_are_no_load_on_redis(redis: FakeRedis) -> None:
    async with replicas(redis, 1, key(requests_per_minute=10)) as (replica,):
        assert await replica.taken(10) == 10
        before = redis.calls
        assert await replica.taken(2000) == 0
        assert redis.calls - before < 50


async def test_requests_of_one_lease_take_one_call(redis: FakeRedis) -> None:
    async with replicas(redis, 1, key(requests_per_minute=256 * 100)) as (replica,):
        before = redis.calls
        assert await replica.taken(100) == 100
        assert redis.calls - before < 10


async def test_an_outage_has_one_line_and_more_gateways_than_configured_another(
    redis: FakeRedis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "serve.access.shared")
    async with replicas(redis, 3, key(requests_per_minute=100), when_lost="share", replicas=2):
        await until(lambda: "3 gateways report" in caplog.text)
        assert "access.shared.replicas is 2" in caplog.text
    caplog.clear()
    async with replicas(redis, 1, key(requests_per_minute=100)) as (replica,):
        await redis.stop()
        await replica.until_state("lost")
        await asyncio.sleep(0.5)
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith(f"shared limits: Redis at {replica.limits.address} ")
        assert line.endswith("; until it is back, keys with limits are refused")
        caplog.clear()
        await redis.start()
        await replica.until_state("shared")
        back, again = (record.getMessage() for record in caplog.records)
        assert "is back" in back and "from now on" in again


async def test_clients_status_and_metrics_report_a_loss(redis: FakeRedis) -> None:
    digest = hashlib.sha256(b"octet-secret").hexdigest()
    access = {
        "keys": [{"name": "team", "sha256": digest, "requests_per_minute": 2}],
        "shared": redis.url,
    }
    body = {"model": "fake", "prompt": "x"}
    headers = {"authorization": "Bearer octet-secret"}
    async with serving(("fake", [Scripted(whole())] * 1), access=access) as served:

        async def ask() -> tuple[int, Any]:
            async with served.session.post("/v1/completions", json=body, headers=headers) as answer:
                return answer.status, (await answer.json()).get("error", {}).get("code")

        assert [(await ask())[0] for _ in range(2)] == [200, 200]
        assert await ask() == (429, "rate_limit_exceeded")
        async with served.session.get("/status") as answer:
            assert "Shared limits" not in dict(problems_of(await answer.json()))
        assert await served.metric("octet_shared_limits_up") == 1
        assert await served.metric("octet_shared_limits_gateways") == 1
        await redis.stop()
        shared = served.gateway.keys.shared
        assert shared is not None
        await until(lambda: shared.state == "lost")
        assert await ask() == (503, "shared_limits_unavailable")
        async with served.session.get("/status") as answer:
            status = await answer.json()
        problem = (
            "Redis cannot be used: see the log; meanwhile requests of keys with limits get 503"
        )
        assert ("Shared limits", problem) in problems_of(status)
        assert status["shared_limits"] == {
            "state": "lost",
            "when_lost": "refuse",
            "gateways": 1,
            "losses": 1,
            "requests_decided_alone": 1,
        }
        assert await served.metric("octet_shared_limits_up") == 0
        assert await served.metric("octet_shared_limits_losses_total") == 1
        assert await served.metric("octet_shared_limits_alone_total") == 1


SERVED = """
models: {m: {pool: {backends: [{type: openai, url: "http://127.0.0.1:9"}]}}}
access:
"""


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("  shared: localhost", "access.shared.url: should be redis://"),
        (
            "  shared: {url: redis://x, when_lost: share}",
            "access.shared.replicas: missing: `when_lost: share` needs the number of gateways",
        ),
        ("  shared: {url: redis://x, prefx: a}", "access.shared.prefx: unknown key"),
        (
            "  shared: redis://x\n  usage_file: u.json",
            "access.usage_file: leave it out: with `shared`, Redis keeps the quotas",
        ),
        ("  shared: redis://:${SECRET}@x:port", "x:port: Port could not be cast"),
        ("  shared: redis://:${SECRET}/b@x", "access.shared.url: has / ? or # in its password"),
        ("  shared: 'redis://:${SECRET}#b@x'", "access.shared.url: has / ? or # in its password"),
        ("  shared: 'redis://[x'", "access.shared.url: [x: Invalid IPv6 URL"),
    ],
)
def test_a_wrong_setting_is_named(
    access: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "a-password")
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path / "config.yaml", SERVED + access)
    assert message in str(caught.value) and "a-password" not in str(caught.value)


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(ConfigError, match=r"needs redis.*pip install 'octet-llm\[shared\]'"):
        configured(tmp_path / "config.yaml", SERVED + "  shared: redis://x")


async def test_a_reload_forgets_nothing_that_was_spent(redis: FakeRedis, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"octet-secret").hexdigest()
    path = tmp_path / "config.yaml"

    def text(limit: int, url: str) -> str:
        entry = f"{{name: team, sha256: {digest}, requests_per_minute: {limit}}}"
        return f"{SERVED}  keys: [{entry}]\n  shared: {url}\n"

    async with serving_gateway(configured(path, text(2, redis.url))) as served:

        async def taken() -> int:
            principal = served.gateway.keys.authenticate(b"Bearer octet-secret")
            for count in range(10):
                try:
                    await principal.charge(1)
                except RequestError:
                    return count
            return 10

        assert await taken() == 2
        path.write_text(text(5, "redis://elsewhere"))
        report = await reload_from(served.gateway, path)
        assert report["needs_restart"] == ["access.shared"]
        await asyncio.sleep(0.3)  # a refusal stands for a moment
        assert await taken() == 3


async def test_a_gateway_starts_without_redis_and_finds_it_later(redis: FakeRedis) -> None:
    await redis.stop()
    limits = gateway(redis)
    replica = Replica(limits, key(requests_per_minute=10))
    await limits.start()
    try:
        assert (await replica.refusal()).status == 503
        await redis.start()
        await replica.until_state("shared")
        assert await replica.taken(20) == 10
    finally:
        await limits.close()

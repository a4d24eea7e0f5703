"""Checks how gateways share limits through a Redis, fake or real.

    for check in CHECKS:
        await check(redis)

Each check takes an empty Redis that works, and may leave it in any state.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import pytest

from octet.errors import ConfigError, RequestError
from serve.access.rates import Charge
from serve.access.shared import SharedLimits
from serve.config import KeyConfig, SharedConfig
from tests.serve.waiting import until

__all__ = ["CHECKS", "Check", "Replica", "TestedRedis", "gateway", "hurry", "key", "replicas"]


class TestedRedis(Protocol):
    @property
    def url(self) -> str: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def empty(self) -> None: ...
    async def set_full(self, full: bool) -> None: ...
    async def set_password(self, password: str) -> None: ...
    async def put(self, key: str, value: str | dict[str, str]) -> None: ...
    async def get(self, key: str) -> Any: ...


Check = Callable[[TestedRedis], Awaitable[None]]


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the times after which a loss is over.

    Holdings lapse by Redis's clock, which goes on while this process is held up: later than that.
    """
    for name, seconds in (("HOLD_S", 60.0), ("RENEW_S", 0.5), ("SETTLE_S", 1.5), ("RETRY_S", 0.1)):
        monkeypatch.setattr(f"serve.access.shared.{name}", seconds)
    monkeypatch.setattr("serve.access.shared.PRESENCE_S", 0.2)


def gateway(redis: TestedRedis, **settings: Any) -> SharedLimits:
    """The limits of a gateway whose clock stands still while this process is held up."""
    config = SharedConfig(url=redis.url, **settings)
    return SharedLimits(config, clock=asyncio.get_running_loop().time)


def key(**limits: Any) -> KeyConfig:
    return KeyConfig(name="team", sha256="0" * 64, **limits)


class Replica:
    """One gateway's limits of the key `team`."""

    def __init__(self, limits: SharedLimits, team: KeyConfig) -> None:
        self.limits = limits
        self.team = team
        self.rates = limits.rates(team)

    async def take(self, tokens: int = 1) -> Charge:
        return await self.rates.take(self.team, self.limits.usage, tokens)

    async def refusal(self, tokens: int = 1) -> RequestError:
        with pytest.raises(RequestError) as caught:
            await self.take(tokens)
        return caught.value

    async def taken(self, tries: int, tokens: int = 1) -> int:
        """Counts those of `tries` requests that were let through; they stay in flight."""
        count = 0
        for _ in range(tries):
            try:
                await self.take(tokens)
                count += 1
            except RequestError as error:
                assert error.status in (429, 503)
        return count

    async def until_taken(self, tokens: int = 1) -> Charge:
        async with asyncio.timeout(20):
            while True:
                try:
                    return await self.take(tokens)
                except RequestError:
                    await asyncio.sleep(0.05)

    async def until_state(self, state: str) -> None:
        async with asyncio.timeout(20):
            await until(lambda: self.limits.state == state)

    async def killed(self) -> None:
        """Stops without giving anything back, as a kill does."""
        task = self.limits._task
        assert task is not None
        self.limits.state = "lost"
        await self.limits.close()


@asynccontextmanager
async def replicas(
    redis: TestedRedis, count: int, team: KeyConfig, **settings: Any
) -> AsyncIterator[list[Replica]]:
    found = [Replica(gateway(redis, **settings), team) for _ in range(count)]
    for replica in found:
        await replica.limits.start()
    for replica in found:  # a Redis that has just started is not used at once
        await replica.until_state("shared")
    try:
        yield found
    finally:
        for replica in found:
            await replica.limits.close()


async def many_gateways_let_through_one_limit(redis: TestedRedis) -> None:
    async with replicas(redis, 4, key(requests_per_minute=1000)) as found:
        counts = await asyncio.gather(*(replica.taken(600) for replica in found))
        assert sum(counts) == 1000 and min(counts) > 0
        error = await found[0].refusal()
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        assert error.retry_after_s is not None and 1 <= error.retry_after_s <= 61
        remaining = found[0].rates.headers(found[0].team)["x-ratelimit-remaining-requests"]
        assert remaining == "0"


async def tokens_that_were_not_used_go_back_to_all(redis: TestedRedis) -> None:
    async with replicas(redis, 2, key(tokens_per_minute=1000)) as (one, other):
        charge = await one.take(900)
        error = await other.refusal(200)
        lease = r"90[0-3]"  # of the tokens, `one` may hold a 256th to begin another request
        assert re.search(f"{lease} are used, this request may take 200", str(error))
        charge.settle(300)
        charge.release()
        await other.until_taken(700)
        await one.refusal(1)


async def what_an_answer_really_took_is_counted(redis: TestedRedis) -> None:
    async with replicas(redis, 2, key(tokens_per_minute=1000)) as (one, other):
        charge = await one.take(100)
        charge.settle(950)  # more than was estimated
        charge.release()
        async with asyncio.timeout(20):
            while True:  # what is granted meanwhile was still free
                try:
                    (await other.take(51)).refund(keep_request=False)
                    await asyncio.sleep(0.1)
                except RequestError:
                    break
        await other.until_taken(50)


async def requests_in_flight_are_limited_together(redis: TestedRedis) -> None:
    async with replicas(redis, 3, key(max_in_flight=2)) as (one, two, three):
        first = await one.take()
        await two.take()
        assert "2 requests are under way" in str(await three.refusal())
        first.release()
        await three.until_taken()
        await one.refusal()


async def a_quota_is_spent_together(redis: TestedRedis) -> None:
    async with replicas(redis, 2, key(tokens_per_day=1000)) as (one, other):
        charge = await one.take(600)
        error = await other.refusal(500)
        assert error.code == "insufficient_quota"
        assert re.search(r"(400|39[7-9]) of today's 1000", str(error))
        charge.settle(450)
        charge.release()
        await other.until_taken(550)


async def a_restarted_gateway_has_not_forgotten_the_quota(redis: TestedRedis) -> None:
    async with replicas(redis, 1, key(tokens_per_day=1000)) as (before,):
        (await before.take(900)).release()
    async with replicas(redis, 1, key(tokens_per_day=1000)) as (after,):
        assert "100 of today's 1000" in str(await after.refusal(101))
        await after.take(100)


async def a_gateway_that_starts_with_an_emptied_redis_waits_for_the_others(
    redis: TestedRedis,
) -> None:
    limits = key(requests_per_minute=100)
    async with replicas(redis, 1, limits) as (one,):
        assert await one.taken(60) == 60
        await redis.stop()
        await redis.empty()
        await redis.start()
        late = Replica(gateway(redis), limits)
        await late.limits.start()
        try:
            assert (await late.refusal()).status == 503 and late.limits.state == "settling"
            for replica in (one, late):
                await replica.until_state("shared")
            assert await late.taken(60) == 40
        finally:
            await late.limits.close()


async def a_killed_gateway_gives_its_holdings_back(redis: TestedRedis) -> None:
    limits = key(tokens_per_day=1000, max_in_flight=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve.access.shared.HOLD_S", 2.0)
        async with replicas(redis, 2, limits) as (one, other):
            await one.take(1000)
            await asyncio.sleep(2.5)  # longer than it is held without a report
            assert (await other.refusal(1)).status == 429
            await one.killed()
            await other.until_taken(1000)


async def without_redis_keys_with_limits_are_refused(redis: TestedRedis) -> None:
    async with replicas(redis, 1, key(requests_per_minute=100)) as (replica,):
        await replica.take()
        await redis.stop()
        await replica.until_state("lost")
        error = await replica.refusal()
        assert (error.status, error.code) == (503, "shared_limits_unavailable")
        assert replica.limits.status()["state"] == "lost" and replica.limits.losses == 1
        assert replica.limits.alone > 0
        await redis.start()
        await replica.until_state("shared")
        await replica.take()


async def without_redis_each_gateway_has_its_share(redis: TestedRedis) -> None:
    limits = key(requests_per_minute=100, tokens_per_minute=1000, tokens_per_day=2000)
    async with replicas(redis, 4, limits, when_lost="share", replicas=4) as found:
        await redis.stop()
        for replica in found:
            await replica.until_state("lost")
        counts = [await replica.taken(60, tokens=10) for replica in found]
        assert counts == [25] * 4
        error = await found[0].refusal(251)  # not a 400: it fits when Redis is back
        assert error.status == 429 and "one gateway's share" in str(error)


async def a_redis_that_comes_back_empty_hears_all_again(redis: TestedRedis) -> None:
    limits = key(requests_per_minute=100, tokens_per_day=1000)
    async with replicas(redis, 2, limits) as (one, other):
        assert await one.taken(60, tokens=8) == 60
        for charge in [await other.take(8) for _ in range(5)]:
            charge.release()
        await redis.stop()
        await redis.empty()
        await redis.start()
        for replica in (one, other):
            await until(lambda replica=replica: replica.limits.losses)
            await replica.until_state("shared")
        counts = await asyncio.gather(one.taken(60), other.taken(60))
        assert sum(counts) == 100 - 65
        assert (await one.refusal(450)).status == 429


async def a_full_redis_is_a_lost_one(redis: TestedRedis) -> None:
    async with replicas(redis, 1, key(requests_per_minute=100)) as (replica,):
        await replica.take()
        await redis.set_full(True)
        await replica.until_state("lost")
        assert replica.limits.status(addresses=True)["reason"] == "is full (maxmemory)"
        await redis.set_full(False)
        await replica.until_state("shared")


async def keys_of_another_application_are_not_touched(redis: TestedRedis) -> None:
    for name, value in (
        ("octet:gateways", "theirs"),
        ("octet:limits:team", {"theirs": "1"}),
        ("octet:limits:team", "theirs"),
        ("octet:quiet", {"theirs": "1"}),
    ):
        await redis.empty()
        await redis.put(name, value)
        with pytest.raises(ConfigError, match="of another application") as caught:
            async with replicas(redis, 1, key(requests_per_minute=100)):
                pass
        assert "prefix" in str(caught.value) and "\n" not in str(caught.value)
        assert await redis.get(name) == value
        async with replicas(redis, 1, key(requests_per_minute=100), prefix="mine") as (replica,):
            await replica.take()


async def a_wrong_password_is_an_error_at_the_start(redis: TestedRedis) -> None:
    await redis.set_password("a-secret")
    with pytest.raises(ConfigError, match=r"access\.shared: Redis at .* refuses") as caught:
        async with replicas(redis, 1, key(requests_per_minute=100)):
            pass
    assert "a-secret" not in str(caught.value)


async def a_client_that_goes_away_while_it_waits_costs_nothing(redis: TestedRedis) -> None:
    async with replicas(redis, 1, key(requests_per_minute=100)) as (replica,):
        for _ in range(20):
            task = asyncio.create_task(replica.take())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert replica.limits.state == "shared"
        assert await replica.taken(120) == 100


CHECKS: tuple[Check, ...] = (
    many_gateways_let_through_one_limit,
    tokens_that_were_not_used_go_back_to_all,
    what_an_answer_really_took_is_counted,
    requests_in_flight_are_limited_together,
    a_quota_is_spent_together,
    a_restarted_gateway_has_not_forgotten_the_quota,
    a_gateway_that_starts_with_an_emptied_redis_waits_for_the_others,
    a_killed_gateway_gives_its_holdings_back,
    without_redis_keys_with_limits_are_refused,
    without_redis_each_gateway_has_its_share,
    a_redis_that_comes_back_empty_hears_all_again,
    a_full_redis_is_a_lost_one,
    keys_of_another_application_are_not_touched,
    a_wrong_password_is_an_error_at_the_start,
    a_client_that_goes_away_while_it_waits_costs_nothing,
)

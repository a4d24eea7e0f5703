"""Tests which requests wait for a free slot at a full backend after theirs was lost."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.serve.api.request.test_attempts import (
    BODY,
    NO_BUDGET,
    Dying,
    ask,
    dead,
    lost,
    over,
    pools,
    refused,
)
from tests.serve.in_process import Client, in_process
from tests.serve.upstreams import Scripted, chunk, whole
from tests.serve.waiting import until


class Held(Scripted):
    """Answers from when it may on, each request after a moment."""

    may: asyncio.Event

    async def relay(self, *arguments: Any) -> Any:
        await self.may.wait()
        await asyncio.sleep(0.002)
        return await super().relay(*arguments)


@pytest.mark.parametrize("failure", [refused, lost, dead])
async def test_who_lost_its_backend_waits_for_room_at_one_that_is_full(failure: Any) -> None:
    dying, sound = Dying(failure()), Held(whole())
    sound.may = dying.died
    async with over(dying, sound, retries=NO_BUDGET) as served:
        first, second = served.gateway.pools["fake"].members
        second.max_in_flight = 1
        asking = [asyncio.create_task(ask(served)) for _ in range(10)]
        await until(lambda: dying.asked >= 9)
        dying.died.set()
        first.go_out("gone", reachable=False)
        assert {status for status, _ in await asyncio.gather(*asking)} == {200}
        assert (dying.asked, sound.asked) == (9, 10)
        second.max_in_flight = 0  # nobody waits who has lost nothing, nor for ever
        assert (await ask(served))[0] == 503


def filled(served: Client, first: Scripted) -> AbstractAsyncContextManager[Any]:
    """The first backend has all that it may have at once."""
    served.gateway.pools["fake"].members[0].max_in_flight = 1
    return served.holding(first, BODY)


async def test_the_wait_for_room_has_an_end() -> None:
    dying, full = Dying(dead()), Scripted([chunk(), None])
    async with (
        over(full, dying, retries=NO_BUDGET, admission={"max_wait_s": 0.05}) as served,
        filled(served, full),
    ):
        dying.died.set()
        assert (await ask(served))[0] == 502 and dying.asked == 1


@pytest.mark.parametrize("others", ["a fallback", "no retry left"])
async def test_nobody_waits_for_room_who_can_go_on_or_must_end(others: str) -> None:
    """`max_wait_s` is 30 s."""
    dying, full, other = Dying(dead()), Scripted([chunk(), None]), Dying(dead())
    fallback = Scripted(whole())
    settings: dict[str, Any] = {
        "pools": pools(retries=NO_BUDGET),
        "models": {"fake": {"pool": "fake"}},
    }
    first, second = [full, dying], [fallback]
    if others == "a fallback":
        settings["models"]["fake"]["fallback"] = ["more"]
    else:
        first.append(other)
    async with (
        in_process(("fake", first), ("more", second), **settings) as served,
        filled(served, full),
    ):
        dying.died.set()
        other.died.set()
        async with asyncio.timeout(10):
            status, _ = await ask(served)
        assert status == (200 if others == "a fallback" else 502)
        assert (dying.asked, other.asked, fallback.asked) in ((1, 0, 1), (1, 1, 0))

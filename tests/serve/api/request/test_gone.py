"""Requests at a server that listens no more, and lets those that it has wait for ever.

As vLLM does when its whole group of processes is told to stop: its engine is gone, and its API
server waits for connections to close that wait for the engine.
"""

import asyncio
from typing import Any

import pytest

from octet.errors import BackendUnavailable
from serve.members import member
from tests.serve.api.request.test_attempts import BODY, NO_BUDGET, TURNS, pools
from tests.serve.in_process import Client, Reply, in_process
from tests.serve.routing.test_health import Scene, played
from tests.serve.upstreams import DONE, Scripted, chunk, whole

SETTINGS = pools(
    retries=NO_BUDGET,
    routing=TURNS,
    health={"probe_after_s": None, "reconnect_s": 0.01},
)


class Leaving(Scripted):
    """Listens until it is told to end."""

    def __init__(self, *outcomes: Any) -> None:
        super().__init__(*outcomes, address="10.0.0.1:80")
        self.ended = asyncio.Event()

    async def hold(self, _reopened: Any = None) -> None:
        if self.ended.is_set():
            raise BackendUnavailable("it cannot be reached", kind="refused")
        await self.ended.wait()


class Mute(Leaving):
    """Not even a status comes."""

    async def relay(self, *_arguments: Any) -> Any:
        self.asked += 1
        await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [Mute, Leaving])
async def test_who_has_no_token_is_answered_by_another(
    kind: type[Leaving], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "GONE_S", 0.05)
    leaving = kind([None])
    sound = Scripted([chunk("good"), DONE] if stream else whole("good"))
    async with in_process(("fake", [leaving, sound]), pools=SETTINGS) as served:
        body = BODY | {"stream": stream}
        asking = [asyncio.create_task(served.request("/v1/completions", body)) for _ in range(8)]
        while sound.asked + leaving.asked < 8:
            await asyncio.sleep(0)
        while sum(task.done() for task in asking) < 4:
            await asyncio.sleep(0.01)
        assert leaving.asked == 4
        leaving.ended.set()
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*asking)
        assert all(a.status == 200 and b"good" in a.body for a in answers)
        assert served.metric("octet_retries_total", pool="fake", reason="lost") == 4
        assert served.metric("octet_deadlines_total", stage="first_token") == 0


async def test_what_has_begun_and_what_is_back_in_time_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member, "GONE_S", 0.05)
    leaving, gone = Leaving([chunk("a"), None]), asyncio.Event()
    begun: asyncio.Queue[Reply] = asyncio.Queue()
    async with in_process(("fake", [leaving]), pools=SETTINGS) as served:
        body = BODY | {"stream": True}
        request = served.request("/v1/completions", body, gone=gone, on_piece=begun.put_nowait)
        asking = asyncio.create_task(request)
        await begun.get()
        leaving.ended.set()
        (only,) = served.gateway.pools["fake"].members
        while only.reachable:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not asking.done() and leaving.running == 1
        gone.set()
        assert (await asking).body == chunk("a")


@played()
async def test_who_is_not_ready_is_within_reach(scene: Scene) -> None:
    """It may finish what it has, and end the connections that carry nothing before that."""
    given_up = asyncio.Event()
    lease = scene.member.lease(1)
    lease.given_up = given_up.set
    scene.server.says_ready = False
    await scene.until("not_ready", 6)
    await asyncio.sleep(2 * member.GONE_S)
    scene.server.die()
    await asyncio.sleep(member.GONE_S - 1)
    assert scene.member.standing == "unreachable" and not given_up.is_set()
    await asyncio.sleep(2)
    assert given_up.is_set()
    lease.release()


@played()
async def test_who_is_gone_behind_a_proxy_is_given_up_too(scene: Scene) -> None:
    """The proxy takes connections, and ends them when it finds nobody behind it."""
    given_up = asyncio.Event()
    lease = scene.member.lease(1)
    lease.given_up = given_up.set
    scene.server.says_ready = False
    scene.server.die()
    for _ in range(int(member.GONE_S)):
        await asyncio.sleep(1)
        scene.server.restart()
        await scene.until("not_ready", 1)
        assert not given_up.is_set()
        scene.server.die()
    await asyncio.sleep(1)
    assert given_up.is_set()
    lease.release()


class SlowToEnd(Mute):
    """Takes longer to let go of a request than the client has time."""

    async def relay(self, *arguments: Any) -> Any:
        try:
            await super().relay(*arguments)
        finally:
            await asyncio.sleep(0.4)


async def answer_of(served: Client, leaving: Leaving, within_s: str) -> Reply:
    """To a request that `leaving` had when it ended."""
    request = served.request("/v1/completions", BODY, {"x-request-timeout": within_s})
    asking = asyncio.create_task(request)
    while not leaving.asked:
        await asyncio.sleep(0)
    leaving.ended.set()
    async with asyncio.timeout(10):
        return await asking


async def test_who_is_given_up_when_the_time_is_over_is_not_asked_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing would end the second attempt."""
    monkeypatch.setattr(member, "GONE_S", 0.05)
    leaving, silent = SlowToEnd(), Scripted([None])
    async with in_process(("fake", [leaving, silent]), pools=SETTINGS) as served:
        reply = await answer_of(served, leaving, within_s="0.3")
        assert reply.status == 504 and silent.asked == 0


async def test_the_deadline_of_the_whole_is_still_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After one was given up: what ends the second attempt is not what ended the first."""
    monkeypatch.setattr(member, "GONE_S", 0.05)
    leaving, silent = Mute(), Scripted([None])
    async with in_process(("fake", [leaving, silent]), pools=SETTINGS) as served:
        reply = await answer_of(served, leaving, within_s="2")
        assert reply.status == 504 and silent.asked == 1
        assert served.metric("octet_deadlines_total", stage="total") == 1

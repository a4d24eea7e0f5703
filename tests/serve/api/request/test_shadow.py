"""Copies of requests for a pool on trial: seen there, counted, and never felt by the client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from octet.errors import BackendUnavailable
from serve.config import ModelConfig
from serve.gateway.state import Epoch
from serve.gateway.status import readiness
from serve.gateway.status import status as status_of
from serve.routing import Routes
from tests.serve.in_process import Client, in_process
from tests.serve.upstreams import DONE, Scripted, chunk, whole
from tests.serve.waiting import until

BODY = {"model": "m", "prompt": "abc", "max_tokens": 4}
STREAM = [chunk("a"), DONE]
TURNS = {"policy": "round_robin"}


@asynccontextmanager
async def shadowed(shadow: Scripted, **settings: Any) -> AsyncIterator[Client]:
    """A model whose main pool answers at once, with a copy of each request for `shadow`."""
    models = {"m": {"pool": "main", "shadow": {"pool": "trial", **settings}}}
    async with in_process(("main", [Scripted(whole())]), ("trial", [shadow]), models=models) as one:
        yield one


async def outcomes(served: Client) -> dict[str, float]:
    """How the copies ended, once none is under way."""
    await until(lambda: not served.gateway.background)
    found = {
        name: served.metric("octet_shadow_requests_total", pool="trial", outcome=name)
        for name in ("ok", "refused", "failed", "timeout", "unavailable", "skipped", "cancelled")
    }
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("outcome", [whole(), STREAM], ids=["whole", "streamed"])
async def test_a_copy_is_answered_beside_the_request(outcome: Any) -> None:
    trial = Scripted(outcome)
    async with shadowed(trial) as served:
        for _ in range(3):
            assert (await served.post("/v1/completions", BODY))[0] == 200
            assert await outcomes(served)
        assert (await outcomes(served), trial.asked) == ({"ok": 3}, 3)
        labels = {"key": "anonymous", "model": "m", "precision": "", "counted": "backend"}
        # The copies' tokens are nobody's.
        assert served.metric("octet_tokens_total", **labels, backend="main-1", type="output") == 3
        assert served.metric("octet_tokens_total", **labels, backend="trial-1", type="output") == 0


WRONG = {
    "failed": BackendUnavailable("no", kind="failed"),
    "cut": [chunk(), BackendUnavailable("cut", kind="lost")],
    "defect": RuntimeError("a defect"),
}


@pytest.mark.parametrize("outcome", WRONG.values(), ids=WRONG)
async def test_what_a_copy_does_wrong_is_its_own_affair(outcome: Any) -> None:
    async with shadowed(Scripted(outcome)) as served:
        assert (await served.post("/v1/completions", BODY))[0] == 200
        assert await outcomes(served) == {"failed": 1}


async def test_copies_are_bounded_and_delay_nobody() -> None:
    silent = Scripted([None])
    async with shadowed(silent, max_in_flight=2) as served:
        async with asyncio.timeout(60):
            for _ in range(5):
                assert (await served.post("/v1/completions", BODY))[0] == 200
                await asyncio.sleep(0)
        assert (silent.asked, len(served.gateway.background)) == (2, 2)
        served.gateway.drain(1.0)
        assert await outcomes(served) == {"skipped": 3, "cancelled": 2}
        assert silent.running == 0


async def test_a_hung_backend_of_copies_is_a_failure_and_a_slow_one_none() -> None:
    quick = {"timeouts": {"total_s": 0.03}, "health": {"probe_after_s": None}}
    models = {"m": {"pool": "main", "shadow": {"pool": "trial"}}}
    slow, hung = Scripted([chunk(), None]), Scripted([None])
    async with in_process(
        ("main", [Scripted(whole())]),
        ("trial", [slow, hung]),
        models=models,
        pools={"trial": quick | {"ejection": {"failures": 2}, "routing": TURNS}},
    ) as served:
        for _ in range(8):
            await served.request("/v1/completions", BODY | {"stream": True})
            await until(lambda: not served.gateway.background)
        assert await outcomes(served) == {"timeout": 8}
        standings = [member.standing for member in served.gateway.pools["trial"].members]
        assert standings == ["in", "ejected"]


async def test_the_pool_of_a_copy_is_closed_after_it() -> None:
    """Though the request that it copies is long done, and a reload took the pool out of use."""
    goes_on = asyncio.Event()

    class Waiting(Scripted):
        closed = False

        async def relay(self, *arguments: Any) -> Any:
            await goes_on.wait()
            assert not self.closed
            return await super().relay(*arguments)

        async def close(self) -> None:
            self.closed = True

    trial = Waiting(whole())
    async with shadowed(trial) as served:
        gateway = served.gateway
        assert (await served.post("/v1/completions", BODY))[0] == 200
        config = gateway.config.model_copy(update={"models": {"m": ModelConfig(pool="main")}})
        pools = {"main": gateway.pools["main"]}
        gateway.replace(Epoch(config, Routes(config.models, pools), gateway.keys), pools)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not trial.closed and gateway.background
        goes_on.set()
        await until(lambda: trial.closed)
        assert await outcomes(served) == {"ok": 1}


async def test_a_shadow_alone_makes_nothing_ready() -> None:
    """Clients get no answer of its: a gateway with nothing else must get no traffic."""
    async with shadowed(Scripted(whole())) as served:
        gateway = served.gateway
        assert readiness(gateway)["ready"] and served.metric("octet_ready") == 1
        (main,) = gateway.pools["main"].members
        main.go_out("gone", reachable=False)
        assert gateway.pools["trial"].ready
        assert not readiness(gateway)["ready"] and not status_of(gateway)["ready"]
        assert served.metric("octet_ready") == 0
        assert [entry["pool"] for entry in readiness(gateway)["models"]["m"]] == ["main"]

"""The health check over real connections, to the fakes of real servers."""

import asyncio
from collections.abc import Callable

import pytest

from serve.config import PoolConfig
from serve.routing import Member, Pool
from serve.routing.policies import Ask
from tests.fake_servers import FakeOpenAI, FakeTriton, running


async def until(standing: str, member: Member) -> None:
    async with asyncio.timeout(60):
        while member.standing != standing:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("vllm", FakeOpenAI),
        ("openai", lambda: FakeOpenAI(flavour="sglang")),
        ("triton", FakeTriton),
    ],
)
async def test_one_that_is_restarted_is_out_meanwhile_and_back_after_one_token(
    kind: str, make: Callable[[], FakeOpenAI | FakeTriton]
) -> None:
    async with running(make()) as server:
        address = server.url.removeprefix("http://") if kind == "triton" else server.url
        entry = {"type": kind, "url": address, "model": "fake"}
        health = {"reconnect_s": 0.02, "load_interval_s": 0.05}
        config = PoolConfig.model_validate({"backends": [entry], "health": health})
        pool = Pool.from_config("p", config, "fake")
        await pool.start()
        (member,) = pool.members
        try:
            assert pool.choose(Ask(10)) is member and pool.ready
            await server.stop()
            await until("unreachable", member)
            assert pool.choose(Ask(10)) is None and not pool.ready and member.last_error
            proved_at = member.last_success
            await server.start(int(address.rpartition(":")[2]))
            await until("in", member)
            assert member.last_success > proved_at and pool.choose(Ask(10)) is member
        finally:
            await pool.close()

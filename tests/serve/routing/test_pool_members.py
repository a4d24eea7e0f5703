"""Members that come and go: started together, prepared beside a pool, and closed once idle."""

import asyncio

import pytest

from octet.errors import OctetError
from serve.config import HttpConfig, PoolConfig
from serve.routing import Pool
from serve.routing import pool as pool_module
from serve.routing.policies import Ask
from tests.serve.routing.stand_ins import Server, fail, servers
from tests.serve.routing.virtual_time import virtual

ASK = Ask(10)


@virtual
async def test_starting_fails_with_the_first_that_can_never_work_and_closes_all() -> None:
    class Broken(Server):
        async def start(self) -> None:
            raise OctetError("no such export")

    backends = [Server("a"), Broken("b")]
    with pytest.raises(OctetError, match="no such export"):
        await Pool.of("p", backends).start()
    assert all(backend.closed for backend in backends)


@virtual
async def test_starting_looks_at_all_at_once_and_waits_for_nobody_who_hangs() -> None:
    backends = servers(4)
    backends[1].die()
    backends[2].says_ready = False
    backends[3].hangs = True
    loop = asyncio.get_running_loop()
    it = Pool.of("p", backends, clock=loop.time)
    await it.start()
    assert loop.time() <= 2.0
    assert [m.standing for m in it.members[:3]] == ["in", "unreachable", "not_ready"]
    assert "refused" in it.members[1].last_error
    assert it.ready and it.choose(ASK, it.members[3:]) is it.members[0]
    await it.close()
    assert all(backend.closed and not backend.connected for backend in backends)
    assert len(asyncio.all_tasks()) == 1


@virtual
async def test_one_that_is_left_out_finishes_what_it_has_and_is_closed() -> None:
    backends = servers(2)
    it = Pool.of("p", backends, clock=asyncio.get_running_loop().time)
    await it.start()
    gone, stays = it.members
    lease, kept = gone.lease(5), stays.lease(7)
    it.swap(it.config, [stays])
    assert it.members == (it.choose(ASK),) == (stays,) and it.retiring == (gone,)
    assert gone.standing == "leaving" and stays.outstanding_tokens == 7
    await asyncio.sleep(100)
    assert not backends[0].closed
    lease.succeeded()
    lease.release()
    await asyncio.sleep(0.1)
    assert backends[0].closed and not backends[1].closed and it.retiring == ()
    kept.release()
    await it.close()
    assert len(asyncio.all_tasks()) == 1


@virtual
async def test_closing_does_not_wait_for_those_that_are_retiring() -> None:
    backends = servers(2)
    it = Pool.of("p", backends)
    it.members[0].lease(5)
    it.swap(it.config, it.members[1:])
    await it.close()
    await it.close()
    assert [backend.closes for backend in backends] == [1, 1]
    assert len(asyncio.all_tasks()) == 1


@virtual
async def test_closing_amid_the_closing_of_one_that_retires_closes_it_once() -> None:
    class Slow(Server):
        async def close(self) -> None:
            await asyncio.sleep(1)
            await super().close()

    backend = Slow()
    it = Pool.of("p", [backend], clock=asyncio.get_running_loop().time)
    await it.start()
    it.swap(it.config, [])
    await asyncio.sleep(0.5)
    await it.close()
    assert backend.closes == 1 and not backend.connected
    assert len(asyncio.all_tasks()) == 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Server]:
    """What `make_backend` makes, by its URL."""
    made: dict[str, Server] = {}

    def make(model: str, config: HttpConfig) -> Server:
        return made.setdefault(config.url, Server(config.url))

    monkeypatch.setattr(pool_module, "make_backend", make)
    return made


@virtual
async def test_one_that_is_prepared_is_looked_at_and_gets_nothing_before_it_is_taken(
    made: dict[str, Server],
) -> None:
    it = Pool.of("p", servers(1), clock=asyncio.get_running_loop().time)
    await it.start()
    entries = [HttpConfig(type="vllm", url=f"http://{name}") for name in "ab"]
    new = await asyncio.gather(*(it.prepare(entry, "admin") for entry in entries))
    assert [(m.name, m.origin, m.standing) for m in new] == [
        ("p-2", "admin", "in"),
        ("p-3", "admin", "in"),
    ]
    assert [it.choose(ASK) for _ in range(3)] == [*it.members] * 3
    it.swap(it.config, [*it.members, new[1]])
    assert {it.choose(ASK) for _ in range(3)} == {it.members[0], new[1]}
    await it.discard(new[0])
    assert made["http://a"].closed and not made["http://b"].closed
    made["http://b"].die()
    await asyncio.sleep(0.01)
    assert new[1].standing == "unreachable"  # it is watched like any other
    await it.close()
    assert len(asyncio.all_tasks()) == 1


@virtual
async def test_one_that_can_never_work_is_closed_again(made: dict[str, Server]) -> None:
    class Broken(Server):
        async def start(self) -> None:
            raise OctetError("no such export")

    made["http://a"] = Broken()
    it = Pool.of("p", servers(1))
    with pytest.raises(OctetError, match="no such export"):
        await it.prepare(HttpConfig(type="vllm", url="http://a"))
    assert made["http://a"].closed and len(it.members) == 1
    assert len(asyncio.all_tasks()) == 1


@virtual
async def test_new_settings_count_from_now_on_and_state_stays() -> None:
    backends = servers(3)
    settings = {"ejection": {"failures": 9}, "health": {"probe_after_s": None}}
    config = PoolConfig.model_validate(settings)
    it = Pool.of("p", backends, config, clock=asyncio.get_running_loop().time)
    await it.start()
    lease = it.members[0].lease(100)
    settings = {
        "ejection": {"failures": 1},
        "routing": {"policy": "session"},
        "retries": {"min_concurrent": 0},
        "health": {"probe_after_s": 10},
    }
    it.swap(PoolConfig.model_validate(settings), it.members)
    assert it.members[0].outstanding_tokens == 100
    assert len({it.choose(Ask(1, session="alice")) for _ in range(9)}) == 1
    assert not it.budget.take()
    fail(it.members[1])
    assert it.members[1].standing == "ejected"
    await asyncio.sleep(1)
    assert backends[2].probes == 1
    lease.release()
    await it.close()

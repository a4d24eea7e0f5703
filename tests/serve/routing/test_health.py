"""Health checks, in virtual time: what is noticed, how soon, and who comes back when."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest

from octet.errors import BackendError, BackendUnavailable
from serve.backends.base import LoadReport
from serve.config import PoolConfig
from serve.routing import Member, Pool
from tests.serve.routing.stand_ins import Server
from tests.serve.routing.virtual_time import run

Scene = Callable[[Server, Member], Awaitable[None]]
DEAD = BackendError("Stub process 'x' is not healthy", kind="dead")


def play(scene: Scene, server: Server | None = None, **health: float | None) -> None:
    """`scene` with one started member of two; afterwards nothing may be left running.

    The other one is well: the last that serves is not ejected for what it did to requests.
    """
    server = server or Server()

    async def main() -> None:
        config = PoolConfig.model_validate(
            {"health": {"probe_after_s": 30} | health, "ejection": {"duration_s": 5}}
        )
        backends = [server, Server("http://b")]
        pool = Pool.of("p", backends, config, clock=asyncio.get_running_loop().time)
        await pool.start()
        await scene(server, pool.members[0])
        await pool.close()
        assert len(asyncio.all_tasks()) == 1 and server.connected == 0

    run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(standing: str, member: Member, limit_s: float) -> float:
    """Seconds until `member` has that standing."""
    began = now()
    while member.standing != standing:
        await asyncio.sleep(0.01)
        assert now() - began <= limit_s, f"still {member} after {limit_s} s"
    return now() - began


def test_the_end_of_the_held_connection_is_seen_at_once() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(7.3)
        server.die()
        await asyncio.sleep(0.001)
        assert member.standing == "unreachable" and "ended" in member.last_error

    play(scene)


def test_even_while_it_hangs_over_another_question() -> None:
    async def scene(server: Server, member: Member) -> None:
        server.hangs = True
        await asyncio.sleep(6)  # it is being asked whether it is ready
        server.die()
        await asyncio.sleep(0.001)
        assert member.standing == "unreachable"

    play(scene)


def test_after_a_restart_it_generates_one_token_and_is_back() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        server.die()
        await asyncio.sleep(60)
        server.probe_s = 0.2
        probes = server.probes
        server.restart()
        assert await until("in", member, 2.0) < 0.8
        assert server.probes == probes + 1
        assert member.last_success == pytest.approx(now(), abs=0.05)

    play(scene)


def test_a_new_process_starts_with_a_closed_breaker() -> None:
    async def scene(server: Server, member: Member) -> None:
        for _ in range(50):  # all that it had are lost with it
            member.lease(1).failed(BackendError("reset", kind="lost"))
        assert member.breaker.state == "open"
        server.die()
        await asyncio.sleep(1)
        server.restart()
        assert await until("in", member, 2.0) < 0.6

    play(scene)


def test_one_that_loads_its_model_is_not_asked_before_it_is_ready() -> None:
    async def scene(server: Server, member: Member) -> None:
        server.die()
        await asyncio.sleep(1)
        server.says_ready = False
        server.restart()
        await asyncio.sleep(20)
        assert member.standing == "not_ready" and server.probes == 1
        assert member.last_error == "it is not ready"
        server.says_ready = True
        assert await until("in", member, 2.0) < 0.6

    play(scene)


def test_one_that_comes_back_dead_is_ejected_and_probed_less_and_less() -> None:
    async def scene(server: Server, member: Member) -> None:
        server.die()
        await asyncio.sleep(1)
        server.probe_error = DEAD
        server.restart()
        await until("ejected", member, 2.0)
        probes = server.probes
        await asyncio.sleep(139)  # after 5, 10, 15, 20, 25, 30 s
        assert member.standing == "ejected" and server.probes - probes == 6
        server.probe_error = None
        await until("in", member, 61)

    play(scene)


def test_ready_over_a_dead_model_is_ejected_by_its_probe() -> None:
    """Triton answers READY while every call fails with "Stub process is not healthy"."""

    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        server.probe_error = DEAD
        assert await until("ejected", member, 31) >= 28
        assert server.connected == 1 and "not healthy" in member.last_error
        server.probe_error = None
        assert await until("in", member, 6) >= 4

    play(scene)


def test_it_is_probed_at_the_start_and_then_only_when_nothing_succeeds() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        assert server.probes == 1
        for _ in range(100):
            await asyncio.sleep(10)
            member.lease(1).succeeded()
        assert server.probes == 1
        await asyncio.sleep(100)
        assert server.probes == 4

    play(scene)


def test_no_probes_where_none_are_wanted() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1000)
        server.die()
        await asyncio.sleep(1)
        server.restart()
        await until("in", member, 1)
        assert server.probes == 0
        member.lease(1).failed(DEAD)
        await until("trial", member, 6)  # a real request will find out

    play(scene, probe_after_s=None)


def test_a_busy_one_is_not_ejected_by_a_probe_that_times_out() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        server.probe_s = 10_000  # all places are taken
        lease = member.lease(1)
        await asyncio.sleep(32)  # long enough for a probe to begin
        for _ in range(100):
            await asyncio.sleep(20)
            lease.progressed()
            assert member.standing == "in"

    play(scene)


def test_nor_one_whose_report_shows_that_it_works() -> None:
    """Its answers are not streamed, or are another gateway's."""

    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        server.probe_s = 10_000
        for step in range(100):
            server.report = LoadReport(8, 3, step / 100, 1000)
            await asyncio.sleep(5)
            assert member.standing == "in"
        await until("ejected", member, 61)  # hung: its cache does not change any more

    play(scene)


def test_an_idle_one_that_hangs_is_ejected() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        server.probe_s = 10_000
        await until("ejected", member, 61)
        assert "no token within 30 s" in member.last_error

    play(scene)


def test_one_that_takes_no_more_is_not_ejected_nor_pestered() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        server.probe_error = BackendError("queue full", kind="overloaded")
        await asyncio.sleep(80)
        assert member.standing == "in" and 2 < server.probes <= 12

    play(scene)


def test_one_that_answers_nothing_is_out_unless_it_is_known_to_work() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        server.hangs = True
        for _ in range(20):
            await asyncio.sleep(1)
            member.lease(1).progressed()
            assert member.standing == "in"
        assert await until("not_ready", member, 15) > 5
        assert "does not report within 2 s" in member.last_error
        server.hangs = False
        await until("in", member, 3)

    play(scene)


def test_a_request_that_lost_its_connection_has_it_looked_into() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        probes = server.probes
        member.lease(1).failed(BackendUnavailable("reset", kind="lost"))
        assert member.standing == "unreachable"
        assert await until("in", member, 0.1) < 0.05  # its held connection is up, and it is ready
        assert server.probes == probes

        server.says_ready = False
        member.lease(1).failed(BackendUnavailable("reset", kind="lost"))
        assert await until("not_ready", member, 0.1) < 0.05

    play(scene)


def test_failures_of_real_requests_want_a_token_and_then_a_real_success() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        for _ in range(5):
            member.lease(1).failed(BackendError("500"))
        assert await until("trial", member, 6) >= 5
        assert server.probes == 2
        member.lease(1).succeeded()
        assert member.standing == "in"

    play(scene)


def test_a_probe_that_began_in_an_earlier_life_says_nothing() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        server.probe_s = 20
        await asyncio.sleep(35)  # a probe is under way
        server.probe_error = DEAD
        server.die()
        await asyncio.sleep(0.1)
        server.probe_error, server.probe_s = None, 0
        server.restart()
        await until("in", member, 1)
        server.probe_error = DEAD  # what the old probe will hear
        await asyncio.sleep(18)
        assert member.standing == "in"

    play(scene)


def test_a_probe_that_began_before_an_ejection_does_not_end_it() -> None:
    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        server.probe_s = 2
        while server.probes < 2:
            await asyncio.sleep(0.1)
        for _ in range(5):
            member.lease(1).failed(BackendError("500"))
        await asyncio.sleep(3)
        assert member.standing == "ejected"
        await until("trial", member, 5)

    play(scene)


def test_recent_success_says_nothing_of_one_that_went_away() -> None:
    """Behind a balancer, a connection is taken though nobody is there to answer."""

    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(1)
        member.lease(1).succeeded()
        server.die()
        server.hangs = True
        server.restart()
        await asyncio.sleep(4)
        assert server.connected == 1 and not member.up

    play(scene)


def test_its_load_is_read_and_kept_with_what_it_had_then() -> None:
    async def scene(server: Server, member: Member) -> None:
        member.lease(70)
        server.report = LoadReport(3, 1, 0.25, 4096)
        await asyncio.sleep(1.2)
        assert member.report == server.report and member.capacity_tokens == 4096
        assert (member.reported_tokens, member.reported_in_flight) == (70, 1)
        assert now() - member.reported_at < 1.2

    play(scene)


OUT = {"ready": "not_ready", "hold": "unreachable", "probe": "ejected", "load": "in"}


@pytest.mark.parametrize(("question", "standing"), OUT.items())
def test_a_defect_is_logged_in_a_line_and_puts_it_out_until_it_is_over(
    question: str, standing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who cannot say how busy it is may serve all the same."""

    async def scene(server: Server, member: Member) -> None:
        await asyncio.sleep(4)
        assert member.standing == standing
        (line,) = [r for r in caplog.records if "a defect" in r.getMessage()]
        assert line.exc_info is None and "p-1" in line.getMessage()
        delattr(server, question)
        await until("in", member, 8)
        server.report = LoadReport(1, 0, 0.1, None)
        await asyncio.sleep(2)
        assert member.report is not None

    async def broken(*_given: Any) -> Any:
        raise ValueError("a defect")

    server = Server()
    setattr(server, question, broken)
    with caplog.at_level(logging.WARNING):
        play(scene, server)


def test_a_check_that_breaks_begins_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_arguments: Any) -> None:
        monkeypatch.undo()
        raise ValueError("a mistake of ours")

    async def scene(server: Server, member: Member) -> None:
        monkeypatch.setattr(member, "reported", wrong)
        server.report = LoadReport(1, 0, 0.1, None)
        await asyncio.sleep(2)
        assert "the health check of p-1 failed" in caplog.text
        await asyncio.sleep(2)
        assert member.report is not None
        server.die()
        await asyncio.sleep(0.01)
        assert member.standing == "unreachable"

    with caplog.at_level(logging.WARNING):
        play(scene)


@pytest.mark.parametrize("turns", range(5))
def test_a_doubt_at_the_last_moment_does_not_hold_up_the_end(turns: int) -> None:
    """A request loses its connection while the pool is closed, some turns of the loop later."""

    async def main() -> None:
        pool = Pool.of("p", [Server()], clock=asyncio.get_running_loop().time)
        await pool.start()
        await asyncio.sleep(0.01)  # until it waits for its next question
        doubt, began = pool.members[0].on_doubt, now()
        assert doubt is not None
        closing = asyncio.create_task(pool.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        doubt()
        async with asyncio.timeout(60):
            await closing
        assert now() - began < 1

    run(main())


def test_checks_know_nothing_of_the_request_that_added_the_member() -> None:
    """Whose id every line that they log would show."""
    request: ContextVar[str] = ContextVar("request", default="")
    seen: set[str] = set()

    class Looking(Server):
        async def ready(self) -> bool:
            seen.add(request.get())
            return await super().ready()

    async def main() -> None:
        request.set("an administrator's")
        pool = Pool.of("p", [Looking()], clock=asyncio.get_running_loop().time)
        await pool.start()
        await pool.close()
        assert seen == {""}

    run(main())

"""Tests which incarnation a proof holds for, and which requests wait until that is known."""

import asyncio

import pytest

from octet.errors import BackendUnavailable
from serve.backends.base import Incarnation
from serve.routing import Pool
from tests.serve.proof.exams import FakeExam, FakeExams
from tests.serve.proof.scene import ADDRESS, Scene, play
from tests.serve.routing.stand_ins import Server
from tests.serve.routing.virtual_time import run


def test_the_end_of_its_connection_ends_its_proof_at_once() -> None:
    async def act(scene: Scene) -> None:
        lease = scene.member.lease(1)
        scene.server.die()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not scene.serves() and lease.maybe_restarted and await lease.restarted()
        scene.exam.says[ADDRESS] = "worse"
        scene.server.restart()
        await scene.until("refused", 2)
        lease.release()

    play(act)


def test_a_swap_behind_an_idle_connection_is_seen_where_the_server_says_when_it_began() -> None:
    server = Server(ADDRESS)
    server.reported = Incarnation(("m",), started=1.0)

    async def act(scene: Scene) -> None:
        lease = scene.member.lease(1)
        server.close_idle()
        assert not scene.serves() and lease.maybe_restarted
        assert await lease.restarted() is False and scene.serves()  # it is the same one
        server.reported = Incarnation(("m",), started=2.0)
        scene.exam.says[ADDRESS] = "worse"
        server.close_idle()
        assert not scene.serves() and await lease.restarted() and not scene.serves()
        await scene.until("refused", 2)
        lease.release()

    play(act, server=server)


def test_one_that_does_not_say_is_proven_anew_after_each_end_of_its_connection() -> None:
    async def act(scene: Scene) -> None:
        scene.server.close_idle()
        assert not scene.serves()
        await asyncio.sleep(0.1)
        assert scene.member.standing == "unproven" and not scene.serves()
        await scene.until("in", 1)
        assert scene.asked == 2

    play(act)


def test_one_that_closes_idle_connections_all_the_time_is_not_asked_all_the_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As some servers do, after 5 s: the proof stays, and the schedule asks."""

    async def act(scene: Scene) -> None:
        out = 0
        for _ in range(720):
            await asyncio.sleep(4)
            scene.server.close_idle()
            scene.serve(6000)
            await asyncio.sleep(1)
            out += not scene.serves()
        assert scene.proof.outcomes["as_expected"] <= 6 + 12 and out <= 6
        assert scene.proof.share(scene.member.served_tokens) <= 0.01
        scene.exam.says[ADDRESS] = "worse"
        await scene.until("refused", 400)  # by the schedule
        scene.server.die()
        await asyncio.sleep(0.001)
        scene.exam.says.clear()
        scene.server.restart()
        await scene.until("in", 2)
        scene.server.close_idle()
        await scene.until("unproven", 1)  # another reported, of which nothing is believed

    play(act)
    said = [r for r in caplog.records if "Raise its idle timeout" in r.getMessage()]
    assert 5 <= len(said) <= 8


def test_a_second_close_while_the_first_is_looked_into_costs_no_interval() -> None:
    class Slow(Server):
        async def incarnation(self) -> Incarnation | None:
            await asyncio.sleep(0.2)
            return Incarnation(("m",), started=1.0)

    async def act(scene: Scene) -> None:
        scene.server.close_idle()
        await asyncio.sleep(0.1)
        scene.server.close_idle()
        await scene.until("in", 1)
        assert scene.asked == 1

    play(act, server=Slow(ADDRESS))


def test_one_that_says_since_when_it_runs_no_more_is_another() -> None:
    server = Server(ADDRESS)
    server.reported = Incarnation(("m",), started=1.0)

    async def act(scene: Scene) -> None:
        for reported in (None, Incarnation(("m",))):
            server.reported = reported
            server.close_idle()
            await asyncio.sleep(0.1)
            assert scene.member.standing == "unproven"
            server.reported = Incarnation(("m",), started=1.0)
            await scene.until("in", 12)

    play(act, server=server)


def test_a_model_that_was_loaded_again_under_the_same_connection_is_proven_anew() -> None:
    server = Server(ADDRESS)
    server.reported = Incarnation(("digest",), counts=(100, 7))

    async def act(scene: Scene) -> None:
        await asyncio.sleep(60)
        server.reported = Incarnation(("digest",), counts=(160, 9))
        await asyncio.sleep(60)
        assert scene.asked == 1
        server.reported = Incarnation(("digest",), counts=(2, 1))
        scene.exam.says[ADDRESS] = "worse"
        await scene.until("refused", 7)

    play(act, server=server)


def test_two_servers_behind_one_address_are_told_to_be_two(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of a load balancer: which of them was proven is not known."""

    class Balanced(Server):
        async def incarnation(self) -> Incarnation | None:
            self.reported = Incarnation(("m",), started=5.0 if self.reported is None else 9.0)
            return self.reported

    async def act(scene: Scene) -> None:
        await scene.until("unproven", 7)
        await scene.until("in", 2)

    play(act, server=Balanced(ADDRESS))
    (line,) = [r.getMessage() for r in caplog.records if "another incarnation" in r.getMessage()]
    assert line.startswith("p/p-1 reports another incarnation")
    assert "configure a backend for each" in line and ADDRESS not in line


def test_a_lost_request_has_its_backend_looked_at_and_nobody_is_sent_there_meanwhile() -> None:
    async def act(scene: Scene) -> None:
        lost, other = scene.member.lease(1), scene.member.lease(1)
        lost.failed(BackendUnavailable("reset", kind="lost"))
        lost.release()
        assert not scene.serves() and other.maybe_restarted
        assert await scene.pool.checked() and scene.serves()
        assert not await other.restarted() and scene.asked == 1
        other.release()

    play(act)


def test_one_that_was_ejected_and_kept_its_connection_needs_no_new_proof() -> None:
    async def act(scene: Scene) -> None:
        scene.member.breaker.trip()
        assert scene.member.standing == "ejected"
        await asyncio.sleep(10)
        assert scene.member.standing == "trial" and scene.asked == 1

    play(act)


def test_while_it_is_ejected_it_is_not_asked() -> None:
    async def act(scene: Scene) -> None:
        scene.member.breaker.trip()
        asked = scene.asked
        await asyncio.sleep(4)
        assert scene.asked == asked and scene.member.standing == "ejected"
        scene.exam.busy.clear()
        await scene.until("trial", 20)

    play(act, FakeExam(busy={ADDRESS}))


def test_no_proof_is_wanted_of_a_pool_without_golden_records() -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.proof is None and scene.serves()
        assert scene.pool.proven.kl is None and scene.pool.proven.artifact is None

    async def main() -> None:
        server = Server(ADDRESS)
        pool = Pool.of("p", [server], clock=asyncio.get_running_loop().time)
        await pool.start()
        await act(Scene(FakeExam(), server, pool))
        lease = pool.members[0].lease(1)
        server.die()
        await asyncio.sleep(0.01)
        assert not lease.maybe_restarted  # a restarted server answers as well as another
        lease.release()
        await pool.close()

    run(main())
    play(act, enabled=False)


def test_nobody_waits_for_a_look_that_will_not_come() -> None:
    """The gateway ends while a lost connection is being looked into."""

    async def act(scene: Scene) -> None:
        lease = scene.member.lease(1)
        scene.server.hangs = True
        scene.member.doubt("reset")
        waiting = asyncio.ensure_future(lease.restarted())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await scene.pool.close()
        async with asyncio.timeout(1):
            assert await waiting  # it is not known to be the same
        lease.release()

    play(act)


def test_a_start_that_is_given_up_waits_for_nothing_more() -> None:
    async def main() -> None:
        server = Server(ADDRESS)
        server.hangs = True
        clock = asyncio.get_running_loop().time
        pool = Pool.of("p", [server], clock=clock, exams=FakeExams(FakeExam()))
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(0.5)
        starting.cancel()
        await asyncio.wait({starting})
        await pool.close()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run(main())

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
from tests.serve.routing.virtual_time import as_test, run, virtual

DEAD = BackendError("Stub process 'x' is not healthy", kind="dead")


def now() -> float:
    return asyncio.get_running_loop().time()


class Scene:
    """A started member of a pool of two."""

    def __init__(self, server: Server, member: Member) -> None:
        self.server, self.member = server, member

    async def until(self, standing: str, limit_s: float) -> float:
        """Seconds until the member has that standing."""
        began = now()
        while self.member.standing != standing:
            await asyncio.sleep(0.01)
            assert now() - began <= limit_s, f"still {self.member} after {limit_s} s"
        return now() - began


def play(
    scene: Callable[[Scene], Awaitable[None]],
    server: Server | None = None,
    **health: float | None,
) -> None:
    """`scene` with one of two members; afterwards nothing may be left running.

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
        await scene(Scene(server, pool.members[0]))
        await pool.close()
        assert len(asyncio.all_tasks()) == 1 and server.connected == 0

    run(main())


def played(**health: float | None) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test whose first parameter is a `Scene`."""
    return lambda scene: as_test(scene, lambda it: play(it, **health), 1)


@played()
async def test_the_end_of_the_held_connection_is_seen_at_once(scene: Scene) -> None:
    await asyncio.sleep(7.3)
    scene.server.die()
    await asyncio.sleep(0.001)
    assert scene.member.standing == "unreachable" and "ended" in scene.member.last_error


@played()
async def test_even_while_it_hangs_over_another_question(scene: Scene) -> None:
    scene.server.hangs = True
    await asyncio.sleep(6)  # it is being asked whether it is ready
    scene.server.die()
    await asyncio.sleep(0.001)
    assert scene.member.standing == "unreachable"


@played()
async def test_after_a_restart_it_generates_one_token_and_is_back(scene: Scene) -> None:
    await asyncio.sleep(1)
    scene.server.die()
    await asyncio.sleep(60)
    scene.server.probe_s = 0.2
    probes = scene.server.probes
    scene.server.restart()
    assert await scene.until("in", 2.0) < 0.8
    assert scene.server.probes == probes + 1
    assert scene.member.last_success == pytest.approx(now(), abs=0.05)


@played()
async def test_a_new_process_starts_with_a_closed_breaker(scene: Scene) -> None:
    for _ in range(50):  # all that it had are lost with it
        scene.member.lease(1).failed(BackendError("reset", kind="lost"))
    assert scene.member.breaker.state == "open"
    scene.server.die()
    await asyncio.sleep(1)
    scene.server.restart()
    assert await scene.until("in", 2.0) < 0.6


@played()
async def test_one_that_loads_its_model_is_not_asked_before_it_is_ready(scene: Scene) -> None:
    scene.server.die()
    await asyncio.sleep(1)
    scene.server.says_ready = False
    scene.server.restart()
    await asyncio.sleep(20)
    assert scene.member.standing == "not_ready" and scene.server.probes == 1
    assert scene.member.last_error == "it is not ready"
    scene.server.says_ready = True
    assert await scene.until("in", 2.0) < 0.6


@played()
async def test_one_that_comes_back_dead_is_ejected_and_probed_less_and_less(scene: Scene) -> None:
    scene.server.die()
    await asyncio.sleep(1)
    scene.server.probe_error = DEAD
    scene.server.restart()
    await scene.until("ejected", 2.0)
    probes = scene.server.probes
    await asyncio.sleep(139)  # after 5, 10, 15, 20, 25, 30 s
    assert scene.member.standing == "ejected" and scene.server.probes - probes == 6
    scene.server.probe_error = None
    await scene.until("in", 61)


@played()
async def test_ready_over_a_dead_model_is_ejected_by_its_probe(scene: Scene) -> None:
    """Triton answers READY while every call fails with "Stub process is not healthy"."""
    await asyncio.sleep(1)
    scene.server.probe_error = DEAD
    assert await scene.until("ejected", 31) >= 28
    assert scene.server.connected == 1 and "not healthy" in scene.member.last_error
    scene.server.probe_error = None
    assert await scene.until("in", 6) >= 4


@played()
async def test_a_probe_whose_connection_was_just_closed_is_sent_again(scene: Scene) -> None:
    await asyncio.sleep(1)
    scene.server.probe_losses, probes = 1, scene.server.probes
    await asyncio.sleep(32)
    assert scene.member.standing == "in" and scene.server.probes == probes + 2
    scene.server.probe_losses = 2
    assert await scene.until("ejected", 31) > 0


@played()
async def test_it_is_probed_at_the_start_and_then_only_when_nothing_succeeds(scene: Scene) -> None:
    await asyncio.sleep(1)
    assert scene.server.probes == 1
    for _ in range(100):
        await asyncio.sleep(10)
        scene.member.lease(1).succeeded()
    assert scene.server.probes == 1
    await asyncio.sleep(100)
    assert scene.server.probes == 4


@played(probe_after_s=None)
async def test_no_probes_where_none_are_wanted(scene: Scene) -> None:
    await asyncio.sleep(1000)
    scene.server.die()
    await asyncio.sleep(1)
    scene.server.restart()
    await scene.until("in", 1)
    assert scene.server.probes == 0
    scene.member.lease(1).failed(DEAD)
    await scene.until("trial", 6)  # a real request will find out


@played()
async def test_a_busy_one_is_not_ejected_by_a_probe_that_times_out(scene: Scene) -> None:
    await asyncio.sleep(1)
    scene.server.probe_s = 10_000  # all places are taken
    lease = scene.member.lease(1)
    await asyncio.sleep(32)  # long enough for a probe to begin
    for _ in range(100):
        await asyncio.sleep(20)
        lease.progressed()
        assert scene.member.standing == "in"


@played()
async def test_nor_one_whose_report_shows_that_it_works(scene: Scene) -> None:
    """Its answers are not streamed, or are another gateway's."""
    await asyncio.sleep(1)
    scene.server.probe_s = 10_000
    for step in range(100):
        scene.server.report = LoadReport(8, 3, step / 100, 1000)
        await asyncio.sleep(5)
        assert scene.member.standing == "in"
    await scene.until("ejected", 61)  # hung: its cache does not change any more


@played()
async def test_an_idle_one_that_hangs_is_ejected(scene: Scene) -> None:
    await asyncio.sleep(1)
    scene.server.probe_s = 10_000
    await scene.until("ejected", 61)
    assert "no token within 30 s" in scene.member.last_error


@played()
async def test_one_that_takes_no_more_is_not_ejected_nor_pestered(scene: Scene) -> None:
    await asyncio.sleep(1)
    scene.server.probe_error = BackendError("queue full", kind="overloaded")
    await asyncio.sleep(80)
    assert scene.member.standing == "in" and 2 < scene.server.probes <= 12


@played()
async def test_one_that_answers_nothing_is_out_unless_it_is_known_to_work(scene: Scene) -> None:
    await asyncio.sleep(1)
    scene.server.hangs = True
    for _ in range(20):
        await asyncio.sleep(1)
        scene.member.lease(1).progressed()
        assert scene.member.standing == "in"
    assert await scene.until("not_ready", 15) > 5
    assert "does not report within 2 s" in scene.member.last_error
    scene.server.hangs = False
    await scene.until("in", 3)


@played()
async def test_a_request_that_lost_its_connection_has_it_looked_into(scene: Scene) -> None:
    await asyncio.sleep(1)
    probes = scene.server.probes
    scene.member.lease(1).failed(BackendUnavailable("reset", kind="lost"))
    assert scene.member.standing == "unreachable"
    assert await scene.until("in", 0.1) < 0.05  # its held connection is up, and it is ready
    assert scene.server.probes == probes

    scene.server.says_ready = False
    scene.member.lease(1).failed(BackendUnavailable("reset", kind="lost"))
    assert await scene.until("not_ready", 0.1) < 0.05


@played()
async def test_failures_of_real_requests_want_a_token_and_then_a_real_success(scene: Scene) -> None:
    await asyncio.sleep(1)
    for _ in range(5):
        scene.member.lease(1).failed(BackendError("500"))
    assert await scene.until("trial", 6) >= 5
    assert scene.server.probes == 2
    scene.member.lease(1).succeeded()
    assert scene.member.standing == "in"


@played()
async def test_a_probe_that_began_in_an_earlier_life_says_nothing(scene: Scene) -> None:
    await asyncio.sleep(1)
    scene.server.probe_s = 20
    await asyncio.sleep(35)  # a probe is under way
    scene.server.probe_error = DEAD
    scene.server.die()
    await asyncio.sleep(0.1)
    scene.server.probe_error, scene.server.probe_s = None, 0
    scene.server.restart()
    await scene.until("in", 1)
    scene.server.probe_error = DEAD  # what the old probe will hear
    await asyncio.sleep(18)
    assert scene.member.standing == "in"


@played()
async def test_a_probe_that_began_before_an_ejection_does_not_end_it(scene: Scene) -> None:
    await asyncio.sleep(1)
    scene.server.probe_s = 2
    while scene.server.probes < 2:
        await asyncio.sleep(0.1)
    for _ in range(5):
        scene.member.lease(1).failed(BackendError("500"))
    await asyncio.sleep(3)
    assert scene.member.standing == "ejected"
    await scene.until("trial", 5)


@played()
async def test_recent_success_says_nothing_of_one_that_went_away(scene: Scene) -> None:
    """Behind a balancer, a connection is taken though nobody is there to answer."""
    await asyncio.sleep(1)
    scene.member.lease(1).succeeded()
    scene.server.die()
    scene.server.hangs = True
    scene.server.restart()
    await asyncio.sleep(4)
    assert scene.server.connected == 1 and not scene.member.up


@played()
async def test_its_load_is_read_and_kept_with_what_it_had_then(scene: Scene) -> None:
    scene.member.lease(70)
    scene.server.report = LoadReport(3, 1, 0.25, 4096)
    await asyncio.sleep(1.2)
    assert scene.member.report == scene.server.report and scene.member.capacity_tokens == 4096
    assert (scene.member.reported_tokens, scene.member.reported_in_flight) == (70, 1)
    assert now() - scene.member.reported_at < 1.2


OUT = {"ready": "not_ready", "hold": "unreachable", "probe": "ejected", "load": "in"}


@pytest.mark.parametrize(("question", "standing"), OUT.items())
def test_a_defect_is_logged_in_a_line_and_puts_it_out_until_it_is_over(
    question: str, standing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who cannot say how busy it is may serve all the same."""

    async def scene(scene: Scene) -> None:
        await asyncio.sleep(4)
        assert scene.member.standing == standing
        (line,) = [r for r in caplog.records if "a defect" in r.getMessage()]
        assert line.exc_info is None and "p-1" in line.getMessage()
        delattr(scene.server, question)
        await scene.until("in", 8)
        scene.server.report = LoadReport(1, 0, 0.1, None)
        await asyncio.sleep(2)
        assert scene.member.report is not None

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

    async def scene(scene: Scene) -> None:
        monkeypatch.setattr(scene.member, "reported", wrong)
        scene.server.report = LoadReport(1, 0, 0.1, None)
        await asyncio.sleep(2)
        assert "the health check of p-1 failed" in caplog.text
        await asyncio.sleep(2)
        assert scene.member.report is not None
        scene.server.die()
        await asyncio.sleep(0.01)
        assert scene.member.standing == "unreachable"

    with caplog.at_level(logging.WARNING):
        play(scene)


@pytest.mark.parametrize("turns", range(5))
@virtual
async def test_a_doubt_at_the_last_moment_does_not_hold_up_the_end(turns: int) -> None:
    """A request loses its connection while the pool is closed, some turns of the loop later."""
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


@virtual
async def test_checks_know_nothing_of_the_request_that_added_the_member() -> None:
    """Whose id every line that they log would show."""
    request: ContextVar[str] = ContextVar("request", default="")
    seen: set[str] = set()

    class Looking(Server):
        async def ready(self) -> bool:
            seen.add(request.get())
            return await super().ready()

    request.set("an administrator's")
    pool = Pool.of("p", [Looking()], clock=asyncio.get_running_loop().time)
    await pool.start()
    await pool.close()
    assert seen == {""}

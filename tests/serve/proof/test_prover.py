"""A backend and its proof, in virtual time: when it is asked, and what follows from the answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octet.errors import BackendUnavailable
from serve.backends.base import Incarnation
from serve.config import PoolConfig
from serve.proof.probe import Unprovable
from serve.proof.state import MemberProof
from serve.routing import Ask, Pool
from tests.serve.proof.exams import RECORD_TOKENS, FakeExam, FakeExams
from tests.serve.routing.stand_ins import Server
from tests.serve.routing.virtual_time import run

ADDRESS = "http://10.0.0.5:8000"


class Scene:
    """A started pool of one server."""

    def __init__(self, exam: FakeExam, server: Server, pool: Pool) -> None:
        self.exam = exam
        self.server = server
        self.pool = pool
        self.member = pool.members[0]

    @property
    def proof(self) -> MemberProof:
        assert self.member.proof is not None
        return self.member.proof

    @property
    def asked(self) -> int:
        """Probes that were begun, each look counted."""
        return len(self.exam.asked)

    def serves(self) -> bool:
        return self.pool.choose(Ask(1)) is self.member

    async def until(self, standing: str, limit_s: float) -> float:
        """Seconds until it has that standing; nobody is routed to it before it is `in`."""
        began = asyncio.get_running_loop().time()
        while self.member.standing != standing:
            assert self.serves() == (self.member.standing in ("in", "trial"))
            await asyncio.sleep(0.05)
            took = asyncio.get_running_loop().time() - began
            assert took <= limit_s, f"still {self.member} after {limit_s} s"
        return asyncio.get_running_loop().time() - began

    def serve(self, tokens: int) -> None:
        lease = self.member.lease(tokens)
        lease.served = tokens
        lease.succeeded()
        lease.release()


def play(
    act: Callable[[Scene], Awaitable[None]],
    exam: FakeExam | None = None,
    server: Server | None = None,
    **settings: Any,
) -> None:
    async def main() -> None:
        config = PoolConfig.model_validate({"health": {"probe_after_s": None}, "proof": settings})
        played, one = exam or FakeExam(), server or Server(ADDRESS)
        clock = asyncio.get_running_loop().time
        pool = Pool.of("p", [one], config, clock=clock, exams=FakeExams(played, config.proof))
        await pool.start()
        await act(Scene(played, one, pool))
        await pool.close()
        assert len(asyncio.all_tasks()) == 1 and one.connected == 0

    run(main())


def test_a_backend_serves_once_its_numbers_are_proven(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = Server(ADDRESS)
    server.die()

    async def act(scene: Scene) -> None:
        assert scene.member.standing == "unreachable" and not scene.serves()
        server.restart()
        await scene.until("unproven", 1)
        assert scene.pool.proven.kl is None and 0.4 < scene.pool.retry_after_s() < 3
        assert await scene.until("in", 1) >= 0.4
        assert scene.serves() and scene.exam.asked_of(ADDRESS) == [tuple(range(24))]
        assert (scene.pool.proven.kl, scene.pool.proven.kl_low) == (0.04, 0.01)
        assert scene.pool.proven.artifact == "a" * 64

    play(act, server=server)
    (line,) = [r for r in caplog.records if "is proven" in r.getMessage()]
    assert "KL 0.02 nats, 0.01 to 0.03 expected" in line.getMessage()
    fields: dict[str, Any] = vars(line)["fields"]
    assert fields["backend"] == "p-1" and fields["kl_interval"] == [0.01, 0.04]
    assert fields["expected_kl"] == [0.01, 0.03] and fields["probe_tokens"] == 2400


def test_a_start_waits_for_the_first_verdict() -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.standing == "in" and asyncio.get_running_loop().time() < 1

    play(act)


def test_but_not_for_ever() -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.standing == "unproven"
        assert 9 < asyncio.get_running_loop().time() < 13

    play(act, FakeExam(seconds=50))


@pytest.mark.parametrize("outcome", ["better", "worse"])
def test_numbers_that_are_not_as_expected_refuse_it(
    outcome: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.standing == "refused" and not scene.serves()
        assert not scene.pool.ready and scene.proof.outcomes[outcome] == 1
        told = scene.proof.as_json(0)
        assert told["cause"] == "match weights without their k_scale"
        assert told["remedy"] == "load the k_scale" and told["outcome"] == outcome
        assert scene.pool.retry_after_s() > 5
        assert scene.member.last_error == f"refused: {told['reason']}"
        assert not scene.member.recovered
        del scene.exam.says[ADDRESS]
        await scene.until("in", 30)
        assert scene.member.recovered

    play(act, FakeExam(says={ADDRESS: outcome}))
    (line,) = [r for r in caplog.records if "is refused" in r.getMessage()]
    assert line.levelno == logging.WARNING and "dropped k_scale" in line.getMessage()


def test_a_refused_backend_is_asked_again_ever_later_and_comes_in_once_it_is_right() -> None:
    async def act(scene: Scene) -> None:
        await asyncio.sleep(300)
        assert 4 <= scene.asked <= 7 and scene.member.standing == "refused"
        scene.exam.says.clear()
        await scene.until("in", 600)

    play(act, FakeExam(says={ADDRESS: "worse"}))


def test_one_that_is_refused_and_restarted_is_asked_at_once() -> None:
    async def act(scene: Scene) -> None:
        await asyncio.sleep(200)
        scene.exam.says.clear()
        scene.server.die()
        await asyncio.sleep(0.001)
        scene.server.restart()
        await scene.until("in", 2)

    play(act, FakeExam(says={ADDRESS: "worse"}))


FOUND = "E4M3 cache where E5M2 was declared"


@pytest.mark.parametrize("busy", [True, False])
def test_what_the_engine_says_of_itself_refuses_it_however_it_answers(busy: bool) -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.standing == "refused" and scene.asked == 1
        assert scene.proof.reason.startswith(FOUND) and "proof.golden" in scene.proof.reason
        told = scene.proof.as_json(0)
        assert told["cause"] == FOUND and "as it was exported" in told["remedy"]
        assert told["outcome"] is None and scene.pool.proven.kl is None
        scene.exam.found.clear()
        scene.exam.busy.clear()
        await scene.until("in", 20)
        assert scene.proof.as_json(0)["cause"] is None

    play(act, FakeExam(found={ADDRESS: [FOUND]}, busy={ADDRESS} if busy else set()))


def test_what_its_numbers_match_is_said_beside_what_the_engine_says() -> None:
    async def act(scene: Scene) -> None:
        told = scene.proof.as_json(0)
        assert told["reason"].startswith(f"{FOUND}; KL 0.02 nats") and told["kl"] == 0.02
        assert told["cause"] == "match weights without their k_scale"
        assert told["remedy"] == "load the k_scale" and scene.proof.outcomes == {"refused": 1}

    play(act, FakeExam(found={ADDRESS: [FOUND]}, says={ADDRESS: "worse"}))


def test_an_unclear_verdict_asks_for_more_prompts_and_then_waits() -> None:
    async def act(scene: Scene) -> None:
        sizes = [len(records) for records in scene.exam.asked_of(ADDRESS)]
        assert sizes[:3] == [24, 20, 20] and scene.member.standing == "unproven"
        await asyncio.sleep(200)
        assert scene.asked < 30  # later each time
        assert scene.member.standing == "unproven" and "no verdict yet" in scene.proof.reason

    play(act, FakeExam(says={ADDRESS: "inconclusive"}))


def test_one_too_busy_to_answer_is_not_failed_and_asked_again() -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.standing == "unproven" and "no answer in time" in scene.proof.reason
        scene.exam.busy.clear()
        assert await scene.until("in", 3) < 2.5

    play(act, FakeExam(busy={ADDRESS}))


def test_a_backend_that_serves_stays_in_when_it_is_too_busy_for_a_probe() -> None:
    async def act(scene: Scene) -> None:
        scene.exam.busy.add(ADDRESS)
        scene.serve(10_000_000)
        await asyncio.sleep(2000)
        assert scene.serves() and scene.proof.outcomes["inconclusive"] > 5
        assert scene.member.standing == "in" and scene.pool.proven.kl == 0.04

    play(act)


def test_one_without_log_probabilities_is_refused_or_admitted_as_configured() -> None:
    async def refused(scene: Scene) -> None:
        assert scene.member.standing == "refused"
        assert "proof.without_logprobs: admit" in scene.proof.reason

    async def admitted(scene: Scene) -> None:
        assert scene.serves() and scene.proof.state == "admitted"
        assert scene.pool.proven.kl is None and "unproven" in scene.proof.reason

    play(refused, FakeExam(alternatives=0))
    play(admitted, FakeExam(alternatives=0), without_logprobs="admit")


def test_one_of_another_tokenizer_is_refused_and_its_address_is_not_told() -> None:
    error = Unprovable(f"vllm {ADDRESS}: has another tokenizer: one has 9 tokens", "tokenizer")

    async def act(scene: Scene) -> None:
        assert scene.member.standing == "refused"
        assert "another tokenizer" in scene.proof.reason and "10.0.0.5" not in scene.proof.reason

    play(act, FakeExam(errors={ADDRESS: error}))


def test_a_connection_that_is_lost_while_it_is_asked_is_no_verdict() -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.standing == "unproven" and scene.proof.outcomes == {"inconclusive": 1}
        scene.exam.errors.clear()
        await scene.until("in", 3)

    play(act, FakeExam(errors={ADDRESS: BackendUnavailable("gone", kind="lost")}))


def test_a_defect_in_a_probe_neither_proves_nor_refuses() -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.standing == "unproven" and scene.proof.outcomes == {"defect": 1}
        scene.exam.errors.clear()
        await scene.until("in", 3)

    play(act, FakeExam(errors={ADDRESS: ZeroDivisionError("a defect")}))


def test_probes_never_take_more_than_their_share() -> None:
    """The admission is counted in: later probes wait until it is made up for."""

    async def act(scene: Scene) -> None:
        admission = 24 * RECORD_TOKENS
        assert scene.proof.tokens == admission
        scene.serve(admission * 99 - 10)
        await asyncio.sleep(500)
        assert scene.proof.tokens == admission
        for _ in range(40):
            scene.serve(50_000)
            await asyncio.sleep(100)
        served = scene.member.served_tokens
        assert scene.proof.tokens <= 0.01 * (served + scene.proof.tokens)
        assert scene.proof.tokens > 0.009 * served  # and they do happen
        assert scene.proof.share(served) <= 0.01

    play(act)


@pytest.mark.parametrize(("share", "every_s"), [(0.0, 10), (0.02, 100)])
def test_schedule_and_share_are_the_operators(share: float, every_s: float) -> None:
    async def act(scene: Scene) -> None:
        scene.serve(10_000_000)
        await asyncio.sleep(1050)
        probes = scene.asked - 1
        assert probes == 0 if share == 0 else 9 <= probes <= 10

    play(act, share=share, every_s=every_s)


def test_one_that_idles_is_not_asked() -> None:
    async def act(scene: Scene) -> None:
        await asyncio.sleep(1000)
        assert scene.asked == 1 and scene.serves()

    play(act)


def test_a_backend_that_drifts_is_out_at_once_and_refused_by_a_whole_probe(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act(scene: Scene) -> None:
        waiting, begun = scene.member.lease(1), scene.member.lease(1)
        begun.progressed()
        scene.exam.says[ADDRESS] = "worse"
        scene.serve(10_000_000)
        await scene.until("unproven", 400)  # by a few prompts
        assert waiting.unsettled and await waiting.outlived()
        await scene.until("refused", 1)
        assert scene.proof.outcomes == {"as_expected": 1, "suspect": 1, "worse": 1}
        assert scene.member.in_flight == 2  # what has begun goes on
        for lease in (waiting, begun):
            lease.release()

    play(act)
    assert any("is asked again: KL" in r.getMessage() for r in caplog.records)


def test_a_suspicion_that_a_whole_probe_does_not_confirm_is_forgotten() -> None:
    async def act(scene: Scene) -> None:
        scene.exam.says[ADDRESS] = "worse"
        scene.serve(10_000_000)
        await scene.until("unproven", 400)
        scene.exam.says.clear()
        await scene.until("in", 1)
        assert scene.proof.outcomes == {"as_expected": 2, "suspect": 1}

    play(act)


def test_evidence_of_small_probes_adds_up() -> None:
    """Two prompts at a time, of which three have to be wrong."""

    async def act(scene: Scene) -> None:
        scene.serve(24 * RECORD_TOKENS * 99 + 2 * RECORD_TOKENS * 99)
        scene.exam.says[ADDRESS] = "worse"
        await asyncio.sleep(400)
        assert scene.serves() and len(scene.exam.asked[-1][1]) == 2
        scene.serve(2 * RECORD_TOKENS * 99)
        await scene.until("refused", 400)

    play(act)


def test_the_end_of_its_connection_ends_its_proof_at_once() -> None:
    async def act(scene: Scene) -> None:
        lease = scene.member.lease(1)
        scene.server.die()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not scene.serves() and lease.unsettled and await lease.outlived()
        scene.exam.says[ADDRESS] = "worse"
        scene.server.restart()
        await scene.until("refused", 2)
        lease.release()

    play(act)


def test_a_swap_behind_an_idle_connection_is_seen_where_the_server_says_when_it_began() -> None:
    server = Server(ADDRESS)
    server.life = Incarnation(("m",), started=1.0)

    async def act(scene: Scene) -> None:
        lease = scene.member.lease(1)
        server.close_idle()
        assert not scene.serves() and lease.unsettled
        assert await lease.outlived() is False and scene.serves()  # it is the same one
        server.life = Incarnation(("m",), started=2.0)
        scene.exam.says[ADDRESS] = "worse"
        server.close_idle()
        assert not scene.serves() and await lease.outlived() and not scene.serves()
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
        await scene.until("unproven", 1)  # another life, of which nothing is believed

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
    server.life = Incarnation(("m",), started=1.0)

    async def act(scene: Scene) -> None:
        for life in (None, Incarnation(("m",))):
            server.life = life
            server.close_idle()
            await asyncio.sleep(0.1)
            assert scene.member.standing == "unproven"
            server.life = Incarnation(("m",), started=1.0)
            await scene.until("in", 12)

    play(act, server=server)


def test_a_model_that_was_loaded_again_under_the_same_connection_is_proven_anew() -> None:
    server = Server(ADDRESS)
    server.life = Incarnation(("digest",), counts=(100, 7))

    async def act(scene: Scene) -> None:
        await asyncio.sleep(60)
        server.life = Incarnation(("digest",), counts=(160, 9))
        await asyncio.sleep(60)
        assert scene.asked == 1
        server.life = Incarnation(("digest",), counts=(2, 1))
        scene.exam.says[ADDRESS] = "worse"
        await scene.until("refused", 7)

    play(act, server=server)


def test_a_lost_request_has_its_backend_looked_at_and_nobody_is_sent_there_meanwhile() -> None:
    async def act(scene: Scene) -> None:
        lost, other = scene.member.lease(1), scene.member.lease(1)
        lost.failed(BackendUnavailable("reset", kind="lost"))
        lost.release()
        assert not scene.serves() and other.unsettled
        assert await scene.pool.looked_into() and scene.serves()
        assert not await other.outlived() and scene.asked == 1
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
        assert not lease.unsettled  # a restarted server answers as well as another
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
        waiting = asyncio.ensure_future(lease.outlived())
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

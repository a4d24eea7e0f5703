"""A backend and its proof: when it is asked, and what follows from the answers."""

import asyncio
import logging
from typing import Any

import pytest

from octet.errors import BackendUnavailable
from serve.members.proof_state import HISTORY
from serve.proof.probe import ClientView, Unprovable
from tests.serve.proof.exams import RECORD_TOKENS, FakeExam
from tests.serve.proof.scene import ADDRESS, Scene, play, played
from tests.serve.routing.stand_ins import Server


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
        assert scene.proof.as_json(0)["settings"] == {"engine": "fake"}
        server.die()
        await scene.until("unreachable", 30)
        assert scene.proof.as_json(0)["settings"] == {}

    play(act, server=server)
    (line,) = [r for r in caplog.records if "is proven" in r.getMessage()]
    assert "KL 0.02 nats, 0.01 to 0.03 expected" in line.getMessage()
    fields: dict[str, Any] = vars(line)["fields"]
    assert fields["backend"] == "p-1" and fields["kl_interval"] == [0.01, 0.04]
    assert fields["expected_kl"] == [0.01, 0.03] and fields["probe_tokens"] == 2400


@played()
async def test_a_start_waits_for_the_first_verdict(scene: Scene) -> None:
    assert scene.member.standing == "in" and asyncio.get_running_loop().time() < 1


@played(lambda: FakeExam(seconds=50))
async def test_but_not_for_ever(scene: Scene) -> None:
    assert scene.member.standing == "unproven"
    assert 9 < asyncio.get_running_loop().time() < 13


def test_a_backend_with_other_defaults_serves_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view = ClientView(differences=["its default repetition_penalty is not"], tokens=90)

    async def act(scene: Scene) -> None:
        assert scene.member.standing == "in" and scene.proof.tokens == 24 * RECORD_TOKENS + 90
        assert scene.proof.as_json(0)["differences"] == view.differences
        scene.serve(10**6)
        await asyncio.sleep(400)  # a regular probe
        assert scene.asked > 1 and scene.proof.as_json(0)["differences"] == view.differences

    play(act, FakeExam(views={ADDRESS: view}))
    (line,) = [r for r in caplog.records if "other defaults" in r.getMessage()]
    assert line.levelno == logging.WARNING and view.differences[0] in line.getMessage()


@played(lambda: FakeExam(views={ADDRESS: ClientView(tokenizer="it reads 'd' as token 101")}))
async def test_a_backend_with_another_tokenizer_is_refused(scene: Scene) -> None:
    assert scene.member.standing == "refused"
    assert scene.proof.as_json(0)["reason"] == "it reads 'd' as token 101"


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


@played(lambda: FakeExam(says={ADDRESS: "worse"}))
async def test_a_refused_backend_is_asked_again_ever_later_and_comes_in_once_it_is_right(
    scene: Scene,
) -> None:
    await asyncio.sleep(300)
    assert 4 <= scene.asked <= 7 and scene.member.standing == "refused"
    scene.exam.says.clear()
    await scene.until("in", 600)


@played(lambda: FakeExam(says={ADDRESS: "worse"}))
async def test_one_that_is_refused_and_restarted_is_asked_at_once(scene: Scene) -> None:
    await asyncio.sleep(200)
    scene.exam.says.clear()
    scene.server.die()
    await asyncio.sleep(0.001)
    scene.server.restart()
    await scene.until("in", 2)


FOUND = "E4M3 cache where E5M2 was declared"


@pytest.mark.parametrize("busy", [True, False])
def test_what_the_engine_says_of_itself_refuses_it_however_it_answers(busy: bool) -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.standing == "refused" and scene.asked == 1
        assert scene.proof.reason.startswith(FOUND) and "proof.golden" in scene.proof.reason
        told = scene.proof.as_json(0)
        assert told["cause"] == FOUND and "as exported" in told["remedy"]
        assert told["outcome"] is None and scene.pool.proven.kl is None
        scene.exam.found.clear()
        scene.exam.busy.clear()
        await scene.until("in", 20)
        assert scene.proof.as_json(0)["cause"] is None

    play(act, FakeExam(found={ADDRESS: [FOUND]}, busy={ADDRESS} if busy else set()))


@played(lambda: FakeExam(found={ADDRESS: [FOUND]}, says={ADDRESS: "worse"}))
async def test_what_its_numbers_match_is_said_beside_what_the_engine_says(scene: Scene) -> None:
    told = scene.proof.as_json(0)
    assert told["reason"].startswith(f"{FOUND}; KL 0.02 nats") and told["kl"] == 0.02
    assert told["cause"] == "match weights without their k_scale"
    assert told["remedy"] == "load the k_scale" and scene.proof.outcomes == {"refused": 1}


@played(lambda: FakeExam(says={ADDRESS: "inconclusive"}))
async def test_an_unclear_verdict_asks_for_more_prompts_and_then_waits(scene: Scene) -> None:
    sizes = [len(records) for records in scene.exam.asked_of(ADDRESS)]
    assert sizes[:3] == [24, 20, 20] and scene.member.standing == "unproven"
    await asyncio.sleep(200)
    assert scene.asked < 30  # later each time
    assert scene.member.standing == "unproven" and "no verdict yet" in scene.proof.reason


@played(lambda: FakeExam(busy={ADDRESS}))
async def test_one_too_busy_to_answer_is_not_failed_and_asked_again(scene: Scene) -> None:
    assert scene.member.standing == "unproven" and "no answer in time" in scene.proof.reason
    scene.exam.busy.clear()
    assert await scene.until("in", 3) < 2.5


@played()
async def test_a_backend_that_serves_stays_in_when_it_is_too_busy_for_a_probe(scene: Scene) -> None:
    scene.exam.busy.add(ADDRESS)
    scene.serve(10_000_000)
    await asyncio.sleep(2000)
    assert scene.serves() and 5 < scene.proof.outcomes["inconclusive"] <= 2000 / 300
    assert scene.member.standing == "in" and scene.pool.proven.kl == 0.04


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


NO_VERDICTS = {
    "the connection is lost": (BackendUnavailable("gone", kind="lost"), "inconclusive"),
    "a defect": (ZeroDivisionError("a defect"), "defect"),
    # As gRPC does when its channel is closed: nobody has cancelled the prover.
    "the library gives the call up": (asyncio.CancelledError(), "inconclusive"),
}


@pytest.mark.parametrize(("error", "outcome"), NO_VERDICTS.values(), ids=NO_VERDICTS)
def test_what_ends_a_probe_neither_proves_nor_refuses(error: BaseException, outcome: str) -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.standing == "unproven" and scene.proof.outcomes == {outcome: 1}
        scene.exam.errors.clear()
        await scene.until("in", 3)

    play(act, FakeExam(errors={ADDRESS: error}))


@played()
async def test_probes_never_take_more_than_their_share(scene: Scene) -> None:
    """The admission is counted in: later probes wait until it is made up for."""
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


@pytest.mark.parametrize(("share", "every_s"), [(0.0, 10), (0.02, 100)])
def test_schedule_and_share_are_the_operators(share: float, every_s: float) -> None:
    async def act(scene: Scene) -> None:
        scene.serve(10_000_000)
        await asyncio.sleep(1050)
        probes = scene.asked - 1
        assert probes == 0 if share == 0 else 9 <= probes <= 10

    play(act, share=share, every_s=every_s)


@played()
async def test_one_that_idles_is_not_asked(scene: Scene) -> None:
    await asyncio.sleep(1000)
    assert scene.asked == 1 and scene.serves()


@played(server=lambda: Server(ADDRESS, context_length=64))
async def test_what_does_not_fit_into_its_context_is_in_the_status(scene: Scene) -> None:
    """And stays there when later probes are judged."""
    for _ in range(2):
        told = scene.proof.as_json(0)
        assert told["left_out"] == {"prompts": 40, "of": 64, "from_tokens": 64}
        assert told["reason"].endswith("nothing of 64 tokens or more was examined")
        scene.serve(10_000_000)
        await asyncio.sleep(1000)
    assert scene.proof.outcomes["as_expected"] >= 2


@played()
async def test_a_backend_is_proven_again_on_request_and_serves_meanwhile(scene: Scene) -> None:
    before = scene.asked
    assert scene.pool.prove_again(scene.member)
    await asyncio.sleep(0.1)
    assert scene.proof.probing and scene.serves()
    assert scene.pool.prove_again(scene.member)  # the one under way is the one that is wanted
    await asyncio.sleep(5)
    # No client was served, so a regular probe would have had nothing to spend.
    assert scene.proof.outcomes == {"as_expected": 2}
    sent = scene.exam.asked_of(ADDRESS)[before:]  # all 64, in parts
    assert [record for records in sent for record in records] == list(range(64))
    await asyncio.sleep(60)
    assert scene.asked == before + len(sent)


@played(lambda: FakeExam(says={ADDRESS: "worse"}))
async def test_a_refused_backend_need_not_wait_for_its_next_turn(scene: Scene) -> None:
    await asyncio.sleep(600)  # by now it is probed every few minutes
    while scene.proof.probing or scene.proof.next_at < asyncio.get_running_loop().time() + 60:
        await asyncio.sleep(1)
    scene.exam.says.clear()
    assert scene.member.standing == "refused"
    assert scene.pool.prove_again(scene.member)
    assert await scene.until("in", 2) < 2


@played()
async def test_a_request_while_it_is_away_is_kept_until_it_is_back(scene: Scene) -> None:
    scene.server.die()
    await scene.until("unreachable", 5)
    asked = scene.asked
    assert scene.pool.prove_again(scene.member)
    await asyncio.sleep(5)
    assert scene.asked == asked
    scene.server.restart()
    await scene.until("in", 5)
    sent = scene.exam.asked_of(ADDRESS)[asked:]
    assert [record for records in sent for record in records] == list(range(64))


@played()
async def test_the_newest_probes_are_remembered_with_their_figures(scene: Scene) -> None:
    for _ in range(30):
        scene.pool.prove_again(scene.member)
        await asyncio.sleep(2)
    scene.exam.says[ADDRESS] = "worse"
    scene.pool.prove_again(scene.member)
    await asyncio.sleep(2)
    history = scene.proof.as_json(0)["history"]
    assert len(history) == HISTORY and history[-1]["outcome"] == "worse"
    assert {entry["outcome"] for entry in history[:-1]} == {"as_expected"}
    assert (history[0]["kl"], history[0]["kl_interval"]) == (0.02, [0.01, 0.04])
    assert history[0]["at"] <= history[-1]["at"]

"""A backend that serves, and what a few prompts of it show later on."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from serve.backends.base import Backend
from serve.proof.probe import FailureKind, Probed, Unprovable
from tests.serve.proof.exams import RECORD_TOKENS, FakeExam, verdict
from tests.serve.proof.scene import ADDRESS, Scene, play, played
from tests.serve.proof.test_examination import Failing

PLENTY = 10_000_000  # tokens, of which probes may have a share


LATER: dict[str, tuple[dict[str, Any], str]] = {
    "another tokenizer": (
        {"errors": {ADDRESS: Unprovable("it has another tokenizer", "tokenizer")}},
        "another tokenizer",
    ),
    "it refuses": ({"errors": {ADDRESS: Unprovable("it refuses them", "refused")}}, "refuses"),
    "no log-probabilities": ({"alternatives": 0}, "no log-probabilities"),
    "its engine's own word": ({"found": {ADDRESS: ["E4M3 cache"]}}, "E4M3 cache"),
}


@pytest.mark.parametrize(("change", "said"), LATER.values(), ids=LATER)
@played()
async def test_one_that_cannot_be_proven_any_more_is_refused(
    scene: Scene, change: dict[str, Any], said: str
) -> None:
    vars(scene.exam).update(change)
    scene.serve(PLENTY)
    await scene.until("refused", 400)
    assert said in scene.proof.reason
    assert scene.proof.outcomes["as_expected"] == scene.proof.outcomes["suspect"] == 1


@played()
async def test_a_slice_of_prompts_that_are_too_long_for_it_is_no_fault(scene: Scene) -> None:
    scene.exam.errors[ADDRESS] = Unprovable("its context is shorter", "context")
    scene.serve(PLENTY)
    await asyncio.sleep(1000)
    assert scene.serves() and scene.proof.outcomes["suspect"] == 0


@played(lambda: FakeExam(alternatives=0), without_logprobs="admit")
async def test_one_that_is_admitted_without_them_is_proven_once_it_gives_them(scene: Scene) -> None:
    scene.serve(PLENTY)
    await asyncio.sleep(1000)
    assert scene.proof.state == "admitted" and scene.proof.outcomes["no_logprobs"] >= 3
    scene.exam.alternatives = 20
    await asyncio.sleep(400)
    assert scene.serves() and scene.proof.state == "proven"


def test_answers_that_cannot_be_judged_take_it_out() -> None:
    class Breaks(FakeExam):
        breaks = False

        async def judge(self, responses: Sequence[Response], looks: int) -> Verdict:
            if self.breaks:
                raise ValueError("/etc/secret")
            return await super().judge(responses, looks)

    exam = Breaks()

    async def act(scene: Scene) -> None:
        exam.breaks = True
        scene.serve(PLENTY)
        await scene.until("unproven", 400)
        await asyncio.sleep(100)
        assert not scene.serves() and "secret" not in scene.proof.reason
        exam.breaks = False
        await scene.until("in", 100)

    play(act, exam)


@pytest.mark.parametrize(("kind", "stays"), [("failed", False), ("busy", True), ("gone", True)])
def test_prompts_that_fail_again_and_again_take_it_out(kind: FailureKind, stays: bool) -> None:
    """A part of them, in probe after probe; not for want of time."""
    exam = Failing(kind=kind)

    async def act(scene: Scene) -> None:
        exam.failing = dict.fromkeys(range(0, 64, 3), 1000)
        scene.serve(PLENTY)
        await asyncio.sleep(600)
        assert scene.serves()
        await asyncio.sleep(600)
        assert scene.serves() == stays and (scene.proof.outcomes["suspect"] == 0) == stays

    play(act, exam)


def _unclear_of(few: int, says: Callable[[], Verdict]) -> FakeExam:
    class Unclear(FakeExam):
        async def judge(self, responses: Sequence[Response], looks: int) -> Verdict:
            return says() if len(responses) > few else verdict("inconclusive")

    return Unclear()


def test_what_the_newest_answers_do_not_tell_all_of_this_life_may() -> None:
    now = [verdict("as_expected")]
    exam = _unclear_of(24, lambda: now[0])

    async def act(scene: Scene) -> None:
        assert scene.serves() and scene.asked == 2
        now[0] = verdict("worse")
        scene.serve(PLENTY)
        await scene.until("refused", 400)

    play(act, exam)


@pytest.mark.parametrize(("setting", "few"), [(24, 6), (3, 1)])
def test_clients_do_not_wait_behind_many_prompts_at_once(setting: int, few: int) -> None:
    async def act(scene: Scene) -> None:
        scene.serve(PLENTY)
        await asyncio.sleep(400)
        running = scene.member.lease(1)
        scene.server.die()
        await asyncio.sleep(0.001)
        scene.server.restart()
        await scene.until("in", 3)
        assert scene.exam.at_once == [setting, few, few]  # the last with a request in it
        running.release()

    play(act, concurrency=setting)


@played()
async def test_the_longer_it_lives_the_more_prompts_it_is_measured_on(scene: Scene) -> None:
    def prompts() -> int:
        assert scene.proof.verdict is not None
        return scene.proof.verdict.measure.prompts

    assert prompts() == 24
    scene.serve(PLENTY)
    await asyncio.sleep(1500)
    assert prompts() == 64  # all of them; what looks wrong is judged by the newest
    assert scene.exam.judged[-2:] == [24, 64]
    scene.server.die()
    await asyncio.sleep(0.001)
    scene.server.restart()
    await scene.until("in", 3)
    assert prompts() == 24


def test_a_backend_that_drifts_is_out_at_once_and_refused_by_a_whole_probe(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act(scene: Scene) -> None:
        waiting, begun = scene.member.lease(1), scene.member.lease(1)
        begun.progressed()
        scene.exam.says[ADDRESS] = "worse"
        scene.serve(10_000_000)
        await scene.until("unproven", 400)  # by a few prompts
        assert waiting.maybe_restarted and await waiting.restarted()
        await scene.until("refused", 1)
        assert scene.proof.outcomes == {"as_expected": 1, "suspect": 1, "worse": 1}
        assert scene.member.in_flight == 2  # what has begun goes on
        for lease in (waiting, begun):
            lease.release()

    play(act)
    assert any("probing it again: KL" in r.getMessage() for r in caplog.records)


@played()
async def test_a_suspicion_that_a_whole_probe_does_not_confirm_is_forgotten(scene: Scene) -> None:
    scene.exam.says[ADDRESS] = "worse"
    scene.serve(10_000_000)
    await scene.until("unproven", 400)
    scene.exam.says.clear()
    await scene.until("in", 2)
    assert scene.proof.outcomes == {"as_expected": 2, "suspect": 1}


class Partly(FakeExam):
    """Wrong on ten prompts, which are not among those that an admission asks first."""

    wrong = True

    async def probe(
        self, backend: Backend, records: Sequence[int], *, concurrency: int, timeout_s: float
    ) -> Probed:
        probed = await super().probe(backend, records, concurrency=concurrency, timeout_s=timeout_s)
        probed.responses = [
            replace(r, tokens=(2,)) if self.wrong and 50 <= r.record < 60 else r
            for r in probed.responses
        ]
        return probed


def test_what_few_prompts_showed_is_not_forgotten_for_others_that_are_right() -> None:
    """Every prompt is asked before it serves again, also after it was refused."""
    exam = Partly()

    async def act(scene: Scene) -> None:
        assert scene.serves() and scene.asked == 1
        scene.serve(PLENTY)
        await scene.until("refused", 1500)
        assert [len(records) for _, records in exam.asked[-3:]] == [24, 20, 20]
        await asyncio.sleep(600)
        assert scene.member.standing == "refused" and scene.proof.outcomes["suspect"] == 1
        exam.wrong = False
        await scene.until("in", 800)
        asked = scene.asked
        scene.server.die()
        await asyncio.sleep(0.001)
        scene.server.restart()
        await scene.until("in", 3)
        assert scene.asked == asked + 1  # nothing speaks against this incarnation

    play(act, exam)


@played()
async def test_evidence_of_small_probes_adds_up(scene: Scene) -> None:
    """Two prompts at a time, of which three have to be wrong."""
    scene.serve(24 * RECORD_TOKENS * 99 + 2 * RECORD_TOKENS * 99)
    scene.exam.says[ADDRESS] = "worse"
    await asyncio.sleep(400)
    assert scene.serves() and len(scene.exam.asked[-1][1]) == 2
    scene.serve(2 * RECORD_TOKENS * 99)
    await scene.until("refused", 400)

"""A whole probe of a backend that answers some prompts and fails at others."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import pytest

from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from serve.backends.base import Backend
from serve.proof.probe import Failure, FailureKind, Probed
from tests.serve.proof.exams import FakeExam
from tests.serve.proof.scene import ADDRESS, Scene, play, played
from tests.serve.routing.stand_ins import Server


@dataclass
class Failing(FakeExam):
    """Each record in `failing` has no answer, so many times."""

    failing: dict[int, int] = field(default_factory=dict)
    kind: FailureKind = "failed"

    async def probe(
        self, backend: Backend, records: Sequence[int], *, concurrency: int, timeout_s: float
    ) -> Probed:
        probed = await super().probe(backend, records, concurrency=concurrency, timeout_s=timeout_s)
        failed = {record for record in records if self.failing.get(record, 0) > 0}
        for record in failed:
            self.failing[record] -= 1
        probed.responses = [r for r in probed.responses if r.record not in failed]
        probed.failures = [Failure(record, self.kind, "500 from within") for record in failed]
        return probed


@pytest.mark.parametrize("kind", sorted({*get_args(FailureKind)} - {"context"}))
@pytest.mark.parametrize("count", [1, 18])
def test_right_answers_do_not_make_up_for_those_that_fail(count: int, kind: FailureKind) -> None:
    always = dict.fromkeys(range(count), 100)

    async def act(scene: Scene) -> None:
        assert scene.member.standing == "unproven" and not scene.serves()
        assert f"{count} of {20 + count} golden prompts" in scene.proof.reason
        assert "500 from within" in scene.proof.reason
        times = Counter(record for _, records in scene.exam.asked for record in records)
        assert times[0] == 3 and times[30] == 1  # those that failed, with each look
        always.clear()
        await scene.until("in", 3)

    play(act, Failing(failing=always, kind=kind))


@played(lambda: Failing(failing={3: 1, 7: 1}))
async def test_one_that_answers_when_it_is_asked_again_is_as_good(scene: Scene) -> None:
    assert scene.member.standing == "in" and scene.proof.outcomes == {"as_expected": 1}
    assert [len(records) for records in scene.exam.asked_of(ADDRESS)] == [24, 22]


@played(lambda: FakeExam(least=40))
async def test_it_is_asked_until_it_has_given_the_answers_that_the_power_needs(
    scene: Scene,
) -> None:
    assert scene.member.standing == "in"
    assert [len(records) for records in scene.exam.asked_of(ADDRESS)] == [24, 20]


@played(lambda: Failing(failing=dict.fromkeys(range(0, 64, 2), 99), kind="context", least=40))
async def test_one_whose_context_leaves_too_few_answers_for_the_power_stays_out(
    scene: Scene,
) -> None:
    assert scene.member.standing == "unproven" and not scene.serves()
    assert "proof.power needs 40 answers, and it returned 32" in scene.proof.reason


@played(lambda: Failing(failing={3: 9, 7: 9}, kind="context"))
async def test_prompts_longer_than_its_context_are_left_out(scene: Scene) -> None:
    assert scene.member.standing == "in" and scene.asked == 1
    assert "2 of 24 golden prompts are longer than its context" in scene.proof.notes[0]


@dataclass
class Long(FakeExam):
    """Of prompts that are longer than any context."""

    def parts(self, seed: int, context: int | None) -> list[tuple[int, ...]]:
        return []


@pytest.mark.parametrize("found", [{}, {ADDRESS: ["E4M3 cache where E5M2 was declared"]}])
def test_one_whose_context_no_prompt_fits_into_is_refused(found: dict[str, list[str]]) -> None:
    async def act(scene: Scene) -> None:
        assert scene.member.standing == "refused" and not any(n for _, n in scene.exam.asked)
        said = "E4M3 cache" if found else "a context of 3 tokens, shorter than every golden prompt"
        assert said in scene.proof.reason and "10.0.0.5" not in scene.proof.reason

    play(act, Long(found=found), Server(ADDRESS, context_length=3))


@played(lambda: Failing(failing=dict.fromkeys(range(18), 100), says={ADDRESS: "worse"}))
async def test_wrong_answers_refuse_it_whatever_else_fails(scene: Scene) -> None:
    assert scene.member.standing == "refused" and scene.asked == 1


class Slow(FakeExam):
    """Has answered ten prompts when the time is over."""

    async def probe(
        self, backend: Backend, records: Sequence[int], *, concurrency: int, timeout_s: float
    ) -> Probed:
        probed = await super().probe(backend, records, concurrency=concurrency, timeout_s=timeout_s)
        await asyncio.sleep(timeout_s - self.seconds)
        probed.responses = probed.responses[:10]
        late = f"no answer in {timeout_s:g} s"
        probed.failures = [Failure(n, "busy", late) for n in records[10:]]
        return probed


@played(Slow)
async def test_one_too_slow_for_its_time_is_asked_no_more_and_it_is_said_what_helps(
    scene: Scene,
) -> None:
    await asyncio.sleep(90)
    assert scene.member.standing == "unproven"
    assert [len(records) for records in scene.exam.asked_of(ADDRESS)] == [24, 24]
    assert scene.proof.notes == (
        "14 of 24 golden prompts were not answered in time: no answer in 60 s",
    )
    said = "its probe was over after 60 s, and some golden prompts had no answer: if it is always"
    assert said in scene.proof.reason


class Waiting(FakeExam):
    """Its answers are judged after those of many other backends."""

    async def judge(self, responses: Sequence[Response], looks: int) -> Verdict:
        await asyncio.sleep(50)
        return await super().judge(responses, looks)


@played(lambda: Waiting(says={ADDRESS: "inconclusive"}))
async def test_the_time_until_answers_are_judged_is_none_of_the_backends(scene: Scene) -> None:
    await asyncio.sleep(150)
    sizes = [len(records) for records in scene.exam.asked_of(ADDRESS)]
    assert sizes[:3] == [24, 20, 20]


class Defective(FakeExam):
    async def judge(self, responses: Sequence[Response], looks: int) -> Verdict:
        raise ZeroDivisionError("a defect")


@played(Defective)
async def test_a_defect_in_the_judgement_is_no_verdict(scene: Scene) -> None:
    assert scene.member.standing == "unproven" and scene.proof.outcomes == {"defect": 1}

"""Golden records of an export, as what backends of a pool are held against."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from octet.errors import ArtifactError
from serve.config.proof import Proof
from serve.proof import golden_exam
from serve.proof.golden_exam import GoldenExam
from tests.serve.proof.exams import verdict
from tests.serve.waiting import until


async def test_one_backend_is_judged_after_the_other_and_requests_go_on(
    proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, on_loop = 0, 0, 0
    go_on = threading.Event()
    loop_thread = threading.get_ident()

    def judge(*_arguments: Any, **_options: Any) -> Any:
        nonlocal running, most, on_loop
        running += 1
        most = max(most, running)
        on_loop += threading.get_ident() == loop_thread
        go_on.wait(60)
        running -= 1
        return verdict("as_expected")

    monkeypatch.setattr(golden_exam, "judge", judge)
    exams = [GoldenExam.load(proofs, Proof()) for _ in range(3)]
    judging = [asyncio.create_task(exam.judge([], 1)) for exam in exams]
    await until(lambda: running)  # the event loop turns meanwhile
    go_on.set()
    found = await asyncio.gather(*judging)
    assert [v.outcome for v in found] == ["as_expected"] * 3
    assert most == 1 and on_loop == 0


@pytest.mark.parametrize(("power", "least"), [(None, 0), (0.04, 24), (0.032, 38), (0.0246, 64)])
def test_an_admission_needs_as_many_answers_as_its_power(
    proofs: Path, power: float | None, least: int
) -> None:
    assert GoldenExam.load(proofs, Proof(power=power)).least == least


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (Proof(power=0.01), r"power of 1 % .* about 394 prompts are needed, and it has 64"),
        (Proof(power=0.02, weights="original"), "does not state its power"),
    ],
)
def test_a_power_that_cannot_be_reached_is_refused(proofs: Path, settings: Proof, why: str) -> None:
    with pytest.raises(ArtifactError, match=why):
        GoldenExam.load(proofs, settings)

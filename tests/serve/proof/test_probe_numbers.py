"""Servers whose log-probabilities are none, or are missing: NaN logits do that."""

import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octet.proof.verdict import Verdict
from serve.config.proof import Proof
from serve.engine.request import Delta, Event, GenerateRequest
from serve.proof.golden_exam import GoldenExam
from serve.proof.probe import Probed
from tests.fakes import FakeRunner, fake_backend, opened
from tests.serve.proof.fake_proofs import HONEST, fake_golden, noisy

_RECORDS = {record.prompt: index for index, record in enumerate(fake_golden().records)}


class Spoiled:
    """A right server; those of a third of the records are `value` from position `first` on.

    None: they are not sent.
    """

    def __init__(self, value: float | None, first: int = 1) -> None:
        self._inner = fake_backend(FakeRunner(model=noisy(HONEST, 1)))
        self._value = value
        self._first = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        spoiled = _RECORDS[str(request.prompt)] % 3 == 0
        position = 0
        async for event in self._inner.generate(request):
            if isinstance(event, Delta) and spoiled:
                found = []
                for told in event.logprobs or ():
                    if position >= self._first:
                        chosen = replace(told.chosen, logprob=self._value)
                        top = tuple(replace(token, logprob=self._value) for token in told.top)
                        top = () if self._value is None else top
                        told = replace(told, chosen=chosen, top=top)
                    found.append(told)
                    position += 1
                event = replace(event, logprobs=tuple(found))
            yield event


async def judged(backend: Any, proofs: Path) -> tuple[Probed, Verdict]:
    exam = GoldenExam.load(proofs, Proof())
    async with opened(backend):
        records = exam.parts(0, None)[0]
        probed = await exam.probe(backend, records, concurrency=8, timeout_s=20.0)
        return probed, await exam.judge(probed.responses, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1000.0])
async def test_what_is_no_log_probability_refuses_it(value: float, proofs: Path) -> None:
    probed, verdict = await judged(Spoiled(value), proofs)
    assert not probed.failures and verdict.outcome == "worse"
    assert verdict.cause is not None and verdict.cause.name == "no_distribution"


@pytest.mark.parametrize("first", [0, 1])
async def test_one_that_leaves_them_out_of_some_answers_is_not_proven(
    first: int, proofs: Path
) -> None:
    probed, verdict = await judged(Spoiled(None, first), proofs)
    assert probed.alternatives == 20 and verdict.outcome == "inconclusive"


async def test_one_that_is_whole_is_as_expected(proofs: Path) -> None:
    _, verdict = await judged(Spoiled(None, 8), proofs)
    assert verdict.outcome == "as_expected"

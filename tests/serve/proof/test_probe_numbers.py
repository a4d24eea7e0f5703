"""Servers whose log-probabilities are none, or are missing: NaN logits do that."""

import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from serve.proof.probe import Probed, probe
from serve.types import Delta, Event, GenerateRequest
from tests.fakes import fake_backend
from tests.serve.proof.fake_proofs import fake_golden

RECORDS = [5, 20, 40, 60]
SOME = 2


class Spoiled:
    """The fake engine; the log-probabilities of the first `SOME` records are as `value` says.

    None: they are not sent. Of each answer from its second token on.
    """

    def __init__(self, value: float | None, first: int = 1) -> None:
        self._inner = fake_backend()
        self._value = value
        self._first = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        spoiled = int(request.request_id.removeprefix("proof-")) in RECORDS[:SOME]
        position = 0
        async for event in self._inner.generate(request):
            if isinstance(event, Delta) and spoiled:
                found = []
                for told in event.logprobs or ():
                    if position >= self._first:
                        top = tuple(replace(token, logprob=self._value) for token in told.top)
                        told = replace(told, top=() if self._value is None else top)
                    found.append(told)
                    position += 1
                event = replace(event, logprobs=tuple(found))
            yield event


async def probed_of(backend: Any) -> Probed:
    await backend.start()
    try:
        return await probe(backend, fake_golden(), RECORDS, timeout_s=20.0)
    finally:
        await backend.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1000.0])
async def test_what_is_no_log_probability_is_a_failure_and_said(value: float) -> None:
    probed = await probed_of(Spoiled(value))
    assert [failure.record for failure in probed.failures] == list(RECORDS[:SOME])
    assert {failure.kind for failure in probed.failures} == {"failed"}
    assert f"log-probability of {value:g}" in probed.notes[0]


@pytest.mark.parametrize("first", [0, 1])
async def test_one_that_leaves_them_out_of_some_answers_has_failed_at_those(first: int) -> None:
    probed = await probed_of(Spoiled(None, first))
    assert [failure.record for failure in probed.failures] == list(RECORDS[:SOME])
    assert probed.alternatives == 20 and "none of this one" in probed.notes[0]


async def test_a_little_above_zero_is_rounding_and_minus_infinity_is_a_probability() -> None:
    for value in (1e-7, -math.inf):
        probed = await probed_of(Spoiled(value))
        assert not probed.failures and len(probed.responses) == len(RECORDS)

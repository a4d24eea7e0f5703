"""Servers whose log-probabilities are none, or are missing: NaN logits do that."""

import math
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from octet.proof.verdict import Verdict
from serve.config.proof import Proof
from serve.engine.request import Delta, Event, GenerateRequest
from serve.proof.admission import Examined, examine
from serve.proof.golden_exam import GoldenExam
from serve.proof.probe import Probed
from serve.proof.recheck import Rounds
from tests.fake_servers import FakeOpenAI, running
from tests.fakes import FakeRunner, fake_backend, opened
from tests.serve.openai_clients import started
from tests.serve.proof.fake_proofs import HONEST, fake_golden, noisy, served

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


@pytest.mark.parametrize("first", [1, 4])
async def test_one_that_leaves_them_out_of_some_answers_is_not_proven(
    first: int, proofs: Path
) -> None:
    probed, verdict = await judged(Spoiled(None, first), proofs)
    assert probed.alternatives == 20 and verdict.outcome == "inconclusive"


async def test_one_that_is_whole_is_as_expected(proofs: Path) -> None:
    _, verdict = await judged(Spoiled(None, 8), proofs)
    assert verdict.outcome == "as_expected"


class OnTheWire(FakeOpenAI):
    """Writes every log-probability as `value`; without `alternatives`, of the chosen token only."""

    def __init__(self, value: float | None, *, alternatives: bool = True) -> None:
        super().__init__()
        self._value = value
        self._alternatives = alternatives

    async def _stream(self, request: Any, response: Any, body: Any, events: Any) -> None:
        await super()._stream(request, response, body, self._spoiled(events))

    async def _spoiled(self, events: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for event in events:
            if isinstance(event, Delta):
                event = replace(event, logprobs=tuple(map(self._position, event.logprobs or ())))
            yield event

    def _position(self, told: Any) -> Any:
        top = tuple(replace(token, logprob=self._value) for token in told.top)
        chosen = replace(told.chosen, logprob=self._value)
        return replace(told, chosen=chosen, top=top if self._alternatives else ())


class CannotWrite(FakeOpenAI):
    """Its JSON encoder refuses NaN, as FastAPI's does."""

    async def _answer(self, request: Any, body: dict[str, Any]) -> Any:
        error = {"message": "Out of range float values are not JSON compliant", "code": 500}
        return web.json_response({"error": error | {"type": "InternalServerError"}}, status=500)


WIRES = {
    "NaN, which JSON lacks": (lambda: OnTheWire(math.nan), "NaN"),
    "null, as vLLM writes NaN": (lambda: OnTheWire(None), "NaN"),
    "null of the chosen token alone": (lambda: OnTheWire(None, alternatives=False), "NaN"),
    "infinity": (lambda: OnTheWire(math.inf), "infinite"),
    "-9999 of everything": (lambda: OnTheWire(-9999.0), "-9999 or less for every token"),
    "an error": (CannotWrite, "NaN"),
}


@pytest.mark.parametrize(("server", "said"), WIRES.values(), ids=WIRES)
async def test_a_server_of_nan_is_refused_by_that_name(
    server: Any, said: str, proofs: Path
) -> None:
    """Also where a server without log-probabilities may serve: it is none of those."""
    exam = GoldenExam.load(proofs, Proof())
    async with running(served(server=server())) as one, started(one.url) as backend:

        async def send(records: tuple[int, ...]) -> Probed:
            return await exam.probe(backend, records, concurrency=8, timeout_s=20.0)

        found: Examined = await examine(exam, backend, send, 0, "admit")
        # So is one that was admitted without any and sends these in a later probe.
        later = await Rounds(exam, backend, 0, ()).check(exam.parts(0, None)[0], send)
        assert later.state == "refused" and later.outcome == "worse"
    assert found.state == "refused" and found.outcome == "worse", found.reason
    assert f"the log-probabilities of 24 of 24 answers are invalid: {said}" in found.reason
    assert "weights or scales that are NaN" in found.reason

"""Every backend over the fake model: the contract, and what only a fake server lets one see."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from octet.errors import BackendUnavailable
from serve.backends.base import Backend
from serve.backends.openai_http import OpenAiHttpBackend
from serve.backends.triton_grpc import TritonBackend
from serve.config import HttpConfig, TritonConfig
from serve.types import Delta, Event, GenerateRequest
from tests.fake_servers import FakeOpenAI, FakeTriton
from tests.fakes import FakeRunner, fake_backend
from tests.serve.contract import CHECKS, Check, ask, collect

KINDS = ("embedded", "vllm", "triton")
pytestmark = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Subject:
    """A started backend over the fake model, and the engine in which its requests end up."""

    backend: Backend
    engine: Any
    stop_server: Any = None


@asynccontextmanager
async def subject(kind: str, delay_s: float = 0.0) -> AsyncIterator[Subject]:
    if kind == "embedded":
        backend: Any = fake_backend(FakeRunner(delay_s=delay_s))
        await backend.start()
        try:
            yield Subject(backend, backend)
        finally:
            await backend.close()
        return
    server: Any = FakeOpenAI(delay_s) if kind == "vllm" else FakeTriton(delay_s)
    await server.start()
    if kind == "vllm":
        backend = OpenAiHttpBackend("fake", HttpConfig(type="vllm", url=server.url))
    else:
        backend = TritonBackend("fake", TritonConfig(type="triton", url=server.url))
    await backend.start()
    try:
        yield Subject(backend, server.engine, server.stop)
    finally:
        await backend.close()
        await server.stop()


def abc(**fields: Any) -> GenerateRequest:
    return ask(fake_backend(), "abc", **fields)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(kind: str, check: Check) -> None:
    async with subject(kind) as it:
        await check(it.backend, "abc", (97, 98, 99))


async def test_the_answer_is_that_of_the_engine_alone(kind: str) -> None:
    async with subject(kind) as it, subject("embedded") as alone:
        for fields in ({}, {"temperature": 1.0, "seed": 5}, {"top_k": 3, "seed": 1}):
            request = abc(**fields)
            text, _ = await collect(it.backend, request)
            assert text == (await collect(alone.backend, request))[0]


async def test_log_probabilities(kind: str) -> None:
    async with subject(kind) as it, subject("embedded") as alone:
        _, events = await collect(it.backend, abc(logprobs=3))
        _, expected = await collect(alone.backend, abc(logprobs=3))

    def positions(events: list[Event]) -> list[Any]:
        return [p for e in events if isinstance(e, Delta) for p in e.logprobs or ()]

    assert len(positions(events)) == 12
    for found, wanted in zip(positions(events), positions(expected), strict=True):
        assert found.chosen.token_id == wanted.chosen.token_id
        assert found.chosen.logprob == pytest.approx(wanted.chosen.logprob)
        ids = {token.token_id: token.logprob for token in found.top}
        for token in wanted.top:
            assert ids[token.token_id] == pytest.approx(token.logprob)


async def test_closing_the_iterator_cancels_the_request(kind: str) -> None:
    async with subject(kind, delay_s=0.02) as it:
        stream: Any = it.backend.generate(abc(max_tokens=400))
        async with aclosing(stream):
            await anext(stream)
            assert it.engine.stats.running == 1
        async with asyncio.timeout(2):
            while it.engine.stats.running:
                await asyncio.sleep(0.01)
        assert it.engine.stats.generated_tokens < 100


async def test_cancelling_the_task_cancels_the_request(kind: str) -> None:
    async with subject(kind, delay_s=0.02) as it:
        task = asyncio.create_task(collect(it.backend, abc(max_tokens=400)))
        while not it.engine.stats.running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(2):
            while it.engine.stats.running:
                await asyncio.sleep(0.01)


async def test_ready_never_raises_and_unavailable_says_who(kind: str) -> None:
    async with subject(kind) as it:
        assert await it.backend.ready()
        if it.stop_server is not None:
            await it.stop_server()
            assert not await it.backend.ready()
            with pytest.raises(BackendUnavailable, match=kind):
                await collect(it.backend, abc())
        await it.backend.close()
        assert not await it.backend.ready()
        with pytest.raises(BackendUnavailable):
            await collect(it.backend, abc())

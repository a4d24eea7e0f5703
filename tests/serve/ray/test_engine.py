"""A replica of an engine, without Ray: what Ray would call."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from octet.errors import OctetError
from serve.config import BackendConfig, GatewayConfig
from serve.proof.exam import Exams
from serve.ray import engine as module
from serve.ray.engine import Engine, OutstandingTokens
from tests.fake_servers import FakeOpenAI, running
from tests.serve.proof.exams import FakeExam

PATH = "/v1/completions"
JSON = {"content-type": "application/json"}


def config(server: FakeOpenAI) -> GatewayConfig:
    pools = {"main": {"backends": [{"type": "vllm", "url": server.url, "model": "fake"}]}}
    return GatewayConfig.model_validate({"models": {"fake": {"pool": "main"}}, "pools": pools})


@asynccontextmanager
async def replica(server: FakeOpenAI) -> AsyncIterator[Engine]:
    engine = Engine.__new__(Engine)
    await Engine.__init__(engine, config(server))  # as Ray does
    try:
        yield engine
    finally:
        await engine.close()


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "fake", "prompt": [1, 2, 3, 4], "max_tokens": 4} | fields).encode()


async def test_it_answers_like_a_gateway() -> None:
    async with running(FakeOpenAI()) as server, replica(server) as engine:
        found = [piece async for piece in engine.answer("POST", PATH, body(), JSON)]
        (status, headers), *pieces = found
        assert status == 200 and headers["content-type"] == "application/json"
        answer = json.loads(b"".join(piece for piece in pieces if isinstance(piece, bytes)))
        assert answer["usage"]["completion_tokens"] == 4
        found = [piece async for piece in engine.answer("POST", PATH, body(stream=True), JSON)]
        assert isinstance(found[-1], bytes) and found[-1].endswith(b"data: [DONE]\n\n")
        (status, _), *_ = [piece async for piece in engine.answer("POST", PATH, b"{", JSON)]
        assert status == 400


async def test_it_reports_outstanding_tokens_and_frees_those_of_a_caller_that_left() -> None:
    async with running(FakeOpenAI()) as server, replica(server) as engine:
        server.runner.gate.clear()  # it answers nothing
        assert sum(engine.record_autoscaling_stats().values()) == 0
        answer = engine.answer("POST", PATH, body(stream=True, max_tokens=96), JSON)
        first = asyncio.ensure_future(anext(answer))
        async with asyncio.timeout(10):
            while engine.record_autoscaling_stats()[module.OUTSTANDING] != 100:
                await asyncio.sleep(0.01)
            first.cancel()
            while engine.record_autoscaling_stats()[module.OUTSTANDING]:
                await asyncio.sleep(0.01)


async def test_one_that_is_refused_never_comes_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(_exams: Exams, _entry: BackendConfig | None) -> Any:
        return FakeExam(says={server.url: "worse", f"vllm {server.url}": "worse"})

    monkeypatch.setattr(Exams, "find", find)
    async with running(FakeOpenAI()) as server:
        with pytest.raises(OctetError, match="main/main-1 is refused: "):
            async with replica(server):
                pass


async def test_one_whose_engine_ended_fails_its_checks_and_holds_requests_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_ASIDE_S", 0.3)
    async with running(FakeOpenAI()) as server, replica(server) as engine:
        await engine.check_health()
        await server.stop()
        with pytest.raises(OctetError, match="main"):
            async with asyncio.timeout(10):
                while True:
                    await engine.check_health()
                    await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        with pytest.raises(OctetError):
            await anext(engine.answer("POST", PATH, body(), JSON))
        assert asyncio.get_running_loop().time() - began >= 0.3


def test_ray_is_told_as_many_replicas_as_the_tokens_need() -> None:
    policy = OutstandingTokens(100)
    reports = {module.OUTSTANDING: {"a": 90.0, "b": 160.0}}
    context = SimpleNamespace(aggregated_metrics=reports, target_num_replicas=7)
    assert policy(context) == (2.5, {})
    assert policy(SimpleNamespace(aggregated_metrics=None, target_num_replicas=7)) == (7, {})

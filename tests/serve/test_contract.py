"""Every backend over the fake model: the contract, and what only a fake server lets one see."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octet.errors import BackendError, BackendUnavailable
from serve.backends.base import Backend
from serve.engine.request import Finished, GenerateRequest
from tests.fake_servers import FLAVOURS, FakeOpenAI, FakeTensorRtLlm, FakeTriton, running
from tests.fakes import END, FakeRunner, byte_tokenizer, fake_backend, opened
from tests.serve.contract import FREED_S, Check, ask, collect, freed_within, owed
from tests.serve.openai_clients import relay_to, triton_to

SERVERS: dict[str, Callable[[float], Any]] = {
    "vllm": FakeOpenAI,
    **{
        f"openai {name}": lambda delay_s, name=name: FakeOpenAI(delay_s, flavour=name)
        for name in FLAVOURS
    },
    "triton entry": FakeTriton,
    "triton vllm": lambda delay_s: FakeTriton(delay_s, token_ids=False),
    "triton ensemble": FakeTensorRtLlm,
    "triton ensemble, uncounted": lambda delay_s: FakeTensorRtLlm(delay_s, counts=False),
    "triton bls": lambda delay_s: FakeTensorRtLlm(delay_s, model="bls"),
    "triton engine": lambda delay_s: FakeTensorRtLlm(delay_s, model="engine"),
}
KINDS = ("embedded", *SERVERS)
NO_LOGPROBS = tuple(kind for kind in KINDS if kind.startswith(("triton e", "triton b")))[1:]
EACH = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Subject:
    """A started backend over the fake model, and the engine in which its requests end up."""

    backend: Backend
    engine: Any
    server: Any = None

    async def running(self) -> int:
        """Requests that the engine has."""
        running: int = self.engine.stats.running
        return running


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte tokenizer's files, with the id of its end token."""
    path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().inner.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"eos_token_id": END}))
    return path


@pytest.fixture
def subject(tokenizer: Path) -> Callable[..., Any]:
    """`async with subject(kind, delay_s) as it`: a Subject."""

    @asynccontextmanager
    async def started(kind: str, delay_s: float = 0.0) -> AsyncIterator[Subject]:
        if kind == "embedded":
            async with opened(fake_backend(FakeRunner(delay_s=delay_s))) as engine:
                yield Subject(engine, engine)
            return
        async with running(SERVERS[kind](delay_s)) as server:
            backend: Any
            if kind.startswith("triton"):
                paths = {"tokenizer": tokenizer, "metrics_url": server.metrics_url}
                backend = triton_to(server.url, **paths)
            else:
                backend = relay_to(server.url, type=kind.split()[0])
            async with opened(backend):
                yield Subject(backend, server.engine, server)

    return started


def abc(**fields: Any) -> GenerateRequest:
    return ask(fake_backend(), "abc", **fields)


@pytest.mark.parametrize(("kind", "check"), owed(KINDS, NO_LOGPROBS))
async def test_contract(subject: Any, kind: str, check: Check) -> None:
    async with subject(kind) as it:
        await check(it.backend, "abc", (97, 98, 99))


@EACH
async def test_the_answer_is_that_of_the_engine_alone(subject: Any, kind: str) -> None:
    settings: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "seed": 1},
        {"ignore_eos": False, "max_tokens": 100},
        {"stop": ("x", "yz")},
    )
    async with subject(kind) as it, subject("embedded") as alone:
        for fields in settings:
            found, events = await collect(it.backend, abc(**fields))
            wanted, expected = await collect(alone.backend, abc(**fields))
            assert found == wanted
            if kind == "triton ensemble, uncounted":  # counts its text: an end token is none of it
                continue
            assert isinstance(events[-1], Finished) and isinstance(expected[-1], Finished)
            assert events[-1].reason == expected[-1].reason
            assert events[-1].usage.prompt_tokens == expected[-1].usage.prompt_tokens


@EACH
async def test_a_client_that_goes_away_frees_the_backend(subject: Any, kind: str) -> None:
    async with subject(kind, delay_s=0.02) as it:
        assert max(await freed_within(it.backend, "abc", it.running)) < FREED_S
        assert it.engine.stats.generated_tokens < 200  # of 2,800 that were asked for


@EACH
async def test_a_client_that_goes_before_the_first_token_frees_the_backend(
    subject: Any, kind: str
) -> None:
    async with subject(kind, delay_s=0.05) as it:
        for _ in range(10):  # a busy machine only adds to what is measured
            seconds, tokens = await _left_before_the_first_token(it)
            if seconds < FREED_S and tokens < 3:
                break
        assert seconds < FREED_S and tokens < 3


@EACH
async def test_a_server_that_goes_away_is_seen_at_once(subject: Any, kind: str) -> None:
    async with subject(kind) as it:
        assert await it.backend.ready()
        holding = asyncio.create_task(it.backend.hold())
        await collect(it.backend, abc())
        await _stop(it)
        async with asyncio.timeout(1):
            await holding
        assert not await it.backend.ready()
        assert await it.backend.load() is None or kind == "embedded"
        with pytest.raises(BackendUnavailable):
            await it.backend.hold()
        for call in (it.backend.probe(), collect(it.backend, abc())):
            with pytest.raises(BackendUnavailable) as failed:
                await call
            assert failed.value.kind == ("dead" if kind == "embedded" else "refused")
        await it.backend.close()
        assert not await it.backend.ready()
        with pytest.raises(BackendUnavailable):
            await collect(it.backend, abc())


@EACH
@pytest.mark.parametrize("read", [0, 2])
async def test_closing_a_backend_fails_what_it_runs(subject: Any, kind: str, read: int) -> None:
    """With an error, and not as if whoever waits for an answer had been cancelled."""
    async with subject(kind, delay_s=0.05 if read == 0 else 0.01) as it:
        stream: Any = it.backend.generate(abc(max_tokens=400))
        for _ in range(read):
            await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        while not it.engine.stats.running:
            await asyncio.sleep(0.005)
        await it.backend.close()
        with pytest.raises(BackendError) as failed:
            async with asyncio.timeout(60):
                await waiting
                _ = [event async for event in stream]
        assert failed.value.kind == "lost"
        begun = read > 0 or waiting.exception() is None
        assert isinstance(failed.value, BackendUnavailable) == (not begun)


async def _left_before_the_first_token(it: Subject) -> tuple[float, int]:
    """Seconds until its engine is free after a client has gone, and tokens that it made for it."""
    before = it.engine.stats.generated_tokens
    task = asyncio.create_task(collect(it.backend, abc(max_tokens=400)))
    while not it.engine.stats.running:
        await asyncio.sleep(0.005)
    started = time.perf_counter()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    while it.engine.stats.running:
        await asyncio.sleep(0.005)
    return time.perf_counter() - started, it.engine.stats.generated_tokens - before


async def _stop(it: Subject) -> None:
    await (it.server.stop() if it.server is not None else it.backend.close())

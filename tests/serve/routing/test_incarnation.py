"""Tests how a restarted server is recognized, as far as it reports its incarnation."""

import asyncio
import json

import pytest

from serve.backends import connection as held
from serve.backends.base import Incarnation
from serve.backends.openai_http import incarnation
from serve.backends.triton_grpc import TritonBackend
from tests.fake_servers import FakeOpenAI, FakeTriton, running
from tests.fakes import fake_backend
from tests.serve.openai_clients import asked, relay_to, started
from tests.triton_config import triton_at

MODELS = json.dumps({"data": [{"id": "m", "root": "/ckpt", "max_model_len": 512}]}).encode()
PAGE = b"""# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79527e+09
vllm:prompt_tokens_total{engine="0",model_name="m"} 10.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 5.0
vllm:generation_tokens_total{engine="0",model_name="m"} 3.0
"""


def told(models: bytes = MODELS, page: bytes = PAGE) -> Incarnation:
    found = incarnation(models, page, "m")
    assert found is not None
    return found


def test_a_vllm_tells_since_when_it_runs_and_what() -> None:
    before = told()
    assert before == Incarnation(("root=/ckpt", "max_model_len=512"), 1.79527e9, (15, 3))
    assert before.shows_restarts and told(page=PAGE.replace(b" 3.0", b" 9.0")).follows(before)
    assert not told(page=PAGE.replace(b"1.79527e+09", b"1.79528e+09")).follows(before)
    assert not told(MODELS.replace(b"/ckpt", b"/other")).follows(before)
    assert not told(MODELS.replace(b"512", b"256")).follows(before)


def test_one_of_several_processes_tells_by_counters_that_fall_back() -> None:
    """Where several processes answer, the page has no start time."""
    page = PAGE.replace(b"process_start", b"other_start")
    before = told(page=page)
    assert before.started is None and before.shows_restarts
    assert told(page=page.replace(b" 10.0", b" 11.0")).follows(before)
    assert not told(page=page.replace(b" 10.0", b" 2.0")).follows(before)
    assert not told(page=b"").follows(before)  # it told before


def test_one_without_metrics_is_not_told_apart() -> None:
    assert not told(page=b"").shows_restarts and told(page=b"").follows(told(page=b""))


@pytest.mark.parametrize("models", [b"", b"[]", b"{}", b'{"data": [1]}', b"<h1>Hello</h1>"])
def test_what_is_no_list_of_models_tells_nothing(models: bytes) -> None:
    assert incarnation(models, PAGE, "m") is None


async def test_servers_are_asked_over_http() -> None:
    async with running(FakeOpenAI()) as server, started(server.url) as backend:
        found = await backend.incarnation()
        assert found == Incarnation(("root=None", "max_model_len=512"))
        await server.stop()
        assert await backend.incarnation() is None
        await server.start(int(server.url.rpartition(":")[2]))


@pytest.mark.parametrize(
    ("status", "known"), [(200, True), (404, True), (501, True), (503, False), (429, False)]
)
async def test_an_error_of_the_metrics_is_no_other_life(
    status: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = relay_to("http://127.0.0.1:1", model="m")
    pages = {"/v1/models": (200, MODELS), "/metrics": (status, PAGE if status == 200 else b"x")}

    async def get(path: str) -> tuple[int, bytes]:
        return pages[path]

    monkeypatch.setattr(backend, "get", get)
    found = await backend.incarnation()
    assert (found is not None) == known and (found == told()) == (status == 200)


async def test_triton_forgets_its_statistics_when_it_loads_a_model_again() -> None:
    async with running(FakeTriton()) as server:
        backend = TritonBackend("fake", triton_at(server.url))
        assert await backend.incarnation() is None
        await backend.start()
        before = await backend.incarnation()
        _ = [event async for event in backend.generate(asked(max_tokens=1))]
        after = await backend.incarnation()
        assert before is not None and after is not None
        assert after.shows_restarts and after.follows(before) and not before.follows(after)
        server.reload()
        again = await backend.incarnation()
        assert again is not None and not again.follows(after)
        server.instances = 2
        other = await backend.incarnation()
        assert other is not None and other.settings != again.settings
        await backend.close()


async def test_an_embedded_engine_lives_once() -> None:
    first = await fake_backend().incarnation()
    assert first is not None and first.shows_restarts and first.follows(first)


async def test_a_connection_that_is_made_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "IDLE_S", 0.0)
    writers: list[asyncio.StreamWriter] = []
    came = asyncio.Event()

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        came.set()

    told: list[int] = []
    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    hold = held.hold_open(
        "x", "127.0.0.1", port, tls=False, timeout_s=5, reopened=lambda: told.append(len(writers))
    )
    task = asyncio.create_task(hold)
    async with asyncio.timeout(60):
        await came.wait()
        came.clear()
        writers[0].close()
        await came.wait()  # there is another
        assert told == [1]  # it was told before that
        writers[1].transport.abort()
        listener.close()
        await task

"""Tests what OpenAI servers report about themselves, and how their end is detected."""

import asyncio
import socket
from dataclasses import replace
from typing import Any

import pytest

from octet.errors import BackendError
from serve.api.events import close
from serve.backends import connection as held
from serve.backends import openai_http
from serve.backends.base import LoadReport
from serve.backends.openai_http import LOAD_SOURCES
from tests.fake_servers import FLAVOURS, FakeOpenAI, running
from tests.serve.openai_clients import asked, listening, started
from tests.serve.upstreams import STREAM_HEAD, chunk, forever, scripted
from tests.serve.waiting import until


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_the_load_is_read_from_each_server_that_tells(flavour: str) -> None:
    kind = "vllm" if flavour == "vllm" else "openai"
    async with (
        running(FakeOpenAI(0.02, flavour=flavour)) as server,
        started(server.url, type=kind) as backend,
    ):
        stream = backend.generate(asked(max_tokens=200))
        _ = [await anext(stream) for _ in range(3)]
        report = await backend.load()
        await stream.aclose()
        if flavour in ("dynamo", "sse-starlette"):
            assert report is None
            return
        assert report is not None and (report.running, report.waiting) == (1, 0)
        assert report.kv_usage is not None and 3 / 8192 <= report.kv_usage < 20 / 8192
        assert report.capacity_tokens == (None if flavour == "trtllm-serve" else 16 * 512)


async def test_engines_of_one_server_are_added_up() -> None:
    page = (
        'vllm:num_requests_running{engine="0",model_name="a}b \\" c"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 4.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1e+01\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
        'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25\n'
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="None"} 1.0\n'
        "vllm:num_requests_running nonsense\n"
    )
    async with running(FakeOpenAI()) as vllm, started(vllm.url) as backend:
        vllm.flavour = replace(vllm.flavour, metrics=page)
        report = await backend.load()
        assert report is not None and (report.running, report.waiting) == (7, 10)
        assert (report.kv_usage, report.capacity_tokens) == (0.375, 1600)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e400", "9e300"])
async def test_figures_that_are_none_are_not_taken(value: str) -> None:
    """vLLM writes NaN until it has measured; whatever is there, `load` does not raise."""
    page = (
        f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 2\n"
        f"vllm:kv_cache_usage_perc {value}\n"
        'vllm:cache_config_info{block_size="²",num_gpu_blocks="9"} 1.0\n'
    )
    async with running(FakeOpenAI()) as vllm, started(vllm.url) as backend:
        vllm.flavour = replace(vllm.flavour, metrics=page)
        assert await backend.load() == LoadReport(0, 2, None, None)
        vllm.flavour = replace(vllm.flavour, metrics=f"vllm:num_requests_running {value}\n")
        assert await backend.load() is None
    body = f'{{"server_load": {value.replace("+Inf", "Infinity")}}}'.encode()
    assert LOAD_SOURCES[-1][1](body) is None or value in ("-1", "9e300")


async def test_without_metrics_vllm_tells_its_load_if_it_tracks_it() -> None:
    vllm = FakeOpenAI(0.02)
    vllm.log_stats, vllm.load_tracking = False, True
    async with running(vllm), started(vllm.url) as backend:
        stream = backend.generate(asked(max_tokens=200))
        await anext(stream)
        report = await backend.load()
        await stream.aclose()
        assert report is not None and (report.running, report.capacity_tokens) == (1, None)


async def test_a_server_that_tells_nothing_is_asked_again_only_after_it_was_away() -> None:
    vllm = FakeOpenAI()
    vllm.log_stats = False
    async with running(vllm), started(vllm.url) as backend:
        assert await backend.ready() and await backend.load() is None
        assert backend._load_from == ()
        vllm.healthy = False
        assert not await backend.ready() and backend._load_from != ()


async def test_the_context_is_known_once_it_is_ready() -> None:
    for flavour, kind, length in (("vllm", "vllm", 512), ("dynamo", "openai", None)):
        async with (
            running(FakeOpenAI(flavour=flavour)) as server,
            started(server.url, type=kind) as backend,
        ):
            assert backend.context_length is None
            assert await backend.ready() and backend.context_length == length
            server.healthy = False
            assert not await backend.ready() and backend.context_length is None


PROBED = {"": "prompt", "/v1/chat/completions": "messages", "/v1/embeddings": "input"}


@pytest.mark.parametrize("only", PROBED)
async def test_a_probe_is_one_token_of_what_the_server_does(only: str) -> None:
    async with running(FakeOpenAI(only=only)) as server:
        async with started(server.url, type="openai") as backend:
            await backend.probe()
            await backend.probe()
        assert len(server.requests) == 2
        assert all(PROBED[only] in request for request in server.requests)
        if only != "/v1/embeddings":
            assert [request["max_tokens"] for request in server.requests] == [1, 1]


async def test_a_probe_answered_with_nothing_is_garbled() -> None:
    for answer in (b"{}", b'{"data": []}', b"[]", b"1", b"no JSON", b"[" * 100_000):

        async def say(
            _: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes = answer
        ) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
            await writer.drain()
            writer.close()

        async with listening(say) as url, started(url) as backend:
            with pytest.raises(BackendError, match="without a result") as failed:
                await backend.probe()
            assert failed.value.kind == "garbled"


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("!busy", "overloaded", "queue full"),
        ("!dead", "dead", "EngineCore"),
        ("!error", "failed", "it broke"),
        ("!hangup", "lost", "connection"),
        ("x" * 600, "failed", "refuses to generate a token"),
    ],
)
async def test_a_probe_says_what_is_wrong(
    fault: str, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_http, "_PROBES", (("/v1/completions", {"prompt": fault}),))
    async with running(FakeOpenAI()) as vllm, started(vllm.url) as backend:
        with pytest.raises(BackendError, match=words) as failed:
            await backend.probe()
        assert failed.value.kind == kind


@pytest.mark.parametrize(
    ("served", "remedy"),
    [
        ("octet", "; it serves fake, not octet: give this backend the name under `model`"),
        ("fake", ""),  # the name is right: something else is wrong
    ],
)
async def test_a_server_of_another_name_says_which_one(served: str, remedy: str) -> None:
    async with (
        running(FakeOpenAI(only="nothing")) as vllm,
        started(vllm.url, model=served) as backend,
    ):
        with pytest.raises(BackendError) as failed:
            await backend.probe()
        words = f"refuses to generate a token: The model does not support /v1/completions{remedy}"
        assert str(failed.value).endswith(words)


async def test_a_server_that_closes_idle_connections_is_held_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held, "IDLE_S", 0.03)
    connections = 0

    async def idle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await asyncio.sleep(0.05)
        writer.close()

    async with started("http://127.0.0.1:1") as backend:
        async with listening(idle) as url:
            backend._urls.clear()
            backend._config = backend._config.model_copy(update={"url": url})
            holding = asyncio.create_task(backend.hold())
            while connections < 3:
                assert not holding.done()
                await asyncio.sleep(0.01)
        async with asyncio.timeout(1):  # nobody listens any more
            await holding


async def test_a_server_that_closes_every_connection_is_not_asked_in_a_loop() -> None:
    connections = 0

    async def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    async with listening(close) as url, started(url) as backend:
        await backend.hold()
        assert connections == 1


@pytest.mark.parametrize("vanished", [True, False])
async def test_requests_at_a_host_that_vanished_end_when_it_is_seen(
    vanished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written to it after that is never acknowledged, nor is it given up for minutes.

    The server is there all the time: only the held connection says that its host is gone.
    """
    seen = asyncio.Event()

    async def hold_open(*_: Any, **__: Any) -> bool:
        await seen.wait()
        return vanished

    monkeypatch.setattr(openai_http, "hold_open", hold_open)
    hung, begun = forever(), forever(STREAM_HEAD, chunk())
    async with scripted(hung, begun) as upstream, started(upstream.url) as backend:
        waiting = asyncio.create_task(backend.relay("/v1/completions", b"{}", {}))
        await until(lambda: upstream.running)
        stream = (await backend.relay("/v1/completions", b"{}", {})).body
        assert await anext(stream) == chunk()
        holding = asyncio.create_task(backend.hold())
        seen.set()
        await holding
        if vanished:
            for asked in (waiting, anext(stream)):
                with pytest.raises(BackendError) as failed:
                    await asked
                assert failed.value.kind == "lost"
            await upstream.freed()
            again = await backend.relay("/v1/completions", b"{}", {})  # it may come back
            assert again.status == 200
            await close(again.body)
        else:  # it drains: what it has begun, it finishes
            await asyncio.sleep(0.05)
            assert upstream.running == 2 and not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await close(stream)


async def test_sockets_notice_a_host_that_vanishes() -> None:
    """That a probe is sent each second is seen here; that a host vanishes would take one."""
    taken = held.kept_alive((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1)))
    with taken:
        options = [taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
            options.append(taken.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)))
        assert options == [1, 1, 1, held.GONE_AFTER_S - 1]

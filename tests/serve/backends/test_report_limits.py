"""Reports of a backend that never end: they are cut off, and count as no report."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from octet.errors import BackendError, BackendUnavailable
from serve.backends.bounds import MAX_REFUSAL, MAX_REPORT
from serve.backends.openai_http import card_of, context_length
from tests.serve.openai_clients import asked, listening, started, triton_to

ENDLESS = 64 * 1024 * 1024  # bytes that the server would send
PAGE = b"vllm:num_requests_running 3\n"


@asynccontextmanager
async def endless(status: bytes = b"200 OK") -> AsyncIterator[tuple[str, list[int]]]:
    """A server whose every answer is a metrics page without end, and the bytes that it sent."""
    sent = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-type: text/plain\r\n\r\n")
                for _ in range(ENDLESS // 65536):
                    writer.write(PAGE * (65536 // len(PAGE)))
                    await writer.drain()
                    sent[0] += 65536
                return
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async with listening(serve) as url:
        yield url, sent


@pytest.mark.parametrize("what", ["load", "ready", "incarnation", "probe", "triton"])
async def test_a_report_without_end_is_no_report(what: str) -> None:
    async with endless() as (url, sent), started(url) as backend:
        tracemalloc.start()
        try:
            if what == "probe":
                with pytest.raises(BackendUnavailable, match=f"over {MAX_REPORT} bytes"):
                    await backend.probe()
            elif what == "ready":  # /health says enough with its status; its page is cut off
                assert await backend.ready() is False
            elif what == "triton":
                triton = triton_to("127.0.0.1:1", metrics_url=f"{url}/metrics")
                assert await triton.load() is None
            else:
                assert await getattr(backend, what)() is None
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 8 * MAX_REPORT  # the socket's buffers of this server included
    assert sent[0] < ENDLESS / 2


async def test_the_body_of_a_refusal_is_cut_off() -> None:
    async with endless(b"500 No") as (url, sent), started(url) as backend:
        with pytest.raises(BackendError, match=f"over {MAX_REFUSAL} bytes"):
            _ = [event async for event in backend.generate(asked())]
    assert sent[0] < ENDLESS / 2


async def test_a_body_whose_connection_is_gone_before_it_is_read_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For which aiohttp raises a RuntimeError, found by a mutated stream of many small chunks."""

    async def gone(*_: Any) -> bytes:
        raise RuntimeError("Connection closed.")

    async with endless() as (url, _), started(url) as backend:
        relay = await backend.relay("/v1/completions", b"{}", {})
        monkeypatch.setattr(aiohttp.StreamReader, "read", gone)
        with pytest.raises(BackendError, match="the connection failed") as caught:
            await anext(aiter(relay.body))
        assert caught.value.kind == "lost"
        assert await backend.load() is None


@pytest.mark.parametrize("load", [-1, 10**12, 10**400, True, 1.5, "7", None])
async def test_a_load_that_is_no_number_of_requests_is_not_taken(load: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        found = head.startswith(b"GET /load")
        body = json.dumps({"server_load": load}).encode() if found else b""
        status = b"200 OK" if found else b"404 No"
        writer.write(b"HTTP/1.1 %s\r\nconnection: close\r\n\r\n%s" % (status, body))
        writer.close()

    async with listening(serve) as url, started(url) as backend:
        assert await backend.load() is None


@pytest.mark.parametrize("length", [-1, 0, True, 2**31, 10**100, 4096.0, "4096", None])
def test_a_context_that_is_no_number_of_tokens_is_not_taken(length: Any) -> None:
    card = card_of(json.dumps({"data": [{"id": "m", "max_model_len": length}]}).encode(), "m")
    assert card is not None and context_length(card) is None

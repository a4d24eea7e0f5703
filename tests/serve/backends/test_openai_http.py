"""A server of OpenAI's protocol as a backend: bytes pass through, each failure has its kind."""

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest

from octet.errors import BackendError, BackendUnavailable, RequestError
from serve.backends.openai_errors import from_event, retry_after
from serve.backends.openai_http import OpenAiHttpBackend
from serve.engine.request import Finished
from tests.fake_servers import FLAVOURS, FakeOpenAI, running
from tests.serve.conftest import serving
from tests.serve.openai_clients import asked, dead_url, listening, relay_to, started

BODY = {"model": "fake", "prompt": "abc", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
CHAT = {k: v for k, v in BODY.items() if k != "prompt"} | {
    "messages": [{"role": "user", "content": "hi"}]
}
TOOL = {"type": "function", "function": {"name": "sum_up", "parameters": {"é": [1, 1e-7]}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "ü", "schema": {"type": "object"}}}
JSON = {"content-type": "application/json"}


async def body_of(backend: OpenAiHttpBackend, prompt: str) -> bytes:
    body = json.dumps(BODY | {"prompt": prompt, "stream": True}).encode()
    relay = await backend.relay("/v1/completions", body, JSON)
    return b"".join([piece async for piece in relay.body])


async def answer(url: str, path: str, body: dict[str, Any]) -> bytes:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        assert response.status == 200
        return await response.read()


# What passes through


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_bytes_pass_through_unchanged(flavour: str) -> None:
    """Of whole answers and of streams: comments, ids, CRLF, unknown members, tools and formats."""
    kind = "vllm" if flavour == "vllm" else "openai"
    usage = {"stream_options": {"include_usage": True}}
    bodies = [
        ("/v1/completions", BODY),
        ("/v1/completions", BODY | {"logprobs": 2}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"}),
        ("/v1/chat/completions", CHAT | {"response_format": SCHEMA}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "min_p": 0.1}),
    ]
    async with (
        running(FakeOpenAI(flavour=flavour)) as server,
        serving(("fake", [relay_to(server.url, type=kind)])) as served,
    ):
        for path, body in bodies:
            for asking in (body, body | {"stream": True} | usage):
                relayed = await answer(served.url, path, asking)
                assert relayed == await answer(server.url, path, asking)
                assert server.requests[-1] == server.requests[-2]
                if "tools" in body:
                    assert b"sum_up" in relayed and b"tool_calls" in relayed
                if "response_format" in body:
                    assert b"json_schema" in relayed


async def test_an_alias_is_replaced_both_ways() -> None:
    async with running(FakeOpenAI()) as vllm:
        backend = relay_to(vllm.url, model="served")
        async with serving(("public", [backend])) as served:
            for stream in (False, True):
                body = BODY | {"model": "public", "stream": stream, "prompt": '"model":"served"'}
                relayed = await answer(served.url, "/v1/completions", body)
                assert vllm.requests[-1]["model"] == "served"
                assert b'"served"' not in relayed and b'"public"' in relayed


async def test_the_headers_given_are_sent_and_the_key_but_no_cookie() -> None:
    async with running(FakeOpenAI()) as vllm:
        async with started(vllm.url, api_key="secret") as backend:
            headers = JSON | {"x-request-id": "mine", "traceparent": "00-1-2-01"}
            for _ in range(2):
                relay = await backend.relay(
                    "/v1/embeddings", b'{"input": "a", "model": "x"}', headers
                )
                assert relay.status == 200 and [p async for p in relay.body]
            _ = [e async for e in backend.generate(asked(headers={"traceparent": "00-3-4-01"}))]
        assert all(sent["authorization"] == "Bearer secret" for sent in vllm.headers)
        assert vllm.headers[1].items() >= headers.items()
        assert set(vllm.headers[1]) - set(headers) == {
            *("accept", "accept-encoding", "authorization", "content-length", "host", "user-agent")
        }
        assert vllm.headers[2]["traceparent"] == "00-3-4-01"


async def test_a_redirect_is_an_answer_and_not_followed() -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 302 Found\r\nlocation: http://10.0.0.1/\r\ncontent-length: 0\r\n"
            b"connection: close\r\n\r\n"
        )
        writer.close()

    async with listening(redirect) as url, started(url) as backend:
        relay = await backend.relay("/v1/completions", b"{}", JSON)
        assert (relay.status, [piece async for piece in relay.body]) == (302, [])
        with pytest.raises(BackendUnavailable) as failed:
            _ = [event async for event in backend.generate(asked())]
        assert failed.value.kind == "garbled"


async def test_connections_are_kept_and_reused_by_any_number_at_once() -> None:
    async with running(FakeOpenAI()) as vllm, started(vllm.url) as backend:
        for _ in range(3):
            await body_of(backend, "abc")
        assert backend._session is not None
        (kept,) = backend._session.connector._conns.values()
        assert len(kept) == 1
        await asyncio.gather(*(body_of(backend, "abc") for _ in range(150)))  # aiohttp allows 100


# How it fails


@pytest.mark.parametrize(
    ("prompt", "error", "kind"),
    [
        ("!busy", BackendUnavailable, "overloaded"),
        ("!limit", BackendUnavailable, "overloaded"),
        ("!error", BackendUnavailable, "failed"),
        ("!dead", BackendUnavailable, "dead"),
        ("!key", BackendUnavailable, "failed"),
        ("!html", BackendUnavailable, "failed"),
        ("!hangup", BackendUnavailable, "lost"),
        ("!reset", BackendUnavailable, "lost"),
        ("!nothttp", BackendUnavailable, "garbled"),
        ("!empty", BackendUnavailable, "lost"),
        ("!die", BackendError, "lost"),
        ("!midreset", BackendError, "lost"),
        ("!garbage", BackendError, "garbled"),
        ("!inside", BackendError, "failed"),
    ],
)
async def test_each_failure_has_its_kind(prompt: str, error: type[Exception], kind: str) -> None:
    async with running(FakeOpenAI()) as vllm, started(vllm.url) as backend:
        with pytest.raises(BackendError) as failed:
            _ = [event async for event in backend.generate(asked(prompt))]
        assert type(failed.value) is error and failed.value.kind == kind
        assert backend.name in str(failed.value)
        assert len(vllm.requests) == 1, "it tried again by itself"
        assert failed.value.retry_after_s == {"!busy": 7, "!limit": 3}.get(prompt)
        assert isinstance((await answered(backend))[-1], Finished)  # the next request is fine


async def answered(backend: OpenAiHttpBackend) -> list[Any]:
    return [event async for event in backend.generate(asked())]


async def test_a_refusal_keeps_its_status_and_field() -> None:
    async with running(FakeOpenAI()) as vllm, started(vllm.url) as backend:
        with pytest.raises(RequestError, match="512") as refused:
            _ = [event async for event in backend.generate(asked("x" * 600))]
        assert (refused.value.status, refused.value.param) == (400, "prompt")


async def test_a_server_that_is_not_there_or_does_not_answer_is_refused() -> None:
    with socket.socket() as full:  # whose queue of connections is full: the next one hangs
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(address)
        for url in (dead_url(), f"http://127.0.0.1:{address[1]}"):
            async with started(url, connect_timeout_s=0.2) as backend:
                for call in (body_of(backend, "abc"), backend.probe(), backend.hold()):
                    with pytest.raises(BackendUnavailable) as failed:
                        await call
                    assert failed.value.kind == "refused"
                assert not await backend.ready() and await backend.load() is None
        for client in waiting:
            client.close()


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, None), (404, None), (429, "overloaded"), (503, "overloaded"), (500, "failed")],
)
def test_an_error_event_is_told_by_its_code_before_its_words(status: int, kind: str | None) -> None:
    error = from_event("vllm", {"message": "no", "code": status})
    assert (error.kind if isinstance(error, BackendError) else None) == kind
    quoting = from_event("vllm", {"message": "bad regex 'EngineDeadError('", "code": status})
    dead = isinstance(quoting, BackendError) and quoting.kind == "dead"
    assert dead == (kind is not None)  # a client cannot take a server out by what it sends


def test_when_to_come_back() -> None:
    assert retry_after("7") == 7 and retry_after(None) is None and retry_after("soon") is None
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after("Fri, 01 Jan 2100 00:00:00 GMT") == retry_after("9" * 400) == 86_400

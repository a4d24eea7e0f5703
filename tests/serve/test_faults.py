"""Tests faults of backends and clients on real sockets: detected, survived, nothing left behind."""

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.serve.api.request.test_attempts import BODY, TURNS, over, pools
from tests.serve.conftest import Served, serving
from tests.serve.in_process import in_process
from tests.serve.openai_clients import relay_to
from tests.serve.upstreams import (
    CHUNKED_HEAD,
    DONE,
    JSON_HEAD,
    STREAM_HEAD,
    Script,
    Scripted,
    chunk,
    forever,
    reset,
    scripted,
    send,
    slowly,
    whole,
)

SOUND = send(STREAM_HEAD, chunk("a"), chunk("b"), DONE)
ERROR = b'{"error": {"message": "CUDA error", "type": "InternalServerError", "code": 500}}'


def status_line(status: str, body: bytes, *fields: bytes) -> bytes:
    head = [b"HTTP/1.1 " + status.encode(), b"content-type: application/json", *fields]
    return b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body])


def garbled_head() -> Script:
    return send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


FIRST_TOKEN_S = 0.2
# What a backend does with its first request, and what it is called.
BEFORE_THE_FIRST_TOKEN = {
    "reset at once": (reset(), "lost"),
    "reset after the headers": (reset(CHUNKED_HEAD), "lost"),
    "closed at once": (send(), "lost"),
    "never answers": (forever(), "timeout"),
    "headers and no more": (forever(STREAM_HEAD), "timeout"),
    "a byte at a time": (slowly(STREAM_HEAD, chunk(), 0.05), "timeout"),
    "no HTTP": (garbled_head(), "garbled"),
    "binary": (send(STREAM_HEAD, b"\x00\xff" * 100 + b"\n\n"), "garbled"),
    "half an event": (send(STREAM_HEAD, chunk()[:-10]), "garbled"),
    "an empty stream": (send(STREAM_HEAD), "garbled"),
    "a 500": (send(status_line("500 Oops", ERROR)), "failed"),
    "a 503": (send(status_line("503 Busy", ERROR, b"retry-after: 3")), "overloaded"),
    "an error inside a 200": (send(STREAM_HEAD, b"data: " + ERROR + b"\n\n", DONE), "failed"),
    "a 200 that is one error": (send(status_line("200 OK", ERROR)), "failed"),
}


@pytest.mark.parametrize(
    ("fault", "kind"), BEFORE_THE_FIRST_TOKEN.values(), ids=BEFORE_THE_FIRST_TOKEN
)
async def test_before_the_first_token_the_client_sees_nothing(fault: Script, kind: str) -> None:
    settings = pools(timeouts={"first_token_s": FIRST_TOKEN_S}, routing=TURNS)
    async with scripted(fault) as broken, scripted(SOUND) as sound:
        backends: list[Any] = [relay_to(broken.url), relay_to(sound.url)]
        async with in_process(("fake", backends), pools=settings) as served:
            for _ in range(2):
                events = await served.events("/v1/completions", BODY)
                assert events[-1] == "[DONE]" and len(events) == 3
            assert (broken.asked, sound.asked) == (1, 2)
            assert served.metric("octet_retries_total", pool="fake", reason=kind) == 1
            await broken.freed()


# What it does after its first token, and the code of the error event.
AFTER_THE_FIRST_TOKEN = {
    "reset": (reset(STREAM_HEAD, chunk()), "backend_error"),
    "closed": (send(STREAM_HEAD, chunk()), "backend_error"),
    "half an event": (send(STREAM_HEAD, chunk(), chunk()[:-10]), "backend_error"),
    "silence": (forever(STREAM_HEAD, chunk()), "deadline_exceeded"),
    "a byte at a time": (slowly(STREAM_HEAD + chunk(), chunk(), 0.05), "deadline_exceeded"),
    "binary": (send(STREAM_HEAD, chunk(), b"\x00\xff" * 100 + b"\n\n"), "backend_error"),
}


@pytest.mark.parametrize(
    ("fault", "code"), AFTER_THE_FIRST_TOKEN.values(), ids=AFTER_THE_FIRST_TOKEN
)
async def test_after_the_first_token_the_stream_ends_in_an_error_event(
    fault: Script, code: str
) -> None:
    settings = pools(timeouts={"inter_token_s": 0.2})
    async with (
        scripted(fault) as broken,
        in_process(("fake", [relay_to(broken.url)]), pools=settings) as served,
    ):
        *events, last = await served.events("/v1/completions", BODY)
        assert [json.loads(event)["choices"][0]["text"] for event in events] == ["x"]
        assert json.loads(last)["error"]["code"] == code
        assert "127.0.0.1" not in last
        assert served.metric("octet_broken_streams_total", model="fake") == 1
        assert broken.asked == 1
        await broken.freed()


WHOLE = {
    "reset half-way": reset(JSON_HEAD, whole()[:20]),
    "cut half-way": send(status_line("200 OK", whole())[:-5]),
    "no JSON": send(status_line("200 OK", b"<html>Welcome</html>")),
    "an error inside a 200": send(status_line("200 OK", ERROR)),
    "a 500": send(status_line("500 Oops", ERROR)),
}


@pytest.mark.parametrize("fault", WHOLE.values(), ids=WHOLE)
async def test_a_whole_answer_is_asked_for_again(fault: Script) -> None:
    async with (
        scripted(fault, send(status_line("200 OK", whole()))) as upstream,
        in_process(("fake", [relay_to(upstream.url)])) as served,
    ):
        status, answer = await served.post("/v1/completions", BODY)
        assert (status, answer) == (200, json.loads(whole()))
        assert upstream.asked == 2


async def test_what_a_backend_says_of_its_failure_reaches_the_client_without_its_address() -> None:
    async with scripted(send()) as upstream:
        host = upstream.url.removeprefix("http://")
        said = json.dumps({"error": {"message": f"no GPU at {upstream.url} ({host})"}}).encode()
        upstream.scripts = [send(status_line("500 Oops", said))]
        async with in_process(("fake", [relay_to(upstream.url)])) as served:
            status, answer = await served.post("/v1/completions", BODY)
            assert status == 500
            assert answer["error"]["message"] == "no GPU at fake-1 (fake-1)"


@pytest.mark.parametrize("why", ["gone", "late"])
async def test_who_has_had_all_of_a_stream_has_had_an_answer(why: str) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    lingering = Scripted([chunk(), usage, DONE, None])  # its connection does not end
    async with over(lingering, timeouts={"total_s": 0.2}) as served:
        gone = asyncio.Event()
        leave = gone.set if why == "gone" else lambda: None
        reply = await served.request(
            "/v1/completions",
            BODY | {"stream": True},
            gone=gone,
            on_piece=lambda reply: reply.body.endswith(DONE) and leave(),
        )
        assert reply.events[-1] == "[DONE]" and reply.complete
        labels = {"key": "anonymous", "model": "fake", "backend": "fake-1", "precision": ""}
        counted = {"type": "output", "counted": "backend"}
        assert served.metric("octet_tokens_total", **labels, **counted) == 3
        (member,) = served.gateway.pools["fake"].members
        assert member.last_error == ""


AFTER_DONE = {"more": send(b"data: x"), "silence": forever(), "a reset": reset(b"")}


@pytest.mark.parametrize("then", AFTER_DONE)
async def test_nothing_after_done_matters(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.api.events.END_S", 0.05)

    async def script(writer: asyncio.StreamWriter) -> None:
        await send(STREAM_HEAD, chunk("a"), DONE)(writer)
        await AFTER_DONE[then](writer)

    async with (
        scripted(script) as upstream,
        in_process(("fake", [relay_to(upstream.url)])) as served,
    ):
        events = await served.events("/v1/completions", BODY)
        assert len(events) == 2 and events[-1] == "[DONE]"
        assert served.metric("octet_broken_streams_total", model="fake") == 0
        await upstream.freed()


async def slow_reader(served: Served) -> socket.socket:
    """A client that asks for a stream and then reads nothing of it."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    port = int(served.url.rpartition(":")[2])
    await loop.sock_connect(client, ("127.0.0.1", port))
    body = json.dumps(BODY | {"stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    await loop.sock_sendall(client, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return client


async def test_a_slow_reader_holds_up_its_backend_and_nobody_else() -> None:
    piece = chunk("x" * 20_000)
    written = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(STREAM_HEAD)
        while written < 2000 * len(piece):  # 40 MB
            writer.write(piece)
            await writer.drain()
            written += len(piece)

    async with (
        scripted(flood, SOUND) as upstream,
        serving(("fake", [relay_to(upstream.url)])) as served,
    ):
        client = await slow_reader(served)
        before = -1
        async with asyncio.timeout(60):
            while written > before or written == 0:  # until everything on the way is full
                before = written
                await asyncio.sleep(0.1)
        # What is on the way lies in the sockets' buffers and in a few of ours.
        assert written < 20 * 2**20, "the gateway keeps what its client does not take"
        for _ in range(5):
            assert (await served.events("/v1/completions", BODY))[-1] == "[DONE]"
        client.close()
        await served.idle()
        await upstream.freed()

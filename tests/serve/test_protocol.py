"""Raw bytes on real sockets: what is refused, with which words, and what is left alone."""

import asyncio
import contextlib
import functools
import inspect
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from serve.config import Limits
from serve.protocol import GuardedProtocol, guarded_protocol

GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT = 2000  # bytes of headers


class App:
    """Answers with the length of the body, /large with much; /flood streams until nobody reads."""

    def __init__(self) -> None:
        self.disconnected = asyncio.Event()
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.set()
        if scope["path"] == "/flood":
            await self.flood(receive, send)
            return
        if scope["path"] == "/wait":
            await self.go_on.wait()
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                return
            size += len(message["body"])
            more = message["more_body"]
        body = b"x" * 16_000_000 if scope["path"] == "/large" else b"%d" % size
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def flood(self, receive: Any, send: Any) -> None:
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        assert gone.result()["type"] == "http.disconnect"
        self.disconnected.set()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])
        }
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def refusal(self) -> tuple[int, str]:
        """Status and code of a refusal, after which the connection ends."""
        status, headers, body = await self.answer()
        assert headers["connection"] == "close"
        assert headers["content-type"] == "application/json"
        assert ("retry-after" in headers) == (status == 503)
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert await self.ends() == b""
        return status, error["code"]

    async def ends(self) -> bytes:
        """What still comes before the server closes."""
        return await self.reader.read()


class Site:
    """A server on a real socket."""

    def __init__(self, limits: Limits) -> None:
        self.app = App()
        self.counted: Counter[str] = Counter()
        self.limits = limits
        self.protocol = guarded_protocol(lambda: self.limits, lambda c: self.counted.update([c]))
        self.state = ServerState()
        self.clients: list[Client] = []
        self.port = 0

    def make(self) -> GuardedProtocol:
        config = uvicorn.Config(self.app, lifespan="off", ws="none", log_config=None)
        config.load()
        return self.protocol(config=config, server_state=self.state, app_state={})

    async def connect(self, data: bytes = b"") -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        await client.send(data)
        return client

    async def idle(self) -> None:
        """Waits until the server has no connection any more."""
        async with asyncio.timeout(5):
            while self.protocol.guard.connections or self.state.tasks:
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def site(**limits: Any) -> AsyncIterator[Site]:
    served = Site(Limits.model_validate({"max_header_bytes": LIMIT} | limits))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(served.make, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(10):
            yield served
    finally:
        server.close()
        for client in served.clients:
            client.writer.transport.abort()
            with contextlib.suppress(OSError):
                await client.writer.wait_closed()
        await served.idle()
        await server.wait_closed()
        guard = served.protocol.guard
        assert guard.refused == 0 and guard._timer is None  # nothing is left behind


def on_each_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Any:
    """The test on asyncio's loop and on uvloop's, whose transports differ."""

    @functools.wraps(test)
    def on(loop: str, **arguments: Any) -> None:
        factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test(**arguments))

    own = inspect.signature(test)
    added = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    on.__signature__ = own.replace(parameters=[added, *own.parameters.values()])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop", ["asyncio", "uvloop"])(on)


def of_size(size: int) -> bytes:
    """A request whose URL and header fields are `size` bytes together, as they are counted."""
    rest = size - len("/" + "Host: x\r\n" + "A: \r\n")
    return b"GET / HTTP/1.1\r\nHost: x\r\nA: %s\r\n\r\n" % (b"a" * rest)


@on_each_loop
async def test_what_is_within_the_limits_passes() -> None:
    async with site() as served:
        client = await served.connect(GET % b"")
        assert (await client.answer())[::2] == (200, b"0")
        await client.send(POST % 5 + b"hello" + GET % b"pipelined")
        assert (await client.answer())[2] == b"5"
        assert (await client.answer())[2] == b"0"
        for part in (CHUNKED, b"3\r\nabc\r\n", b"0\r\nSome: trailer\r\n\r\n"):
            await client.send(part)
        assert (await client.answer())[2] == b"3"
        await client.send(of_size(LIMIT))
        assert (await client.answer())[0] == 200
        # The body, and what was before in the same bytes, are no headers.
        await client.send(POST % 300_000 + b"x" * 200_000)
        await client.send(b"x" * 100_000 + (GET % b"")[:20])
        assert (await client.answer())[2] == b"300000"
        await client.send((GET % b"")[20:])
        assert (await client.answer())[0] == 200
        assert not served.counted


TOO_LARGE: dict[str, bytes] = {
    "one byte": of_size(LIMIT + 1),
    "one field": of_size(1_000_000),
    "many fields": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
    "the path": GET % (b"a" * LIMIT),
    "with a body": (POST % 5)[:-2] + b"A: " + b"a" * LIMIT + b"\r\n\r\nhello",
    "never ends": b"GET / HTTP/1.1\r\nA: " + b"a" * LIMIT,
    "never ends, fields": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * LIMIT,
    "never ends, path": b"GET /" + b"a" * (2 * LIMIT),
    "trailers": CHUNKED + b"0\r\n" + b"A: b\r\n" * LIMIT,
}


@pytest.mark.parametrize("case", TOO_LARGE)
@on_each_loop
async def test_headers_that_are_too_large(case: str) -> None:
    async with site() as served:
        client = await served.connect(TOO_LARGE[case])
        assert await client.refusal() == (431, "headers_too_large")
        assert served.counted == {"headers_too_large": 1}
        assert served.app.asked.is_set() == (case == "trailers")


@on_each_loop
async def test_headers_that_are_too_large_in_two_parts() -> None:
    async with site() as served:
        client = await served.connect(of_size(LIMIT + 1)[: LIMIT // 2])
        await asyncio.sleep(0.02)
        await client.send(of_size(LIMIT + 1)[LIMIT // 2 :])
        assert await client.refusal() == (431, "headers_too_large")
        assert not served.app.asked.is_set()


@on_each_loop
async def test_an_endless_header_is_stopped_as_it_arrives() -> None:
    async with site() as served:
        client = await served.connect(b"GET / HTTP/1.1\r\nA: ")
        sent = 0
        while not client.reader._buffer:  # type: ignore[attr-defined]
            await client.send(b"a" * 100)
            await asyncio.sleep(0)
            sent += 100
            assert sent < 100 * LIMIT
        assert await client.refusal() == (431, "headers_too_large")


MALFORMED: dict[str, bytes] = {
    "garbage": b"\x00\x01\x02\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "not ASCII": b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    "method": b"G\x07T / HTTP/1.1\r\n\r\n",
    "NUL in a field": b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n",
    "length": b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunks": (POST % 3)[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk size": CHUNKED + b"xyz\r\n",
    "a tunnel": b"CONNECT other:443 HTTP/1.1\r\nHost: other\r\n\r\n",
}


@pytest.mark.parametrize("case", MALFORMED)
@on_each_loop
async def test_what_is_not_http(case: str) -> None:
    async with site() as served:
        client = await served.connect(MALFORMED[case])
        assert await client.refusal() == (400, "malformed_http")
        assert served.counted == {"malformed_http": 1}
        if served.app.asked.is_set():  # a body went wrong: its request sees its client go
            await served.app.disconnected.wait()


@on_each_loop
async def test_a_refused_client_that_goes_on_sending_still_gets_the_answer() -> None:
    async with site() as served:
        client = await served.connect(b"\x00 garbage\r\n")
        for _ in range(50):
            await client.send(b"x" * 20_000)
        assert await client.refusal() == (400, "malformed_http")


BAD_SUCCESSORS: dict[str, tuple[bytes, int]] = {
    "garbage": (b"\x00 garbage\r\n", 1),
    "a request, then garbage": (GET % b"" + b"\x00 garbage\r\n", 2),
    "large headers": (of_size(LIMIT + 1), 1),
    "a broken body": (CHUNKED + b"xyz\r\n", 1),
    "a request, then a broken body": (GET % b"" + CHUNKED + b"xyz\r\n", 2),
}


@pytest.mark.parametrize("case", BAD_SUCCESSORS)
@on_each_loop
async def test_answers_under_way_are_finished_before_a_refusal_closes(case: str) -> None:
    successor, whole = BAD_SUCCESSORS[case]
    async with site() as served:
        client = await served.connect(GET % b"wait")
        await served.app.asked.wait()
        await client.send(successor)
        while not served.counted:
            await asyncio.sleep(0.005)
        served.app.go_on.set()
        for _ in range(whole):
            assert (await client.answer())[::2] == (200, b"0")
        assert await client.ends() == b""
        assert served.counted.total() == 1


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
UPGRADES: dict[str, tuple[list[bytes], bytes]] = {
    "no body": ([(GET % b"")[:-2] + H2C], b"0"),
    "body": ([(POST % 5)[:-2] + H2C + b"hello"], b"5"),
    "body in parts": ([(POST % 5)[:-2] + H2C, b"he", b"llo"], b"5"),
    "empty body": ([(POST % 0)[:-2] + H2C], b"0"),
    "chunks": ([CHUNKED[:-2] + H2C + b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"], b"5"),
    "websocket": ([(GET % b"")[:-2] + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"], b"0"),
}


@pytest.mark.parametrize("case", UPGRADES)
@on_each_loop
async def test_a_request_for_another_protocol_is_answered_in_this_one(case: str) -> None:
    parts, expected = UPGRADES[case]
    async with site() as served:
        client = await served.connect()
        for _ in range(2):  # and the connection goes on
            for part in parts:
                await client.send(part)
                await asyncio.sleep(0.005)
            status, headers, body = await client.answer()
            assert (status, body) == (200, expected) and "connection" not in headers
        await client.send(b"".join(parts) + GET % b"")
        assert (await client.answer())[2] == expected
        assert (await client.answer())[2] == b"0"
        assert not served.counted


@on_each_loop
async def test_more_connections_than_there_is_room_for() -> None:
    async with site(max_connections=2) as served:
        first, second = await served.connect(), await served.connect(GET % b"")
        assert (await second.answer())[0] == 200
        third = await served.connect(GET % b"")
        assert await third.refusal() == (503, "too_many_connections")
        third.writer.close()
        silent = await served.connect()
        while served.protocol.guard.refused != 1:  # the third has gone
            await asyncio.sleep(0.005)
        first.writer.close()
        while len(served.protocol.guard.connections) > 2:
            await asyncio.sleep(0.005)
        fourth = await served.connect(GET % b"")  # one that is turned away takes no place
        assert (await fourth.answer())[0] == 200
        assert await silent.ends() == b""  # nothing was asked, nothing is answered
        assert served.counted == {"too_many_connections": 1}


@on_each_loop
async def test_a_reload_changes_the_limits_for_new_connections() -> None:
    async with site() as served:
        served.limits = Limits(max_header_bytes=5)
        client = await served.connect(GET % b"")
        assert await client.refusal() == (431, "headers_too_large")


SLOW: dict[str, list[bytes]] = {
    "headers": [b"GET / HTTP/1.1\r\n", b"A: b\r\n"],
    "headers of a second request": [GET % b"" + b"GET", b" "],
    "body": [POST % 100, b"x"],
    "chunked body": [CHUNKED, b"1\r\nx\r\n"],
}


@pytest.mark.parametrize("case", SLOW)
@on_each_loop
async def test_a_client_that_is_slow_to_send(case: str) -> None:
    async with site(read_timeout_s=0.2) as served:
        first, again = SLOW[case]
        client = await served.connect(first)
        if "second" in case:
            assert (await client.answer())[0] == 200

        async def dribble() -> None:
            while True:
                await client.send(again)
                await asyncio.sleep(0.02)

        dribbling = asyncio.create_task(dribble())
        assert await client.refusal() == (408, "request_timeout")
        dribbling.cancel()
        assert served.counted == {"request_timeout": 1}
        if "body" in case:
            await served.app.disconnected.wait()


@on_each_loop
async def test_a_connection_that_never_says_a_word_is_closed_without_one() -> None:
    async with site(read_timeout_s=0.1) as served:
        client = await served.connect()
        assert await client.ends() == b"" and not served.counted


@on_each_loop
async def test_an_idle_connection_and_a_slow_application_are_no_slow_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(read_timeout_s=0.1) as served:
        client = await served.connect(GET % b"")
        assert (await client.answer())[0] == 200
        await asyncio.sleep(0.25)
        monkeypatch.setattr("serve.protocol.LEAST_BYTES_PER_S", math.inf)
        await client.send((POST % 200_000).replace(b"/", b"/wait", 1) + b"x" * 100_000)
        await asyncio.sleep(0.25)  # the application does not read, so that nobody does
        served.app.go_on.set()
        await client.send(b"x" * 100_000)
        assert (await client.answer())[2] == b"200000"


@on_each_loop
async def test_a_large_body_over_a_slow_line_is_no_slow_client() -> None:
    async with site(read_timeout_s=0.1) as served:
        client = await served.connect(POST % 300_000)
        for _ in range(15):  # 0.3 s, at a megabyte a second
            await client.send(b"x" * 20_000)
            await asyncio.sleep(0.02)
        assert (await client.answer())[2] == b"300000"


@on_each_loop
async def test_a_client_that_takes_nothing_is_cut_and_its_request_ends() -> None:
    async with site(write_timeout_s=0.2) as served:
        client = await served.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET % b"flood")
        await served.app.disconnected.wait()
        assert served.counted == {"client_stalled": 1}
        await served.idle()


@on_each_loop
async def test_a_client_that_does_not_take_a_whole_answer_is_cut() -> None:
    async with site(write_timeout_s=0.2) as served:
        client = await served.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET % b"large")
        await served.app.asked.wait()
        await served.idle()  # the application had ended long before
        assert served.counted == {"client_stalled": 1}


@on_each_loop
async def test_a_client_that_takes_a_little_is_left_alone() -> None:
    async with site(write_timeout_s=0.2) as served:
        client = await served.connect(GET % b"flood")
        for _ in range(10):
            await client.reader.readexactly(3_000_000)
            await asyncio.sleep(0.05)
        assert not served.app.disconnected.is_set() and not served.counted


@on_each_loop
async def test_a_shutdown_closes_what_was_refused_and_what_is_idle() -> None:
    async with site() as served:
        idle, refused = await served.connect(GET % b""), await served.connect(b"\x00\r\n")
        await idle.answer()
        await refused.answer()
        for connection in list(served.state.connections):
            connection.shutdown()
        assert await idle.ends() == b"" and await refused.ends() == b""
        await served.idle()

"""Raw bytes on real sockets: what is refused, with which words, and what is left alone."""

import asyncio

import pytest

from serve.config import Limits
from serve.http import protocol
from serve.http.protocol import FEW_FILES
from tests.serve.http.raw_site import CHUNKED, GET, LIMIT, POST, App, of_size, on_each_loop, site
from tests.serve.longest_step import MOST_S, least_longest_step
from tests.serve.waiting import until


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


async def turned_away(data: bytes, status: int, code: str) -> App:
    """Who sends these bytes is told so, once, and counted; returns what it was sent to."""
    async with site() as served:
        client = await served.connect(data)
        assert await client.refusal() == (status, code)
        assert served.counted == {code: 1}
    return served.app


@pytest.mark.parametrize("case", TOO_LARGE)
@on_each_loop
async def test_headers_that_are_too_large(case: str) -> None:
    app = await turned_away(TOO_LARGE[case], 431, "headers_too_large")
    assert app.asked.is_set() == (case == "trailers")


@on_each_loop
async def test_an_endless_header_is_stopped_as_it_arrives() -> None:
    async with site() as served:
        client = await served.connect(b"GET / HTTP/1.1\r\nA: ")
        refusal = asyncio.create_task(client.refusal())
        sent = 0
        while not refusal.done():
            await client.send(b"a" * 100)
            await asyncio.sleep(0)
            sent += 100
            assert sent < 100 * LIMIT
        assert await refusal == (431, "headers_too_large")


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
    "a length below 0": b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "a list of lengths": b"POST / HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\nhello",
    "another coding than chunks": CHUNKED.replace(b"chunked", b"chunked, gzip") + b"0\r\n\r\n",
    "chunk size": CHUNKED + b"xyz\r\n",
    "a chunk longer than its size": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "a tunnel": b"CONNECT other:443 HTTP/1.1\r\nHost: other\r\n\r\n",
}


@pytest.mark.parametrize("case", MALFORMED)
@on_each_loop
async def test_what_is_not_http(case: str) -> None:
    app = await turned_away(MALFORMED[case], 400, "malformed_http")
    # A body may go wrong: its request sees its client go.
    assert app.disconnected.is_set() == app.asked.is_set()


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
        await until(lambda: served.counted)
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
async def test_a_reload_changes_the_limits_for_new_connections() -> None:
    async with site() as served:
        served.limits = Limits(max_header_bytes=5)
        client = await served.connect(GET % b"")
        assert await client.refusal() == (431, "headers_too_large")


@pytest.mark.parametrize("count", [1100, 5000])
@pytest.mark.parametrize("request_", [(GET % b"")[:-2] + H2C, GET % b""], ids=["upgrade", "plain"])
@on_each_loop
async def test_many_pipelined_requests_are_all_answered(request_: bytes, count: int) -> None:
    async with site() as served:
        client = await served.connect(request_ * count)
        for _ in range(count):
            assert (await client.answer())[::2] == (200, b"0")
        await client.send(GET % b"")
        assert (await client.answer())[2] == b"0"


async def test_pipelined_requests_take_no_long_step() -> None:
    async with site() as served:

        async def pipeline() -> None:
            client = await served.connect(b"GET / HTTP/1.1\r\n\r\n" * 20_000)
            for _ in range(20_000):
                await client.answer()

        assert await least_longest_step(pipeline) < MOST_S


@on_each_loop
async def test_pipelined_requests_without_end_are_not_read() -> None:
    """While the first one is answered, and whoever answers it waits for its client to go away."""
    async with site() as served:
        client = await served.connect(GET % b"watch")
        await served.app.asked.wait()
        writing = asyncio.ensure_future(client.send((GET % b"") * 1_000_000))
        await asyncio.sleep(0.3)
        assert not writing.done()
        (connection,) = served.protocol.guard.connections
        assert len(connection.pipeline) < 400 and len(connection._unparsed) < 2_000_000
        writing.cancel()
        client.writer.transport.abort()
        served.app.go_on.set()


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /early HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5000000\r\n\r\n",
        b"POST /early HTTP/1.0\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n",
        b"POST /early HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n4c4b40\r\n",
    ],
    ids=["close", "HTTP/1.0", "chunked"],
)
@on_each_loop
async def test_an_answer_before_the_end_of_the_body_is_not_lost_to_a_reset(request_: bytes) -> None:
    async with site() as served:
        client = await served.connect(request_)
        for _ in range(50):
            await client.send(b"x" * 100_000)
            await asyncio.sleep(0.001)
        status, headers, body = await client.answer()
        assert (status, body, headers["connection"]) == (413, b"early", "close")
        assert await client.ends() == b""


@on_each_loop
async def test_few_free_descriptors_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(protocol, "most_files", lambda: FEW_FILES + 3)
    async with site() as served:
        for _ in range(3):
            client = await served.connect(GET % b"")
            assert (await client.answer())[0] == 200
    assert [message[:47] for message in caplog.messages] == [
        "the process has nearly all of its 67 open files"
    ]

"""Connections that are too many, and clients that send or take too slowly: cut, or left alone."""

import asyncio
import math
from contextlib import suppress
from typing import Any

import pytest

from tests.serve.http.raw_site import CHUNKED, GET, POST, on_each_loop, site
from tests.serve.waiting import until


@on_each_loop
async def test_more_connections_than_there_is_room_for() -> None:
    async with site(max_connections=2) as served:
        first, second = await served.connect(), await served.connect(GET % b"")
        assert (await second.answer())[0] == 200
        third = await served.connect(GET % b"")
        assert await third.refusal() == (503, "too_many_connections")
        third.writer.close()
        silent = await served.connect()
        await until(lambda: served.protocol.guard.refused == 1)  # the third has gone
        first.writer.close()
        await until(lambda: len(served.protocol.guard.connections) <= 2)
        fourth = await served.connect(GET % b"")  # one that is turned away takes no place
        assert (await fourth.answer())[0] == 200
        assert await silent.ends() == b""  # nothing was asked, nothing is answered
        assert served.counted == {"too_many_connections": 1}


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
            with suppress(OSError):  # once it is cut off
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
        monkeypatch.setattr("serve.http.protocol.LEAST_BYTES_PER_S", math.inf)
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


@pytest.mark.parametrize("path", [b"flood", b"large"])
@on_each_loop
async def test_a_client_that_takes_nothing_is_cut(path: bytes) -> None:
    async with site(write_timeout_s=0.2) as served:
        client = await served.connect()
        transport: Any = client.writer.transport  # of asyncio or of uvloop
        transport.pause_reading()
        await client.send(GET % path)
        await served.app.asked.wait()
        await served.idle()
        assert served.counted == {"client_stalled": 1}
        # The application of a whole answer had ended long before; the other one is told.
        assert served.app.disconnected.is_set() == (path == b"flood")


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

"""A server with guarded connections on a real socket, and clients that speak raw bytes to it."""

import asyncio
import contextlib
import functools
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from serve.config import Limits
from serve.http.protocol import GuardedProtocol, guarded_protocol
from tests.patient_loop import PatientLoop

__all__ = [
    "CHUNKED",
    "GET",
    "LIMIT",
    "POST",
    "App",
    "Client",
    "Site",
    "of_size",
    "on_each_loop",
    "site",
]

GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT = 2000  # bytes of headers


class App:
    """Answers with the length of the body, /large with much.

    /flood streams until nobody reads; /early answers before the body has arrived.
    """

    def __init__(self) -> None:
        self.disconnected = asyncio.Event()
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.set()
        if scope["path"] == "/flood":
            await self.flood(receive, send)
            return
        if scope["path"] == "/early":
            await receive()
            headers = [(b"content-length", b"5")]
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            await send({"type": "http.response.body", "body": b"early"})
            return
        if scope["path"] == "/watch":
            await self.watch(receive, send)
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

    async def watch(self, receive: Any, send: Any) -> None:
        """Waits, and meanwhile for the client to go away, as the gateway does."""

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        watching = asyncio.create_task(gone())
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        watching.cancel()

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
        async with asyncio.timeout(60):
            while self.protocol.guard.connections or self.state.tasks:
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def site(**limits: Any) -> AsyncIterator[Site]:
    served = Site(Limits.model_validate({"max_header_bytes": LIMIT} | limits))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(served.make, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(60):
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


class PatientUvloop(uvloop.Loop):
    """As PatientLoop, for those who ask for the time: timers are the machine's.

    They ask at each sweep, at most 50 ms after the one before where a limit is 0.2 s or less.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = self._seen = super().time()

    def time(self) -> float:
        now = super().time()
        self._now += min(now - self._seen, 0.06)
        self._seen = now
        return self._now


def on_each_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Any:
    """The test on asyncio's loop and on uvloop's, whose transports differ."""

    @functools.wraps(test)
    def on(loop: str, **arguments: Any) -> None:
        factory = PatientUvloop if loop == "uvloop" else PatientLoop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test(**arguments))

    own, shown = inspect.signature(test), cast(Any, on)
    added = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    shown.__signature__ = own.replace(parameters=[added, *own.parameters.values()])
    return pytest.mark.parametrize("loop", ["asyncio", "uvloop"])(on)


def of_size(size: int) -> bytes:
    """A request whose URL and header fields are `size` bytes together, as they are counted."""
    rest = size - len("/" + "Host: x\r\n" + "A: \r\n")
    return b"GET / HTTP/1.1\r\nHost: x\r\nA: %s\r\n\r\n" % (b"a" * rest)

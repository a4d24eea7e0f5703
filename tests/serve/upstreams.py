"""Upstreams that misbehave: on raw sockets by a script of bytes, or as a `Backend` of their own.

async with scripted(reset(), send(STREAM_HEAD, chunk(), DONE)) as upstream: ...
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from serve.backends.base import Relay
from tests.serve.waiting import until

__all__ = [
    "CHUNKED_HEAD",
    "DONE",
    "JSON_HEAD",
    "STREAM_HEAD",
    "Script",
    "Scripted",
    "Upstream",
    "chunk",
    "forever",
    "reset",
    "scripted",
    "send",
    "slowly",
    "whole",
]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CHUNKED_HEAD = STREAM_HEAD.replace(b"connection: close", b"transfer-encoding: chunked")
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(text: str = "x") -> bytes:
    """One event with a token."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    data = {"id": "cmpl-0", "object": "text_completion", "model": "fake", "choices": [choice]}
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def whole(text: str = "x") -> bytes:
    """An answer that is not streamed."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
    data = {"id": "cmpl-0", "object": "text_completion", "model": "fake", "choices": [choice]}
    return json.dumps(data | {"usage": usage}).encode()


def send(*pieces: bytes) -> Script:
    """Writes the pieces one by one, then closes."""

    async def script(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return script


def reset(*pieces: bytes) -> Script:
    """Writes the pieces, and breaks the connection off with a RST."""

    async def script(writer: asyncio.StreamWriter) -> None:
        await send(*pieces)(writer)
        if pieces:
            await asyncio.sleep(0.05)  # a RST overtakes what has not been read
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    return script


def forever(*pieces: bytes) -> Script:
    """Writes the pieces, and then nothing more."""

    async def script(writer: asyncio.StreamWriter) -> None:
        await send(*pieces)(writer)
        await asyncio.Event().wait()

    return script


def slowly(head: bytes, body: bytes, pause_s: float) -> Script:
    """Writes `body` a byte at a time."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for byte in body:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(pause_s)

    return script


class Upstream:
    """Answers each POST with the next script, the last one again and again; GETs are healthy."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = scripts
        self.url = ""
        self.asked = 0
        self.running = 0  # POSTs that have not ended
        self.bodies: list[bytes] = []

    async def freed(self) -> None:
        """Returns once the gateway has let go of every request; fails if that takes too long."""
        await until(lambda: not self.running)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                await self._post(head, reader, writer)
                return
        except (asyncio.IncompleteReadError, OSError):
            pass  # the gateway closed it
        finally:
            writer.close()

    async def _post(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        self.bodies.append(await reader.readexactly(int(fields[b"content-length"])))
        script = self.scripts[min(self.asked, len(self.scripts) - 1)]
        self.asked += 1
        self.running += 1
        answering = asyncio.ensure_future(script(writer))
        hung_up = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((answering, hung_up), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            self.running -= 1
            for task in (answering, hung_up):
                task.cancel()
            await asyncio.gather(answering, hung_up, return_exceptions=True)


@asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[Upstream]:
    """Such an upstream on a loopback socket."""
    upstream = Upstream(scripts)
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        with suppress(asyncio.CancelledError):  # at the end of the test
            await upstream.handle(reader, writer)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield upstream
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Scripted:
    """A relaying backend without a socket: each request gets the next outcome, the last for ever.

    An outcome is an error to raise, the body of an answer, its status and its body, or the pieces
    of a stream (in which an error is raised, seconds are waited for, and None waits for ever).
    """

    accepts_extra = True
    context_length = tokenizer = None
    models = ("fake",)
    served_name = "fake"

    def __init__(
        self,
        *outcomes: Exception | bytes | tuple[int, bytes] | list[Any],
        address: str = "10.0.0.1:80",
    ):
        self.name = f"vllm http://{address}"
        self.outcomes = outcomes
        self.asked = 0
        self.running = 0
        self.sent: list[bytes] = []
        self.bodies: list[AsyncIterator[bytes]] = []

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def load(self) -> None: ...
    async def probe(self) -> None: ...

    async def hold(self, _reopened: Any = None) -> None:
        await asyncio.Event().wait()

    async def incarnation(self) -> None: ...

    async def ready(self) -> bool:
        return True

    async def relay(self, _path: str, body: bytes, _headers: Any) -> Relay:
        self.sent.append(body)
        outcome = self.outcomes[min(self.asked, len(self.outcomes) - 1)]
        self.asked += 1
        if isinstance(outcome, Exception):
            raise outcome
        status, outcome = outcome if isinstance(outcome, tuple) else (200, outcome)
        streamed = isinstance(outcome, list)
        kind = "text/event-stream" if streamed else "application/json"
        answer = self._body(outcome if streamed else [outcome])
        self.bodies.append(answer)  # whoever forgets to close one finds it running
        return Relay(status, {"content-type": kind}, answer)

    async def _body(self, pieces: list[Any]) -> AsyncIterator[bytes]:
        self.running += 1
        try:
            for piece in pieces:
                if piece is None:
                    await asyncio.Event().wait()
                if isinstance(piece, Exception):
                    raise piece
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                else:
                    yield piece
        finally:
            self.running -= 1

"""Clients that stream completions through the published port, and what became of each request."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp

__all__ = ["URL", "Clients", "Request", "stream"]

URL = "http://127.0.0.1:8000"
PROMPT = "def fibonacci(n):\n"
NEWCOMER_TOKENS = 16
PATIENCE_S = 300  # of a client; longer than any deadline of the gateway that these tests meet


@dataclass
class Request:
    """One completion: its tokens' times, and how it ended."""

    started: float = field(default_factory=time.monotonic)
    tokens: list[float] = field(default_factory=list)
    error: str | None = None
    ended: bool = False  # the gateway said so: by [DONE], by an error event, or by a status

    @property
    def complete(self) -> bool:
        return self.ended and self.error is None

    @property
    def first_token_s(self) -> float:
        return self.tokens[0] - self.started

    @property
    def longest_silence_s(self) -> float:
        times = [self.started, *self.tokens]
        return max((b - a for a, b in pairwise(times)), default=0.0)


async def stream(
    session: aiohttp.ClientSession, max_tokens: int, request: Request | None = None
) -> Request:
    """Streams one completion into `request`; no failure raises."""
    request = request or Request()
    body = {
        "model": "python-lm",
        "prompt": PROMPT,
        "stream": True,
        "temperature": 1.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    try:
        async with session.post(f"{URL}/v1/completions", json=body) as response:
            if response.status != 200:
                request.error = f"{response.status}: {await response.text()}"
                request.ended = True
                return request
            async for line in response.content:
                receive(request, line.strip())
    except (aiohttp.ClientError, TimeoutError) as error:
        request.error = f"{type(error).__name__}: {error}"
    if not request.ended and request.error is None:
        request.error = "the stream ended without [DONE]"
    return request


def receive(request: Request, line: bytes) -> None:
    """Takes one line of server-sent events."""
    if not line.startswith(b"data: "):
        return
    data = line.removeprefix(b"data: ")
    if data == b"[DONE]":
        request.ended = True
        return
    event = json.loads(data)
    if "error" in event:
        request.error, request.ended = str(event["error"]), True
    elif any(choice["text"] for choice in event["choices"]):
        request.tokens.append(time.monotonic())


class Clients:
    """Clients that each send their next request when the last has ended, and newcomers.

    A client whose stream a fault holds up sends nothing; newcomers do, one each second.
    """

    def __init__(self, session: aiohttp.ClientSession, count: int, max_tokens: int) -> None:
        self.requests: list[Request] = []
        self._session = session
        self._count = count
        self._max_tokens = max_tokens
        self._stopping = False

    async def _send(self, max_tokens: int) -> Request:
        request = Request()
        self.requests.append(request)
        return await stream(self._session, max_tokens, request)

    async def _client(self) -> None:
        while not self._stopping:
            if (await self._send(self._max_tokens)).error is not None:
                await asyncio.sleep(0.2)

    async def _newcomers(self, group: asyncio.TaskGroup) -> None:
        while not self._stopping:
            await asyncio.sleep(1)
            group.create_task(self._send(NEWCOMER_TOKENS))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sends while the block runs; leaving it waits for the requests that have begun."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._count):
                group.create_task(self._client())
            try:
                await self.all_streaming()
                group.create_task(self._newcomers(group))
                yield
            finally:
                self._stopping = True

    async def all_streaming(self) -> None:
        """Waits until every client is in the middle of a stream."""
        async with asyncio.timeout(60):
            while True:
                running = [r for r in self.requests if r.tokens and not r.ended]
                if len(running) == self._count:
                    return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def session(key: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    # A connection of its own for each request, as from many clients.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector
    ) as opened:
        yield opened

"""Started backends and requests to them, and servers that speak something else."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from serve.backends.base import Backend
from serve.backends.openai_http import OpenAiHttpBackend
from serve.backends.triton_grpc import TritonBackend
from serve.config import HttpConfig
from serve.engine.request import Event, GenerateRequest
from tests.fakes import opened
from tests.triton_config import triton_at

__all__ = [
    "asked",
    "dead_url",
    "events_of",
    "listening",
    "relay_to",
    "started",
    "triton_to",
]


def relay_to(url: str, **settings: Any) -> OpenAiHttpBackend:
    return OpenAiHttpBackend("fake", HttpConfig(**{"type": "vllm", "url": url} | settings))


def triton_to(url: str, **settings: Any) -> TritonBackend:
    return TritonBackend("fake", triton_at(url, **settings))


@asynccontextmanager
async def started(url: str, **settings: Any) -> AsyncIterator[OpenAiHttpBackend]:
    async with opened(relay_to(url, **settings)) as backend:
        yield backend


def dead_url() -> str:
    """A URL of this machine where nobody listens."""
    unused = socket.socket()
    unused.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    unused.detach()  # bound until this process ends: nobody else listens there meanwhile
    return url


@asynccontextmanager
async def listening(serve: Callable[..., Any]) -> AsyncIterator[str]:
    """The URL of a server that hands each connection to `serve(reader, writer)`."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def asked(prompt: Any = "abc", **fields: Any) -> GenerateRequest:
    """Nine tokens, greedily, whatever the model thinks of its end."""
    settings = {"request_id": "r", "model": "fake", "max_tokens": 9, "temperature": 0.0}
    return GenerateRequest(prompt=prompt, **settings | {"ignore_eos": True} | fields)


async def events_of(backend: Backend, request: GenerateRequest) -> list[Event]:
    return [event async for event in backend.generate(request)]

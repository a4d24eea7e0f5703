"""Clients of a server that speaks OpenAI's protocol, and servers that speak something else."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import HttpConfig
from serve.engine.request import GenerateRequest

__all__ = ["asked", "dead_url", "listening", "relay_to", "started"]


def relay_to(url: str, **settings: Any) -> OpenAiHttpBackend:
    return OpenAiHttpBackend("fake", HttpConfig(**{"type": "vllm", "url": url} | settings))


@asynccontextmanager
async def started(url: str, **settings: Any) -> AsyncIterator[OpenAiHttpBackend]:
    backend = relay_to(url, **settings)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


def dead_url() -> str:
    """A URL of this machine where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


@asynccontextmanager
async def listening(serve: Callable[..., Any]) -> AsyncIterator[str]:
    """The URL of a server that hands each connection to `serve(reader, writer)`."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def asked(prompt: str = "abc", **fields: Any) -> GenerateRequest:
    settings = {"request_id": "r", "model": "fake", "max_tokens": 9, "ignore_eos": True} | fields
    return GenerateRequest(prompt=prompt, **settings)

"""Runs what all fake servers share: the engine that answers, and a record of the requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from serve.backends.embedded import EmbeddedBackend
from serve.engine.request import GenerateRequest
from tests.fakes import FakeRunner, fake_backend
from tests.ports import reserved_port

__all__ = ["FakeServer", "asked", "fault_of", "running"]


class FakeServer:
    """What was asked, with which headers, and how much of it runs or was cancelled."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.runner = FakeRunner(delay_s=delay_s)
        self.engine: EmbeddedBackend = fake_backend(self.runner)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = 0
        self.cancelled = 0
        self.url = ""


def fault_of(body: dict[str, Any]) -> str:
    """The misbehaviour that a prompt asks for; none is ''."""
    prompt = body.get("prompt") or body.get("input")
    prompt = prompt or (body.get("messages") or [{}])[-1].get("content")
    return prompt.split()[0] if isinstance(prompt, str) and prompt.startswith("!") else ""


def asked(
    body: dict[str, Any], engine: EmbeddedBackend, number: int, default_limit: int = 16
) -> GenerateRequest:
    """An OpenAI body, or vLLM's sampling parameters, as the engine's request.

    `number`, of the server's requests, is the seed of one without a seed.
    """
    chat = "messages" in body
    prompt: Any = engine.chat_prompt(body["messages"]) if chat else body["prompt"]
    stop = body.get("stop") or []
    limit = body.get("max_tokens")
    logprobs = body.get("logprobs")
    if chat:
        logprobs = body.get("top_logprobs", 0) if logprobs else None
    return GenerateRequest(
        request_id="fake",
        model=body["model"],
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        max_tokens=limit if limit is not None else None if chat else default_limit,
        temperature=body.get("temperature", 1.0),
        top_p=body.get("top_p", 1.0),
        top_k=max(body.get("top_k", 0), 0),
        seed=number if body.get("seed") is None else body["seed"],
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.get("stop_token_ids") or ()),
        logprobs=logprobs,
        echo=bool(body.get("echo")),
        ignore_eos=bool(body.get("ignore_eos")),
    )


@asynccontextmanager
async def running(server: Any) -> AsyncIterator[Any]:
    """Starts a fake server, and stops it at the end; its port is its own also while it is down."""
    with reserved_port() as port:
        await server.start(port)
        try:
            yield server
        finally:
            await server.stop()

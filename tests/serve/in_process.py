"""The gateway's application without a server: requests are calls, thousands of them a second."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from serve.config import GatewayConfig, Health, PoolConfig
from serve.gateway.state import Gateway
from serve.http.app import create_app
from serve.proof.exam import Exams
from serve.routing import Pool
from tests.serve.waiting import until

__all__ = ["Client", "Reply", "in_process"]


@dataclass
class Reply:
    """What a client has received."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of each server-sent event."""
        assert self.status == 200, self.body
        assert self.headers["content-type"].startswith("text/event-stream")
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == "" and all(line.startswith("data: ") for line in lines), lines
        return [line.removeprefix("data: ") for line in lines]


class Client:
    """Speaks ASGI to a started gateway, as uvicorn does."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.app = create_app(gateway)

    async def request(
        self,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None = None,
        *,
        gone: asyncio.Event | None = None,
        on_piece: Callable[[Reply], Any] = lambda reply: None,
    ) -> Reply:
        """POSTs `body`; the client goes away when `gone` is set."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in fields.items()],
        }
        reply, end, unread = Reply(), gone or asyncio.Event(), [raw]

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await end.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert not reply.status
                reply.status = message["status"]
                pairs = message["headers"]
                reply.headers = {k.decode().lower(): v.decode() for k, v in pairs}
                return
            reply.body += message.get("body", b"")
            on_piece(reply)
            if not message.get("more_body"):
                assert not reply.complete
                reply.complete = True
                end.set()
            await asyncio.sleep(0)  # a client's socket may be full at any time

        await self.app(scope, receive, send)
        assert reply.complete or end.is_set(), "neither answered nor left"
        return reply

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        reply = await self.request(path, body)
        return reply.status, reply.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of each server-sent event of a streamed answer."""
        return (await self.request(path, body | {"stream": True})).events

    @asynccontextmanager
    async def holding(self, backend: Any, body: Any) -> AsyncIterator[asyncio.Event]:
        """A stream at `backend`, whose client goes away at the end, or when the event is set."""
        gone = asyncio.Event()
        request = self.request("/v1/completions", body | {"stream": True}, gone=gone)
        stream = asyncio.create_task(request)
        await until(lambda: backend.running)
        yield gone
        gone.set()
        await stream

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def in_process(
    *pools: tuple[str, list[Any]], exams: Exams | None = None, **settings: Any
) -> AsyncIterator[Client]:
    """A started gateway over the given pools; each is a model, unless `settings` has `models`.

    Pools that `settings` does not mention send no probes. `exams` is what backends are proven with,
    if not with what `settings` say.
    """
    config = GatewayConfig.model_validate(
        {"models": {name: {"pool": name} for name, _ in pools}} | settings
    )
    quiet = PoolConfig(health=Health(probe_after_s=None))
    made = {
        name: Pool.of(name, found, config.pools.get(name, quiet), exams=exams)
        for name, found in pools
    }
    gateway = Gateway(config, made)
    await gateway.start()
    try:
        yield Client(gateway)
        held = gateway.running, *(pool.active for pool in made.values())
        assert not any(held), f"still running: {held}"
        for pool in made.values():
            _require_nothing_held(gateway, pool)
    finally:
        await gateway.close()


def _require_nothing_held(gateway: Gateway, pool: Pool) -> None:
    assert pool.budget.retrying == 0
    for member in pool.members:
        assert (member.in_flight, member.outstanding_tokens) == (0, 0), member
        backend: Any = member.backend
        assert not getattr(backend, "running", 0), "the backend is still at work"
    gate = gateway.admission.gates.get(pool.name)
    assert gate is None or (gate.tokens, gate.requests, len(gate.queue)) == (0, 0, 0)

"""A backend whose server can be killed, hung, and made to lie."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octet.errors import BackendError, BackendUnavailable
from serve.backends.base import Backend, Incarnation, LoadReport
from serve.config import PoolConfig
from serve.routing import Member, Pool
from tests.serve.clock import Clock


class Server:
    """A backend of which only what routing needs is there."""

    models = ("m",)
    accepts_extra = False
    tokenizer = None

    def __init__(self, name: str = "http://a", *, context_length: int | None = None) -> None:
        self.name = name
        self.context_length = context_length
        self.alive = True
        self.says_ready = True
        self.hangs = False  # answers no question, and keeps its connections
        self.probe_error: BackendError | None = None
        self.probe_losses = 0  # probes whose connection is lost
        self.probe_s = 0.0  # how long a token takes
        self.report: LoadReport | None = None
        self.reported: Incarnation | None = None
        self.probes = 0
        self.started = False
        self.closes = 0
        self._ended = asyncio.Event()
        self.connected = 0  # held connections

    @property
    def closed(self) -> bool:
        return self.closes > 0

    def die(self) -> None:
        self.alive = False
        self._ended.set()

    def restart(self) -> None:
        self.alive = True
        self._ended = asyncio.Event()

    async def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        self.closes += 1

    async def hold(self, reopened: Callable[[], None] = lambda: None) -> None:
        if not self.alive:
            raise BackendUnavailable(f"{self.name}: connection refused", kind="refused")
        self.connected += 1
        self._reopened = reopened
        try:
            await self._ended.wait()
        finally:
            self.connected -= 1

    def close_idle(self) -> None:
        """Ends the held connection in order; another one is made at once."""
        self._reopened()

    async def incarnation(self) -> Incarnation | None:
        await self._answer()
        return self.reported

    async def ready(self) -> bool:
        await self._answer()
        return self.alive and self.says_ready

    async def load(self) -> LoadReport | None:
        await self._answer()
        return self.report if self.alive else None

    async def probe(self) -> None:
        self.probes += 1
        await self._answer()
        await asyncio.sleep(self.probe_s)
        if not self.alive:
            raise BackendUnavailable(f"{self.name}: connection refused", kind="refused")
        if self.probe_losses:
            self.probe_losses -= 1
            raise BackendUnavailable(f"{self.name}: closed the connection", kind="lost")
        if self.probe_error is not None:
            raise self.probe_error

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()

    def generate(self, request: object) -> Any:
        raise AssertionError("routing sends no requests")

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        raise AssertionError("routing reads no messages")


def servers(count: int) -> list[Server]:
    return [Server(f"http://host-{number}:8000") for number in range(count)]


def pool_of(backends: Sequence[Backend], **sections: Any) -> tuple[Pool, Clock]:
    """A pool that was not started, with a clock of its own."""
    clock = Clock(0.0)
    return Pool.of("p", backends, PoolConfig.model_validate(sections), clock=clock), clock


def fail(member: Member, times: int = 1) -> None:
    """So many requests at `member` come to nothing."""
    for _ in range(times):
        lease = member.lease(1)
        lease.failed(BackendError("x"))
        lease.release()

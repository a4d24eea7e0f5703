"""The time between two reloads: each request is served by the configuration it arrived under."""

import asyncio
from collections.abc import Awaitable, Iterable

from serve.access.keys import Keys
from serve.config import GatewayConfig
from serve.routing import Routes

__all__ = ["Entry", "Epoch", "all_of"]


class Epoch:
    """One configuration in use; it lasts until the last request that arrived under it ends."""

    def __init__(self, config: GatewayConfig, routes: Routes, keys: Keys) -> None:
        self.config = config
        self.routes = routes
        self.keys = keys
        self.running = 0  # requests
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> "Entry":
        self.running += 1
        self._idle.clear()
        return Entry(self)

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def ended(self) -> None:
        """Waits until no request is left. Another epoch has begun by then, so none is added."""
        await self._idle.wait()


class Entry:
    """A request that is counted as running until it leaves."""

    __slots__ = ("_epoch", "config", "keys", "routes")

    def __init__(self, epoch: Epoch) -> None:
        self.config = epoch.config
        self.routes = epoch.routes
        self.keys = epoch.keys
        self._epoch: Epoch | None = epoch

    def leave(self) -> None:
        """Stops counting the request. Safe to call twice."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.leave()


async def all_of(steps: Iterable[Awaitable[None]]) -> None:
    """Awaits all at once; once all have ended, raises the first failure, if any."""
    outcomes = await asyncio.gather(*steps, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome

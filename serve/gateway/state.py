"""The gateway's state: the configuration in use, the pools, the metrics, and its readiness.

An `Epoch` is the time between two reloads: each request is served by the configuration that it
arrived under.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, Self

from octet.errors import RequestError
from serve.access.keys import Keys
from serve.admission.admission import Admission
from serve.config import GatewayConfig
from serve.gateway.capture import Capture, require_writable
from serve.gateway.collector import GatewayCollector
from serve.gateway.discovery import Discovery
from serve.gateway.recent import Recent
from serve.gateway.rollout import Rollouts
from serve.gateway.walk import walk
from serve.routing import Pool, Routes
from serve.routing.pool import FIRST_PROOF_S
from serve.telemetry.metrics import Metrics
from serve.telemetry.traces import tracing_from

__all__ = ["Epoch", "Gateway", "all_of", "shutting_down"]


class Epoch:
    """One configuration in use; it lasts until the last request that arrived under it ends."""

    def __init__(self, config: GatewayConfig, routes: Routes, keys: Keys) -> None:
        self.config = config
        self.routes = routes
        self.keys = keys
        self.running = 0  # requests
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> Self:
        """Counts a request as running until it leaves."""
        self.running += 1
        self._idle.clear()
        return self

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def ended(self) -> None:
        """Waits until no request is left. Another epoch has begun by then, so none is added."""
        await self._idle.wait()


async def all_of(steps: Iterable[Awaitable[None]]) -> None:
    """Awaits all at once; once all have ended, raises the first failure, if any."""
    outcomes = await asyncio.gather(*steps, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0  # for each pool to close its backends


class Gateway:
    """The state that all endpoints share.

    Call `start` before the first request and `close` after the last.
    """

    def __init__(
        self, config: GatewayConfig, pools: dict[str, Pool], *, processes: int = 1
    ) -> None:
        """`processes` of one machine serve this configuration: see serve/workers.py."""
        self.config = config
        self.pools = pools
        self.processes = processes
        self.metrics = Metrics()
        self.rollouts = Rollouts(self)
        routes = Routes.from_config(config, pools, self.rollouts.shares)
        self.epoch = Epoch(config, routes, Keys.from_config(config.access))
        self.admission = Admission(config.limits, processes=processes)
        self.metrics.registry.register(GatewayCollector(self))
        self.recent = Recent(self)
        self.tracing = tracing_from(config.traces)
        self.created = int(time.time())
        self.path: Path | None = None  # of the configuration, for reloads
        self.proves = True  # False: no backend needs a proof, whatever the file says
        self.last_reload: dict[str, Any] | None = None
        self.draining = False
        self.drain_begun = asyncio.Event()
        self.changing = asyncio.Lock()  # held while the members of pools change
        self.reloading = asyncio.Lock()  # held from reading the file to the end of the reload
        self.background: set[asyncio.Task[None]] = set()  # copies of requests, for shadow pools
        self.earlier: dict[Epoch, asyncio.Task[None]] = {}  # previous ones with requests left
        self.finishing: list[Pool] = []  # no longer configured; requests may still wait for them
        self.discoveries = self._discover()
        self.captures = self._capture({})
        self._tasks: list[asyncio.Task[None]] = []  # tasks that run until `close`
        self._drain_until = 0.0

    @classmethod
    def from_config(cls, config: GatewayConfig, *, processes: int = 1) -> Self:
        """Raises OctetError if a backend's library, files or key are missing, or a directory."""
        require_writable(config)
        pools = {}
        for name, pool in config.all_pools.items():
            if models := config.models_of(name):
                dormant = name in config.one_at_a_time
                pools[name] = Pool.from_config(name, pool, models[0], dormant=dormant)
        return cls(config, pools, processes=processes)

    @property
    def routes(self) -> Routes:
        return self.epoch.routes

    @property
    def keys(self) -> Keys:
        return self.epoch.keys

    @property
    def running(self) -> int:
        """Returns the number of requests being answered."""
        return self.epoch.running + sum(epoch.running for epoch in self.earlier)

    @property
    def ready(self) -> bool:
        """Returns whether new requests are accepted, and a backend that answers clients works."""
        models = self.config.models.items()
        answering = {pool for name, model in models for pool in model.answering(name)}
        works = any(pool.ready for name, pool in self.pools.items() if name in answering)
        return works and not self.draining

    def enter(self) -> Epoch:
        """Counts a request until it leaves. Raises RequestError (503) once draining has begun."""
        self.require_accepting()
        return self.epoch.enter()

    def require_accepting(self) -> None:
        """Raises RequestError (503) once draining has begun."""
        if self.draining:
            raise shutting_down(max(1.0, self._drain_until - time.monotonic()))

    def drain(self, timeout_s: float) -> None:
        """Stops accepting requests; refused clients get a `Retry-After` of `timeout_s`."""
        self.draining = True
        self.drain_begun.set()
        self._drain_until = time.monotonic() + timeout_s
        for task in self.background:
            task.cancel()

    async def start(self, *, patience_s: float = FIRST_PROOF_S) -> None:
        """Starts every backend, and waits for the first verdicts, `patience_s` at most.

        Raises the OctetError of the first backend that can never work.
        """
        try:
            if self.keys.shared is not None:
                await self.keys.shared.start()
            await all_of(pool.start(patience_s=patience_s) for pool in self.pools.values())
            await all_of(discovery.start() for discovery in self.discoveries)
        except BaseException:
            await self.close()
            raise
        for name, model in self.config.models.items():
            if model.one_at_a_time:
                pools = [self.pools[pool] for pool in model.in_order(name)]
                self._tasks.append(asyncio.create_task(walk(name, pools, self.changing)))
        self._tasks.append(asyncio.create_task(self.recent.run()))
        self.admission.memory.warn()  # the models are in memory by now

    async def close(self) -> None:
        """Closes everything, at most 10 s for each pool; safe to call twice."""
        tasks = [*self._tasks, *self.background, *self.earlier.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.rollouts.close()
        await all_of(discovery.close() for discovery in self.discoveries)
        await all_of(map(_closed, [*self.pools.values(), *self.finishing]))
        if self.keys.shared is not None:
            await self.keys.shared.close()
        await asyncio.to_thread(self.keys.close)  # writes what the keys have spent
        for capture in self.captures.values():
            await asyncio.to_thread(capture.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def replace(self, epoch: Epoch, pools: dict[str, Pool]) -> None:
        """Switches to `epoch` and `pools` in one step. Only a reload may call this."""
        before, self.epoch = self.epoch, epoch
        gone = [pool for name, pool in self.pools.items() if pools.get(name) is not pool]
        self.config, self.pools = epoch.config, pools
        self.rollouts.apply(epoch.config)
        self.admission.reload(epoch.config.limits)
        for discovery in self.discoveries:
            discovery.stop()
        self.discoveries = self._discover()
        self.captures = self._capture(self.captures)
        # Requests of the previous epoch and of earlier ones may still wait for pools out of use.
        epochs = [*self.earlier, before]
        self.finishing += gone
        self.earlier[before] = asyncio.create_task(self._finish(before, epochs, gone))

    async def _finish(self, epoch: Epoch, epochs: list[Epoch], pools: list[Pool]) -> None:
        await all_of(earlier.ended() for earlier in epochs)
        if copies := list(self.background):  # of their requests; each has its own time limit
            await asyncio.wait(copies)
        await all_of(map(_closed, pools))
        self.finishing = [pool for pool in self.finishing if pool not in pools]
        del self.earlier[epoch]

    def _capture(self, before: dict[str, Capture]) -> dict[str, Capture]:
        """Returns the captures of the models that have one; an unchanged one goes on."""
        found = {}
        for name, model in self.config.models.items():
            if model.capture is not None:
                capture = before.get(name)
                if capture is None or capture.config != model.capture:
                    capture = Capture(name, model.capture, self.metrics.captured)
                found[name] = capture
        for name, capture in before.items():
            if found.get(name) is not capture:
                capture.stop()
        return found

    def _discover(self) -> list[Discovery]:
        return [
            Discovery(source, pool, self.config.models_of(name), self.changing)
            for name, pool in self.pools.items()
            for source in pool.config.discover
        ]


async def _closed(pool: Pool) -> None:
    try:
        await asyncio.wait_for(pool.close(), CLOSE_TIMEOUT_S)
    except TimeoutError:
        _log.error("pool %s: not closed within %g s", pool.name, CLOSE_TIMEOUT_S)


def shutting_down(retry_after_s: float = 1.0) -> RequestError:
    """Returns the 503 error of a gateway that drains."""
    return RequestError(
        "the server is shutting down",
        status=503,
        code="draining",
        kind="service_unavailable_error",
        retry_after_s=retry_after_s,
    )

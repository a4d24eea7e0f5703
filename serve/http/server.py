"""Uvicorn with draining: the first signal lets requests finish, the second cuts them off."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from serve.gateway.state import Gateway
from serve.gateway.unproven import proving, unproven
from serve.http.app import create_admin_app, create_app
from serve.http.protocol import guarded_protocol
from serve.http.ui import EVENTS
from serve.telemetry.logs import say

__all__ = ["AdminServer", "DrainingServer"]

KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that they close it first
LAST_BYTES_S = 2  # for bytes already written to arrive after the last request has ended


class DrainingServer(uvicorn.Server):
    """A Uvicorn server that keeps listening while it drains, so that /ready can return 503."""

    def __init__(
        self, gateway: Gateway, on_started: Callable[["DrainingServer"], None] | None = None
    ) -> None:
        super().__init__(_uvicorn_config(create_app(gateway), gateway))
        self.gateway = gateway
        self.cut_short = False
        self._on_started = on_started
        self._give_up_at = 0.0  # while draining
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and only then announces it: a reader of the line can connect, or signal."""
        await super().startup(sockets)
        assert sockets
        names = ", ".join(self.gateway.routes.names)
        logs, pools = self.gateway.config.logs, self.gateway.pools
        for pool in pools.values():
            if pool.members and not (pool.ready or proving([pool])):  # the log has the reason
                line = f"none of its {len(pool.members)} backends serves yet"
                say(f"warning: pool {pool.name}: {line}", logs, logging.WARNING)
        for line in unproven({name: pool.config for name, pool in pools.items()}):
            say(f"warning: {line}", logs, logging.WARNING)
        for line in proving(pools.values()):
            say(line, logs)
        say(f"serving {names} on {_url(sockets[0])}", logs)
        if self._on_started is not None:
            self._on_started(self)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts the drain at the first signal, and ends it at another.

        Runs as a callback of the event loop: inside a signal handler, not even printing is safe.
        """
        self._loop.call_soon_threadsafe(self._exit, sig)

    def _exit(self, sig: int) -> None:
        if self.gateway.draining:
            self._give_up_at = 0.0
            self.force_exit = True
            if not self.gateway.running:  # else clients get an error event first: see on_tick
                self._cut_off()
            return
        timeout_s = self.gateway.config.drain_timeout_s
        self._give_up_at = time.monotonic() + timeout_s
        self.gateway.drain(timeout_s)
        name, running = signal.Signals(sig).name, self.gateway.running
        line = f"{name}: draining {running} requests, at most {timeout_s:g} s; again to force"
        say(line, self.gateway.config.logs)

    async def on_tick(self, counter: int) -> bool:
        """Runs every 0.1 s; returning True ends the main loop."""
        if not self.gateway.draining:
            return await super().on_tick(counter)
        left_s = self._give_up_at - time.monotonic()
        if self.gateway.running and left_s > 0:
            return await super().on_tick(counter)
        if self.gateway.running:
            self.cut_short = True
            await self.gateway.close()  # running answers end in an error event
            await self._settle()
        # Slow clients have the rest of the deadline to read what was written for them.
        self.config.timeout_graceful_shutdown = max(round(left_s), LAST_BYTES_S)
        return True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for clients to read what was written for them; if forced, for only 0.1 s."""
        if self.force_exit:
            await asyncio.sleep(0.1)
            self._cut_off()
        _cut_off_sleeping_pages(self.server_state)
        await super().shutdown(sockets)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            self.cut_short |= connection.transport.get_write_buffer_size() > 0
            connection.transport.abort()

    async def _settle(self) -> None:
        """Waits for requests that lost their backend to send that error to their clients."""
        give_up = time.monotonic() + 1.0
        while self.gateway.running and time.monotonic() < give_up:
            await asyncio.sleep(0.02)


class AdminServer(uvicorn.Server):
    """The server of the administration address. DrainingServer handles the signals."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(_uvicorn_config(create_admin_app(gateway), gateway))
        self._logs = gateway.config.logs

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        say(f"administration on {_url(sockets[0])}", self._logs)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        _cut_off_sleeping_pages(self.server_state)
        await super().shutdown(sockets)


def _cut_off_sleeping_pages(state: Any) -> None:
    """Aborts the streams of /ui that no client reads, such as those of a sleeping computer.

    The others end by themselves; these would take all the time that is left for slow clients.
    """
    for connection in list(state.connections):
        path = connection.scope and connection.scope["path"]
        if path == EVENTS and connection.transport.get_write_buffer_size() > 0:
            connection.transport.abort()


def _uvicorn_config(app: Any, gateway: Gateway) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=guarded_protocol(lambda: gateway.config.limits, gateway.metrics.refused),
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_BYTES_S,
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"

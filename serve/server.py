"""A gateway's life: startup, main loop, shutdown; the first signal drains, the second forces."""

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from octet.artifact import Manifest
from octet.errors import ConfigError
from serve.app import create_app
from serve.config import EmbeddedConfig, GatewayConfig, Listen, ModelConfig, PoolConfig
from serve.gateway import Gateway

__all__ = ["bind", "run", "serve_gateway"]

KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that they close it first
FORCED = 1  # exit code when a second signal, or the deadline, cut requests short


def run(
    target: Path | None = None,
    *,
    config: Path | None = None,
    host: str | None = None,
    port: int | None = None,
) -> None:
    """Serves until a signal: an ONNX export under its model's name, or what `config` lists.

    `host` and `port` take precedence over the file's. Raises an OctetError for a configuration
    that cannot work, or an address that cannot be listened on; exits 1 if requests were cut short.
    """
    settings = _settings(target, config)
    given = {"host": host, "port": port}
    listen = settings.listen.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    settings = settings.model_copy(update={"listen": listen})
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    gateway = Gateway.from_config(settings)
    listener = bind(listen)
    with listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        clean = runner.run(serve_gateway(gateway, listener))
    if not clean:
        sys.exit(FORCED)


async def serve_gateway(
    gateway: Gateway,
    listener: socket.socket,
    *,
    on_started: Callable[["DrainingServer"], None] | None = None,
) -> bool:
    """Starts the backends, serves on `listener`, drains at a signal, closes the backends.

    Returns whether every request ran to its end.
    """
    await gateway.start()
    server = DrainingServer(gateway, on_started)
    try:
        await server.serve(sockets=[listener])
    finally:
        await gateway.close()
    return not server.cut_short


class DrainingServer(uvicorn.Server):
    """Uvicorn, but it goes on listening while it drains, so that /ready can say 503."""

    def __init__(
        self, gateway: Gateway, on_started: Callable[["DrainingServer"], None] | None = None
    ) -> None:
        app = create_app(gateway)
        settings = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,  # the requests have ended by then, or their backend has
        )
        super().__init__(settings)
        self.gateway = gateway
        self.cut_short = False
        self._on_started = on_started
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and only then says so: whoever reads the line can connect, or send a signal."""
        await super().startup(sockets)
        assert sockets
        host, port = sockets[0].getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _say(f"serving {', '.join(self.gateway.pools)} on {url}")
        if self._on_started is not None:
            self._on_started(self)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the drain; another one ends it."""
        name = signal.Signals(sig).name
        if self._deadline is None:
            timeout_s = self.gateway.config.drain_timeout_s
            self.gateway.draining = True
            self._deadline = time.monotonic() + timeout_s
            running = self.gateway.running
            _say(f"{name}: draining {running} requests, at most {timeout_s:g} s; again to force")
        else:
            self._deadline = 0.0

    async def on_tick(self, counter: int) -> bool:
        """Called every 0.1 s; true ends the main loop."""
        if self._deadline is not None:
            if self.gateway.running and time.monotonic() >= self._deadline:
                self.cut_short = True
                await self.gateway.close()  # running answers end in an error event
                await self._settle()
                return True
            if not self.gateway.running:
                return True
        return await super().on_tick(counter)

    async def _settle(self) -> None:
        """Lets the requests that lost their backend say so to their clients."""
        give_up = time.monotonic() + 1.0
        while self.gateway.running and time.monotonic() < give_up:
            await asyncio.sleep(0.02)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _settings(target: Path | None, config: Path | None) -> GatewayConfig:
    if config is not None:
        return GatewayConfig.load(config)
    if target is None:
        raise ConfigError("nothing to serve: give an export or a configuration file")
    # Fails early on a directory that is neither; the runner verifies its hashes.
    manifest = Manifest.load(target, verify=False)
    if manifest.kind not in ("onnx", "engine"):
        raise ConfigError(
            f"{target}: is a {manifest.kind}; what is served here is an ONNX export or an engine"
        )
    name = manifest.model.name
    embedded = EmbeddedConfig(type="embedded", path=target)
    return GatewayConfig(models={name: ModelConfig(pool=PoolConfig(backends=(embedded,)))})


def bind(listen: Listen) -> socket.socket:
    """A bound socket that does not listen yet: before the backends run, nobody is kept waiting.

    Its protocol is named, because asyncio turns off Nagle's algorithm only for sockets that say
    they are TCP; without that, each small answer waits 40 ms for the client's delayed ACK.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {listen.host}:{listen.port}: {error.strerror or error}"
        ) from None
    return listener


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:  # not built for this platform
        return None
    return uvloop.new_event_loop

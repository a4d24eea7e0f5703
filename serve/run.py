"""`octet serve`: runs a gateway, from its configuration to its end."""

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from octet.errors import ConfigError, OctetError
from serve.config import GatewayConfig, checks
from serve.gateway.reload import reload_from
from serve.gateway.state import Gateway
from serve.gateway.unproven import keep_warning
from serve.http.protocol import most_files
from serve.http.server import AdminServer, DrainingServer
from serve.telemetry.logs import logging_to, say

__all__ = [
    "FORCED",
    "DrainingServer",
    "bind",
    "prepared",
    "run",
    "serve_gateway",
    "serve_until_signal",
]

FORCED = 1  # exit code when a second signal, or the deadline, cut requests short


def run(
    settings: GatewayConfig,
    *,
    config: Path | None = None,
    host: str | None = None,
    port: int | None = None,
    proof: bool = True,
) -> None:
    """Serves the models of `settings` until a signal; a reload reads the file `config` again.

    `host` and `port` take precedence over the file's. Without `proof`, backends serve whatever
    their log-probabilities are. Raises an OctetError for a configuration that cannot work, or an
    address that cannot be listened on; exits 1 if requests were cut short.
    """
    settings = prepared(settings, host=host, port=port, proof=proof)
    gateway = Gateway.from_config(settings)
    gateway.path, gateway.proves = config, proof
    with contextlib.ExitStack() as stack:
        stack.enter_context(logging_to(settings.logs))
        listener = stack.enter_context(bind(settings.listen.host, settings.listen.port))
        admin = settings.admin
        admin_listener = None
        if admin.port is not None:
            admin_listener = stack.enter_context(bind(admin.host, admin.port))
        clean = serve_until_signal(gateway, listener, admin_listener)
    if not clean:
        sys.exit(FORCED)


def prepared(
    settings: GatewayConfig, *, host: str | None, port: int | None, proof: bool
) -> GatewayConfig:
    """Returns the settings with these options, after their warnings; raises the file limit."""
    settings = settings if proof else settings.without_proof()
    given = {"host": host, "port": port}
    listen = settings.listen.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    settings = settings.model_copy(update={"listen": listen})
    for warning in checks.warnings(settings):
        say(f"warning: {warning}", settings.logs, logging.WARNING)
    if warning := _allow_files(settings):
        say(f"warning: {warning}", settings.logs, logging.WARNING)
    return settings


def serve_until_signal(
    gateway: Gateway,
    listener: socket.socket,
    admin_listener: socket.socket | None,
    on_started: Callable[[], None] = lambda: None,
) -> bool:
    """Runs `serve_gateway` in an event loop of its own, with what suits a process of its own."""

    def started(_server: DrainingServer) -> None:
        _freeze_objects()
        on_started()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve_gateway(gateway, listener, admin_listener, on_started=started))


def _allow_files(settings: GatewayConfig) -> str:
    """Raises the limit of open files to what the system allows; returns a warning if it is low."""
    try:
        import resource
    except ModuleNotFoundError:  # not Unix
        return ""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # A connection of a client, and one to its backend.
    needed, allowed = 2 * settings.limits.max_connections, most_files()
    if allowed >= needed:
        return ""
    return (
        f"limits.max_connections is {settings.limits.max_connections}, which may need {needed} "
        f"open files, but the process may open {allowed}: raise the limit (ulimit -n)"
    )


def _freeze_objects() -> None:
    """Exempts all present objects from garbage collection: they live as long as the process.

    A request makes some 300 objects, hardly any of them in cycles; at Python's default thresholds
    the collector would inspect all of them at every other request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def serve_gateway(
    gateway: Gateway,
    listener: socket.socket,
    admin_listener: socket.socket | None = None,
    *,
    on_started: Callable[[DrainingServer], None] | None = None,
    patience_s: float = 0.0,
) -> bool:
    """Starts the backends, serves on `listener`, drains at a signal, closes the backends.

    It listens before the backends are proven, so that /health and /ready can report it; or after
    the first verdicts, if they come within `patience_s`. Administration is on `admin_listener`, if
    there is one. SIGHUP rereads the configuration. Returns whether every request ran to its end.
    """
    await gateway.start(patience_s=patience_s)
    server = DrainingServer(gateway, on_started)
    admin = AdminServer(gateway) if admin_listener is not None else None
    warning = asyncio.create_task(keep_warning(gateway))
    try:
        async with _reloading_at_hangup(gateway):
            if admin is None or admin_listener is None:
                await server.serve(sockets=[listener])
            else:
                await _both(server, listener, admin, admin_listener)
    finally:
        warning.cancel()
        await gateway.close()
    return not server.cut_short


async def _both(
    server: DrainingServer,
    listener: socket.socket,
    admin: AdminServer,
    admin_listener: socket.socket,
) -> None:
    """Serves administration until the server ends, so that it can report a drain's progress."""
    administration = asyncio.create_task(admin.serve(sockets=[admin_listener]))
    try:
        await server.serve(sockets=[listener])
    finally:
        admin.should_exit = True
        await administration


@contextlib.asynccontextmanager
async def _reloading_at_hangup(gateway: Gateway) -> AsyncIterator[None]:
    """Reloads at SIGHUP in a callback of the event loop: nothing runs inside the signal handler."""
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        with contextlib.suppress(OctetError):  # it has been logged
            await reload_from(gateway, gateway.path)

    def at_signal() -> None:
        task = loop.create_task(reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    try:
        loop.add_signal_handler(signal.SIGHUP, at_signal)
    except (NotImplementedError, RuntimeError, ValueError):  # not Unix, or not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in reloads:
            task.cancel()
        await asyncio.gather(*reloads, return_exceptions=True)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Returns a bound socket that does not listen yet: no client waits before the backends run.

    `shared`: others of this user may bind the same port, and get a part of its connections.

    Its protocol is given, because asyncio turns off Nagle's algorithm only for sockets whose
    protocol is TCP; otherwise each small answer waits 40 ms for the client's delayed ACK.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        line = f"cannot listen on {host}:{port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            line += "; stop what listens there, or give another --port"
        raise ConfigError(line) from None
    return listener


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:  # not built for this platform
        return None
    return uvloop.new_event_loop

"""Deploys the application to a Ray cluster that runs, and reports what becomes of it."""

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ProxyStatus

from octet.errors import ConfigError, OctetError, printable
from serve.check import check
from serve.config.checks import load_config
from serve.ray.app import application
from serve.ray.plan import require_resources

__all__ = ["APPLICATION", "deploy"]

APPLICATION = "octet"
CONNECT_S = 5.0
_POLL_S = 0.5
# How a client of HTTP/2 begins, as gRPC does: the preface and empty settings (RFC 9113, 3.4).
_SETTINGS = b"\x04"  # the type of the server's first frame, too
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0\0\0\0\0"
_FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)


def deploy(path: Path, address: str | None, say: Callable[[str], None]) -> None:
    """Deploys the configuration `path`, and returns once each replica is proven and serves.

    `address` is the cluster's (default: RAY_ADDRESS, or the cluster of this machine). `say` gets a
    line for each step. Raises OctetError for a configuration that Ray cannot serve, without a
    cluster of this Ray's version, for replicas that no machine can hold, and for a replica that
    does not start, or is refused.
    """
    for line in check(path):
        say(line)
    config = load_config(path)
    app = application(config)
    _connect(address)
    try:
        require_resources(config, ray.nodes())
        host, port = config.listen.host, config.listen.port
        _start(HTTPOptions(host=host, port=port))
        _require_address(host, port)
        target = serve.RunTarget(target=app, name=APPLICATION, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        _wait(say)
        say(f"serving {', '.join(config.models)} on http://{host}:{port}")
    finally:
        ray.shutdown()  # leaves the application running


def _connect(address: str | None) -> None:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _require_listener(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        if reason.startswith("Version mismatch: "):
            raise ConfigError(
                "the Ray cluster is of another version: install the same here and there"
                f" ({printable(reason.partition(': ')[2])})"
            ) from None
        where = "on this machine" if address == "auto" else f"at {address}"
        raise ConfigError(
            f"no Ray cluster answers {where} ({printable(reason).rstrip('.')}): start one with"
            " `ray start --head`, or give its --address"
        ) from None


def _require_listener(address: str) -> None:
    """Raises OSError unless HOST:PORT speaks HTTP/2; Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        connection.sendall(_HELLO)
        # A frame begins with 3 bytes of length and its type.
        if connection.recv(4, socket.MSG_WAITALL)[3:] != _SETTINGS:
            raise OSError("what listens there is no Ray")


def _start(options: HTTPOptions) -> None:
    """Starts Ray Serve, unless it runs."""
    try:
        serve.start(http_options=options)
    except RayError:
        # Its HTTP proxy took over five seconds, as on a busy machine. Ray starts another proxy,
        # but fails here. The second call takes what runs; `_wait` waits for the proxy.
        serve.start(http_options=options)


def _require_address(host: str, port: int) -> None:
    """Raises ConfigError if Ray Serve runs already, and listens elsewhere."""
    options = _get_global_client().http_config
    if (options.host, options.port) != (host, port):
        raise ConfigError(
            f"listen: is {host}:{port}, but Ray Serve runs already, on {options.host}:"
            f"{options.port}: change it, or stop what Ray serves with `serve shutdown`"
        )


def _wait(say: Callable[[str], None]) -> None:
    """Returns when all deployments run, and an HTTP proxy is ready.

    Raises OctetError with the reason if a deployment does not run.
    """
    said: dict[str, str] = {}
    while True:
        found = serve.status()
        status = found.applications[APPLICATION]
        proxies = Counter(found.proxies.values())
        if status.status == ApplicationStatus.RUNNING and proxies[ProxyStatus.HEALTHY]:
            return
        counts: dict[str, Mapping[str, int]] = {
            "Ray's HTTP proxy": proxies,
            **{name: x.replica_states for name, x in status.deployments.items()},
        }
        for name, counted in counts.items():
            states = ", ".join(f"{count} {state.lower()}" for state, count in counted.items())
            if states and said.get(name) != states:
                said[name] = states
                say(f"{name}: {states}")
        if status.status in _FAILED:
            reasons = [status.message, *(d.message for d in status.deployments.values())]
            raise OctetError(f"not deployed: {_cause(reasons)}")
        time.sleep(_POLL_S)


def _cause(messages: Iterable[str]) -> str:
    """Returns the line with Octet's own error in these messages, which contain tracebacks."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("octet.errors.")]
    line = (ours or lines[-1:] or ["Ray gives no reason"])[0]
    return printable((line.partition("Error: ")[2] or line)[:1000])

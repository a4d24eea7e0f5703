"""One replica of an engine: a gateway of one backend, without an address.

Ray sends requests to a replica once its constructor has returned, so the constructor returns once
the backend is proven, and raises if it is refused. From then on Ray calls `check_health`: a replica
whose engine ended, or whose answers are wrong by now, gets no more requests and is replaced.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack
from typing import Any

from octet.errors import OctetError
from serve.backends.base import supervised
from serve.config import GatewayConfig
from serve.gateway.state import Gateway
from serve.http.app import create_app
from serve.telemetry.logs import logging_to

__all__ = ["HEALTH_S", "OUTSTANDING", "Engine", "OutstandingTokens"]

HEALTH_S = 1.0  # between two health checks; Ray replaces a replica at the third failure in a row
_ASIDE_S = 10.0  # by then Ray has stopped sending requests to a replica that fails its checks
_POLL_S = 0.1
OUTSTANDING = "outstanding_tokens"


class Engine:
    """A deployment's class: each replica runs the one backend of `config`."""

    async def __init__(self, config: GatewayConfig) -> None:  # type: ignore[misc]
        """Raises OctetError if the backend cannot start, or is not what its artifact says."""
        self._stack = ExitStack()
        self._stack.enter_context(logging_to(config.logs))
        self._gateway = Gateway.from_config(config)
        (self._pool,) = self._gateway.pools.values()
        self._app = create_app(self._gateway)
        self._requests: set[asyncio.Task[None]] = set()
        try:
            await self._gateway.start()
            while not self._pool.ready:
                if problem := self._problem():
                    raise OctetError(problem)
                await asyncio.sleep(_POLL_S)
        except BaseException:
            await self.close()
            raise

    async def answer(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[tuple[int, dict[str, str]] | bytes, None]:
        """Yields the status with the headers, then the body in pieces as they come.

        Nothing comes before the first token. Closing the generator cancels the request.
        """
        await self._require_ready()
        messages: asyncio.Queue[Any] = asyncio.Queue()
        gone = asyncio.Event()
        request = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if request:
                return request.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            await self._app(_scope(method, path, headers), receive, messages.put)

        running = asyncio.create_task(run())
        self._requests.add(running)
        running.add_done_callback(self._requests.discard)
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    fields = message["headers"]
                    yield message["status"], {n.decode(): v.decode() for n, v in fields}
                elif piece := message.get("body"):
                    yield piece
            running.result()
        finally:
            gone.set()

    async def check_health(self) -> None:
        """Raises OctetError while the backend does not serve."""
        if not self._pool.ready:
            raise OctetError(self._problem() or f"pool {self._pool.name}: does not serve")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Reports the tokens of the requests that are queued here or in progress, for Ray."""
        gates = self._gateway.admission.gates.values()
        return {OUTSTANDING: float(sum(gate.tokens + gate.queue.tokens for gate in gates))}

    async def close(self) -> None:
        """Ends the engine."""
        await self._gateway.close()
        self._stack.close()

    async def _require_ready(self) -> None:
        """Raises OctetError, but not before Ray sends requests elsewhere, if it does not serve.

        A replica that failed fast would have the shortest queue, and attract all requests.
        """
        waited_s = 0.0
        while not self._pool.ready:
            if waited_s >= _ASIDE_S:
                await self.check_health()
            await asyncio.sleep(_POLL_S)
            waited_s += _POLL_S

    def _problem(self) -> str:
        """Says why the backend will not serve; "" if it does, or may soon."""
        (member,) = self._pool.members
        backend, proof = member.backend, member.proof
        if member.standing == "refused" and proof is not None:
            return f"{self._pool.name}/{member.name} is refused: {proof.reason}"
        if supervised(backend) and backend.gave_up:
            return f"{self._pool.name}/{member.name}: {backend.gave_up}"
        return ""


class OutstandingTokens:
    """A policy of Ray's autoscaler: as many replicas as the outstanding tokens need."""

    def __init__(self, tokens_per_replica: int) -> None:
        self._each = tokens_per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Returns the number of replicas, which Ray rounds up, limits and delays; and no state."""
        reports = (context.aggregated_metrics or {}).get(OUTSTANDING)
        if not reports:  # none has come yet
            return context.target_num_replicas, {}
        return sum(reports.values()) / self._each, {}


def _scope(method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
    }

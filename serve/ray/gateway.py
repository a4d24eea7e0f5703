"""One replica of the gateway: the ingress of the application."""

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from starlette.types import ASGIApp

from serve.config import GatewayConfig
from serve.gateway.state import Gateway
from serve.http.app import create_app
from serve.members.factory import make_backend
from serve.ray.backend import RayBackend
from serve.routing import Pool
from serve.telemetry.logs import logging_to

__all__ = ["GatewayReplica"]

_POLL_S = 0.1


class GatewayReplica:
    """A deployment's class. Its engines are deployments of their own; it proves them as one.

    Its constructor returns once it can answer.
    """

    async def __init__(  # type: ignore[misc]
        self, config: GatewayConfig, engines: Mapping[str, Mapping[int, Any]]
    ) -> None:
        """`engines` has a handle for each engine, by pool and number in its `backends`."""
        self._stack = ExitStack()
        self._stack.enter_context(logging_to(config.logs))
        pools = {}
        for name, pool in config.all_pools.items():
            if not (models := config.models_of(name)):
                continue
            # Ray's own checks replace the token that is generated after a silence.
            health = pool.health.model_copy(update={"probe_after_s": None})
            backends = [
                (RayBackend(models[0], handle.deployment_name, handle), entry)
                if (handle := engines.get(name, {}).get(i)) is not None
                else (make_backend(models[0], entry), entry)
                for i, entry in enumerate(pool.backends)
            ]
            if name in engines:
                pool = pool.model_copy(update={"health": health})
            pools[name] = Pool(name, pool, backends, model=models[0])
        self._gateway = Gateway(config, pools)
        await self._gateway.start()
        while not self._gateway.ready:
            await asyncio.sleep(_POLL_S)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application; Ray calls this after the constructor."""
        return create_app(self._gateway)

    async def __del__(self) -> None:
        """Closes the gateway; Ray awaits it before it ends the replica."""
        await self._gateway.close()
        self._stack.close()

"""The gateway's state: the pools, the limits, the figures, and whether it takes requests."""

import asyncio
import time
from typing import Any

from octet.errors import RequestError, nearest
from serve.backends.base import Backend
from serve.config import GatewayConfig
from serve.metrics import Metrics
from serve.pool import Pool

__all__ = ["Gateway"]

READY_TIMEOUT_S = 2.0


class Gateway:
    """What every endpoint works on."""

    def __init__(self, config: GatewayConfig, pools: dict[str, Pool]) -> None:
        self.config = config
        self.pools = pools
        self.metrics = Metrics()
        self.created = int(time.time())
        self.draining = False
        self.running = 0  # completions being answered

    @classmethod
    def from_config(cls, config: GatewayConfig) -> "Gateway":
        return cls(
            config,
            {name: Pool.from_config(name, model) for name, model in config.all_pools.items()},
        )

    def pool(self, model: str) -> Pool:
        """Raises RequestError (404) for a name that is not served."""
        pool = self.pools.get(model)
        if pool is None:
            model = model[:100]
            raise RequestError(
                f"the model '{model}' does not exist{nearest(model, self.pools)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return pool

    def require_accepting(self) -> None:
        """Raises RequestError (503) once draining has begun."""
        if self.draining:
            raise RequestError(
                "the server is shutting down",
                status=503,
                code="draining",
                kind="service_unavailable_error",
            )

    async def readiness(self) -> dict[str, Any]:
        """Whether a request sent now would be served, and by which backends."""
        entries = [(name, b) for name, pool in self.pools.items() for b in pool.backends]
        answers = await asyncio.gather(*(_ready(backend) for _, backend in entries))
        models: dict[str, list[dict[str, Any]]] = {name: [] for name in self.pools}
        for (name, backend), answer in zip(entries, answers, strict=True):
            models[name].append({"backend": backend.name, "ready": answer})
        ready = any(answers) and not self.draining
        return {"ready": ready, "draining": self.draining, "models": models}

    async def start(self) -> None:
        """Starts every backend. Raises the OctetError of the first that can never work."""
        try:
            for pool in self.pools.values():
                await pool.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        for pool in self.pools.values():
            await pool.close()


async def _ready(backend: Backend) -> bool:
    try:
        return await asyncio.wait_for(backend.ready(), READY_TIMEOUT_S)
    except TimeoutError:
        return False

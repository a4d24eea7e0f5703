"""Real servers behind a gateway that runs as a process of its own, and what it says of them."""

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.integration.servers.launch import GatewayServer, TritonServer, VllmServer
from tests.integration.servers.process import Server, free_port

__all__ = ["MODEL", "Fleet", "Watch", "configuration"]

MODEL = "python-lm"
LOOK_S = 0.5  # at the gateway's metrics


@dataclass
class Fleet:
    """The servers by their names in the gateway's configuration, and that configuration."""

    servers: dict[str, Server]
    config: dict[str, Any]
    directory: Path

    def gateway(self, **changes: Any) -> GatewayServer:
        """A gateway with a port and a file of its own; not yet started."""
        port = free_port()
        config = self.directory / f"gateway-{port}.yaml"
        self.write(config, port, **changes)
        return GatewayServer(config=config, port=port, log=self.directory / f"gateway-{port}.log")

    def write(self, config: Path, port: int, **changes: Any) -> None:
        content = {"listen": {"port": port}, "logs": {"access": True}} | self.config | changes
        config.write_text(yaml.safe_dump(content))


def configuration(servers: dict[str, Server], exports: Path) -> dict[str, Any]:
    backends: list[dict[str, Any]] = []
    for name, server in servers.items():
        if isinstance(server, VllmServer):
            backends.append({"name": name, "type": "vllm", "url": server.url})
        else:
            assert isinstance(server, TritonServer)
            address, tokenizer = server.grpc_address, str(exports / "onnx")
            backends.append(
                {"name": name, "type": "triton", "url": address, "tokenizer": tokenizer}
            )
    pool = {
        "backends": backends,
        "health": {"probe_after_s": 3.0},
        "routing": {"policy": "round_robin"},  # all take part, however slow
    }
    return {"models": {MODEL: {"pool": pool}}, "drain_timeout_s": 300}


class Watch:
    """What the gateway says of itself."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(url)

    async def close(self) -> None:
        await self._session.close()

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples that carry these labels."""
        async with self._session.get("/metrics") as response:
            text = await response.text()
        lines = re.findall(rf"^{name}(?:{{(.*?)}})? (\S+)$", text, re.MULTILINE)
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        return sum(float(value) for found, value in lines if wanted <= set(found.split(",")))

    async def available(self, backend: str) -> bool:
        up = await self.metric("octet_backend_up", backend=backend)
        breaker = await self.metric("octet_backend_breaker_state", backend=backend)
        return up == 1 and breaker == 0

    async def until(self, backend: str, available: bool) -> float:
        """Seconds until `backend` is, or is not, available.

        Each look counts as LOOK_S at most: what takes it longer is that the machine is held up.
        """
        seconds, before = 0.0, time.monotonic()
        async with asyncio.timeout(300):
            while await self.available(backend) != available:
                await asyncio.sleep(0.05)
                now = time.monotonic()
                seconds, before = seconds + min(now - before, LOOK_S), now
        return seconds + min(time.monotonic() - before, LOOK_S)

    async def busy(self, backend: str) -> None:
        """Waits until `backend` has answered something, and has more to answer.

        One request is enough: a quick backend of a slow pool rarely has two.
        """
        async with asyncio.timeout(300):
            while not (
                await self.answered(backend)
                and await self.metric("octet_backend_in_flight", backend=backend)
            ):
                await asyncio.sleep(0.05)

    async def answered(self, backend: str) -> float:
        """Tokens that `backend` has written."""
        return await self.metric("octet_tokens_total", backend=backend, type="output")

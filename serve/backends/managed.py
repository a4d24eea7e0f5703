"""A vLLM that the gateway starts, keeps running, and stops."""

import asyncio
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from octet.errors import ConfigError
from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import HttpConfig, ManagedConfig
from serve.vllm.command import (
    SAFE_PATH,
    WEIGHT_ONLY,
    Installed,
    artifact_flags,
    find_vllm,
    gpus,
    gpus_at_rest,
    machine_flags,
    require_checkpoint,
    served_name,
    start_variables,
    weight_only_flags,
)
from serve.vllm.process import free_port
from serve.vllm.supervisor import Supervisor

__all__ = ["ManagedBackend"]

_log = logging.getLogger(__name__)
_CACHES = 1 << 30  # bytes of a disk that kernel caches may need


class ManagedBackend(OpenAiHttpBackend):
    """A vLLM on 127.0.0.1. Each of its processes gets another port."""

    def __init__(self, model: str, config: ManagedConfig) -> None:
        """Raises OctetError for an artifact that is no checkpoint."""
        require_checkpoint(config.artifact)
        self._managed = config
        name = config.model or served_name(config.artifact)
        server = HttpConfig(type="vllm", url=_url(free_port()), model=name)
        super().__init__(model, server)
        self.supervisor: Supervisor | None = None

    @property
    def gave_up(self) -> str:
        """Says why vLLM does not start, or ""; further starts are tried even so."""
        return "" if self.supervisor is None else self.supervisor.gave_up

    @property
    def process(self) -> dict[str, Any]:
        found = self.supervisor
        if found is None:
            return {}
        return {"pid": found.pid, "starts": found.starts, "last_end": found.last_end or None}

    async def start(self) -> None:
        await super().start()
        vllm = await asyncio.to_thread(self._found)
        config = self._managed
        found = await asyncio.to_thread(gpus, os.environ | config.environment)
        self.supervisor = Supervisor(
            config.name or config.artifact.name,
            lambda: asyncio.to_thread(self._words, vllm),
            self._health,
            environment=SAFE_PATH
            | start_variables(config.artifact, found)
            | (WEIGHT_ONLY if config.weight_only else {})
            | config.environment,
            moved=self._move,
            start_timeout_s=config.start_timeout_s,
        )
        self.supervisor.start()

    async def ready(self) -> bool:
        ready = await super().ready()
        if ready and self.supervisor is not None:  # which may not have looked yet
            self.supervisor.was_healthy = True
        return ready

    async def close(self) -> None:
        if self.supervisor is not None:
            await self.supervisor.close()
        await super().close()

    def _found(self) -> Installed:
        """Finds vLLM. Raises OctetError if it cannot serve the artifact on this machine."""
        config = self._managed
        vllm = find_vllm(config.command, config.python)
        if vllm.problem:
            _log.warning("%s; it is proven all the same", vllm.problem)
        variables = os.environ | config.environment
        _require_space(Path(variables.get("VLLM_CACHE_ROOT") or Path.home()))
        machine_flags(config.artifact, gpus(), config.options)
        return vllm

    def _words(self, vllm: Installed) -> list[str]:
        """Returns the command that starts vLLM with the memory that is free now, without a port."""
        config = self._managed
        return [
            *vllm.words,
            str(config.artifact.resolve()),
            *(artifact_flags(config.artifact) or ("--served-model-name", self.served_name)),
            *machine_flags(config.artifact, gpus_at_rest(), config.options),
            *(weight_only_flags(vllm) if config.weight_only else ()),
            "--disable-uvicorn-access-log",  # each health check would be a line
            *config.options,
        ]

    async def _health(self) -> int:
        status, _ = await self.get("/health")
        return status

    def _move(self, port: int) -> None:
        self._config = self._config.model_copy(update={"url": _url(port)})
        self.url = self._config.url
        self.name = f"{self._config.type} {self.url}"
        self._urls.clear()


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _require_space(directory: Path) -> None:
    """Raises ConfigError if the disk of the kernel caches is full."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < _CACHES:
        raise ConfigError(
            f"{directory}: {free >> 20} MB are free, and vLLM's kernel caches may take"
            f" {_CACHES >> 20} MB: free some space, or set VLLM_CACHE_ROOT to another disk"
        )

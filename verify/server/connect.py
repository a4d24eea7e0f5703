"""Connects `octet verify URL` to the server that the command line describes."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import ValidationError

from octet.errors import BackendUnavailable, ConfigError, OctetError
from octet.proof.declared import Engine
from octet.recipe import KvCacheDtype

if TYPE_CHECKING:
    from serve.backends.base import Backend
    from serve.config import BackendConfig, HttpConfig
    from serve.config.proof import Proof

__all__ = ["SCHEMES", "Query", "http_config", "reached"]

SCHEMES = ("http", "https", "grpc", "triton")
_ASIDE_S = 10.0  # timeout of the request that finds out why a server does not answer


@dataclass(frozen=True)
class Query:
    """The command line's description of a server."""

    url: str
    golden: Path
    key: Path | None = None  # that must have signed `golden`
    model: str | None = None
    api_key_env: str | None = None
    weights: Literal["quantized", "original"] = "quantized"
    kv_cache: KvCacheDtype | None = None
    engine: Engine | None = None
    device: str | None = None
    checkpoint: Path | None = None
    seed: int = 0
    every_prompt: bool = False
    concurrency: int = 8
    timeout_s: float = 120.0

    def proof(self, **schedule: Any) -> "Proof":
        """Returns how the server is proven, as a gateway's configuration says it."""
        from serve.config.proof import Proof

        return Proof(
            golden=self.golden,
            key=self.key,
            weights=self.weights,
            kv_cache=self.kv_cache,
            engine=self.engine,
            device=self.device,
            **schedule,
        )


async def reached(query: Query) -> "Backend":
    """Starts a backend and returns it once it is ready. Raises OctetError."""
    if query.url.partition("://")[0] in ("http", "https"):
        backend = await _openai(query)
    else:
        backend = await _started(*_triton(query))
    if not await backend.ready():
        await backend.close()
        if query.url.startswith("http"):
            await _require_answer(query.url)
        raise BackendUnavailable(f"{query.url}: does not answer, or is not ready")
    return backend


async def _require_answer(url: str) -> None:
    """Raises BackendUnavailable, with the reason, if no server can be reached."""
    from verify.evaluation.targets.client import Client

    try:
        async with asyncio.timeout(_ASIDE_S), Client(url, None) as client:
            await client.ask("/v1/models")
    except TimeoutError:
        raise BackendUnavailable(f"{url}: no answer within {_ASIDE_S:g} s") from None
    except BackendUnavailable as error:
        if error.kind in ("refused", "lost", "garbled", "timeout"):
            raise
    except OctetError:
        pass  # it answers


async def _openai(query: Query) -> "Backend":
    """Starts a backend for an HTTP server; of type vllm for vLLM, which returns tokens by id."""
    return await _started(*await _http(query))


async def http_config(query: Query) -> "tuple[str, HttpConfig]":
    """Returns the model that an HTTP server serves, and the configuration of its backend.

    Raises BackendUnavailable if it does not answer, and ConfigError if it cannot be queried.
    """
    await _require_answer(query.url)
    return await _http(query)


async def _http(query: Query) -> "tuple[str, HttpConfig]":
    from serve.config import HttpConfig
    from serve.config.backends import key_in
    from serve.proof.engine_report import engine_report

    key = key_in(query.api_key_env)

    def config(kind: Literal["vllm", "openai"], model: str | None) -> HttpConfig:
        try:
            return HttpConfig(type=kind, url=query.url, model=model, api_key=key)
        except ValidationError as error:
            raise _refused(query, error) from None

    backend = await _started(query.model or "", config("openai", query.model))
    try:
        model = query.model or await _only_model(query.url, backend)
        report = await engine_report(backend)
    finally:
        await backend.close()
    kind: Literal["vllm", "openai"] = "openai"
    if report is not None and report.engine == "vllm":
        kind = "vllm"
    return model, config(kind, model)


async def _only_model(url: str, backend: "Backend") -> str:
    """Returns the only model served. Raises OctetError if the server lists none or several."""
    from serve.backends.openai_http import OpenAiHttpBackend

    assert isinstance(backend, OpenAiHttpBackend)
    status, body = await backend.get("/v1/models")
    try:
        names = [card["id"] for card in json.loads(body)["data"] if not card.get("parent")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        if not status:
            await _require_answer(url)
            raise BackendUnavailable(f"{url}: cannot be reached") from None
        said = "it refuses the key" if status in (401, 403) else f"it answered {status}"
        raise ConfigError(f"{url}: /v1/models does not list models: {said}") from None
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        raise ConfigError(f"{url}: serves {len(names)} models ({listed}): name one with --model")
    return str(names[0])


def _triton(query: Query) -> "tuple[str, BackendConfig]":
    from serve.config import TritonConfig

    parts = urlsplit(query.url)
    model = parts.path.strip("/") or query.model
    if not model or (query.model and query.model != model):
        raise ConfigError(f"{query.url}: name its model once: with --model, or after the port")
    tokenizer = query.golden if (query.golden / "tokenizer.json").is_file() else None
    try:
        return model, TritonConfig(
            type="triton", url=parts.netloc, model=model, tokenizer=tokenizer
        )
    except ValidationError as error:
        raise _refused(query, error) from None


def _refused(query: Query, error: ValidationError) -> ConfigError:
    return ConfigError(f"{query.url}: {error.errors()[0]['msg'].removeprefix('Value error, ')}")


async def _started(model: str, config: "BackendConfig") -> "Backend":
    from serve.members.factory import make_backend

    backend = make_backend(model, config)
    await backend.start()
    return backend

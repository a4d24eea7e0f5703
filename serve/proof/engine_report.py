"""Compares an engine's report about itself with the declared configuration.

This finds faults that log-probabilities need not show.

| engine   | reports                                                                               |
|----------|---------------------------------------------------------------------------------------|
| vLLM     | its version; the cache format, once `auto` is resolved; whether it caches prefixes;   |
|          | the checkpoint's path; the context; its start time. The kind of build only if its     |
|          | version has it ("0.32.0+cpu"); by default, CPU builds use blocks of 128 tokens,       |
|          | others of 16. Not whether it captures CUDA graphs, nor its kernels                    |
| Triton   | its version; the model's backend, versions, parameters and kind of instances          |
| others   | the context, at most                                                                  |
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from octet.proof.declared import Declared
from octet.proof.reference import Proofs
from octet.recipe import KvCacheDtype
from serve.backends.base import Backend
from serve.backends.embedded import EmbeddedBackend
from serve.backends.openai_http import OpenAiHttpBackend, card_of, context_length
from serve.backends.prometheus import samples
from serve.proof.served_files import differences

__all__ = ["EngineReport", "Inspection", "engine_report", "structural_findings"]

_STARTED, _CACHE = "process_start_time_seconds", "vllm:cache_config_info"
# vLLM's --kv-cache-dtype after `auto` is resolved. A value that is not listed is not compared.
_FORMATS: dict[str, KvCacheDtype] = {
    "fp8_e5m2": "e5m2",
    "fp8": "e4m3",
    "fp8_e4m3": "e4m3",
    "auto": "float16",
    "bfloat16": "float16",
    "float16": "float16",
    "half": "float16",
}
_FLAGS: dict[KvCacheDtype, str] = {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto"}
_NAMES: dict[KvCacheDtype, str] = {"e5m2": "E5M2", "e4m3": "E4M3", "float16": "16-bit"}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class EngineReport:
    """Facts that an engine reports about itself; None for a fact that it does not report."""

    engine: Literal["vllm", "triton", "embedded", "openai"]
    version: str | None = None
    machine: Literal["cpu", "gpu"] | None = None  # that it was built for
    cache_dtype: str | None = None  # in the engine's own terms
    started: float | None = None  # seconds since 1970
    root: str | None = None  # path of the checkpoint that it loaded
    context: int | None = None  # tokens
    local: bool = False  # whether it runs on this machine
    facts: Mapping[str, str] = field(default_factory=dict)  # for people

    @property
    def caches_prefixes(self) -> bool:
        """Returns whether it may cache prefixes: Octet's own engine never does, alone or in Triton.

        In Triton, that engine shows as the backend "python".
        """
        return self.engine != "embedded" and self.facts.get("backend") != "python"

    @property
    def settings(self) -> dict[str, str | int]:
        """Returns what it was started with: no address, and no path."""
        known: dict[str, str | int | None] = {
            "engine": self.engine,
            "version": self.version,
            "cache": self.cache_dtype,
            "context": self.context,
            "prefix caching": self.facts.get("prefix caching"),
            "backend": self.facts.get("backend"),
        }
        return {name: value for name, value in known.items() if value is not None}

    @property
    def kv_cache(self) -> KvCacheDtype | None:
        return _FORMATS.get(self.cache_dtype or "")


@dataclass(frozen=True)
class Inspection:
    """An engine's report about itself, compared with the declared configuration."""

    findings: Sequence[str] = ()  # contradictions, a line each
    settings: Mapping[str, str | int] = field(default_factory=dict)  # that it was started with


async def engine_report(backend: Backend) -> EngineReport | None:
    """Queries the report of a started backend; None if it has none, or not now. Never raises."""
    if isinstance(backend, OpenAiHttpBackend):
        return await _of_openai(backend)
    if isinstance(backend, EmbeddedBackend):
        from octet import __version__

        return EngineReport("embedded", __version__, context=backend.context_length, local=True)
    described = getattr(backend, "described", None)  # Triton's: its libraries may be missing
    return None if described is None else _of_triton(await described())


def structural_findings(
    report: EngineReport, proofs: Proofs, declared: Declared, directory: Path | None = None
) -> list[str]:
    """Lists the contradictions to the declared configuration, one line each.

    No line contains a server's address or a file's path. `directory` is the one that `proofs` were
    loaded from. Reads files, so do not call it in an event loop.
    """
    found = []
    wanted, given = declared.kv_cache, report.kv_cache
    # While `auto` is not resolved, the checkpoint's own configuration may still select E4M3.
    open_ = report.cache_dtype == "auto" and wanted == "e4m3"
    if wanted is not None and given not in (None, wanted) and not open_:
        found.append(
            f"{_NAMES[given]} cache (cache_dtype={report.cache_dtype}) where {_NAMES[wanted]} was"
            f" declared: start it with --kv-cache-dtype {_FLAGS[wanted]}"
        )
    built = f"vllm-{report.machine}" if report.engine == "vllm" and report.machine else None
    if built is not None and declared.engine not in (None, built):
        found.append(
            f"a {built} build (version {report.version}) where {declared.engine} was declared"
        )
    elif report.machine == "cpu" and declared.device and declared.device.vendor != "cpu":
        found.append(
            f"a build for CPUs (version {report.version}) where {declared.device.name} was declared"
        )
    elif report.engine == "vllm" and declared.engine in ("tensorrt", "onnxruntime"):
        found.append(
            f"vLLM {report.version or ''}".rstrip() + f" where {declared.engine} was declared"
        )
    if report.root and directory is not None and declared.weights == proofs.weights:
        root = Path(report.root)
        if root.is_absolute():
            found += differences(
                root, directory, proofs, trusted=report.local, since=report.started
            )
    return found


async def _of_openai(backend: OpenAiHttpBackend) -> EngineReport | None:
    status, models = await backend.get("/v1/models")
    if status != 200:
        return None
    card = card_of(models, backend.served_name) or {}
    _, version_body = await backend.get("/version")
    version = _field(version_body, "version")
    _, page = await backend.get("/metrics")
    found = samples(page, (_STARTED, _CACHE))
    cache = dict(found[_CACHE][0][0]) if _CACHE in found else {}
    started = max((value for _, value in found.get(_STARTED, ())), default=None)
    facts: dict[str, str] = {}
    if cache.get("user_specified_block_size") == "False" and cache.get("block_size") == "128":
        facts["blocks"] = "of 128 tokens (as CPU builds choose)"
    if cache.get("enable_prefix_caching") in ("True", "False"):
        facts["prefix caching"] = "on" if cache["enable_prefix_caching"] == "True" else "off"
    return EngineReport(
        "vllm" if cache or card.get("owned_by") == "vllm" else "openai",
        version,
        _machine(version),
        cache.get("cache_dtype"),
        started,
        _text(card.get("root")),
        context_length(card),
        urlsplit(backend.url).hostname in _LOOPBACK,
        facts,
    )


def _of_triton(described: Mapping[str, Any] | None) -> EngineReport | None:
    """Builds the report from the server's metadata, the model's configuration and statistics."""
    if described is None:
        return None
    kinds = set(described["kinds"])
    machine: Literal["cpu", "gpu"] | None = None
    if kinds and kinds <= {"KIND_CPU"}:
        machine = "cpu"
    elif kinds == {"KIND_GPU"}:
        machine = "gpu"
    facts = {"backend": described["backend"], **described["parameters"]}
    return EngineReport("triton", described["version"], machine, facts=facts)


def _field(body: bytes, name: str) -> str | None:
    try:
        return _text(json.loads(body)[name])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _machine(version: str | None) -> Literal["cpu", "gpu"] | None:
    """Derives the machine from the local part of the version, which not every build has."""
    local = (version or "").partition("+")[2]
    return "cpu" if "cpu" in local else "gpu" if "cu" in local or "rocm" in local else None

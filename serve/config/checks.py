"""Checks that need the whole file, such as for unknown names and names that occur twice."""

import re
from collections.abc import Hashable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from octet.errors import nearest
from serve.config.access import SharedConfig
from serve.config.backends import (
    BackendConfig,
    EmbeddedConfig,
    HttpConfig,
    ManagedConfig,
    TritonConfig,
)
from serve.config.document import Document, Loc, Problem
from serve.config.gateway import GatewayConfig
from serve.config.load import refuse, validated
from serve.config.models import ModelConfig
from serve.config.pools import DnsDiscovery, FileDiscovery, PoolConfig
from serve.config.problems import problems_of
from serve.config.section import Section, tag

__all__ = [
    "at_address",
    "is_measured",
    "load_config",
    "needs_model",
    "pools_of",
    "problems",
    "warnings",
]

_BACKEND: TypeAdapter[BackendConfig] = TypeAdapter(BackendConfig)
_NO_TIERS = ": the file has no `tiers`"
_ORIGIN = re.compile(r"\*|https?://[^/\s]+")
_REDIS = ("redis://", "rediss://", "unix://")
_RAW_PASSWORD = re.compile(r"rediss?://[^/?#]*[/?#].*@")  # its end would be read as the address


def load_config(path: Path) -> GatewayConfig:
    """Reads and validates `path`; relative paths in it are relative to its directory.

    Raises ConfigError with one line: the file, the key, its problem, and the number of further
    problems.
    """
    document = Document.read(path)
    config = validated(path, document, GatewayConfig, GatewayConfig).with_keys_file()
    refuse(path, document, [*document.problems, *problems(config)])
    return config


def problems(config: GatewayConfig) -> list[Problem]:
    """Lists problems in the documentation's order: access, names, tiers, pools, models."""
    found = [*_access(config), *_names(config), *_tiers(config)]
    for name, loc, pool in pools_of(config):
        found += _pool(config, name, loc, pool)
    for name, model in config.models.items():
        found += _model(config, ("models", name), model)
    return [*found, *_captures(config)]


def warnings(config: GatewayConfig) -> list[str]:
    """Lists settings that work but are probably a mistake."""
    unused = [name for name in config.pools if not config.models_of(name)]
    now = datetime.now(UTC)
    expired = [key for key in config.access.keys if key.expires is not None and key.expires <= now]
    refused = config.tiers and not any(map(is_measured, config.all_pools.values()))
    tiers = "tiers: no pool is measured (see `proof`): each request of a tier will be refused"
    return [
        *([tiers] if refused else []),
        *(f"pools.{name}: no model uses it; it is not started" for name in unused),
        *(f"access.keys: the key '{key.name}' expired at {key.expires}" for key in expired),
    ]


def problems_of_workers(settings: GatewayConfig, count: int) -> Iterator[Problem]:
    """Yields why `count` processes cannot serve `settings`."""
    access = settings.access
    for _, loc, pool in pools_of(settings):
        if any(isinstance(backend, EmbeddedConfig | ManagedConfig) for backend in pool.backends):
            yield (
                loc,
                f"--workers {count} would start its engine {count} times; give the `url` of a "
                "server that runs already",
            )
    if access.shared is None and any(key.limited for key in access.keys):
        yield (
            ("access", "shared"),
            f"missing: each of {count} workers would give a key its whole limits",
        )
    replicas = access.shared.replicas if access.shared else None
    if replicas is not None and replicas < count:
        yield (
            ("access", "shared", "replicas"),
            f"is {replicas}; count all {count} workers of each gateway",
        )
    if settings.admin.port is None:
        yield (
            ("admin", "port"),
            "missing: each worker has /status and /metrics of its own, from there on",
        )
    elif settings.admin.port + count > 65536:
        yield ("admin", "port"), f"leaves no port for the last of {count} workers"


def at_address(template: DnsDiscovery, host: str) -> BackendConfig:
    """Makes the backend of `template` at one address. Raises pydantic's ValidationError."""
    bracketed = f"[{host}]" if ":" in host else host
    scheme = "" if template.backend.get("type") == "triton" else "http://"
    url = f"{scheme}{bracketed}:{template.port}"
    return _BACKEND.validate_python({**template.backend, "url": url})


def needs_model(config: BackendConfig, models: Iterable[str]) -> str | None:
    """Returns the problem of a backend that several models use and that names no `model`."""
    models = sorted(models)
    if len(models) < 2 or isinstance(config, EmbeddedConfig | ManagedConfig) or config.model:
        return None
    return f"set `model` to its name there: the models {', '.join(models)} use this pool"


def pools_of(config: GatewayConfig) -> Iterator[tuple[str, Loc, PoolConfig]]:
    """Yields each pool with its name and its place in the file."""
    for name, pool in config.pools.items():
        yield name, ("pools", name), pool
    for name, model in config.models.items():
        if isinstance(model.pool, PoolConfig):
            yield name, ("models", name, "pool", tag(PoolConfig)), model.pool


def _access(config: GatewayConfig) -> Iterator[Problem]:
    access, admin, listen = config.access, config.admin, config.listen
    digests = [key.sha256 for key in access.keys]
    yield from _duplicates(("access", "keys"), "name", [key.name for key in access.keys])
    yield from _duplicates(("access", "keys"), "sha256", digests)
    names = [
        name
        for model, entry in config.models.items()
        for name in (model, *entry.aliases, *entry.tier_aliases)
    ]
    for i, key in enumerate(access.keys):
        for j, name in enumerate(key.models or ()):
            if name not in names:
                yield (
                    ("access", "keys", i, "models", j),
                    f"unknown model '{name}'{nearest(name, names)}",
                )
    for i, origin in enumerate(access.cors_origins):
        if not _ORIGIN.fullmatch(origin):
            message = "should be * or an origin such as https://example.org, without a path"
            yield ("access", "cors_origins", i), message
    if access.shared is not None:
        yield from _shared(access.shared, access.usage_file)
    if admin.sha256 in digests:
        yield ("admin", "sha256"), "is also the key of a client, who would administer"
    if admin.port and (admin.host, admin.port) == (listen.host, listen.port):
        yield ("admin", "port"), "is the port that clients are served on"
    endpoint = config.traces.endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        yield ("traces", "endpoint"), "must start with http:// or https://"


def _shared(shared: SharedConfig, usage_file: Path | None) -> Iterator[Problem]:
    loc: Loc = ("access", "shared")
    if not shared.url.startswith(_REDIS):
        yield (*loc, "url"), "should be redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH"
    elif _RAW_PASSWORD.match(shared.url):
        yield (*loc, "url"), "has / ? or # in its password: write %2F, %3F or %23"
    if shared.when_lost == "share" and shared.replicas is None:
        yield (*loc, "replicas"), "missing: `when_lost: share` needs the number of gateways"
    if usage_file is not None:
        yield ("access", "usage_file"), "leave it out: with `shared`, Redis keeps the quotas"


def _names(config: GatewayConfig) -> Iterator[Problem]:
    taken = dict.fromkeys(config.models, "a model")
    for name, model in config.models.items():
        aliases: list[tuple[Loc, str]] = [
            *((("aliases", i), alias) for i, alias in enumerate(model.aliases)),
            *((("tier_aliases", alias), alias) for alias in model.tier_aliases),
        ]
        for loc, alias in aliases:
            if alias in taken:
                message = f"'{alias}' is already the name of {taken[alias]}"
                yield ("models", name, *loc), message
            taken[alias] = f"an alias of '{name}'"
        if isinstance(model.pool, PoolConfig) and name in config.pools:
            yield ("pools", name), f"the model '{name}' has a pool of its own, which has that name"


def _pool(config: GatewayConfig, name: str, loc: Loc, pool: PoolConfig) -> Iterator[Problem]:
    if not pool.backends and not pool.discover:
        yield loc, "has no backends, and nothing that discovers any"
    named = [backend.name for backend in pool.backends if backend.name is not None]
    yield from _duplicates((*loc, "backends"), "name", named)
    models = config.models_of(name)
    for i, backend in enumerate(pool.backends):
        if problem := needs_model(backend, models):
            yield (*loc, "backends", i), problem
    for i, source in enumerate(pool.discover):
        if isinstance(source, DnsDiscovery):
            yield from _template((*loc, "discover", i, "backend"), source, models)
    if pool.judge is not None:
        yield from _judge(config, name, (*loc, "judge", "reference"), pool.judge.reference)
    ejection = pool.ejection
    if ejection.duration_s > ejection.max_duration_s:
        yield (*loc, "ejection", "duration_s"), "is longer than max_duration_s"


def _judge(config: GatewayConfig, name: str, loc: Loc, reference: str) -> Iterator[Problem]:
    pools = config.all_pools
    if reference not in pools:
        yield loc, f"unknown pool '{reference}'{nearest(reference, pools)}"
    elif reference == name:
        yield loc, "is the pool itself: name another one, such as the BF16 checkpoint's"
    elif not is_measured(pools[reference]):
        message = f"'{reference}' is never proven: give it golden records, under `proof`"
        yield loc, message


def _template(loc: Loc, source: DnsDiscovery, models: Iterable[str]) -> Iterator[Problem]:
    for key in ("name", "url", "artifact"):
        if key in source.backend:
            yield (*loc, key), "leave it out: each address found gets one of its own"
    if source.backend.get("type") == "embedded":
        yield (*loc, "type"), "an embedded engine has no address to be found at"
        return
    try:
        backend = at_address(source, "127.0.0.1")
    except ValidationError as error:
        for inner, message in problems_of(error, _backend_section(source)):
            yield (*loc, *inner), message
        return
    if problem := needs_model(backend, models):
        yield loc, problem


def _backend_section(source: DnsDiscovery) -> type[Section]:
    return TritonConfig if source.backend.get("type") == "triton" else HttpConfig


def _model(config: GatewayConfig, loc: Loc, model: ModelConfig) -> Iterator[Problem]:
    known = config.all_pools
    uses: list[tuple[Loc, str]] = [
        *(((*loc, "canary", i, "pool"), entry.pool) for i, entry in enumerate(model.canary)),
        *(((*loc, "fallback", i), name) for i, name in enumerate(model.fallback)),
    ]
    main = model.pool if isinstance(model.pool, str) else str(loc[-1])
    for where, name in uses:
        if name == main:
            yield where, f"'{name}' is the model's pool already"
    shadow: list[tuple[Loc, str]] = []
    if model.shadow is not None:
        shadow = [((*loc, "shadow", "pool"), model.shadow.pool)]
    for where, name in [((*loc, "pool"), main), *uses, *shadow]:
        if name not in known:
            yield where, f"unknown pool '{name}'{nearest(name, known)}"
    total = sum(entry.fraction for entry in model.canary)
    if total > 1 + 1e-9:
        yield (*loc, "canary"), f"the fractions add up to {total:g}, which is more than 1"
    canaries = [entry.pool for entry in model.canary]
    yield from _duplicates((*loc, "canary"), "pool", canaries)
    if model.one_at_a_time:
        yield from _one_at_a_time(config, loc, model)
    for i, name in enumerate(model.fallback):
        if name in model.fallback[:i]:
            yield (*loc, "fallback", i), f"'{name}' is there twice"


def _captures(config: GatewayConfig) -> Iterator[Problem]:
    taken: dict[Path, str] = {}
    for name, model in config.models.items():
        if model.capture is not None:
            other = taken.setdefault(model.capture.file, name)
            if other != name:
                message = f"is the file of the model '{other}' too; give each its own"
                yield ("models", name, "capture", "file"), message


def _one_at_a_time(config: GatewayConfig, loc: Loc, model: ModelConfig) -> Iterator[Problem]:
    where, own = (*loc, "one_at_a_time"), str(loc[-1])
    if not model.fallback:
        yield where, "needs a `fallback`: there is only one pool"
    elsewhere = {pool for pool in model.pool_names(own) if pool not in model.in_order(own)}
    elsewhere = {canary.pool for canary in model.canary} | elsewhere
    for name in model.in_order(own):
        users = set(config.models_of(name)) - {own}
        if users or name in elsewhere:
            user = min(users, default="a canary or the shadow")
            yield where, f"the pool '{name}' is also used by {user}, and may not be running"
        elif name in config.all_pools and config.all_pools[name].discover:
            yield where, f"the pool '{name}' discovers backends, which run already"


def _duplicates(loc: Loc, key: str, values: list[str]) -> Iterator[Problem]:
    seen: set[Hashable] = set()
    for i, value in enumerate(values):
        if value in seen:
            yield (*loc, i, key), f"'{value}' is there twice"
        seen.add(value)


def is_measured(pool: PoolConfig) -> bool:
    """Decides whether the pool has, or may get, golden records to measure its backends by.

    A backend that is embedded or started here brings its own; a file of backends may list one.
    """
    own = any(isinstance(backend, EmbeddedConfig | ManagedConfig) for backend in pool.backends)
    listed = any(isinstance(source, FileDiscovery) for source in pool.discover)
    return pool.proof.enabled and (pool.proof.golden is not None or own or listed)


def _tiers(config: GatewayConfig) -> Iterator[Problem]:
    for (before, above), (name, tier) in pairwise(config.tiers.items()):
        loc: Loc = ("tiers", name, "max_kl")
        if tier.max_kl == above.max_kl:
            yield loc, f"is the budget of '{before}' too: one tier of the two is enough"
        elif tier.max_kl < above.max_kl:
            yield loc, f"is smaller than that of '{before}': list the most exact tier first"
    for name, model in config.models.items():
        named = list(_named(("models", name), model))
        for where, tier_name in named:
            if tier_name not in config.tiers:
                known = nearest(tier_name, config.tiers) if config.tiers else _NO_TIERS
                yield where, f"unknown tier '{tier_name}'{known}"
        if named and not any(is_measured(pool) for pool in _pools(config, name, model)):
            message = "no pool of the model is measured: give one golden records, under `proof`"
            yield named[0][0], message


def _named(loc: Loc, model: ModelConfig) -> Iterator[tuple[Loc, str]]:
    """Yields each tier that the model names, with its place in the file."""
    if model.tier is not None:
        yield (*loc, "tier"), model.tier
    for alias, tier in model.tier_aliases.items():
        yield (*loc, "tier_aliases", alias), tier


def _pools(config: GatewayConfig, name: str, model: ModelConfig) -> Iterator[PoolConfig]:
    """Yields the known pools that tiers choose from; unknown ones are reported elsewhere.

    A canary gets only a share of the requests, so it cannot keep a tier for the others.
    """
    known = config.all_pools
    main, *_ = model.answering(name)
    return (known[pool] for pool in (main, *model.fallback) if pool in known)

"""`octet serve --check`: lists a configuration, and all problems found without serving it."""

from collections.abc import Iterator
from pathlib import Path

from octet.artifacts.manifest import Manifest
from octet.errors import OctetError
from serve.config import (
    BackendConfig,
    DnsDiscovery,
    EmbeddedConfig,
    FileDiscovery,
    GatewayConfig,
    ModelConfig,
    PoolConfig,
    Tier,
    checks,
)
from serve.config.checks import at_address, load_config, pools_of, problems_of_workers
from serve.config.document import Document, Loc, Problem
from serve.config.load import load_backends, refuse
from serve.engine.tokenizer import Tokenizer
from serve.gateway.capture import problem_with
from serve.gateway.state import Gateway
from serve.gateway.unproven import unproven
from serve.members.factory import make_backend
from serve.proof.exam import Exams, directory_of

__all__ = ["check"]


def check(path: Path, *, proof: bool = True, workers: int = 1) -> list[str]:
    """Reads the file as `octet serve` would, and makes its backends without starting them.

    Without `proof`, reads it as `octet serve --no-proof` would; with `workers` above 1, as for so
    many processes. Returns its findings as lines.
    Raises OctetError for a configuration that cannot work: `Refused` with every problem of the
    file.
    """
    config = load_config(path)
    config = config if proof else config.without_proof()
    of_workers = problems_of_workers(config, workers) if workers > 1 else ()
    refuse(path, Document.read(path), [*_problems(config), *of_workers])
    lines = [f"warning: {warning}" for warning in (*checks.warnings(config), *_warnings(config))]
    lines += [_tier(name, tier) for name, tier in config.tiers.items()]
    lines += [_model(name, model) for name, model in config.models.items()]
    gateway = Gateway.from_config(config)
    for name, pool in gateway.pools.items():
        found = [f"{member.name} ({member.backend.name})" for member in pool.members]
        if pool.phase == "dormant":
            number = len(pool.config.backends)
            found = [f"{number} backend{'s' if number > 1 else ''}, started one pool at a time"]
        found += [d.origin for d in gateway.discoveries if d.pool is pool]
        lines.append(f"pool {name}, {pool.config.routing.policy}: {', '.join(found)}")
        exams = Exams(pool.config.proof)
        labels = [exams.load(*key).label for key in _golden(pool.config)]
        lines += [f"pool {name}: to be proven by {label}" for label in labels]
    keys = len(config.access.keys)
    lines.append(f"{keys} API keys" if keys else "no API keys: anyone may send requests")
    return lines


def _tier(name: str, tier: Tier) -> str:
    less = ", or else the most exact pool" if tier.allow_less_exact else ""
    return f"tier {name}: at most {tier.max_kl:g} nats from the reference{less}"


def _model(name: str, model: ModelConfig) -> str:
    """Lists a model's pools in the order in which they are used, with their shares."""
    main = model.pool if isinstance(model.pool, str) else name
    parts = [main]
    parts += [f"canary {canary.pool} ({canary.fraction:.4g})" for canary in model.canary]
    parts += [f"fallback {fallback}" for fallback in model.fallback]
    if model.shadow is not None:
        parts.append(f"shadow {model.shadow.pool} ({model.shadow.fraction:.4g})")
    if model.capture is not None:
        parts.append(f"capture {model.capture.file} ({model.capture.share:.4g})")
    names = [*model.aliases, *(f"{name}: {tier}" for name, tier in model.tier_aliases.items())]
    aliases = f" ({', '.join(names)})" if names else ""
    if model.tier is not None:
        parts.append(f"tier {model.tier}")
    return f"model {name}{aliases}: {', '.join(parts)}"


def _problems(config: GatewayConfig) -> Iterator[Problem]:
    """Yields problems that only the file system and the environment show."""
    for name, loc, pool in pools_of(config):
        model = next(iter(config.models_of(name)), name)
        wrong: set[Loc] = set()
        for i, backend in enumerate(pool.backends):
            if message := _wrong_with(backend, model):
                wrong.add(("backends", i))
                yield (*loc, "backends", i), message
        yield from _unprovable(loc, pool, wrong)
        for i, source in enumerate(pool.discover):
            if isinstance(source, DnsDiscovery):
                if message := _wrong_with(at_address(source, "127.0.0.1"), model):
                    yield (*loc, "discover", i, "backend"), message
            elif isinstance(source, FileDiscovery) and source.file.exists():
                try:
                    found = load_backends(source.file)
                except OctetError as error:
                    yield (*loc, "discover", i, "file"), str(error)
                    continue
                for j, backend in enumerate(found):
                    if message := _wrong_with(backend, model):
                        yield (*loc, "discover", i, "file"), f"{source.file}: {j}: {message}"
    for name, entry in config.models.items():
        if entry.capture is not None and (message := problem_with(entry.capture.file)):
            yield ("models", name, "capture", "file"), message


def _golden(pool: PoolConfig) -> dict[tuple[Path, bool], Loc]:
    """Maps each directory of golden records, and whether an embedded backend's, to its place."""
    found: dict[tuple[Path, bool], Loc] = {}
    for i, entry in enumerate([*pool.backends, *([None] if pool.discover else [])]):
        directory = directory_of(pool.proof, entry)
        if directory is not None:
            own = directory != pool.proof.golden
            where: Loc = ("backends", i, "path") if own else ("proof", "golden")
            found.setdefault((directory, isinstance(entry, EmbeddedConfig)), where)
    return found


def _unprovable(loc: Loc, pool: PoolConfig, wrong: set[Loc]) -> Iterator[Problem]:
    """Yields problems of golden records, except those of backends that are already in `wrong`."""
    exams = Exams(pool.proof)
    for key, where in _golden(pool).items():
        if where[:-1] in wrong:
            continue
        try:
            exams.load(*key)
        except OctetError as error:
            yield (*loc, *where), str(error)


def _warnings(config: GatewayConfig) -> Iterator[str]:
    used = {name: pool for name, _, pool in pools_of(config) if config.models_of(name)}
    yield from unproven(used)
    for name, _, pool in pools_of(config):
        for source in pool.discover:
            if isinstance(source, FileDiscovery) and not source.file.exists():
                yield f"pool {name}: {source.file} is not there (yet): it brings no backends"


def _wrong_with(backend: BackendConfig, model: str) -> str | None:
    """Returns why a backend could not start, or None; does not read an embedded one's weights."""
    try:
        make_backend(model, backend)
        if isinstance(backend, EmbeddedConfig):
            manifest = Manifest.load(backend.path, verify=False)
            if manifest.kind != "engine":
                Manifest.load(backend.path, "onnx", verify=False)
            for file in manifest.files:
                if not (backend.path / file).is_file():
                    message = f"{backend.path / file}: missing; its manifest lists it"
                    return f"{message}; {manifest.remedy}"
            Tokenizer.load(backend.path)
    except OctetError as error:
        return str(error)
    return None

"""Plans the deployments of a configuration under Ray Serve, and what their replicas need."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import ConfigError, nearest
from serve.config import EmbeddedConfig, GatewayConfig, ManagedConfig, ModelConfig, RayEngines

__all__ = ["Deployment", "engines_of", "gateway_needs", "problems", "require_resources"]

Resources = Mapping[str, float]  # CPU and GPU


@dataclass(frozen=True)
class Deployment:
    """One engine: entry number `index` of the `backends` of `pool`."""

    pool: str
    index: int
    entry: EmbeddedConfig | ManagedConfig
    replicas: RayEngines

    @property
    def name(self) -> str:
        return f"{self.pool}-{self.index + 1}"

    @property
    def tensor_parallel(self) -> int:
        """Returns the number of GPUs that the artifact was exported for."""
        entry = self.entry
        if isinstance(entry, EmbeddedConfig) or not (entry.artifact / MANIFEST_FILE).exists():
            return 1
        return int(Manifest.load(entry.artifact, verify=False).details.get("tensor_parallel", 1))

    @property
    def gpus(self) -> int:
        if self.replicas.gpus is not None:
            return self.replicas.gpus
        return self.tensor_parallel if isinstance(self.entry, ManagedConfig) else 0

    @property
    def needs(self) -> Resources:
        """Returns the resources of one replica."""
        return {"CPU": self.replicas.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def alone(self, config: GatewayConfig) -> GatewayConfig:
        """Returns the configuration of a gateway of this backend, open to its only caller."""
        entry = self.entry.model_copy(update={"name": self.entry.name or self.name})
        pool = config.all_pools[self.pool]
        return GatewayConfig(
            limits=config.limits,
            logs=config.logs.model_copy(update={"access": False}),
            pools={self.pool: pool.model_copy(update={"backends": (entry,), "discover": ()})},
            models={config.models_of(self.pool)[0]: ModelConfig(pool=self.pool)},
        )


def engines_of(config: GatewayConfig) -> Iterator[Deployment]:
    """Yields each engine that Ray starts: embedded ones, and vLLM with an artifact."""
    for name, pool in config.all_pools.items():
        replicas = config.ray.engines.get(name, RayEngines())
        for i, entry in enumerate(pool.backends):
            if config.models_of(name) and isinstance(entry, EmbeddedConfig | ManagedConfig):
                yield Deployment(name, i, entry, replicas)


def gateway_needs(config: GatewayConfig) -> Resources:
    """Returns the resources of one replica of the gateway."""
    return {"CPU": config.ray.gateway_cpus}


def problems(config: GatewayConfig) -> Iterator[str]:
    """Yields why Ray cannot serve `config`, a line each."""
    access, ray = config.access, config.ray
    shared, several = access.shared, f"{ray.gateways} gateways (ray.gateways)"
    if access.usage_file is not None:
        yield "access.usage_file: replicas share no file; count quotas with access.shared"
    if shared is None and ray.gateways > 1 and any(key.limited for key in access.keys):
        yield f"access.shared: missing: each of {several} would give a key its whole limits"
    if shared and shared.replicas is not None and shared.replicas < ray.gateways:
        yield f"access.shared.replicas: is {shared.replicas}; count all {several}"
    if config.admin.port is not None:
        yield "admin.port: replicas of one machine cannot share a port; leave it out"
    for name in config.one_at_a_time:
        yield f"pool {name}: Ray starts all pools; leave out one_at_a_time of its model"
    known = {engine.pool for engine in engines_of(config)}
    for name in ray.engines:
        if name not in known:
            yield f"ray.engines.{name}: no pool of that name has an engine{nearest(name, known)}"
    for engine in engines_of(config):
        if 0 < engine.gpus < engine.tensor_parallel:
            yield (
                f"ray.engines.{engine.pool}.gpus: is {engine.gpus}, and the artifact was exported"
                f" for tensor parallelism {engine.tensor_parallel}"
            )


def require_resources(config: GatewayConfig, nodes: Iterable[Mapping[str, Any]]) -> None:
    """Raises ConfigError if no machine can hold one replica, or all together not the fewest.

    `nodes` is what `ray.nodes()` returns. Ray itself would wait for ever.
    """
    alive: list[Resources] = [node["Resources"] for node in nodes if node["Alive"]]
    wanted = [("gateway", config.ray.gateways, gateway_needs(config))]
    wanted += [(e.name, e.replicas.min_replicas, e.needs) for e in engines_of(config)]
    total: dict[str, float] = {}
    for name, count, needs in wanted:
        for kind, amount in needs.items():
            total[kind] = total.get(kind, 0.0) + count * amount
        if not any(all(has.get(k, 0.0) >= n for k, n in needs.items()) for has in alive):
            most = {kind: max((has.get(kind, 0.0) for has in alive), default=0.0) for kind in needs}
            raise ConfigError(
                f"{name}: a replica needs {_amounts(needs)} on one machine, and a machine of the"
                f" cluster has at most {_amounts(most)}: lower it under `ray`, or add a machine"
            )
    there = {kind: sum(has.get(kind, 0.0) for has in alive) for kind in total}
    if any(there[kind] < amount for kind, amount in total.items()):
        raise ConfigError(
            f"the fewest replicas need {_amounts(total)}, and the cluster has {_amounts(there)}:"
            " lower them under `ray`, or add a machine"
        )


def _amounts(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())

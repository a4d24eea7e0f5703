"""Builds the application of Ray Serve from the gateway's configuration.

`octet deploy ray CONFIG` deploys it; so does `serve run serve.ray.app:build config=FILE`, or any
other way of Ray Serve that takes an import path, such as KubeRay's RayService.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from octet.errors import ConfigError
from serve.config import GatewayConfig
from serve.config.checks import load_config
from serve.ray.engine import HEALTH_S, Engine, OutstandingTokens
from serve.ray.gateway import GatewayReplica
from serve.ray.plan import Deployment, engines_of, gateway_needs, problems

__all__ = ["EngineReplica", "application", "build"]

_MANY = 4096  # requests of a replica; its own admission limits them


def build(arguments: Mapping[str, str]) -> Any:
    """Returns the application for `serve run serve.ray.app:build config=FILE`."""
    if set(arguments) != {"config"}:
        raise ConfigError("serve.ray.app:build takes one argument: config=FILE")
    return application(load_config(Path(arguments["config"])))


def application(config: GatewayConfig) -> Any:
    """Returns the application, not yet deployed. Raises ConfigError for what Ray cannot serve."""
    for problem in problems(config):
        raise ConfigError(problem)
    engines: dict[str, dict[int, Any]] = {}
    for engine in engines_of(config):
        engines.setdefault(engine.pool, {})[engine.index] = _bound(config, engine)
    gateway = serve.deployment(
        serve.ingress()(GatewayReplica),
        name="gateway",
        num_replicas=config.ray.gateways,
        max_ongoing_requests=config.limits.max_connections,
        ray_actor_options={"num_cpus": gateway_needs(config)["CPU"]},
        graceful_shutdown_timeout_s=config.drain_timeout_s,
    )
    return gateway.bind(config, engines)


class EngineReplica(Engine):
    """The deployment's class of every engine."""

    async def __del__(self) -> None:
        """Ends the engine; Ray awaits this before it ends the replica."""
        await self.close()


def _bound(config: GatewayConfig, engine: Deployment) -> Any:
    """Binds the deployment of one engine.

    A replica's resources are one bundle of a placement group: with tensor parallelism, the
    processes of vLLM need all of their GPUs at once, on one machine.
    """
    replicas, needs = engine.replicas, dict(engine.needs)
    scaling = AutoscalingConfig(
        min_replicas=replicas.min_replicas,
        max_replicas=replicas.max_replicas,
        upscale_delay_s=replicas.upscale_delay_s,
        downscale_delay_s=replicas.downscale_delay_s,
        policy=AutoscalingPolicy(
            policy_function=OutstandingTokens,
            policy_kwargs={"tokens_per_replica": replicas.tokens_per_replica},
        ),
    )
    deployment = serve.deployment(
        EngineReplica,
        name=engine.name,
        autoscaling_config=scaling,
        max_ongoing_requests=_MANY,
        ray_actor_options={"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0.0)},
        placement_group_bundles=[needs],
        placement_group_strategy="STRICT_PACK",
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        health_check_period_s=HEALTH_S,
    )
    return deployment.bind(engine.alone(config))

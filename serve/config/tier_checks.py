"""Checks tiers: their order, the names that refer to them, and that they can be kept."""

from collections.abc import Iterator
from itertools import pairwise

from octet.errors import nearest
from serve.config.backends import EmbeddedConfig
from serve.config.document import Loc, Problem
from serve.config.gateway import GatewayConfig
from serve.config.models import ModelConfig
from serve.config.pools import FileDiscovery, PoolConfig

__all__ = ["is_measured", "problems", "warnings"]


def is_measured(pool: PoolConfig) -> bool:
    """Decides whether the pool has, or may get, golden records to measure its backends by.

    An embedded backend brings its own, and a file of backends may list one.
    """
    own = any(isinstance(backend, EmbeddedConfig) for backend in pool.backends)
    listed = any(isinstance(source, FileDiscovery) for source in pool.discover)
    return pool.proof.enabled and (pool.proof.golden is not None or own or listed)


def problems(config: GatewayConfig) -> Iterator[Problem]:
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
                yield where, f"unknown tier '{tier_name}'{_known(tier_name, config)}"
        if named and not any(is_measured(pool) for pool in _pools(config, name, model)):
            message = "no pool of the model is measured: give one golden records, under `proof`"
            yield named[0][0], message


def warnings(config: GatewayConfig) -> Iterator[str]:
    if config.tiers and not any(map(is_measured, config.all_pools.values())):
        yield "tiers: no pool is measured (see `proof`): each request of a tier will be refused"


def _named(loc: Loc, model: ModelConfig) -> Iterator[tuple[Loc, str]]:
    """Yields each tier that the model names, with its place in the file."""
    if model.tier is not None:
        yield (*loc, "tier"), model.tier
    for alias, tier in model.tier_aliases.items():
        yield (*loc, "tier_aliases", alias), tier


def _known(name: str, config: GatewayConfig) -> str:
    return nearest(name, config.tiers) if config.tiers else ": the file has no `tiers`"


def _pools(config: GatewayConfig, name: str, model: ModelConfig) -> Iterator[PoolConfig]:
    """Yields the known pools that tiers choose from; unknown ones are reported elsewhere.

    A canary gets only a share of the requests, so it cannot keep a tier for the others.
    """
    known = config.all_pools
    main, *_ = model.answering(name)
    return (known[pool] for pool in (main, *model.fallback) if pool in known)

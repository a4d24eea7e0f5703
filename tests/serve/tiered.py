"""Gateways whose pools have measured divergences, as if they had been probed; what clients see."""

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from serve.config import GatewayConfig
from serve.gateway.state import Gateway
from serve.members.proof_state import MemberProof
from serve.routing import Pool
from serve.routing.pool import Proven
from tests.serve.conftest import Served, serving_gateway
from tests.serve.in_process import Client, Reply, in_process
from tests.serve.upstreams import Scripted, whole

__all__ = [
    "ALIASES",
    "ARTIFACT",
    "BODY",
    "COSTS",
    "KL",
    "OURS",
    "PATH",
    "TIERS",
    "Figures",
    "asked",
    "config",
    "error",
    "figures",
    "in_tiers",
    "said",
    "sound",
    "tier",
    "tiered",
]

ARTIFACT = "0123456789abcdef" * 4
TIERS = {"exact": {"max_kl": 0.001}, "standard": {"max_kl": 0.02}, "economy": {"max_kl": 0.1}}
KL = {"bf16": 0.0004, "fp8": 0.0123456, "fp4": 0.06}
COSTS = {"bf16": 4.0, "fp8": 2.0, "fp4": 1.0}
BODY = {"model": "m", "prompt": "abc", "max_tokens": 4}
ALIASES = {"aliases": ["n"], "tier_aliases": {"m-exact": "exact", "m-cheap": "economy"}}
PATH = "/v1/completions"
OURS = ("tier", "precision", "artifact", "divergence")
MODEL = {"pool": "fp8", "fallback": ["bf16", "fp4"]}


@dataclass
class Figures:
    """Nats by pool, upper and lower bounds; what is not in `kl` is not measured."""

    kl: dict[str, float] = field(default_factory=lambda: dict(KL))
    low: dict[str, float] = field(default_factory=dict)


@contextmanager
def figures() -> Iterator[Figures]:
    """What every pool says that it measures, until the end."""
    stated = Figures()

    def proven(pool: Pool) -> Proven:
        return Proven(stated.kl.get(pool.name), stated.low.get(pool.name), ARTIFACT)

    with patch.object(Pool, "proven", property(proven)):
        yield stated


def config(model: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """The settings of the model `m` over three pools; no pool sends probes."""
    quiet = {"health": {"probe_after_s": None}, "ejection": {"failures": 100}}
    pools = {name: quiet | {"precision": name, "cost": cost} for name, cost in COSTS.items()}
    return {"models": {"m": MODEL | (model or {})}, "pools": pools, "tiers": TIERS} | settings


@asynccontextmanager
async def tiered(
    backends: dict[str, list[Any]], model: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Served, Figures]]:
    """On a socket, over the given backends by pool."""
    parsed = GatewayConfig.model_validate(config(model, **settings) | {"drain_timeout_s": 0.5})
    with figures() as stated:
        pools = {name: Pool.of(name, found, parsed.pools[name]) for name, found in backends.items()}
        async with serving_gateway(Gateway(parsed, pools)) as served:
            _prove(pools)
            yield served, stated


def _prove(pools: Mapping[str, Pool]) -> None:
    """Every backend, by one artifact."""
    for member in (member for pool in pools.values() for member in pool.members):
        member.proof = MemberProof("the test", ARTIFACT, time.monotonic)
        member.proof.state = "proven"
        member.changed()


@asynccontextmanager
async def in_tiers(
    backends: dict[str, list[Any]], model: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Client, Figures]]:
    """Without a server."""
    with figures() as stated:
        async with in_process(*backends.items(), **config(model, **settings)) as served:
            _prove(served.gateway.pools)
            yield served, stated


def said(headers: Any) -> tuple[str | None, ...]:
    """Tier, precision, artifact and divergence."""
    return tuple(headers.get(f"x-octet-{name}") for name in OURS)


def tier(name: str) -> dict[str, str]:
    return {"x-octet-tier": name}


def sound(answer: Any = None) -> dict[str, list[Scripted]]:
    """One backend a pool."""
    return {name: [Scripted(whole() if answer is None else answer)] for name in COSTS}


def asked(backends: dict[str, list[Scripted]]) -> dict[str, int]:
    return {name: backend.asked for name, (backend,) in backends.items()}


def error(reply: Reply, status: int, code: str) -> str:
    """The message of a refusal that is as it should be."""
    said = reply.json()["error"]
    assert (reply.status, said["code"]) == (status, code), reply.body
    assert "\n" not in said["message"]
    message: str = said["message"]
    return message

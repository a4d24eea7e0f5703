"""Reports the gateway's state: /ready in short, /status in full."""

import time
from typing import Any

from octet import __version__
from serve.backends.base import supervised
from serve.config import ModelConfig
from serve.gateway.capture import Capture
from serve.gateway.state import Gateway
from serve.routing import Member, Pool, Route

__all__ = ["backend", "readiness", "status"]


def readiness(gateway: Gateway) -> dict[str, Any]:
    """Reports whether a request sent now would be served, and by which backends."""
    models: dict[str, list[dict[str, Any]]] = {}
    for name, config in gateway.config.models.items():
        pools = dict.fromkeys(config.answering(name))
        models[name] = [
            {
                "pool": pool,
                "backend": member.name,
                "ready": member.up,
                "standing": member.standing,
                "proof": "none" if member.proof is None else member.proof.state,
            }
            for pool in pools
            for member in gateway.pools[pool].members
        ]
    return {"ready": gateway.ready, "draining": gateway.draining, "models": models}


def status(gateway: Gateway, *, addresses: bool = False) -> dict[str, Any]:
    """Reports the full current state; the backends' addresses only with `addresses`."""
    admission = gateway.admission.status()
    pools = {
        name: _pool(gateway, pool, admission["pools"].get(name), addresses)
        for name, pool in gateway.pools.items()
    }
    last_reload = gateway.last_reload
    if last_reload is not None and not addresses:
        last_reload = {"at": last_reload["at"], "outcome": last_reload["outcome"]}
    shared = gateway.keys.shared
    return {
        "version": __version__,
        "unproven_pools": [name for name, pool in gateway.pools.items() if pool.unproven],
        "uptime_s": round(time.time() - gateway.created, 1),
        "ready": gateway.ready,
        "draining": gateway.draining,
        "requests": gateway.running,
        "memory": admission["memory"],
        "shared_limits": None if shared is None else shared.status(addresses=addresses),
        "models": {
            name: _model(name, model, gateway.routes.resolve(name), gateway.rollouts.status(name))
            | {"capture": _capture(gateway.captures.get(name), addresses)}
            for name, model in gateway.config.models.items()
        },
        "pools": pools,
        "pools_finishing": [pool.name for pool in gateway.finishing],
        "last_reload": last_reload,
    }


def backend(gateway: Gateway, member: Member, *, addresses: bool) -> dict[str, Any]:
    """Reports one member. Its address and its own error text are for administrators only."""
    now = time.monotonic()
    proof: dict[str, Any] = {"state": "none"}  # none is required
    if member.proof is not None:
        proof = member.proof.as_json(member.served_tokens)
    entry: dict[str, Any] = {
        "name": member.name,
        "origin": member.origin if addresses else member.origin.partition(" ")[0],
        "standing": member.standing,
        "up": member.up,
        "breaker": member.breaker.state,
        "in_flight": member.in_flight,
        "outstanding_tokens": member.outstanding_tokens,
        "load": _load(member),
        "tokens_per_s": gateway.recent.backend(member),
        "proof": proof,
        "last_success_s_ago": _ago(member.last_success, now),
        "out_for_s": None if member.out_since is None else round(now - member.out_since, 1),
    }
    if addresses:
        entry["address"] = member.backend.name
        entry["last_error"] = member.last_error or None
        entry["last_error_s_ago"] = _ago(member.last_error_at, now)
        if supervised(member.backend):
            entry["process"] = member.backend.process
        entry["recovered"] = member.recovered if member.last_error else None
    return entry


def _load(member: Member) -> dict[str, Any] | None:
    report = member.report
    if report is None:
        return None
    return {
        "running": report.running,
        "waiting": report.waiting,
        "kv_usage": report.kv_usage,
        "capacity_tokens": member.capacity_tokens,
    }


def _ago(moment: float, now: float) -> float | None:
    return round(now - moment, 1) if moment > 0 else None


def _model(
    name: str, config: ModelConfig, route: Route, rollout: dict[str, Any] | None
) -> dict[str, Any]:
    shadow = config.shadow
    shares = {pool.name: share for pool, share in route.canary_shares()}
    return {
        "aliases": list(config.aliases),
        "pool": config.pool if isinstance(config.pool, str) else name,
        "canary": [
            {"pool": c.pool, "fraction": c.fraction, "share": shares[c.pool]} for c in config.canary
        ],
        "rollout": rollout,
        "fallback": list(config.fallback),
        "one_at_a_time": config.one_at_a_time,
        "shadow": None if shadow is None else {"pool": shadow.pool, "fraction": shadow.fraction},
        "tier": config.tier,
        "tier_aliases": dict(config.tier_aliases),
        "tiers": {name: tier.status() for name, tier in route.tiers.items()},
    }


def _capture(capture: Capture | None, addresses: bool) -> dict[str, Any] | None:
    return None if capture is None else capture.status(addresses=addresses)


def _proof(pool: Pool) -> dict[str, Any]:
    """Reports the divergence of the serving backends, and whether any may serve unproven."""
    proven = pool.proven
    return {
        "wanted": pool.config.proof.enabled,
        "unproven": pool.unproven,
        "kl_interval": None if proven.kl is None else [proven.kl_low, proven.kl],
        "artifact": proven.artifact,
    }


def _pool(
    gateway: Gateway, pool: Pool, queue: dict[str, Any] | None, addresses: bool
) -> dict[str, Any]:
    retries = pool.config.retries
    entry = {
        "precision": pool.precision,
        "policy": pool.config.routing.policy,
        "phase": pool.phase,
        "given_up": pool.given_up and pool.given_up.code,
        "ready": pool.ready,
        "proof": _proof(pool),
        "judged": None if pool.judgement is None else pool.judgement.as_json(),
        "active": pool.active,
        "capacity_tokens": pool.capacity_tokens,
        "context_length": pool.context_length,
        "queue": queue,
        "retries": {
            "under_way": pool.budget.retrying,
            "budget": retries.budget,
            "min_concurrent": retries.min_concurrent,
        },
        "recent": gateway.recent.pool(pool.name),
        "backends": [backend(gateway, member, addresses=addresses) for member in pool.members],
        "retiring": [backend(gateway, member, addresses=addresses) for member in pool.retiring],
    }
    sources = [source for source in gateway.discoveries if source.pool is pool]
    if addresses:
        entry["given_up_because"] = pool.given_up and pool.given_up.reason
        entry["discovery"] = [
            {"source": source.origin, "problem": source.problem or None} for source in sources
        ]
    return entry

"""What tiers cost a request: to decide who may answer, and to say who did.

The decision is made per request, from what the pools measure at that moment. Each figure is the
best of 15 rounds of 20,000 calls, less the same loop around nothing.

    python benchmarks/tier_choice.py [--output benchmarks/results/tier_choice-MACHINE.json]
"""

import argparse
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.card import conditions, report
from serve.api.provenance import provenance, requested_tier
from serve.config import GatewayConfig
from serve.routing import Pool, Route, Routes

ROUNDS, CALLS = 15, 20_000
FIELDS = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"accept", b"*/*")]


def routed(count: int) -> tuple[Route, Route]:
    """A model's route with and without tiers, over `count` pools, the first the least exact."""
    names = [f"pool-{i}" for i in range(count)]
    model = {"pool": names[0], "fallback": names[1:]}
    settings = {
        "models": {"m": model},
        "pools": {name: {"precision": "fp8", "cost": i + 1} for i, name in enumerate(names)},
    }
    tiers = {"exact": {"max_kl": 0.001}, "standard": {"max_kl": 0.02}, "economy": {"max_kl": 0.1}}
    pools = {name: Pool(name, config, ()) for name, config in _pools(settings).items()}
    for i, pool in enumerate(pools.values()):
        pool.measured_kl, pool.measured_kl_low = 0.019 / (i + 1), 0.015 / (i + 1)
        pool.artifact = "0123456789abcdef" * 4
    made = [
        Routes.from_config(GatewayConfig.model_validate(settings | {"tiers": found}), pools)
        for found in (tiers, {})
    ]
    return made[0].resolve("m"), made[1].resolve("m")


def _pools(settings: dict[str, Any]) -> dict[str, Any]:
    return GatewayConfig.model_validate(settings).pools


def best_us(call: Callable[[], Any]) -> float:
    """Microseconds a call."""

    def least(what: Callable[[], Any]) -> float:
        return min(timeit.repeat(what, repeat=ROUNDS, number=CALLS)) / CALLS

    return (least(call) - least(lambda: None)) * 1e6


def measured(count: int) -> dict[str, Any]:
    """A row of the table."""
    with_tiers, without = routed(count)
    sent = [*FIELDS, (b"x-octet-tier", b"standard")]
    headers, plain = dict(sent), dict(FIELDS)
    tier = with_tiers.tiers["standard"]
    pool = tier.order()[0]

    def decide(
        route: Route, headers: dict[bytes, bytes], fields: list[tuple[bytes, bytes]]
    ) -> None:
        found = route.tier("m", requested_tier(headers, fields))
        order = route.pools(found)
        if found is not None:
            found.require(order[0])

    return {
        "pools": count,
        "no tier (us)": best_us(lambda: decide(without, plain, FIELDS)),
        "tier asked (us)": best_us(lambda: decide(with_tiers, headers, sent)),
        "answer headers, no tier (us)": best_us(lambda: provenance(pool, None)),
        "answer headers, tier (us)": best_us(lambda: provenance(pool, tier)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    rows = [measured(count) for count in (1, 3, 8)]
    report("tier choice", conditions(rounds=ROUNDS, calls=CALLS), rows, output)


if __name__ == "__main__":
    main()

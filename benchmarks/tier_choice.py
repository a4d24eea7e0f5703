"""Measures what tiers cost a request: choosing the pool, and naming it in the answer.

The decision is made per request, from what the pools measure at that moment. Each figure is the
best of 300 rounds of 1,000 calls, less the same loop around nothing.

    python benchmarks/tier_choice.py [--output benchmarks/results/tier_choice-MACHINE.json]
"""

import argparse
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from card import conditions, report

from octet.proof.divergence import Measure
from octet.proof.verdict import Verdict
from serve.api.request.exchange import provenance, requested_tier
from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import GatewayConfig, HttpConfig
from serve.members.proof_state import MemberProof
from serve.routing import Pool, Route, Routes

ROUNDS, CALLS = 300, 1_000
URL = "http://127.0.0.1:9"  # nobody is asked
FIELDS = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"accept", b"*/*")]


def routed(count: int) -> tuple[Route, Route]:
    """A model's route with and without tiers, over `count` pools, the first the least exact."""
    names = [f"pool-{i}" for i in range(count)]
    model = {"pool": names[0], "fallback": names[1:]}
    settings = {
        "models": {"m": model},
        "pools": {name: {"precision": "fp8", "cost": i + 1} for i, name in enumerate(names)},
    }
    tiers = {"exact": {"max_kl": 0.001}, "standard": {"max_kl": 0.03}, "economy": {"max_kl": 0.1}}
    configs = [GatewayConfig.model_validate(settings | {"tiers": found}) for found in (tiers, {})]
    pools = {
        name: proven(Pool.of(name, [backend()], config), 0.019 / (i + 1))
        for i, (name, config) in enumerate(configs[0].pools.items())
    }
    with_tiers, without = (Routes.from_config(config, pools).resolve("m") for config in configs)
    return with_tiers, without


def backend() -> OpenAiHttpBackend:
    return OpenAiHttpBackend("m", HttpConfig(type="vllm", url=URL))


def proven(pool: Pool, kl: float) -> Pool:
    """`pool`, whose backend's probe has measured `kl` nats."""
    (member,) = pool.members
    member.proof = MemberProof("the benchmark", "0123456789abcdef" * 4, time.monotonic)
    figures = Measure(kl, 0.8 * kl, 1.2 * kl, kl, kl, 1.0, None, 64, 512)
    member.proof.state = "proven"
    member.proof.verdict = Verdict("as_expected", figures, None, None, None, (), (), "")
    return pool


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
    member = pool.members[0]

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
        "answer headers, no tier (us)": best_us(lambda: provenance(pool, None, member)),
        "answer headers, tier (us)": best_us(lambda: provenance(pool, tier, member)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    rows = [measured(count) for count in (1, 3, 8)]
    report("tier choice", conditions(rounds=ROUNDS, calls=CALLS), rows, output)


if __name__ == "__main__":
    main()

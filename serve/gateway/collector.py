"""Gauges of the current state: pools, backends and queues, read at each scrape.

So they add no cost to requests, and cannot drift from the state that they show.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octet import __version__
from serve.access.keys import Keys
from serve.admission.admission import Admission
from serve.admission.token_gate import Gate
from serve.members.member import Member
from serve.members.proof_state import MemberProof
from serve.routing import Pool, Routes

__all__ = ["GatewayCollector", "backend_metrics"]

BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}
# "none": no proof is required. "weakly_proven" came later: alerts compare with 3.
PROOF_STATES = {
    "refused": -1,
    "none": 0,
    "unproven": 1,
    "admitted": 2,
    "weakly_proven": 2.5,
    "proven": 3,
}
RULINGS = {"exceeds": -1, "undecided": 0, "within": 1}
_BACKEND = ("pool", "backend")
# Each gauge's name, documentation and reader; a reader returns None if there is no value.
_GATE: tuple[tuple[str, str, Callable[[Gate], float | None]], ...] = (
    ("queue_requests", "Requests in a pool's queue.", lambda gate: len(gate.queue)),
    (
        "queue_tokens",
        "Estimated tokens of the requests in a pool's queue.",
        lambda gate: gate.queue.tokens,
    ),
    (
        "admitted_tokens",
        "Estimated tokens of the requests in flight in a pool.",
        lambda gate: gate.tokens,
    ),
    (
        "admission_limit_tokens",
        "Limit of octet_admitted_tokens; absent: no limit.",
        lambda gate: gate.limit,
    ),
)
_MEMBER: tuple[tuple[str, str, Callable[[Member], float | None]], ...] = (
    (
        "up",
        "1 if it serves: reachable, ready, not refused by its proof, its breaker not open.",
        lambda m: m.up,
    ),
    (
        "proof_state",
        "-1 refused, 0 no proof required, 1 not proven yet, 2 admitted without figures, 2.5 weakly"
        " proven, by a bound alone, 3 proven.",
        lambda m: PROOF_STATES["none" if m.proof is None else m.proof.state],
    ),
    (
        "breaker_state",
        "0 closed, 1 half-open, 2 open.",
        lambda m: BREAKER_STATES[m.breaker.state],
    ),
    ("in_flight", "Requests that this gateway has in flight there.", lambda m: m.in_flight),
    (
        "outstanding_tokens",
        "Estimated tokens that those requests may still take.",
        lambda m: m.outstanding_tokens,
    ),
    (
        "running",
        "Requests that the backend reports as running, from all of its clients.",
        lambda m: m.report.running if m.report else None,
    ),
    (
        "waiting",
        "Requests that the backend reports as waiting in its queue.",
        lambda m: m.report.waiting if m.report else None,
    ),
    (
        "kv_usage",
        "Used part of the KV cache, 0 to 1, as the backend reports it.",
        lambda m: m.report.kv_usage if m.report else None,
    ),
)


class Shown(Protocol):
    """The parts of a gateway that have gauges."""

    @property
    def pools(self) -> Mapping[str, Pool]: ...
    @property
    def routes(self) -> Routes: ...
    @property
    def admission(self) -> Admission: ...
    @property
    def keys(self) -> Keys: ...
    @property
    def ready(self) -> bool: ...


class GatewayCollector(Collector):
    def __init__(self, gateway: Shown) -> None:
        self.gateway = gateway

    def collect(self) -> Iterator[Metric]:
        gateway = self.gateway
        info = GaugeMetricFamily("octet_build_info", "The gateway's version.", labels=("version",))
        info.add_metric((__version__,), 1)
        yield info
        pools = GaugeMetricFamily(
            "octet_pool_ready",
            "1 if at least one backend of the pool serves.",
            labels=("pool", "precision"),
        )
        unproven = GaugeMetricFamily(
            "octet_pool_unproven",
            "1 if a backend of the pool serves without a proof of its answers.",
            labels=("pool",),
        )
        given_up = GaugeMetricFamily(
            "octet_pool_given_up",
            "1 if the pool was given up, and the next one of its model started instead.",
            labels=("pool", "reason"),
        )
        for pool in gateway.pools.values():
            if pool.given_up is not None:
                given_up.add_metric((pool.name, pool.given_up.code), 1)
            pools.add_metric((pool.name, pool.precision or ""), pool.ready)
            unproven.add_metric((pool.name,), pool.unproven)
        yield pools
        yield unproven
        yield given_up
        yield GaugeMetricFamily(
            "octet_ready", "1 if new requests are accepted and a backend serves.", gateway.ready
        )
        yield self._tiers()
        yield from self._judgements()
        yield from self._shared_limits()
        yield from self._queues()
        yield from backend_metrics(gateway.pools.values())

    def _tiers(self) -> Metric:
        fits = GaugeMetricFamily(
            "octet_tier_fits",
            "1 if the pool's measured divergence is within the tier's budget.",
            labels=("model", "tier", "pool"),
        )
        for route in self.gateway.routes:
            for tier in route.tiers.values():
                for pool, fitting in tier.fitting().items():
                    fits.add_metric((route.name, tier.name, pool), fitting)
        return fits

    def _judgements(self) -> Iterator[Metric]:
        divergence = GaugeMetricFamily(
            "octet_judged_divergence_nats",
            "KL divergence per token from the judge's reference pool, with its 95 % confidence "
            "sequence; limit: the largest that is allowed.",
            labels=("pool", "figure"),
        )
        agreement = GaugeMetricFamily(
            "octet_judged_agreement",
            "Share of tokens whose likeliest one is that of the judge's reference pool.",
            labels=("pool", "figure"),
        )
        ruling = GaugeMetricFamily(
            "octet_judged_ruling",
            "1 within the limit, 0 undecided, -1 exceeds it.",
            labels=("pool",),
        )
        for pool in self.gateway.pools.values():
            if pool.judgement is None:
                continue
            ruling.add_metric((pool.name,), RULINGS[pool.judgement.ruling])
            divergence.add_metric((pool.name, "limit"), pool.judgement.config.max_kl)
            for gauge, running in (
                (divergence, pool.judgement.kl),
                (agreement, pool.judgement.agreement),
            ):
                ends = {"measured": running.mean, "low": running.low, "high": running.high}
                for figure, value in ends.items():
                    if math.isfinite(value):
                        gauge.add_metric((pool.name, figure), value)
        yield from (divergence, agreement, ruling)
        shares = GaugeMetricFamily(
            "octet_canary_share",
            "Share of the model's requests that the canary gets now.",
            labels=("model", "pool"),
        )
        for route in self.gateway.routes:
            for pool, share in route.canary_shares():
                shares.add_metric((route.name, pool.name), share)
        yield shares

    def _shared_limits(self) -> Iterator[Metric]:
        shared = self.gateway.keys.shared
        if shared is None:
            return
        yield GaugeMetricFamily(
            "octet_shared_limits_up",
            "1 if Redis counts the keys' limits; 0 if access.shared.when_lost applies.",
            shared.up,
        )
        yield GaugeMetricFamily(
            "octet_shared_limits_gateways", "Gateways that report to Redis.", shared.gateways
        )
        yield CounterMetricFamily(
            "octet_shared_limits_losses", "Times that Redis was lost.", shared.losses
        )
        yield CounterMetricFamily(
            "octet_shared_limits_alone",
            "Requests of keys with limits that were decided without Redis.",
            shared.alone,
        )

    def _queues(self) -> Iterator[Metric]:
        gates = self.gateway.admission.gates
        for name, documentation, read in _GATE:
            gauge = GaugeMetricFamily(f"octet_{name}", documentation, labels=("pool",))
            for pool, gate in gates.items():
                value = read(gate)
                if value is not None:
                    gauge.add_metric((pool,), value)
            yield gauge
        rejections = CounterMetricFamily(
            "octet_admission_rejections",
            "Requests refused at the gate; without a pool: before one was chosen.",
            labels=("pool", "reason"),
        )
        for labels, count in self.gateway.admission.rejections.items():
            rejections.add_metric(labels, count)
        yield rejections


def backend_metrics(pools: Iterable[Pool]) -> Iterator[Metric]:
    """Yields the metrics of the pools' backends, and of their proofs."""
    members = [(pool.name, m) for pool in pools for m in pool.members]
    for name, documentation, read in _MEMBER:
        gauge = GaugeMetricFamily(f"octet_backend_{name}", documentation, labels=_BACKEND)
        for pool, member in members:
            value = read(member)
            if value is not None:
                gauge.add_metric((pool, member.name), value)
        yield gauge
    transitions = CounterMetricFamily(
        "octet_backend_breaker_transitions",
        "Changes of the breaker's state.",
        labels=(*_BACKEND, "from", "to"),
    )
    ejections = CounterMetricFamily(
        "octet_backend_ejections", "Times the breaker has opened.", labels=_BACKEND
    )
    for pool, member in members:
        counts = member.breaker.transitions
        for (before, after), count in counts.items():
            transitions.add_metric((pool, member.name, before, after), count)
        opened = sum(count for (_, after), count in counts.items() if after == "open")
        ejections.add_metric((pool, member.name), opened)
    yield transitions
    yield ejections
    yield from _proof_metrics(members)


def _proof_metrics(members: Iterable[tuple[str, Member]]) -> Iterator[Metric]:
    proofs = [(pool, member.name, member.proof) for pool, member in members if member.proof]
    divergence = GaugeMetricFamily(
        "octet_backend_divergence_nats",
        "Mean KL divergence from the reference on golden prompts: measured, with its 95 % "
        "interval, and the range expected of a conforming backend.",
        labels=(*_BACKEND, "figure"),
    )
    probes = CounterMetricFamily(
        "octet_backend_probes",
        "Proofs on golden prompts, by outcome.",
        labels=(*_BACKEND, "outcome"),
    )
    tokens = CounterMetricFamily(
        "octet_backend_probe_tokens", "Tokens that proofs took.", labels=_BACKEND
    )
    for pool, name, proof in proofs:
        for figure, nats in _figures(proof):
            divergence.add_metric((pool, name, figure), nats)
        for outcome, count in proof.outcomes.items():
            probes.add_metric((pool, name, outcome), count)
        tokens.add_metric((pool, name), proof.tokens)
    yield from (divergence, probes, tokens)


def _figures(proof: MemberProof) -> Iterator[tuple[str, float]]:
    """Yields the known figures, in nats."""
    verdict = proof.verdict
    if verdict is None:
        return
    measure, expected = verdict.measure, verdict.expected
    yield "measured", measure.kl_mean
    yield "measured_low", measure.kl_low
    yield "measured_high", measure.kl_high
    if expected is not None:
        yield "expected_low", expected.low
        yield "expected_high", expected.high

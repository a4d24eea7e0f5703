"""Gauges of what is now: pools, backends and queues, read when somebody scrapes.

So they cost requests nothing, and cannot drift from what they show.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octet import __version__

if TYPE_CHECKING:
    from serve.gateway import Gateway
    from serve.routing.member import Member

__all__ = ["GatewayCollector"]

BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}
_BACKEND = ("pool", "backend")


class GatewayCollector(Collector):
    def __init__(self, gateway: "Gateway") -> None:
        self.gateway = gateway

    def collect(self) -> Iterator[Metric]:
        gateway = self.gateway
        info = GaugeMetricFamily("octet_build_info", "The gateway's version.", labels=("version",))
        info.add_metric((__version__,), 1)
        yield info
        pools = GaugeMetricFamily(
            "octet_pool_ready", "Whether a backend of it works.", labels=("pool", "precision")
        )
        for pool in gateway.pools.values():
            pools.add_metric((pool.name, pool.precision or ""), pool.ready)
        yield pools
        ready = not gateway.draining and any(pool.ready for pool in gateway.pools.values())
        yield GaugeMetricFamily(
            "octet_ready", "Whether new requests are taken and some backend works.", ready
        )
        yield from self._queues()
        yield from self._backends()

    def _queues(self) -> Iterator[Metric]:
        gates = self.gateway.admission.status()["pools"]
        for name, key, documentation in (
            ("octet_queue_requests", "queued", "Requests that wait at a pool's gate."),
            ("octet_queue_tokens", "queued_tokens", "Tokens of the requests that wait."),
            ("octet_admitted_tokens", "admitted_tokens", "Tokens under way in a pool."),
            ("octet_admission_limit_tokens", "limit_tokens", "At most so many; absent: no limit."),
        ):
            gauge = GaugeMetricFamily(name, documentation, labels=("pool",))
            for pool, gate in gates.items():
                if gate[key] is not None:
                    gauge.add_metric((pool,), gate[key])
            yield gauge

    def _backends(self) -> Iterator[Metric]:
        members = [(pool.name, m) for pool in self.gateway.pools.values() for m in pool.members]
        gauges = {
            name: GaugeMetricFamily(f"octet_backend_{name}", documentation, labels=_BACKEND)
            for name, documentation in (
                ("up", "Whether requests are given to it: reachable, and its breaker not open."),
                ("breaker_state", "0 closed, 1 half-open, 2 open."),
                ("in_flight", "Requests that this gateway has on it."),
                ("outstanding_tokens", "Tokens that those may still take, as estimated."),
                ("running", "Requests it runs, from everybody, as it says itself."),
                ("waiting", "Requests that wait in its own queue, as it says itself."),
                ("kv_usage", "Used part of its KV cache, 0 to 1, as it says itself."),
            )
        }
        for pool, member in members:
            for name, value in _now(member).items():
                if value is not None:
                    gauges[name].add_metric((pool, member.name), value)
        yield from gauges.values()
        transitions = CounterMetricFamily(
            "octet_backend_breaker_transitions",
            "Changes of its breaker's state.",
            labels=(*_BACKEND, "from", "to"),
        )
        ejections = CounterMetricFamily(
            "octet_backend_ejections", "Times its breaker has opened.", labels=_BACKEND
        )
        for pool, member in members:
            counts = member.breaker.transitions
            for (before, after), count in counts.items():
                transitions.add_metric((pool, member.name, before, after), count)
            opened = sum(count for (_, after), count in counts.items() if after == "open")
            ejections.add_metric((pool, member.name), opened)
        yield transitions
        yield ejections


def _now(member: "Member") -> dict[str, float | None]:
    """By the gauge's name; None where the backend does not say."""
    state, report = member.breaker.state, member.report
    return {
        "up": member.reachable and state != "open",
        "breaker_state": BREAKER_STATES[state],
        "in_flight": member.in_flight,
        "outstanding_tokens": member.outstanding_tokens,
        "running": None if report is None else report.running,
        "waiting": None if report is None else report.waiting,
        "kv_usage": None if report is None else report.kv_usage,
    }

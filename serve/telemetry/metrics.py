"""The gateway's own metrics, under OpenTelemetry's `gen_ai.*` names where the convention has one.

Gauges of pools, queues and backends are not kept here: `serve/gateway/collector.py` reads them at
each scrape.
"""

import bisect
import math
from collections.abc import Sequence
from typing import cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

__all__ = ["Metrics", "buckets_of", "observe_many", "quantile"]

# The boundaries that OpenTelemetry's semantic conventions for generative AI advise. A token of a
# small model takes less than their first boundary per token, 10 ms, so three lower ones are added.
_DURATION_S = [0.01 * 2**i for i in range(14)]
_FIRST_TOKEN_S = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
]
_PER_TOKEN_S = [
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
]
_OPERATION = ("gen_ai_operation_name", "gen_ai_request_model", "pool")


def observe_many(histogram: Histogram, amount: float, count: int) -> None:
    """Observes `amount` `count` times, in the time of one. The library has no method for it."""
    if count == 0:
        return
    histogram._sum.inc(amount * count)
    index = bisect.bisect_left(histogram._upper_bounds, amount)
    histogram._buckets[index].inc(count)


def buckets_of(histogram: Histogram, by: str, **only: str) -> dict[str, list[float]]:
    """Returns how many values each bucket holds, by one label, summed over the other labels.

    With `only`, counts only series with these values of labels, where the histogram has the label.
    The library has no method for it but to render everything.
    """
    names = histogram._labelnames
    place = names.index(by)
    wanted = [(names.index(name), value) for name, value in only.items() if name in names]
    found: dict[str, list[float]] = {}
    for labels, series in list(histogram._metrics.items()):
        if all(labels[at] == value for at, value in wanted):
            counts = [bucket.get() for bucket in cast(Histogram, series)._buckets]
            before = found.get(labels[place])
            found[labels[place]] = (
                counts if before is None else [a + b for a, b in zip(before, counts, strict=True)]
            )
    return found


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """Estimates a quantile from a histogram; None if it is empty.

    `bounds` are the buckets' upper bounds, the last infinite; `counts` are not cumulative. Values
    are taken to be spread evenly within a bucket, as in Prometheus's `histogram_quantile`; beyond
    the last finite bound, that bound is returned.
    """
    wanted = q * sum(counts)
    if wanted <= 0:
        return None
    low = below = 0.0
    for high, count in zip(bounds, counts, strict=True):
        if below + count >= wanted:
            return low if math.isinf(high) else low + (high - low) * (wanted - below) / count
        low, below = high, below + count
    return low


class Metrics:
    """Every metric that is counted as it happens, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # they would add a line per series
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "octet_requests",
            "Requests answered, by HTTP status (499: the client went away first).",
            ("endpoint", "model", "status"),
        )
        self.in_flight = Gauge(
            "octet_requests_in_flight",
            "Requests being answered now.",
            ("endpoint",),
            registry=self.registry,
        )
        self.disconnects = self._counter(
            "octet_client_disconnects",
            "Requests whose client went away before the end of the answer.",
            ("endpoint",),
        )
        self.errors = self._counter(
            "octet_errors",
            "Error objects sent, in a body or in a stream, by their code.",
            ("endpoint", "code"),
        )
        self.broken = self._counter(
            "octet_broken_streams",
            "Streamed answers that ended in an error event, a client's own deadline included.",
            ("model",),
        )
        self.tokens = self._counter(
            "octet_tokens",
            "Tokens read (input) and written (output); counted: by the backend, or estimated.",
            ("key", "model", "backend", "precision", "type", "counted"),
        )
        self.uncounted = self._counter(
            "octet_uncounted_streams",
            "Streams whose backend reported no token counts: estimated instead.",
            ("model",),
        )
        self._count_routing()
        self._measure()
        ProcessCollector(registry=self.registry)  # CPU, memory and open files

    def _count_routing(self) -> None:
        self.failovers = self._counter(
            "octet_backend_failovers",
            "Requests that a backend could not answer, given to the next one.",
            ("model", "backend"),
        )
        self.retries = self._counter(
            "octet_retries",
            "Requests sent once more, by what went wrong before.",
            ("pool", "reason"),
        )
        self.retries_exhausted = self._counter(
            "octet_retries_exhausted",
            "Requests given up because no attempt, or no retry budget, was left.",
            ("pool",),
        )
        self.deadlines = self._counter(
            "octet_deadlines", "Requests whose time ran out, by where they were then.", ("stage",)
        )
        self.tiers = self._counter(
            "octet_tier_requests",
            "Requests of a tier, by the last pool tried; without a pool: none fitted.",
            ("model", "tier", "pool"),
        )
        self.shadows = self._counter(
            "octet_shadow_requests",
            "Copies of requests whose answers are thrown away.",
            ("pool", "outcome"),
        )
        self.copies = self._counter(
            "octet_judged_copies",
            "Copies of requests that a judge compared with its reference pool, by outcome.",
            ("pool", "outcome"),
        )
        self.captured = self._counter(
            "octet_captured_requests",
            "Requests that were drawn to be captured; without the outcome kept: why one was not.",
            ("model", "outcome"),
        )
        self.rollouts = self._counter(
            "octet_rollouts", "Rollouts that ended, by outcome.", ("model", "pool", "outcome")
        )
        self.reloads = self._counter("octet_reloads", "Configurations read again.", ("outcome",))

    def _measure(self) -> None:
        self.duration = self._histogram(
            "gen_ai_server_request_duration_seconds",
            "From the request's arrival to the answer's last byte; error_type is empty for whole "
            "answers.",
            (*_OPERATION, "error_type"),
            _DURATION_S,
        )
        self.queue = self._histogram(
            "octet_queue_seconds", "The wait at a pool's gate.", ("pool",), _FIRST_TOKEN_S
        )
        self.first_token = self._histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the request's arrival to the first event of a streamed answer.",
            _OPERATION,
            _FIRST_TOKEN_S,
        )
        self.per_token = self._histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of a streamed answer's tokens after the first.",
            _OPERATION,
            _PER_TOKEN_S,
        )
        self.inter_token = self._histogram(
            "octet_inter_token_latency_seconds",
            "Between consecutive events of one choice of a streamed answer.",
            _OPERATION,
            _PER_TOKEN_S,
        )

    def refused(self, code: str, endpoint: str = "none") -> None:
        """Counts an error object; `none` is for a request refused before its path was known."""
        self.errors.labels(endpoint, code).inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Returns all metrics and their content type, in the format that `accept` prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _counter(self, name: str, documentation: str, labels: Sequence[str]) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _histogram(
        self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> Histogram:
        return Histogram(name, documentation, labels, buckets=bounds, registry=self.registry)

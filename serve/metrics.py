"""Prometheus metrics; OpenTelemetry's `gen_ai.*` names where that convention has one."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The bucket boundaries that OpenTelemetry's semantic conventions for generative AI advise.
_DURATION_S = [0.01 * 2**i for i in range(14)]
_FIRST_TOKEN_S = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
]
_PER_TOKEN_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5]


class Metrics:
    """The gateway's own figures, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "octet_requests",
            "Requests answered, by HTTP status (499: the client went away first).",
            ["endpoint", "model", "status"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "octet_requests_in_flight",
            "Requests being answered now.",
            ["endpoint"],
            registry=registry,
        )
        self.disconnects = Counter(
            "octet_client_disconnects",
            "Requests whose client went away before the end of the answer.",
            ["endpoint"],
            registry=registry,
        )
        self.broken = Counter(
            "octet_broken_streams",
            "Streamed answers that ended in an error event.",
            ["model"],
            registry=registry,
        )
        self.failovers = Counter(
            "octet_backend_failovers",
            "Requests that a backend could not start, given to the next of the pool.",
            ["model", "backend"],
            registry=registry,
        )
        self.tokens = Counter(
            "octet_tokens",
            "Tokens read and written, as the backend counts them.",
            ["model", "type"],
            registry=registry,
        )
        self.uncounted = Counter(
            "octet_uncounted_streams",
            "Relayed streams without a usage event (include_usage not asked): not in octet_tokens.",
            ["model"],
            registry=registry,
        )
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From the request's arrival to the answer's last byte.",
            ["gen_ai_operation_name", "gen_ai_request_model"],
            buckets=_DURATION_S,
            registry=registry,
        )
        self.first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the request's arrival to the first event of a streamed answer.",
            ["gen_ai_request_model"],
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of a streamed answer's tokens after the first.",
            ["gen_ai_request_model"],
            buckets=_PER_TOKEN_S,
            registry=registry,
        )
        self.inter_token = Histogram(
            "octet_inter_token_latency_seconds",
            "Between consecutive events of a streamed answer.",
            ["model"],
            buckets=_PER_TOKEN_S,
            registry=registry,
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)

"""A pool: interchangeable backends, and how requests are spread over them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from serve.config.backends import BackendConfig
from serve.config.proof import Judge, Proof
from serve.config.section import (
    Count,
    Fraction,
    Integer,
    Name,
    Number,
    Port,
    Seconds,
    Section,
    tag,
)

__all__ = [
    "Admission",
    "DnsDiscovery",
    "Ejection",
    "FileDiscovery",
    "Health",
    "PoolConfig",
    "Retries",
    "Routing",
    "Timeouts",
]


class Routing(Section):
    """Chooses the next backend among those that are available."""

    policy: Literal["round_robin", "least_tokens", "power_of_two", "prefix", "session"] = (
        "least_tokens"
    )
    prefix_chars: Count = 1024  # `prefix`: this much of the prompt is hashed
    session_header: str = "x-session-id"  # `session`: else the body's prompt_cache_key or user


class Health(Section):
    """Active checks: a held connection, the server's own readiness, and now and then a token."""

    interval_s: Seconds = 5.0  # between two readiness checks
    timeout_s: Seconds = 2.0  # for the response
    reconnect_s: Seconds = 0.5  # between two attempts to reach a backend that went away
    load_interval_s: Seconds = 1.0  # between two readings of queue and KV usage
    # Without a success for so long, one token is generated; null: never.
    probe_after_s: Seconds | None = 30.0
    probe_timeout_s: Seconds = 30.0  # for that token, on a backend that is not busy


class Ejection(Section):
    """Passive checks: a circuit breaker on the outcomes of real requests."""

    failures: Count = 5  # in a row that open the breaker
    duration_s: Seconds = 5.0  # of the first ejection; each further one is longer by this much
    max_duration_s: Seconds = 60.0
    # At most this part of the pool is ejected for failures: of several backends at least one may
    # be, but never the last that serves. Unreachable backends are not counted.
    max_fraction: Fraction = 0.5


class Retries(Section):
    """Retries, which occur only before the first token and are limited to a part of the traffic."""

    attempts: Count = 3  # of one request: the first one, and the retries in all pools
    budget: Fraction = 0.2  # of the pool's active requests may be retries
    min_concurrent: Annotated[Integer, Field(ge=0)] = 3  # retries that are always allowed


class Timeouts(Section):
    """Deadlines of one request; a client's X-Request-Timeout (seconds) can only shorten `total`."""

    first_token_s: Seconds = 120.0  # of a streamed answer, from when a backend is sent the request
    inter_token_s: Seconds = 60.0  # the longest silence of a streamed answer
    total_s: Seconds = 600.0  # from the request's arrival, its wait in the queue included


class Admission(Section):
    """Limits the tokens in flight: those of each prompt and of its longest possible answer."""

    # Null: twice what the backends' KV caches hold, if they report it; else no limit.
    max_tokens: Count | None = None
    max_queue: Annotated[Integer, Field(ge=0)] = 1024  # queued requests
    max_wait_s: Seconds = 30.0
    answer_tokens: Count = 512  # counted for a request that does not limit its answer


class DnsDiscovery(Section):
    """A backend at each address of a DNS name, which is resolved again every `every_s`."""

    dns: str
    port: Annotated[Port, Field(gt=0)]
    every_s: Seconds = 10.0
    backend: dict[str, object]  # a backend's keys without `url`; checked with one filled in


class FileDiscovery(Section):
    """A YAML file with a list of backends, reread when it changes."""

    file: Path
    every_s: Seconds = 2.0


def _names_a_source(value: Any) -> Any:
    if isinstance(value, Section) or (
        isinstance(value, dict) and ("dns" in value or "file" in value)
    ):
        return value
    raise ValueError("should be a section with `dns` or `file`")


def _source(value: Any) -> str:
    if isinstance(value, Section):
        return tag(type(value))
    return tag(DnsDiscovery if "dns" in value else FileDiscovery)


Discovery = Annotated[
    Annotated[DnsDiscovery, Tag(tag(DnsDiscovery))]
    | Annotated[FileDiscovery, Tag(tag(FileDiscovery))],
    Discriminator(_source),
    BeforeValidator(_names_a_source),
]


class PoolConfig(Section):
    """Backends that serve the same weights in the same precision."""

    backends: tuple[BackendConfig, ...] = ()
    discover: tuple[Discovery, ...] = ()
    precision: Name | None = None  # such as fp8 or bf16: a label in metrics and answers
    cost: Annotated[Number, Field(gt=0)] = (
        1.0  # of a token, relative to other pools; a tier takes the cheapest
    )
    proof: Proof = Proof()
    judge: Judge | None = None
    routing: Routing = Routing()
    health: Health = Health()
    ejection: Ejection = Ejection()
    retries: Retries = Retries()
    timeouts: Timeouts = Timeouts()
    admission: Admission = Admission()

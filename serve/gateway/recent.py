"""Rates and latencies of the last minutes, for /status and the page at /ui.

A timer reads the gateway's cumulative counts; every figure is a difference between two readings.
The number of readings is bounded, so looking at them costs the same after a minute and a year.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from serve.members.member import Member
from serve.routing import Pool
from serve.telemetry.metrics import Metrics, buckets_of, quantile

__all__ = ["EVERY_S", "LATENCIES_OVER", "RATES_OVER", "Recent"]

EVERY_S = 5.0
RATES_OVER = 12  # readings: a minute
LATENCIES_OVER = 60  # readings: five minutes
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_Backend = tuple[str, str]  # pool and name


class Counted(Protocol):
    """The parts of a gateway that are read."""

    @property
    def pools(self) -> Mapping[str, Pool]: ...
    @property
    def metrics(self) -> Metrics: ...


@dataclass(frozen=True)
class Reading:
    """Cumulative counts at one time: tokens (read, written), and each histogram's buckets."""

    at: float  # seconds, by the clock
    tokens: dict[_Backend, tuple[int, int]]
    latencies: dict[str, dict[str, list[float]]]  # by histogram, then by pool


class Recent:
    """The last readings of one gateway, and the figures that they give."""

    def __init__(self, gateway: Counted, clock: Callable[[], float] = time.monotonic) -> None:
        metrics = gateway.metrics
        self._gateway = gateway
        self._clock = clock
        self._histograms = {
            "first_token_s": metrics.first_token,
            "per_token_s": metrics.per_token,
            "request_s": metrics.duration,
            "queue_s": metrics.queue,
        }
        self._readings: deque[Reading] = deque(maxlen=LATENCIES_OVER + 1)

    async def run(self) -> None:
        """Reads every `EVERY_S`, until it is cancelled."""
        while True:
            self.read()
            await asyncio.sleep(EVERY_S)

    def read(self) -> None:
        """Adds a reading, and drops the oldest beyond the limit."""
        tokens = {
            (name, member.name): (
                member.served_tokens - member.written_tokens,
                member.written_tokens,
            )
            for name, pool in self._gateway.pools.items()
            for member in (*pool.members, *pool.retiring)
        }
        latencies = {
            # Refused and failed requests would make the gateway look fast.
            name: buckets_of(histogram, "pool", error_type="")
            for name, histogram in self._histograms.items()
        }
        self._readings.append(Reading(self._clock(), tokens, latencies))

    def backend(self, member: Member) -> dict[str, float] | None:
        """Returns the tokens/s of one backend; None before the second reading."""
        rates = self._rates([(member.pool, member.name)])
        return rates and {"input": rates[0], "output": rates[1]}

    def pool(self, name: str) -> dict[str, Any]:
        """Returns the tokens/s of one pool, their course, and percentiles of its latencies.

        Tokens count when their request ends. A percentile is None if no request gave a value.
        """
        ours = [key for key in self._newest if key[0] == name]
        rates = self._rates(ours)
        written = [self._counted(reading, ours)[1] for reading in self._readings]
        times = [reading.at for reading in self._readings]
        course = [
            round(max(after - before, 0) / max(then - since, 1e-3), 1)
            for (before, after), (since, then) in zip(
                pairwise(written), pairwise(times), strict=True
            )
        ]
        return {
            "tokens_per_s": rates and {"input": rates[0], "output": rates[1]},
            "output_tokens_per_s": course,
            "every_s": EVERY_S,
            "latencies": {key: self._percentiles(key, name) for key in self._histograms},
        }

    @property
    def _newest(self) -> dict[_Backend, tuple[int, int]]:
        return self._readings[-1].tokens if self._readings else {}

    def _rates(self, backends: Sequence[_Backend]) -> tuple[float, float] | None:
        if len(self._readings) < 2:
            return None
        first = self._readings[max(len(self._readings) - 1 - RATES_OVER, 0)]
        last = self._readings[-1]
        seconds = max(last.at - first.at, 1e-3)
        before, after = self._counted(first, backends), self._counted(last, backends)
        read, written = (max(b - a, 0) / seconds for a, b in zip(before, after, strict=True))
        return round(read, 1), round(written, 1)

    @staticmethod
    def _counted(reading: Reading, backends: Sequence[_Backend]) -> tuple[int, int]:
        counts = [reading.tokens.get(key, (0, 0)) for key in backends]
        return sum(read for read, _ in counts), sum(written for _, written in counts)

    def _percentiles(self, key: str, pool: str) -> dict[str, float | None]:
        if len(self._readings) < 2:
            return dict.fromkeys(_QUANTILES)
        first, last = (r.latencies[key].get(pool) for r in (self._readings[0], self._readings[-1]))
        counts = last or []
        if first is not None:
            counts = [after - before for before, after in zip(first, counts, strict=True)]
        bounds = self._histograms[key]._upper_bounds
        found = {name: quantile(bounds, counts, q) for name, q in _QUANTILES.items()}
        return {name: value and float(f"{value:.3g}") for name, value in found.items()}

"""Rates and percentiles of the last minutes, from readings at chosen times."""

import math
from typing import Any

import pytest

from serve.gateway.recent import EVERY_S, LATENCIES_OVER, Recent
from serve.gateway.state import Gateway
from serve.telemetry.metrics import quantile
from tests.serve.conftest import Served
from tests.serve.telemetry.gateways import busy_gateway


class Scene:
    def __init__(self) -> None:
        self.gateway: Gateway = busy_gateway()
        self.now = 0.0
        self.recent = Recent(self.gateway, clock=lambda: self.now)
        (self.member,) = self.gateway.pools["main"].members

    def read(self, times: int = 1) -> dict[str, Any]:
        for _ in range(times):
            self.recent.read()
            self.now += EVERY_S
        return self.recent.pool("main")

    def serve(self, read: int, written: int) -> None:
        lease = self.member.lease(read + written)
        lease.served, lease.written = read + written, written
        lease.release()

    def took(self, seconds: float, pool: str = "main", error: str = "") -> None:
        metrics = self.gateway.metrics
        metrics.first_token.labels("chat", "m", pool).observe(seconds)
        metrics.duration.labels("chat", "m", pool, error).observe(seconds)


def test_nothing_is_known_before_the_second_reading() -> None:
    scene = Scene()
    assert scene.recent.pool("main")["tokens_per_s"] is None
    found = scene.read()
    assert found["tokens_per_s"] is None and found["output_tokens_per_s"] == []
    assert found["latencies"]["first_token_s"] == {"p50": None, "p90": None, "p99": None}
    assert scene.recent.backend(scene.member) is None


def test_tokens_of_the_last_minute() -> None:
    scene = Scene()
    scene.read()
    scene.serve(300, 100)
    found = scene.read()
    assert found["tokens_per_s"] == {"input": 60, "output": 20}
    assert found["output_tokens_per_s"] == [20]
    assert scene.recent.backend(scene.member) == {"input": 60, "output": 20}
    found = scene.read(11)
    assert found["tokens_per_s"] == {"input": 5, "output": 1.7}
    assert scene.read(5)["tokens_per_s"] == {"input": 0, "output": 0}
    assert scene.recent.pool("other")["tokens_per_s"] == {"input": 0, "output": 0}


def test_readings_are_bounded() -> None:
    scene = Scene()
    found = scene.read(1000)
    assert len(found["output_tokens_per_s"]) == LATENCIES_OVER
    assert len(scene.recent._readings) == LATENCIES_OVER + 1


def test_percentiles_are_of_the_last_five_minutes_and_of_whole_answers() -> None:
    scene = Scene()
    scene.took(9.0)
    scene.read()
    for _ in range(99):
        scene.took(0.05)
        scene.took(0.05, pool="elsewhere")
    scene.took(0.9)
    scene.took(100, error="timeout")
    found = scene.read()["latencies"]
    assert 0.04 < found["first_token_s"]["p50"] <= 0.06
    assert 0.04 < found["request_s"]["p90"] < found["request_s"]["p99"] <= 0.08
    assert found["queue_s"]["p50"] is None
    found = scene.read(LATENCIES_OVER)["latencies"]
    assert found["first_token_s"]["p50"] is None


def test_a_member_that_is_replaced_takes_nothing_away() -> None:
    scene = Scene()
    scene.serve(1000, 1000)
    scene.read()
    scene.member.served_tokens = scene.member.written_tokens = 0
    found = scene.read()
    assert found["tokens_per_s"] == {"input": 0, "output": 0}
    assert found["output_tokens_per_s"] == [0]


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([10, 0, 0], 0.5, 0.5),
        ([5, 5, 0], 0.75, 1.5),
        ([5, 0, 5], 0.99, 2.0),  # beyond the last finite bound
        ([0, 4, 0], 1.0, 2.0),
    ],
)
def test_a_quantile_is_interpolated_within_its_bucket(
    counts: list[float], q: float, expected: float | None
) -> None:
    assert quantile([1.0, 2.0, math.inf], counts, q) == expected


async def test_a_running_gateway_reads(embedded: Served) -> None:
    status, answer = await embedded.post("/v1/completions", {"model": "fake", "prompt": "abc"})
    assert status == 200
    await embedded.idle()
    embedded.gateway.recent.read()
    async with embedded.session.get("/status") as response:
        pool = (await response.json())["pools"]["fake"]
    (backend,) = pool["backends"]
    rates = pool["recent"]["tokens_per_s"]
    assert rates["output"] > 0 and backend["tokens_per_s"] == rates
    assert pool["recent"]["latencies"]["request_s"]["p50"] > 0
    (member,) = embedded.gateway.pools["fake"].members
    assert member.written_tokens == answer["usage"]["completion_tokens"]

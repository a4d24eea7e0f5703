"""The benchmark of an engine: what it measures, at which shape, and how it is shown."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from octet.tables import fitted
from serve.tensorrt.benchmark import benchmark, table
from tests.serve.fake_gpu import FakeGpu


@pytest.fixture
def result(engines: Callable[[str], Path], gpu: FakeGpu) -> dict[str, Any]:
    return benchmark(engines("e5m2"), duration_s=0.05, iterations=4, warm_up_s=0.02)


def test_each_profile_is_measured_at_its_usual_shape(result: dict[str, Any]) -> None:
    assert result["gpu"] == "sm89" and result["builder"]["name"] == "TensorRT"
    assert result["profiles"]["prefill"]["shape"] == {
        "batch": 1,
        "tokens": 64,
        "cached": 0,
        "logits": 1,
    }
    assert result["profiles"]["decode"]["shape"] == {
        "batch": 4,
        "tokens": 1,
        "cached": 128,
        "logits": 1,
    }
    for figures in result["profiles"].values():
        assert figures["iterations"] >= 4
        assert figures["wall_s"] >= 0.05 or figures["iterations"] == 4
        sizes = figures["shape"]["batch"] * figures["shape"]["tokens"]
        assert figures["tokens_per_s"] == pytest.approx(figures["throughput_per_s"] * sizes)


def test_the_parts_make_up_the_latency_and_are_in_order(result: dict[str, Any]) -> None:
    for figures in result["profiles"].values():
        parts = [figures[part]["mean"] for part in ("h2d", "gpu_compute", "d2h")]
        assert figures["latency"]["mean"] == pytest.approx(sum(parts))
        for way in ("latency", "enqueue", "h2d", "gpu_compute", "d2h"):
            named = [figures[way][at] for at in ("min", "median", "p90", "p95", "p99", "max")]
            assert named == sorted(named) and named[0] > 0
        # The fake computes while the stream is waited for: the model is the longest part by far.
        assert figures["gpu_compute"]["median"] > 10 * figures["enqueue"]["median"]
        assert figures["latency"]["median"] * figures["iterations"] < 2 * figures["wall_s"]


def test_it_is_json_and_a_table(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result)) == result
    out = io.StringIO()
    Console(file=out, width=160).print(table(result))
    lines = out.getvalue().splitlines()
    (decode,) = [line for line in lines if "decode 4 x 1, 128 cached" in line]
    assert f"{1e3 * result['profiles']['decode']['latency']['p99']:.3f}" in decode
    assert f"{result['profiles']['decode']['tokens_per_s']:,.0f}" in decode
    assert sum("gpu_compute" in line for line in lines) == 2


def test_a_narrow_terminal_shows_the_median(result: dict[str, Any]) -> None:
    out = io.StringIO()
    console = Console(file=out, width=40)
    console.print(fitted(table(result), console))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 40 and "…" not in out.getvalue()
    (compute, _) = [line for line in lines if "gpu_compute" in line]
    assert f"{1e3 * result['profiles']['prefill']['gpu_compute']['median']:.3f}" in compute

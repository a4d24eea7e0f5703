"""Speeds that are transferred from measurements, against the speeds that were measured."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octet.errors import ConfigError
from octet.hardware.devices import find_device
from octet.hardware.support import support
from octet.plan.console import BOUND
from octet.plan.measured import Measurement, estimate, read_bench
from octet.plan.roofline import Load, Roofline
from octet.plan.sizes import Sizes
from octet.plan.vllm_memory import BLOCK
from octet.recipe import KvCacheDtype, Recipe
from tests.layout import ROOT
from tests.octet.plan.shapes import LLAMA_8B, spec_of

GRID = json.loads((ROOT / "benchmarks/results/recipe_grid-h200.json").read_text())
LOADS = (Load(1, 128, 128), Load(1, 7900, 128), Load(16, 1024, 128))
H200 = find_device(GRID["conditions"]["gpu"])


def cells() -> list[tuple[Roofline, list[Measurement], dict[str, Any]]]:
    """Returns each row of the grid that was measured under load."""
    found = []
    for row in GRID["results"]:
        name = None if row["weights"] == "bf16" else row["weights"]
        cache: KvCacheDtype = "float16" if row["cache"] == "auto" else row["cache"]
        recipe = None if name is None else Recipe.load(name)
        native = support(H200, "vllm", "0.24", recipe, cache).weights == "native"
        roofline = Roofline(Sizes(spec_of(LLAMA_8B), recipe), cache, H200, 1, native)
        measured = [
            Measurement(name, cache, 1, load, row[f"{load} tokens_per_s"])
            for load in LOADS
            if f"{load} tokens_per_s" in row
        ]
        found.append((roofline, measured, row))
    return found


def test_a_load_that_was_measured_keeps_its_speed() -> None:
    roofline, measured, _ = cells()[0]
    assert estimate(roofline, LOADS[2], measured) == (measured[2].tokens_per_s, "measured")


def test_another_load_is_within_15_percent() -> None:
    """Each load is predicted from the two others of its row, though it is outside of them.

    Left out is fp8-block, whose kernel for 16 requests is another one: it is 50 to 61 % off.
    """
    tried = 0
    for roofline, measured, row in cells():
        if row["weights"] == "fp8-block" or len(measured) < 3:
            continue
        for one in measured:
            others = [other for other in measured if other is not one]
            speed, basis = estimate(roofline, one.load, others)
            assert speed == pytest.approx(one.tokens_per_s, rel=0.15) and basis == "extrapolated"
            tried += 1
    assert tried == 39


def test_the_stated_share_of_the_roofline_is_what_was_measured() -> None:
    shares = [
        one.tokens_per_s / (roofline.tokens_per_s(one.load) or 0)
        for roofline, measured, _ in cells()
        for one in measured
    ]
    assert f"{min(shares):.2f} to {max(shares):.2f} of it" in BOUND.replace("\n", " ")


def test_without_a_measurement_it_is_a_bound() -> None:
    roofline, measured, _ = cells()[0]
    other = Roofline(roofline.sizes, "e4m3", H200, 1, True)
    speed, basis = estimate(other, LOADS[0], measured)
    assert basis == "roofline" and speed == other.tokens_per_s(LOADS[0])
    inside = Load(4, 1024, 128)
    assert estimate(roofline, inside, measured)[1] == "interpolated"


def test_a_roofline_falls_with_the_context_and_rises_with_the_batch() -> None:
    roofline = cells()[0][0]
    batches = [roofline.tokens_per_s(Load(n, 512, 128)) or 0 for n in (1, 4, 16, 64, 256)]
    contexts = [roofline.tokens_per_s(Load(8, n, 128)) or 0 for n in (128, 1024, 8192, 65536)]
    assert all(a < b for a, b in pairwise(batches)) and all(a > b for a, b in pairwise(contexts))
    two = Roofline(roofline.sizes, roofline.kv_cache, H200, 2, True)
    assert 1 < (two.tokens_per_s(LOADS[0]) or 0) / (roofline.tokens_per_s(LOADS[0]) or 1) <= 2


def test_blocks_hold_the_tokens_that_vllm_reports() -> None:
    """The servers of the grid had a cache of 2.5 GiB each."""
    for roofline, _, row in cells():
        token = roofline.sizes.cache_bytes(roofline.kv_cache, 1)
        blocks = int(GRID["conditions"]["cache_gib"] * 2**30) // (BLOCK * token)
        assert blocks * BLOCK == row["KV tokens"]


def bench(served: object, gpu: str | None = "NVIDIA H200") -> dict[str, Any]:
    figures = {"tokens_per_s": {"median": 500.0, "low": 490.0, "high": 510.0}}
    return {
        "served": served,
        "gpu": gpu,
        "loads": ["1x128x128"],
        "cells": [[{"figures": figures}]],
    }


def test_a_benchmark_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    served = {"recipe": "fp8", "kv_cache": "e5m2", "tensor_parallel": 1}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench([served])))
    assert read_bench(path, H200) == [Measurement("fp8", "e5m2", 1, LOADS[0], 500.0)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bench([None]), "every target was a URL"),
        (bench([None], "NVIDIA L40S"), "measured on NVIDIA L40S, and --gpu is H200"),
        (bench([{"recipe": "fp8"}]), "not what `octet bench --json` prints"),
        ({}, "not what `octet bench --json` prints"),
        (GRID, "not what `octet bench --json` prints"),
    ],
)
def test_other_files_are_refused(data: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        read_bench(path, H200)

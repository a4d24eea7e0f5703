"""Tests the scenarios of a recipe: each engine's path, fallbacks, a bounded number of faults."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from calibrate.simulate.scenarios import (
    FACTORS,
    MOST_LAYERS,
    scenarios_of,
    serving_paths,
    simulated_paths,
)
from octet.artifacts.serving_path import ServingPath
from octet.hardware.devices import devices
from octet.hardware.support import ENGINES, numerics
from octet.model.spec import ModelSpec
from octet.recipe import PRESETS, KvCacheDtype
from tests.calibrate.bench import Bench, make_bench, recipe_with


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kv_cache", ["e5m2", "e4m3", "float16"])
def test_a_silent_fallback_is_among_the_paths(preset: str, kv_cache: KvCacheDtype) -> None:
    recipe = recipe_with(preset, kv_cache=kv_cache)
    paths = simulated_paths(recipe)
    assert len(set(paths)) == len(paths)
    assert set(serving_paths(recipe)) <= set(paths)
    caches: tuple[KvCacheDtype, ...] = ("e5m2", "e4m3", "float16")
    assert {x.kv_cache for x in paths if x.weights and not x.activations} == set(caches)


@pytest.mark.parametrize("preset", PRESETS)
def test_only_blocks_are_served_with_scales_of_powers_of_two(preset: str) -> None:
    found = [path for path in serving_paths(PRESETS[preset]) if path.power_scales]
    caches = {path.kv_cache for path in found}
    assert caches == ({"e5m2", "e4m3", "float16"} if preset == "fp8-block" else set())
    assert all(path.activations and path.kv_rounding == "nearest" for path in found)
    assert not serving_paths(PRESETS[preset])[0].power_scales  # the one that power is stated for


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Bench:
    return make_bench(tiny_model, samples=2)


@pytest.mark.parametrize("layers", [2, 80])
def test_a_deep_model_has_no_more_faults(layers: int, bench: Bench) -> None:
    recipe = recipe_with("fp8", kv_cache="e5m2")
    spec: ModelSpec = bench.checkpoint.spec.model_copy(update={"layers": layers})
    one = {n: x for n, x in bench.scales(recipe).items() if ".0." in n}
    scales = {n.replace(".0.", f".{i}."): x for i in range(layers) for n, x in one.items()}
    found = [x.fault for x in scenarios_of(spec, recipe, scales) if x.fault]
    at = sorted({x.layer for x in found if x.layer is not None})
    assert len(at) == min(layers, MOST_LAYERS) and (at[0], at[-1]) == (0, layers - 1)
    assert np.ptp(np.diff(at)) <= 1  # evenly spaced
    many = [x for x in found if x.layer is not None]
    assert len(many) == len(at) * len(FACTORS) * (2 if layers < 16 else 1)  # of main paths
    each = [x for x in found if x.layer == at[1]]
    assert {x.factor for x in each} == set(FACTORS) and {x.kind for x in each} == {
        "weight_scales_scaled"
    }


@pytest.mark.parametrize("cache", ["e5m2", "e4m3", "float16"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("quantized", [True, False])
def test_every_way_that_the_hardware_model_knows_is_simulated(
    preset: str, cache: KvCacheDtype, quantized: bool
) -> None:
    recipe = PRESETS[preset].model_copy(update={"kv_cache": cache})
    known = {path.model_copy(update={"compute": "bfloat16"}) for path in simulated_paths(recipe)}
    for device, engine in product(devices(), ENGINES):
        for way in numerics(device, engine, None, recipe if quantized else None, cache):
            path = ServingPath(
                weights=quantized,
                activations=way.activations,
                kv_cache=cache,
                kv_rounding=way.rounding,
                queries=way.queries,
            )
            assert path in known, f"{engine} on {device.name}"

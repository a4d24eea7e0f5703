"""Scales follow the recipe: shapes, sharing, and the cache's rules."""

from typing import Any

import numpy as np
import pytest
import torch

from calibrate.counting import count_reference
from calibrate.histogram import Histogram
from calibrate.scales import check_recipe, input_scales, kv_scale, kv_scales, weight_scales
from octet import formats, scaling
from octet.checkpoint import Checkpoint
from octet.errors import ConfigError
from octet.recipe import Recipe, TensorScheme


def histogram_of(*values: float) -> Histogram:
    return Histogram(count_reference(torch.tensor(values)), "bfloat16")


def recipe_of(**weights: Any) -> Recipe:
    tensor = TensorScheme(granularity="tensor")
    return Recipe(name="test", weights=TensorScheme(**weights), activations=tensor)


def stored(checkpoint: Checkpoint, linear: str) -> np.ndarray:
    return checkpoint.read(f"{linear}.weight").float32()


def test_channel_scales_map_each_rows_largest_to_448(checkpoint: Checkpoint) -> None:
    scales = dict(weight_scales(checkpoint, Recipe.load("fp8")))
    assert set(scales) == {linear.name for linear in checkpoint.spec.linears()}
    for linear in checkpoint.spec.linears():
        amax = np.abs(stored(checkpoint, linear.name)).max(axis=1, keepdims=True)
        assert scales[linear.name].scale.shape == (linear.out_features, 1)
        np.testing.assert_array_equal(scales[linear.name].scale, amax / np.float32(448))


def test_tensor_scales_are_shared_by_what_is_fused(checkpoint: Checkpoint) -> None:
    scales = dict(weight_scales(checkpoint, Recipe.load("fp8-static")))
    for fused in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        names = [f"model.layers.0.{fused[0]}.{projection}_proj" for projection in fused[1]]
        amax = max(np.abs(stored(checkpoint, name)).max() for name in names)
        for name in names:
            assert scales[name].scale.shape == ()
            assert scales[name].scale == np.float32(amax) / np.float32(448)


def test_block_scales(checkpoint: Checkpoint) -> None:
    scales = dict(weight_scales(checkpoint, Recipe.load("fp8-block")))
    weight = stored(checkpoint, "model.layers.1.mlp.down_proj")
    blocks = np.abs(weight).reshape(2, 128, 4, 128).max(axis=(1, 3))
    scale = scales["model.layers.1.mlp.down_proj"].scale
    np.testing.assert_array_equal(scale, blocks / np.float32(448))


@pytest.mark.parametrize(
    "weights",
    [
        {"granularity": "tensor"},
        {"granularity": "channel"},
        {"granularity": "block", "group_size": 128},
    ],
    ids=lambda weights: weights["granularity"],
)
def test_mse_lowers_the_error_of_every_weight(
    checkpoint: Checkpoint, weights: dict[str, Any]
) -> None:
    by_max = dict(weight_scales(checkpoint, recipe_of(**weights)))
    by_mse = dict(weight_scales(checkpoint, recipe_of(**weights, method="mse")))
    granularity = scaling.Granularity.of(weights["granularity"], weights.get("group_size"))
    shared = "model.layers.0.self_attn.o_proj"  # by itself in its group
    error = {}
    for method, scales in (("max", by_max), ("mse", by_mse)):
        weight, scale = stored(checkpoint, shared), scales[shared].scale
        back = scaling.fake_quantize(weight, scale, formats.E4M3, granularity)
        error[method] = float(((back - weight).astype(np.float64) ** 2).sum())
        signal = float((weight.astype(np.float64) ** 2).sum())
        expected = 10 * np.log10(signal / error[method])
        assert scales[shared].sqnr_db == pytest.approx(expected, abs=1e-3)
    assert error["mse"] < error["max"]
    assert all(by_mse[name].scale.shape == by_max[name].scale.shape for name in by_max)


def test_weight_methods_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights\.method 'kl'.*max or mse"):
        check_recipe(recipe_of(granularity="channel", method="kl"))
    check_recipe(recipe_of(granularity="channel", method="mse"))


def test_excluded_linears_get_no_scales(checkpoint: Checkpoint) -> None:
    base = Recipe.load("fp8-static")
    recipe = base.model_copy(update={"exclude": ("*.down_proj", "*.q_proj")})
    histograms = {x.input: histogram_of(1.0, 7.0) for x in checkpoint.spec.linears()}
    weights = dict(weight_scales(checkpoint, recipe))
    inputs = input_scales(checkpoint, recipe, histograms)
    for name in weights:
        assert not name.endswith(("down_proj", "q_proj"))
    assert set(inputs) == {f"{name}.input_scale" for name in weights}
    # What is left of a fused group still shares its scale.
    k, v = (f"model.layers.0.self_attn.{x}_proj" for x in "kv")
    assert weights[k].scale == weights[v].scale


def test_input_scales_only_for_static_recipes(checkpoint: Checkpoint) -> None:
    histograms = {x.input: histogram_of(1.0, 7.0) for x in checkpoint.spec.linears()}
    assert input_scales(checkpoint, Recipe.load("fp8"), histograms) == {}
    static = input_scales(checkpoint, Recipe.load("fp8-static"), histograms)
    assert len(static) == 7 * checkpoint.spec.layers
    assert all(scale == np.float32(7 / 448) for scale in static.values())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, 20.0), 1.0),  # ordinary
        ((0.0,), 1.0),
        ((1.0, 57_344.0), 1.0),  # the largest E5M2 itself
        ((1.0, 114_688.0), 2.0),  # would saturate
        ((3e-6, 1e-6, 2e-6), 2.0**-34),  # all below the smallest subnormal: would be zero
    ],
)
def test_an_e5m2_cache_keeps_scale_one_unless_it_would_lose(
    values: tuple[float, ...], expected: float
) -> None:
    assert kv_scale(histogram_of(*values), "e5m2") == expected


def test_other_caches() -> None:
    assert kv_scale(histogram_of(1.0, 20.0), "float16") == 1.0
    assert kv_scale(histogram_of(1.0, 448.0), "e4m3") == 1.0
    assert kv_scale(histogram_of(1.0, 20.0), "e4m3") == np.float32(20 / 448)


def test_every_layer_has_cache_scales(checkpoint: Checkpoint) -> None:
    layers = [f"model.layers.{i}.self_attn" for i in range(checkpoint.spec.layers)]
    histograms = {f"{x}.{kind}": histogram_of(1.0) for x in layers for kind in ("key", "value")}
    scales = kv_scales(checkpoint, Recipe.load("fp8"), histograms)
    assert set(scales) == {f"{x}.{scale}" for x in layers for scale in ("k_scale", "v_scale")}
    assert all(scale.shape == () and scale == 1.0 for scale in scales.values())

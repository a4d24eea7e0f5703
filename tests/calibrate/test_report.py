"""Warnings say what a scale costs, and only then."""

import math

import torch

from calibrate.counting import count_reference
from calibrate.histogram import Histogram
from calibrate.report import Report, TensorReport, report_tensors, scale_warnings
from calibrate.search import Quality, find_scale
from octet.calibration import Observation
from octet.formats import E4M3
from octet.recipe import Recipe, ScaleMethod, TensorScheme

INPUT = Observation(kind="input", consumers=("a.q_proj",), observed_dtype="float32")
KEY = Observation(kind="key", consumers=("a",), observed_dtype="float32")


def recipe_of(method: ScaleMethod) -> Recipe:
    tensor = TensorScheme(granularity="tensor")
    activations = TensorScheme(granularity="tensor", method=method, percentile=99.0)
    return Recipe(name="test", weights=tensor, activations=activations)


def reports(method: ScaleMethod, *, key_scale: float = 1.0) -> dict[str, TensorReport]:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    x[:10] *= 100
    histogram = Histogram(count_reference(x), "bfloat16")
    chosen = {
        "a.q_proj.input": find_scale(histogram, E4M3, method, percentile=99.0),
        "a.key": key_scale,
    }
    observations = {"a.q_proj.input": INPUT, "a.key": KEY}
    histograms = dict.fromkeys(observations, histogram)
    return report_tensors(recipe_of(method), observations, histograms, chosen)


def test_a_method_that_clips_is_warned_about() -> None:
    (warning,) = scale_warnings(recipe_of("percentile"), reports("percentile"))
    assert "'percentile' clips 1 inputs" in warning
    assert "a.q_proj.input" in warning
    assert scale_warnings(recipe_of("max"), reports("max")) == []


def test_a_cache_scale_is_warned_about() -> None:
    (warning,) = scale_warnings(recipe_of("max"), reports("max", key_scale=4.0))
    assert "a.key" in warning
    assert "scale 4" in warning


def test_the_cache_is_measured_on_its_own_format() -> None:
    found = reports("max")
    assert found["a.q_proj.input"].format == "e4m3"
    assert found["a.key"].format == "e5m2"
    assert found["a.key"].chosen is not None
    assert found["a.key"].chosen.sqnr_db < found["a.q_proj.input"].methods["max"].sqnr_db - 4


def test_an_infinite_ratio_is_null_in_json() -> None:
    tensor = TensorReport("input", "e4m3", 3, 0.0, {"max": Quality(1.0, math.inf, 0, 0)}, None)
    data = Report({"x": tensor}, {}, ()).as_json()
    assert data["tensors"]["x"]["methods"]["max"]["sqnr_db"] is None

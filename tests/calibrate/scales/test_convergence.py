"""The verdict names what the last samples would have cost, and nothing that costs nothing."""

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from calibrate.observe.histogram import Histogram
from calibrate.scales.activations import find_scale, measure
from calibrate.scales.convergence import TOLERANCE_DB, Convergence, convergence
from calibrate.scales.tensor_scheme import scheme_of
from octet.numerics.formats import E4M3
from octet.recipe import Recipe
from tests.calibrate.report_data import COUNTS, chunks, observation, observations

INPUT = "model.layers.0.self_attn.q_proj.input"
KEY = "model.layers.0.self_attn.key"


def course_of(recipe: str, spans: dict[str, NDArray[np.int64]] | None = None) -> Convergence:
    found = chunks() if spans is None else spans
    return convergence(found, observations(), Recipe.load(recipe), COUNTS)


def code_of(value: float) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16


def test_each_scale_is_that_of_the_samples_so_far_judged_on_all() -> None:
    spans = chunks(late={INPUT: 30.0})
    course = course_of("fp8-static", spans).tensors[INPUT]
    assert course.scale is not None
    assert course.sqnr_db is not None
    everything = Histogram(spans[INPUT].sum(axis=0), "bfloat16")
    for index in range(len(COUNTS)):
        part = Histogram(spans[INPUT][: index + 1].sum(axis=0), "bfloat16")
        assert course.absmax[index] == part.absmax
        assert course.p999[index] == part.quantile(0.999)
        assert course.scale[index] == find_scale(part, E4M3, "max")
        expected = measure(everything, E4M3, course.scale[index]).sqnr_db
        assert course.sqnr_db[index] == expected


def test_a_set_that_settled_was_enough() -> None:
    found = course_of("fp8-static")
    assert found.enough is True
    assert found.moved == ()
    assert found.verdict == (
        "128 samples were enough: those after the first 64 changed no expected error;"
        " no scale moved."
    )


def test_a_scale_that_moved_at_no_cost_is_no_reason_for_more() -> None:
    """A fifth larger for one value among 10^8: too rare to show, and E4M3 has range to spare."""
    spans = chunks()
    spans[INPUT][0, code_of(1.0)] += 10**8
    spans[INPUT][-1, code_of(6.0)] += 1
    found = course_of("fp8-static", spans)
    course = found.tensors[INPUT]
    assert course.grown is not None
    assert course.grown > 0.15
    assert not found.moved
    assert f"by {course.grown:+.1%}, is {INPUT}" in found.verdict


def test_tensors_that_moved_are_named_the_worst_first() -> None:
    found = course_of(
        "fp8-static", chunks(late={INPUT: 10.0, "model.layers.1.mlp.down_proj.input": 40.0})
    )
    assert found.enough is False
    assert found.moved == ("model.layers.1.mlp.down_proj.input", INPUT)
    assert found.verdict.startswith(
        "128 samples may not be enough: those after the first 64 still moved 2 of 12 tensors:"
        " model.layers.1.mlp.down_proj.input ("
    )
    assert found.verdict.endswith("Calibrate on 256 or more.")
    assert found.tensors[INPUT].lost_db is not None
    assert found.tensors[INPUT].lost_db > TOLERANCE_DB


@pytest.mark.parametrize("recipe", ["fp8", "fp8-block", "mxfp8", "mxfp4"])
def test_no_one_is_warned_of_a_scale_that_is_not_stored(recipe: str) -> None:
    found = course_of(recipe, chunks(late={INPUT: 40.0}))
    course = found.tensors[INPUT]
    assert course.scale is None
    assert course.sqnr_db is None
    assert course.absmax[-1] > course.absmax[-2]
    assert found.enough is True
    weighed = "The scales of 4-bit weights are for the inputs of the samples"
    none = "No scale is taken from the samples: inputs are scaled at run time"
    assert found.verdict.startswith(weighed if recipe == "mxfp4" else none)


def test_a_global_scale_that_grew_is_warned_of_without_an_error_that_is_unknown() -> None:
    assert course_of("nvfp4", chunks(late={INPUT: 1.1})).moved == ()
    found = course_of("nvfp4", chunks(late={INPUT: 2.0}))
    course = found.tensors[INPUT]
    assert course.scale is not None
    assert course.scale[-1] == pytest.approx(course.absmax[-1] / (448 * 6), rel=1e-6)
    assert course.sqnr_db is None
    assert found.moved == (INPUT,)
    assert "(global scale +100%)" in found.verdict


def test_a_cache_that_outgrows_its_scale_is_named() -> None:
    e4m3 = Recipe.load("fp8").model_copy(update={"kv_cache": "e4m3"})
    spans = chunks(late={KEY: 40.0})
    assert convergence(spans, observations(), e4m3, COUNTS).moved == (KEY,)
    assert course_of("fp8", spans).moved == ()  # E5M2 holds it without a scale


def test_one_count_is_no_verdict() -> None:
    spans = {name: span.sum(axis=0, keepdims=True) for name, span in chunks().items()}
    found = convergence(spans, observations(), Recipe.load("fp8-static"), (32,))
    assert found.enough is None
    assert found.moved == ()
    assert "not known" in found.verdict


def test_a_few_samples_at_the_end_are_no_step_to_judge_by() -> None:
    spans = chunks(late={INPUT: 30.0})
    spans = {name: np.concatenate([span, 0 * span[:1]]) for name, span in spans.items()}
    found = convergence(spans, observations(), Recipe.load("fp8-static"), (*COUNTS, 130))
    assert found.before == 1
    assert found.moved == (INPUT,)
    assert "those after the first 64" in found.verdict


def test_json_states_the_tolerances_and_has_no_infinity() -> None:
    zeros = {name: np.zeros_like(span) for name, span in chunks().items()}
    found = course_of("fp8-static", zeros)
    assert found.tensors[INPUT].sqnr_db == (math.inf,) * 3
    data = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert data["counts"] == [32, 64, 128]
    assert data["tolerance"]["sqnr_db"] == TOLERANCE_DB
    assert data["tensors"][INPUT]["sqnr_db"] == [None] * 3
    assert data["moved"] == []


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("fp8", "e4m3 per token, at run time"),
        ("fp8-static", "e4m3 per tensor, static (max)"),
        ("fp8-block", "e4m3 per 128, at run time"),
        ("mxfp4", "e2m1 per 32, at run time, power-of-two scales"),
        ("nvfp4", "e2m1 per 16, at run time, E4M3 scales under one static global scale"),
    ],
)
def test_what_a_recipe_does_is_said_in_words(recipe: str, said: str) -> None:
    loaded = Recipe.load(recipe)
    inputs = observation("input", ("model.layers.0.mlp.down_proj",))
    assert str(scheme_of(loaded, inputs)) == said
    excluded = loaded.model_copy(update={"exclude": ("*.down_proj",)})
    assert str(scheme_of(excluded, inputs)) == "full precision"
    assert str(scheme_of(loaded, observation("key", ("x",)))) == "e5m2 cache, one scale a layer"

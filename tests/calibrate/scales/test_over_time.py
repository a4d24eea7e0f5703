"""The rules of scaling over time, on planted counts."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from calibrate.observe.histogram import Histogram
from calibrate.scales.activations import find_scale, measure, scale_of
from calibrate.scales.domains import compare, distance
from calibrate.scales.over_time import RULES, Course, Delayed, DelayedScale, Point, TensorOverTime
from octet.errors import ConfigError
from octet.numerics.formats import E4M3
from tests.calibrate.contents import count_reference


def counts_of(amplitude: float, seed: int = 0) -> NDArray[np.int64]:
    generator = torch.Generator().manual_seed(seed)
    return count_reference(torch.randn(4000, generator=generator) * amplitude)


def scales_over(amaxes: list[float], options: Delayed) -> list[float]:
    """Returns the scale that each step is quantized with."""
    delayed, found = DelayedScale(E4M3, options), []
    for amax in amaxes:
        found.append(delayed.scale)
        delayed.step(amax)
    return found


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_history_of_one_is_the_current_scaling_of_the_step_before(algorithm: Any) -> None:
    """To the last bit, whatever the algorithm, for the stream of a real tensor's histograms."""
    tensor = TensorOverTime(E4M3, "bfloat16", 1.0, Delayed(1, algorithm, 0))
    steps = [tensor.step("prose", counts_of(2.0**k, k)) for k in (0, 3, -4, 5, 5, -9)]
    for before, after in pairwise(steps):
        assert after["delayed"] == before["current"]
    assert steps[0]["delayed"] == 1.0  # as Transformer Engine begins


def test_delayed_scaling_is_transformer_engines() -> None:
    """Each scale is that of their kernel: amax / (448 · 2^-margin), over the last L amaxes."""
    amaxes = [1.0, 8.0, 2.0, 0.0, 0.5, 3.0]
    found = scales_over(amaxes, Delayed(3, "max", 0))
    assert found == [1.0, *(scale_of(x, E4M3) for x in (1.0, 8.0, 8.0, 8.0, 2.0))]
    found = scales_over(amaxes, Delayed(3, "most_recent", 0))
    # an amax of 0 keeps the scale
    assert found == [1.0, *(scale_of(x, E4M3) for x in (1.0, 8.0, 2.0, 2.0, 0.5))]
    plain, room = (scales_over(amaxes, Delayed(3, "max", margin)) for margin in (0, 2))
    assert room[1:] == [4 * x for x in plain[1:]]


def test_the_kernel_in_float32_agrees() -> None:
    """Their factor divides, 448 · 2^-m / amax; its inverse is ours within a rounding."""
    for amax in (0.013, 1.7, 448.0, 3e4):
        theirs = np.float32(1) / (np.float32(448 * 2.0**-1) / np.float32(amax))
        assert scale_of(amax, E4M3, 1) == pytest.approx(float(theirs), rel=2**-22)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((0, "max", 0), "a history of 0 steps"),
        ((4, "mean", 0), "no algorithm 'mean': delayed scaling has max and most_recent"),
        ((4, "max", 9), "a margin of 9: give 0 to 8"),
    ],
)
def test_options_that_do_not_exist_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Delayed(*options)


def test_a_shift_saturates_frozen_scales_and_one_step_of_delayed_ones() -> None:
    """Effects add up over steps: they are those of the histogram of all steps at that scale."""
    frozen = scale_of(Histogram(counts_of(1.0), "bfloat16").absmax, E4M3)
    tensor = TensorOverTime(E4M3, "bfloat16", frozen, Delayed(2, "max", 0))
    for seed in range(4):
        tensor.step("quiet", counts_of(1.0, seed))
    for seed in range(4):
        tensor.step("loud", counts_of(16.0, seed))
    loud = {rule: tensor.effects["loud", rule] for rule in RULES}
    assert loud["current"].saturated == 0
    assert 0 < loud["delayed"].saturated < loud["frozen"].saturated
    whole = measure(tensor.histogram("loud"), E4M3, frozen)
    assert loud["frozen"].saturated == round(whole.saturated * loud["frozen"].elements)
    assert loud["frozen"].underflow == round(whole.underflow * loud["frozen"].elements)
    noise = loud["frozen"].relative_error
    assert -10 * np.log10(noise) == pytest.approx(whole.sqnr_db)
    assert noise > 100 * loud["current"].relative_error


def test_an_expert_that_no_token_reached_keeps_its_scale() -> None:
    tensor = TensorOverTime(E4M3, "bfloat16", 0.5, Delayed())
    one = tensor.step("prose", counts_of(4.0))
    tensor.step("prose", np.zeros(32768, np.int64))
    assert tensor.step("prose", counts_of(1.0))["delayed"] == one["current"]
    assert tensor.effects["prose", "frozen"].elements == 8000


@pytest.mark.parametrize("steps", [1, 255, 256, 257, 1000, 4097])
def test_a_course_has_a_bounded_number_of_points(steps: int) -> None:
    course = Course()
    for step in range(steps):
        course.add(Point("a" if step < steps // 2 else "b", 1.0 + step, 2.0 * step))
    assert len(course.points) <= 256 and course.width * len(course.points) >= steps
    assert course.width * (len(course.points) - 1) < steps
    assert course.points[-1].current == steps and course.points[-1].delayed == 2 * (steps - 1)
    assert course.points[0].domain == ("a" if steps > 1 else "b")


def test_memory_does_not_grow_with_the_stream() -> None:
    tensor = TensorOverTime(E4M3, "bfloat16", 0.01, Delayed(8))
    sizes = []
    for step in range(600):
        tensor.step("ab"[step % 2], counts_of(1.0, step % 5))
        if step in (299, 599):
            sizes.append((tensor.counts.nbytes, len(tensor.effects)))
    assert sizes[1][0] <= 2 * sizes[0][0] and sizes[1][1] == sizes[0][1] == 2 * len(RULES)


def test_domains_are_compared_by_their_exact_histograms() -> None:
    quiet, loud = (Histogram(counts_of(x), "bfloat16") for x in (1.0, 16.0))
    dead = Histogram(count_reference(torch.zeros(4)), "bfloat16")
    found = compare(
        {"quiet": quiet, "loud": loud, "dead": dead}, E4M3, lambda x: find_scale(x, E4M3, "max")
    )
    assert set(found.scales) == {"quiet", "loud"} and found.ratio == 16
    assert found.worst == ("quiet", "loud")
    cost = found.costs["quiet", "loud"]
    assert cost.saturated == round(measure(loud, E4M3, found.scales["quiet"]).saturated * 4000) > 0
    assert found.costs["loud", "quiet"].saturated == 0
    # of |x| for N(0, 1) and N(0, 16²): their densities are equal at x
    x = math.sqrt(2 * math.log(16) / (1 - 1 / 256))
    expected = math.erf(x / math.sqrt(2)) - math.erf(x / 16 / math.sqrt(2))
    assert found.distance == distance(loud, quiet) == pytest.approx(expected, abs=0.02)
    assert distance(quiet, quiet) == 0


def test_one_domain_compares_with_nothing() -> None:
    only = Histogram(counts_of(1.0), "bfloat16")
    found = compare({"prose": only}, E4M3, lambda x: find_scale(x, E4M3, "max"))
    assert (found.ratio, found.distance, found.worst) == (1.0, 0.0, None)


def test_a_margin_is_head_room_of_max_alone() -> None:
    histogram = Histogram(counts_of(1.0), "bfloat16")
    plain = find_scale(histogram, E4M3, "max")
    assert find_scale(histogram, E4M3, "max", margin=3) == 8 * plain
    assert measure(Histogram(counts_of(8.0), "bfloat16"), E4M3, plain).saturated > 0
    assert measure(Histogram(counts_of(8.0), "bfloat16"), E4M3, 8 * plain).saturated == 0

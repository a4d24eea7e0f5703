"""Sums over the levels of a format rank scales as the costs bin by bin do."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from calibrate.scales.activations import _occupied, divergence, squared_error
from calibrate.scales.level_costs import LevelCosts
from octet.numerics.formats import E2M1, E4M3, E5M2, Format
from tests.calibrate.scales.test_activations import DISTRIBUTIONS, histogram_of


def scales_of(absmax: float, fmt: Format) -> NDArray[np.float32]:
    """From 2 octaves above the scale of max to 14 below."""
    return (absmax / fmt.max * 2.0 ** np.arange(2, -14, -1 / 8)).astype(np.float32)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_cost_is_that_of_the_bins(name: str, fmt: Format) -> None:
    histogram = histogram_of(DISTRIBUTIONS[name])
    scales = scales_of(histogram.absmax, fmt)
    values, counts = histogram.finite()
    got = LevelCosts(values, counts).squared_errors(fmt, scales)
    expected = [squared_error(histogram, fmt, float(scale)) for scale in scales]
    power = counts @ values.astype(np.float64) ** 2
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12 * power)

    occupied, counts, widths = _occupied(histogram)
    got = LevelCosts(occupied, counts).divergences(fmt, scales, widths)
    expected = [divergence(histogram, fmt, float(scale)) for scale in scales]
    np.testing.assert_allclose(got - got[0], np.subtract(expected, expected[0]), atol=1e-9)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
def test_a_value_in_the_middle_goes_to_the_even_code(fmt: Format) -> None:
    """Every bfloat16 up to twice the largest value, so that many quotients are in the middle."""
    magnitudes = torch.arange(1, 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    histogram = histogram_of(magnitudes[magnitudes <= 2 * fmt.max])
    scales = np.float32([1, 2, 4, 8])
    values, counts, widths = _occupied(histogram)
    got = LevelCosts(values, counts).divergences(fmt, scales, widths)
    expected = [divergence(histogram, fmt, float(scale)) for scale in scales]
    np.testing.assert_allclose(got - got[0], np.subtract(expected, expected[0]), atol=1e-12)

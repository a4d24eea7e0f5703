"""A histogram knows the distribution it was made from, exactly."""

import numpy as np
import pytest
import torch

from calibrate.observe.histogram import SMALL, Histogram, bin_widths, magnitudes
from calibrate.quality.sqnr import Noise
from tests.calibrate.contents import count_reference


def of(x: torch.Tensor) -> Histogram:
    return Histogram(count_reference(x), "float16" if x.dtype == torch.float16 else "bfloat16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_and_extremes(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, -3.0, 2.5, float("nan"), float("inf"), -float("inf")]).to(dtype)
    histogram = of(x)
    assert (histogram.total, histogram.zeros) == (7, 2)
    assert histogram.absmax == 3.0
    values, counts = histogram.finite()
    assert values.tolist() == [0.0, 2.5, 3.0]
    assert counts.tolist() == [2, 1, 1]


def test_magnitudes_are_those_of_the_codes() -> None:
    codes = torch.arange(32_768, dtype=torch.int16)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        expected = codes.view(dtype).float().numpy()
        np.testing.assert_array_equal(magnitudes(name), expected)
        finite = expected[np.isfinite(expected)]
        assert len(bin_widths(name)) == len(finite)
        np.testing.assert_array_equal(bin_widths(name)[:-1], np.diff(finite.astype(np.float64)))


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.5, 0.9, 0.999, 0.9999, 1.0])
def test_quantiles_are_numpys_inverted_cdf(fraction: float) -> None:
    x = torch.randn(12_345, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    expected = np.quantile(x.abs().float().numpy(), fraction, method="inverted_cdf")
    assert of(x).quantile(fraction) == expected


def test_small_values_are_of_those_that_are_not_zero() -> None:
    x = torch.cat([torch.zeros(990), torch.arange(1.0, 11.0)])
    assert of(x).quantile(SMALL) == 0.0
    assert of(x).small_limit() == 9.0
    assert of(x[990:]).small_limit() == 9.0
    assert of(x[:990]).small_limit() == 0.0


def test_a_mostly_zero_input_is_measured_where_it_is_not_zero() -> None:
    """As a report estimates it: the values that one large value leaves without a code."""
    x = torch.zeros(40, 64)
    x[:, 0], x[0, 1] = 1.0, 4e5  # E4M3 under one scale: 4e5/448 is the step, and 1 becomes 0
    noise = Noise({"x": of(x).small_limit()})
    noise.add("x", x, torch.where(x > 1, x, 0.0))
    assert noise.ratios()[1] == 0.0  # dB: nothing is left; None would be "nothing to lose"


def test_nothing_observed() -> None:
    histogram = of(torch.zeros(0))
    assert (histogram.total, histogram.absmax, histogram.quantile(0.5)) == (0, 0.0, 0.0)
    assert histogram.small_limit() == 0.0

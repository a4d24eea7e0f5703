"""Scales found from the counts are the best there are, up to a stated tolerance."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from calibrate.observe.histogram import Histogram
from calibrate.scales.activations import divergence, find_scale, measure, squared_error
from octet.numerics import formats
from octet.numerics.formats import E2M1, E4M3, E5M2, Format
from tests.calibrate.contents import count_reference

N = 40_000


def distributions() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(N, generator=generator)
    outliers = normal.clone()
    outliers[:40] *= 300
    heavy = torch.distributions.StudentT(3.0)
    torch.manual_seed(0)
    return {
        "normal": normal,
        "outliers": outliers,
        "student": heavy.sample((N,)),
        "tiny": normal * 1e-30,
        "huge": normal * 1e30,
        "uniform": torch.rand(N, generator=generator),
        "sparse": torch.nn.functional.relu(normal),
        "two values": torch.tensor([1.0, 100.0]).repeat(N // 2),
        "one value": torch.full((N,), 0.37),
        "wide": torch.exp(normal * 8),
    }


DISTRIBUTIONS = distributions()


def histogram_of(x: torch.Tensor) -> Histogram:
    return Histogram(count_reference(x), "bfloat16")


def direct_error(x: torch.Tensor, fmt: Format, scale: float) -> float:
    """The squared error computed on the elements, without a histogram."""
    values = x.to(torch.bfloat16).float().numpy()
    with np.errstate(over="ignore"):
        rounded = formats.round_to(values / np.float32(scale), fmt).astype(np.float64) * scale
    return float(((values.astype(np.float64) - rounded) ** 2).sum())


def dense_scales(histogram: Histogram, fmt: Format) -> NDArray[np.float64]:
    """Brute force: 500 scales an octave, from 2 octaves above the scale of max to 14 below."""
    return histogram.absmax / fmt.max * 2.0 ** np.arange(-14, 2, 1 / 500)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_expected_error_is_the_error(name: str, fmt: Format) -> None:
    x = DISTRIBUTIONS[name]
    histogram = histogram_of(x)
    for method in ("max", "mse", "percentile", "kl"):
        scale = find_scale(histogram, fmt, method)
        assert squared_error(histogram, fmt, scale) == pytest.approx(direct_error(x, fmt, scale))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_brute_force_does_not_beat_mse_by_more_than_a_twentieth_of_a_decibel(
    name: str, fmt: Format
) -> None:
    histogram = histogram_of(DISTRIBUTIONS[name])
    found = squared_error(histogram, fmt, find_scale(histogram, fmt, "mse"))
    coarse = dense_scales(histogram, fmt)[::5]
    best = min(squared_error(histogram, fmt, scale) for scale in coarse)
    assert found <= best * 10**0.005
    assert found <= squared_error(histogram, fmt, find_scale(histogram, fmt, "max"))


@pytest.mark.parametrize("name", ["normal", "outliers", "student"])
def test_brute_force_does_not_beat_kl_by_more_than_two_percent(name: str) -> None:
    histogram = histogram_of(DISTRIBUTIONS[name])
    found = divergence(histogram, E4M3, find_scale(histogram, E4M3, "kl"))
    coarse = dense_scales(histogram, E4M3)[::5]
    best = min(divergence(histogram, E4M3, scale) for scale in coarse)
    assert 0 <= found <= best * 1.02


def test_divergence_by_its_definition() -> None:
    """Four magnitudes onto E2M1 with scale 1: 1 and 1.125 share a value, 8 and 16 saturate."""
    x = torch.tensor([1.0] * 3 + [1.125] * 1 + [8.0] * 2 + [16.0] * 2 + [0.0] * 5)
    p = np.array([3, 1, 2, 2]) / 8
    widths = np.array([2.0**-7, 2.0**-7, 2.0**-4, 2.0**-3])
    level_1, level_6 = widths[:2] / widths[:2].sum(), widths[2:] / widths[2:].sum()
    q = np.concatenate([level_1 * 4 / 8, level_6 * 4 / 8])
    expected = float((p * np.log(p / q)).sum())
    assert divergence(histogram_of(x), E2M1, 1.0) == pytest.approx(expected)


def test_percentile_maps_that_quantile_to_the_largest_value() -> None:
    histogram = histogram_of(DISTRIBUTIONS["outliers"])
    scale = find_scale(histogram, E4M3, "percentile", percentile=99.0)
    assert scale == np.float32(histogram.quantile(0.99) / 448)
    assert 0.005 < measure(histogram, E4M3, scale).saturated <= 0.01


def test_max_saturates_nothing() -> None:
    for x in DISTRIBUTIONS.values():
        histogram = histogram_of(x)
        assert measure(histogram, E4M3, find_scale(histogram, E4M3, "max")).saturated == 0


def test_clipping_by_percentile_costs_many_decibels_on_fp8_with_outliers() -> None:
    histogram = histogram_of(DISTRIBUTIONS["outliers"])
    by_max = measure(histogram, E4M3, find_scale(histogram, E4M3, "max"))
    clipped = find_scale(histogram, E4M3, "percentile", percentile=99.9)
    by_mse = measure(histogram, E4M3, find_scale(histogram, E4M3, "mse"))
    assert by_max.sqnr_db - measure(histogram, E4M3, clipped).sqnr_db > 10
    assert by_mse.saturated == 0


def test_scaling_by_a_power_of_two_scales_the_answer() -> None:
    x = DISTRIBUTIONS["student"]
    for method in ("max", "mse", "percentile", "kl"):
        small = find_scale(histogram_of(x), E4M3, method)
        assert find_scale(histogram_of(x * 1024), E4M3, method) == small * 1024


def test_underflow_counts_the_elements_that_become_zero() -> None:
    x = torch.tensor([448.0, 2.0**-9, 2.0**-10, 2.0**-11, 0.0])
    quality = measure(histogram_of(x), E4M3, 1.0)  # 2^-10 is a tie and goes to zero
    assert quality.underflow == 2 / 5


@pytest.mark.parametrize("method", ["max", "mse", "percentile", "kl"])
def test_zeros_and_mostly_zeros_have_a_usable_scale(method: str) -> None:
    assert find_scale(histogram_of(torch.zeros(100)), E4M3, method) == 1.0
    mostly = torch.zeros(100_000)
    mostly[0] = 5.0
    assert find_scale(histogram_of(mostly), E4M3, method) > 0
    assert measure(histogram_of(torch.zeros(3)), E4M3, 1.0).sqnr_db == np.inf

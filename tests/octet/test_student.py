"""The quantile of Student's t is that of its density, and what tables print."""

import math

import numpy as np
import pytest

from octet.statistics import t_quantile, upper_bound

# Abramowitz and Stegun, table 26.10, to its three decimals: 95 % one-sided.
TABLE = {1: 6.314, 2: 2.920, 3: 2.353, 7: 1.895, 10: 1.812, 29: 1.699, 30: 1.697, 120: 1.658}


@pytest.mark.parametrize("degrees", TABLE)
def test_it_is_the_tables(degrees: int) -> None:
    assert t_quantile(0.95, degrees) == pytest.approx(TABLE[degrees], abs=5.1e-4)


@pytest.mark.parametrize("degrees", [1, 2, 5, 8, 31, 100])
@pytest.mark.parametrize("probability", [0.5, 0.8, 0.95, 0.99])
def test_its_density_has_that_mass_below(degrees: int, probability: float) -> None:
    """Γ((n+1)/2) / (√(nπ) Γ(n/2)) · (1 + t²/n)^(-(n+1)/2), added up in small steps from 0."""
    n, end = degrees, t_quantile(probability, degrees)
    t = np.linspace(0, end, 20_001)
    logs = math.lgamma((n + 1) / 2) - math.lgamma(n / 2) - 0.5 * math.log(n * math.pi)
    density = np.exp(logs - (n + 1) / 2 * np.log1p(t * t / n))
    mass = float(((density[1:] + density[:-1]) / 2 * np.diff(t)).sum())
    assert 0.5 + mass == pytest.approx(probability, abs=1e-6)


def test_many_degrees_are_the_normal_distribution_and_none_bound_nothing() -> None:
    assert t_quantile(0.95, 16_383) == pytest.approx(1.644854, abs=2e-4)
    assert t_quantile(0.95, 0) == math.inf


@pytest.mark.parametrize("samples", [3, 7])
def test_the_bound_holds_as_often_as_it_says(samples: int) -> None:
    """The mean of a few normal values is under its bound 95 times in 100, not 86 or 92."""
    draws = np.random.default_rng(0).normal(1.0, 0.5, (20_000, samples))
    held = np.mean([upper_bound(one, np.ones(samples)) >= 1.0 for one in draws])
    assert held == pytest.approx(0.95, abs=0.005)

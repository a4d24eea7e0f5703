"""Confidence intervals over samples: what they cover, of distributions whose mean is known."""

import math

import numpy as np
import pytest

from octet.statistics import hall_ends, interval, moments, student_ends, t_quantile, upper_bound

SHAPE = 0.6  # of a log-normal divergence per document: a skewness of 2.3


def draws(n: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Sums and tokens [count, n] of documents of 50 to 500 tokens, and the true mean."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(50, 500, (count, n)).astype(float)
    means = generator.lognormal(0.0, SHAPE, (count, n))
    return tokens * means, tokens, math.exp(SHAPE**2 / 2)


@pytest.mark.parametrize("n", [32, 64, 128])
def test_intervals_hold_the_truth_of_skewed_sums(n: int) -> None:
    x, m, truth = draws(n, 4000, seed=n)
    found = [interval(*one) for one in zip(x, m, strict=True)]
    above = np.mean([one.high < truth for one in found])
    below = np.mean([one.low > truth for one in found])
    assert 0.935 <= 1 - above - below <= 0.965
    student = student_ends(moments(x, m))
    assert np.mean(student[1] < truth) > above + 0.005  # which misses too often on that side


@pytest.mark.parametrize("n", [64, 128])
def test_a_bound_is_passed_by_the_truth_as_seldom_as_it_says(n: int) -> None:
    x, m, truth = draws(n, 4000, seed=n)
    passed = np.mean([upper_bound(*one) < truth for one in zip(x, m, strict=True)])
    assert passed == pytest.approx(0.05, abs=0.02)
    found = moments(x, m)
    student = found.mean + t_quantile(0.95, n - 1) * found.error
    assert np.mean(student < truth) > passed + 0.01


def test_a_bound_is_one_end_alone() -> None:
    (x,), (m,), _ = draws(50, 1, seed=5)
    assert interval(x, m).mean < upper_bound(x, m) < interval(x, m).high
    assert math.isinf(upper_bound(x[:1], m[:1]))


def test_without_skewness_both_methods_are_one() -> None:
    tokens = np.full(40, 100.0)
    x = np.linspace(-1, 1, 40) * 100
    found = moments(x, tokens)
    assert found.coupling == 0 and abs(found.skewness) < 1e-12
    assert np.allclose(student_ends(found), hall_ends(found))
    reach = t_quantile(0.975, 39) * np.std(x / 100, ddof=1) / math.sqrt(40)
    assert interval(x, tokens).high == pytest.approx(reach)


def test_a_mirrored_sample_has_the_mirrored_interval() -> None:
    (x,), (m,), _ = draws(50, 1, seed=5)
    one, other = interval(x, m), interval(-x, m)
    assert (one.mean, one.low, one.high) == pytest.approx((-other.mean, -other.high, -other.low))
    assert one.high - one.mean > one.mean - one.low  # further out where the tail is


def test_few_samples_have_wide_intervals_or_none() -> None:
    x, m = np.array([1.0, 3.0, 4.0]), np.ones(3)
    found = interval(x, m)
    reach = t_quantile(0.975, 2) * np.std(x, ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((x.mean() - reach, x.mean() + reach))
    alone = interval(x[:1], m[:1])
    assert alone.mean == 1.0 and math.isnan(alone.low) and math.isnan(alone.high)


def test_samples_of_one_mean_leave_nothing_to_bound() -> None:
    m = np.array([3.0, 50.0, 700.0] * 4)
    found = interval(0.1 * m, m)
    assert found.low == found.mean == found.high == pytest.approx(0.1)
    assert interval(0 * m, m).high == 0.0

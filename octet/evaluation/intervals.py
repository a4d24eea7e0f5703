"""Confidence intervals of a mean per token, where samples, not tokens, are independent.

The mean is the ratio θ = Σxᵢ / Σmᵢ over samples i with a sum xᵢ over mᵢ tokens; its linearised
standard error is se = sqrt(n/(n-1) · Σ(xᵢ - θ·mᵢ)²) / Σmᵢ. Sums of divergences are skewed, and the
interval θ ± t·se, correct to first order only, misses too often on one side. The bootstrap-t
interval (Efron 1982; Hall, The Bootstrap and Edgeworth Expansion, 1992, §3.5) draws n samples with
replacement many times, takes the quantiles of T* = (θ* - θ)/se*, and is
[θ - T*(97.5 %)·se, θ - T*(2.5 %)·se]: correct to second order. What it covers, beside what the
t interval covers, is measured by benchmarks/evaluate_coverage.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from octet.student import t_quantile

__all__ = ["CONFIDENCE", "FEW", "Interval", "bootstrap_t", "mean_and_error"]

CONFIDENCE = 0.95  # of intervals, two-sided
FEW = 8  # samples: with fewer, resampling says little, and the interval is Student's
DRAWS = 9_999
_TOGETHER = 1 << 22  # numbers drawn at a time: 32 MB
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean per token with its 95 % confidence interval; NaN bounds if there is none."""

    mean: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> "Interval":  # an increasing one
        return Interval(function(self.mean), function(self.low), function(self.high))


def mean_and_error(sums: Numbers, tokens: Numbers) -> tuple[Numbers, Numbers]:
    """θ and its standard error along the last axis of `sums` and `tokens` [..., n], n >= 2."""
    n = sums.shape[-1]
    total = tokens.sum(axis=-1)
    mean = sums.sum(axis=-1) / total
    residuals = sums - mean[..., None] * tokens
    squares = (residuals * residuals).sum(axis=-1)
    return mean, np.sqrt(squares * (n / (n - 1))) / total


def bootstrap_t(
    sums: ArrayLike, tokens: ArrayLike, *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """The 95 % interval of Σ`sums` / Σ`tokens`, both [n]; always the same for the same numbers."""
    x, m = np.asarray(sums, np.float64), np.asarray(tokens, np.float64)
    n = len(x)
    if n < 2:
        return Interval(float(x.sum() / m.sum()), math.nan, math.nan)
    mean, error = (float(value) for value in mean_and_error(x, m))
    # Rounding of the sums leaves as much where all samples have one mean: nothing to bound.
    if error <= 1e-12 * max(abs(mean), float(np.abs(x).sum() / m.sum())):
        return Interval(mean, mean, mean)
    if n < FEW:
        reach = t_quantile((1 + CONFIDENCE) / 2, n - 1) * error
        return Interval(mean, mean - reach, mean + reach)
    generator = np.random.default_rng(seed)
    found = []
    for start in range(0, draws, step := max(1, _TOGETHER // n)):
        drawn = generator.integers(0, n, (min(step, draws - start), n))
        means, errors = mean_and_error(x[drawn], m[drawn])
        found.append(_studentised(means - mean, errors))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(found), [1 - tail, tail])
    return Interval(mean, mean - float(low) * error, mean - float(high) * error)


def _studentised(differences: Numbers, errors: Numbers) -> Numbers:
    """A draw may be one sample n times over, if hardly ever: its T* is infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(differences / errors, nan=0.0, posinf=1e9, neginf=-1e9)

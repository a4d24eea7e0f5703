"""Confidence intervals of a mean per token, where samples, not tokens, are independent.

The mean is the ratio θ = Σxᵢ / Σmᵢ over n samples with a sum xᵢ over mᵢ tokens. With residuals
uᵢ = xᵢ - θ·mᵢ its standard error is sqrt(n/(n-1) · Σuᵢ²) / Σmᵢ. Each end of an interval is the
outer one of Student's and of Hall's for skewed sums (J. R. Statist. Soc. B 54 (1992) 221).

docs/explanation/intervals.md has the formulas and their measured coverage.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "CONFIDENCE",
    "FEW",
    "Interval",
    "hall_ends",
    "interval",
    "moments",
    "student_ends",
    "t_quantile",
    "upper_bound",
]

_HALVINGS = 60  # of the interval of angles, which then has the width of a float's last bit


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """Returns the quantile of Student's t with `degrees` degrees of freedom, by bisection.

    `probability` is at least 1/2. Infinite for less than one degree of freedom.
    """
    if degrees < 1:
        return math.inf
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        angle = (low + high) / 2
        if (1 + _between(angle, degrees)) / 2 < probability:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan(low)


def _between(angle: float, degrees: int) -> float:
    """Returns P(|T| < √n · tan `angle`)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


CONFIDENCE = 0.95  # of intervals, two-sided, and of bounds, one-sided
_TWO_SIDED = (1 + CONFIDENCE) / 2  # the quantile at either end
FEW = 8  # samples: with fewer, their skewness is not usable
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean per token with its 95 % confidence interval; NaN ends if there is none."""

    mean: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> "Interval":
        """Maps the mean and both ends through an increasing function."""
        return Interval(function(self.mean), function(self.low), function(self.high))


@dataclass(frozen=True)
class Moments:
    """θ̂ and its standard error, s and κ of docs/explanation/intervals.md, for one or many draws."""

    samples: int
    mean: Numbers
    error: Numbers
    skewness: Numbers  # s
    coupling: Numbers  # κ


def interval(sums: ArrayLike, tokens: ArrayLike) -> Interval:
    """Returns the 95 % interval of Σ`sums` / Σ`tokens`, both [n]."""
    x, m = np.asarray(sums, np.float64), np.asarray(tokens, np.float64)
    if len(x) < 2:
        return Interval(float(x.sum() / m.sum()), math.nan, math.nan)
    return Interval(*map(float, _outer(x, m, _TWO_SIDED)))


def upper_bound(sums: ArrayLike, tokens: ArrayLike) -> float:
    """Returns a 95 % upper bound of Σ`sums` / Σ`tokens`, both [n]; inf for one sample."""
    x, m = np.asarray(sums, np.float64), np.asarray(tokens, np.float64)
    return float(_outer(x, m, CONFIDENCE)[2]) if len(x) > 1 else math.inf


def _outer(x: Numbers, m: Numbers, level: float) -> tuple[Numbers, Numbers, Numbers]:
    """Returns the mean, and the outer ends of both intervals at the quantile `level`."""
    found = moments(x, m)
    # If all samples have the same mean, only rounding is left, and the interval is that point.
    if float(found.error) <= 1e-12 * max(abs(float(found.mean)), float(np.abs(x).sum() / m.sum())):
        return found.mean, found.mean, found.mean
    low, high = student_ends(found, level)
    if len(x) >= FEW:
        lower, upper = hall_ends(found, level)
        low, high = np.minimum(low, lower), np.maximum(high, upper)
    return found.mean, low, high


def moments(sums: Numbers, tokens: Numbers) -> Moments:
    """Computes moments along the last axis of `sums` and `tokens` [..., n], n >= 2."""
    n = sums.shape[-1]
    total = tokens.sum(axis=-1)
    mean = sums.sum(axis=-1) / total
    residuals = sums - mean[..., None] * tokens
    squares = (residuals * residuals).sum(axis=-1)
    deviation = np.sqrt(squares / n)
    scale = np.where(deviation > 0, deviation, 1.0)
    centred = tokens - (total / n)[..., None]
    return Moments(
        samples=n,
        mean=mean,
        error=np.sqrt(squares * (n / (n - 1))) / total,
        skewness=(residuals**3).mean(axis=-1) / scale**3,
        coupling=(residuals * centred).mean(axis=-1) / (scale * total / n),
    )


def student_ends(found: Moments, level: float = _TWO_SIDED) -> tuple[Numbers, Numbers]:
    reach = t_quantile(level, found.samples - 1) * found.error
    return found.mean - reach, found.mean + reach


def hall_ends(found: Moments, level: float = _TWO_SIDED) -> tuple[Numbers, Numbers]:
    t = t_quantile(level, found.samples - 1)
    a = (found.skewness / 3 - found.coupling) / math.sqrt(found.samples)
    b = found.skewness / (6 * math.sqrt(found.samples))
    high, low = _inverse(a, b, -t), _inverse(a, b, t)
    return found.mean - low * found.error, found.mean - high * found.error


def _inverse(a: Numbers, b: Numbers, t: float) -> Numbers:
    """Returns the T whose g(T) is `t`."""
    some = np.abs(a) > 1e-9  # below this, g is a plain shift, to the last bit
    safe = np.where(some, a, 1.0)
    found: Numbers = np.where(some, (np.cbrt(1 + 3 * safe * (t - b)) - 1) / safe, t - b)
    return found

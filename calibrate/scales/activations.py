"""Finds the best scale of a tensor for a format, from its histogram alone.

The expected squared error of scale s is Σ countᵢ·(vᵢ - s·Q(vᵢ/s))², where Q rounds to the target
format's own grid and saturates. It is exact: the histogram holds every magnitude that occurred.

| method     | the scale that                                                                   |
|------------|----------------------------------------------------------------------------------|
| max        | maps the largest magnitude to the largest value of the format: nothing saturates |
| mse        | has the least expected squared error                                             |
| percentile | maps a percentile of the magnitudes there, and saturates the rest                |
| kl         | keeps the distribution closest, see `divergence`                                 |

On FP8, clipping usually hurts: the grid is relative, so a smaller scale gains nothing except where
values underflow, and it saturates the outliers that carry the error. `max` is normally within
0.1 dB of `mse`. The report prints all four for comparison.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrate.observe.histogram import Histogram, bin_widths
from calibrate.scales.level_costs import LevelCosts
from octet.numerics import formats
from octet.numerics.formats import Format, encode, round_to
from octet.numerics.scaling import scale_from_absmax
from octet.recipe import ScaleMethod

__all__ = [
    "METHODS",
    "Effect",
    "Quality",
    "divergence",
    "effect",
    "find_scale",
    "measure",
    "scale_of",
    "squared_error",
]

METHODS: tuple[ScaleMethod, ...] = ("max", "mse", "percentile", "kl")

Cost: TypeAlias = Callable[[float], float]  # cost of a scale

# Candidates, in octaves from the scale of `max`. Above it only the grid's phase changes, which
# repeats every octave. 12 octaves below it, a real tensor has even its ordinary values clipped.
_LOWEST, _HIGHEST = -12, 1
_STEPS = 16  # per octave, in the first pass
_FINE_STEPS = 256  # per octave, around the best of the first pass
_KEPT = 8  # candidates that each pass passes on: the second pass, or the choice of the best


@dataclass(frozen=True)
class Quality:
    """Effect of a scale on a tensor.

    `sqnr_db` is the signal-to-quantization-noise ratio in dB (infinite without error). `saturated`
    is the fraction of elements beyond the format's largest value by more than half its last step,
    that is by more than rounding. `underflow` is the fraction of elements that are not zero but
    become zero.
    """

    scale: float
    sqnr_db: float
    saturated: float
    underflow: float


@dataclass(frozen=True)
class Effect:
    """Effect of a scale on `elements` of a tensor, as sums that add up over steps.

    `saturated` and `underflow` count elements as `Quality` does. `noise` is the sum of squared
    errors, `power` that of squares.
    """

    elements: int = 0
    saturated: int = 0
    underflow: int = 0
    noise: float = 0.0
    power: float = 0.0

    def __add__(self, other: Self) -> "Effect":
        return Effect(
            self.elements + other.elements,
            self.saturated + other.saturated,
            self.underflow + other.underflow,
            self.noise + other.noise,
            self.power + other.power,
        )

    @property
    def relative_error(self) -> float:
        """The squared error relative to the squares; 0 for a tensor of zeros."""
        return self.noise / self.power if self.power > 0 else 0.0


def find_scale(
    histogram: Histogram,
    fmt: Format,
    method: ScaleMethod,
    *,
    percentile: float = 99.99,
    margin: int = 0,
) -> float:
    """Returns the scale by `method`, a float32 value; 1.0 for a tensor of zeros.

    `margin` is for `max`: head-room, see `scale_of`.
    """
    largest = scale_of(histogram.absmax, fmt)
    if histogram.absmax == 0 or method == "max":
        return scale_of(histogram.absmax, fmt, margin)
    if method == "percentile":
        clipped = histogram.quantile(percentile / 100)
        return scale_of(clipped, fmt) if clipped > 0 else largest
    if method == "kl":
        values, counts, widths = _occupied(histogram)
        ranked = LevelCosts(values, counts)
        found = _best(lambda scales: ranked.divergences(fmt, scales, widths), largest)
        return min(found, key=_divergence_of(histogram, fmt))
    ranked = LevelCosts(*histogram.finite())
    found = _best(lambda scales: ranked.squared_errors(fmt, scales), largest)
    optima = [_local_optimum(histogram, fmt, scale) for scale in found]
    return min(optima, key=_error_of(histogram, fmt))


def squared_error(histogram: Histogram, fmt: Format, scale: float) -> float:
    """Computes Σ countᵢ·(vᵢ - s·Q(vᵢ/s))² over the finite elements."""
    return _error_of(histogram, fmt)(scale)


def divergence(histogram: Histogram, fmt: Format, scale: float) -> float:
    """Computes KL(P ‖ Q) in nats between the magnitudes before and after quantization.

    P is the normalised histogram without zero, which every scale preserves. Q holds only the number
    of elements at each value of the format. It spreads them over the occupied bins that round to
    the value, in proportion to the bins' widths. Saturated elements belong to the format's largest
    value and underflowing ones to its zero, so Q covers P and the divergence is finite.

    This is TensorRT's entropy calibration (S. Migacz, "8-bit Inference with TensorRT", GTC 2017),
    with two changes. There all bins have the same width; here bins are logarithmic, and weighting
    by width preserves the assumption of a constant density within each quantized value. There the
    clipped mass is added to P's last bin, because Q is built without it; here Q includes it.
    """
    return _divergence_of(histogram, fmt)(scale)


def measure(histogram: Histogram, fmt: Format, scale: float) -> Quality:
    """Measures the effect of `scale` on the finite elements of the tensor."""
    if histogram.absmax == 0:
        return Quality(scale, np.inf, 0.0, 0.0)
    found = effect(histogram, fmt, scale)
    sqnr_db = 10 * np.log10(found.power / found.noise) if found.noise > 0 else np.inf
    total = found.elements
    return Quality(scale, float(sqnr_db), found.saturated / total, found.underflow / total)


def effect(histogram: Histogram, fmt: Format, scale: float) -> Effect:
    """Counts what `scale` does to the finite elements of the tensor."""
    values, counts = histogram.finite()
    wide = values.astype(np.float64)
    rounded = _rounded(values, fmt, scale)
    last, largest = formats.grid(fmt)[-2:].astype(np.float64)
    return Effect(
        elements=int(counts.sum()),
        saturated=int(counts[wide > (largest + (largest - last) / 2) * scale].sum()),
        underflow=int(counts[(values > 0) & (rounded == 0)].sum()),
        noise=float(counts @ (wide - rounded) ** 2),
        power=float(counts @ wide**2),
    )


def scale_of(amax: float, fmt: Format, margin: int = 0) -> float:
    """Returns 2^margin · amax / fmt.max, a float32 value; 1.0 for an amax of 0.

    `margin` is head-room: values up to 2^margin times `amax` do not saturate.
    """
    if amax == 0:
        return 1.0
    return float(scale_from_absmax(np.asarray(amax, np.float32), fmt)) * 2.0**margin


def _rounded(values: NDArray[np.float32], fmt: Format, scale: float) -> NDArray[np.float64]:
    """Computes s·Q(v/s), with the quotient in float32, as kernels do."""
    with np.errstate(over="ignore"):  # an overflow to Inf saturates
        return round_to(values / np.float32(scale), fmt).astype(np.float64) * scale


def _error_of(histogram: Histogram, fmt: Format) -> Cost:
    values, counts = histogram.finite()

    def cost(scale: float) -> float:
        error = values - _rounded(values, fmt, scale)
        return float(counts @ (error * error))

    return cost


def _occupied(
    histogram: Histogram,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]:
    """Returns the values, counts and widths of the occupied bins but zero."""
    values, counts = histogram.finite()
    codes = np.flatnonzero(histogram.counts)[: len(values)]
    some = slice(1 if histogram.zeros else 0, None)
    return values[some], counts[some], bin_widths(histogram.code_dtype)[codes[some]]


def _divergence_of(histogram: Histogram, fmt: Format) -> Cost:
    values, p, widths = _occupied(histogram)
    if not len(values):
        return lambda scale: 0.0
    p = p / p.sum()

    def cost(scale: float) -> float:
        with np.errstate(over="ignore"):
            levels = encode(values / np.float32(scale), fmt)
        mass = np.bincount(levels, weights=p)
        width = np.bincount(levels, weights=widths)
        q = mass[levels] * widths / width[levels]
        return float(p @ np.log(p / q))

    return cost


def _best(
    costs: Callable[[NDArray[np.float32]], NDArray[np.float64]], largest: float
) -> list[float]:
    """Returns the best candidates, best first; of equals, the largest, which saturates least."""
    coarse = np.arange(_HIGHEST * _STEPS, _LOWEST * _STEPS - 1, -1) / _STEPS
    best = coarse[np.argsort(costs(_at(coarse, largest)), kind="stable")[:_KEPT]]
    around = np.arange(1 - _FINE_STEPS // _STEPS, _FINE_STEPS // _STEPS) / _FINE_STEPS
    fine = _at(np.unique(best[:, None] + around)[::-1], largest)
    order = np.argsort(costs(fine), kind="stable")[:_KEPT]
    return [float(scale) for scale in fine[order]]


def _local_optimum(histogram: Histogram, fmt: Format, scale: float) -> float:
    """Returns the nearest local optimum of the squared error.

    For fixed codes q, Σ c·(v - s·q)² is least at s = Σ c·v·q / Σ c·q²; for fixed s, the nearest q
    is best. Each step lowers the error, so alternating them does too (Lloyd, 1982).
    """
    values, counts = histogram.finite()
    weighted = values * counts.astype(np.float64)
    cost = _error_of(histogram, fmt)
    error = cost(scale)
    while True:
        q = _rounded(values, fmt, scale) / scale
        power = float(counts @ (q * q))
        if power == 0:
            return scale
        better = float(np.float32(float(weighted @ q) / power))
        lower = cost(better) if better > 0 else np.inf
        if not lower < error:
            return scale
        scale, error = better, lower


def _at(octaves: NDArray[np.float64], largest: float) -> NDArray[np.float32]:
    """Returns the scales `octaves` octaves above `largest`."""
    return (largest * 2.0**octaves).astype(np.float32)

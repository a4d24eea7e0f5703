"""The best scale of a tensor for a format, from its histogram alone.

The squared error expected of scale s is Σ countᵢ·(vᵢ - s·Q(vᵢ/s))², where Q rounds to the target
format's own grid and saturates. It is exact: the histogram holds every magnitude that occurred.

| method     | the scale that                                                                   |
|------------|----------------------------------------------------------------------------------|
| max        | maps the largest magnitude to the largest value of the format: nothing saturates |
| mse        | has the least expected squared error                                             |
| percentile | maps a percentile of the magnitudes there, and saturates the rest                |
| kl         | keeps the distribution closest, see `divergence`                                 |

On FP8, clipping usually hurts: the grid is relative, so a smaller scale gains nothing except where
values underflow, and it saturates the outliers that carry the error. `max` is normally within
0.1 dB of `mse`. The report prints all four, so that it can be seen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrate.observe.histogram import Histogram, bin_widths
from octet.numerics import formats
from octet.numerics.formats import Format, encode, round_to
from octet.numerics.scaling import scale_from_absmax
from octet.recipe import ScaleMethod

__all__ = ["METHODS", "Quality", "divergence", "find_scale", "measure", "squared_error"]

METHODS: tuple[ScaleMethod, ...] = ("max", "mse", "percentile", "kl")

Cost: TypeAlias = Callable[[float], float]  # of a scale

# Candidates, in octaves from the scale of `max`. Above it only the grid's phase changes, which
# repeats every octave; 12 octaves below, all but the outliers of any real tensor are clipped too.
_LOWEST, _HIGHEST = -12, 1
_STEPS = 16  # an octave, at first
_FINE_STEPS = 256  # an octave, around the best of the first
_KEPT = 8  # how many of the first are refined, and of those polished


@dataclass(frozen=True)
class Quality:
    """What a scale does to a tensor.

    `sqnr_db` is the signal-to-quantization-noise ratio in dB (infinite without error); `saturated`
    is the fraction of elements beyond the format's largest value by more than half its last step,
    which rounding does not explain; `underflow` that of the non-zero elements that become zero.
    """

    scale: float
    sqnr_db: float
    saturated: float
    underflow: float


def find_scale(
    histogram: Histogram, fmt: Format, method: ScaleMethod, *, percentile: float = 99.99
) -> float:
    """The scale by `method`, a float32 value; 1.0 for a tensor of zeros."""
    largest = _scale_of(histogram.absmax, fmt)
    if histogram.absmax == 0 or method == "max":
        return largest
    if method == "percentile":
        clipped = histogram.quantile(percentile / 100)
        return _scale_of(clipped, fmt) if clipped > 0 else largest
    if method == "kl":
        return _minimise(_divergence_of(histogram, fmt), largest)[0]
    cost = _error_of(histogram, fmt)
    polished = [_polish(histogram, fmt, scale) for scale in _minimise(cost, largest)]
    return min(polished, key=cost)


def squared_error(histogram: Histogram, fmt: Format, scale: float) -> float:
    """Σ countᵢ·(vᵢ - s·Q(vᵢ/s))², over the finite elements."""
    return _error_of(histogram, fmt)(scale)


def divergence(histogram: Histogram, fmt: Format, scale: float) -> float:
    """KL(P ‖ Q) in nats between the distribution of magnitudes before and after quantization.

    P is the normalised histogram without zero, which every scale keeps. Q knows only how many
    elements each value of the format received, and spreads them over the bins rounded to it that
    occur, in proportion to the bins' widths. Saturated elements belong to the format's largest
    value and underflowing ones to its zero, so Q covers P and the divergence is finite.

    This is TensorRT's entropy calibration (S. Migacz, "8-bit Inference with TensorRT", GTC 2017),
    with two changes. There all bins have one width; widths keep its meaning, a constant density
    within each quantized value, where bins are logarithmic. And there the clipped mass is added to
    P's last bin, because Q is built without it; here Q has it.
    """
    return _divergence_of(histogram, fmt)(scale)


def measure(histogram: Histogram, fmt: Format, scale: float) -> Quality:
    """What `scale` does to the finite elements of the tensor."""
    values, counts = histogram.finite()
    total = int(counts.sum())
    if histogram.absmax == 0:
        return Quality(scale, np.inf, 0.0, 0.0)
    wide = values.astype(np.float64)
    rounded = _rounded(values, fmt, scale)
    noise = float(counts @ (wide - rounded) ** 2)
    sqnr_db = 10 * np.log10(float(counts @ wide**2) / noise) if noise > 0 else np.inf
    last, largest = formats.grid(fmt)[-2:].astype(np.float64)
    saturated = int(counts[wide > (largest + (largest - last) / 2) * scale].sum())
    underflow = int(counts[(values > 0) & (rounded == 0)].sum())
    return Quality(scale, float(sqnr_db), saturated / total, underflow / total)


def _rounded(values: NDArray[np.float32], fmt: Format, scale: float) -> NDArray[np.float64]:
    """s·Q(v/s); the quotient in float32, as kernels compute it."""
    with np.errstate(over="ignore"):  # an overflow to Inf saturates
        return round_to(values / np.float32(scale), fmt).astype(np.float64) * scale


def _scale_of(amax: float, fmt: Format) -> float:
    return float(scale_from_absmax(np.asarray(amax, np.float32), fmt))


def _error_of(histogram: Histogram, fmt: Format) -> Cost:
    values, counts = histogram.finite()

    def cost(scale: float) -> float:
        error = values - _rounded(values, fmt, scale)
        return float(counts @ (error * error))

    return cost


def _divergence_of(histogram: Histogram, fmt: Format) -> Cost:
    values, counts = histogram.finite()
    codes = np.flatnonzero(histogram.counts)[: len(values)]
    some = slice(1 if histogram.zeros else 0, None)
    values, p, widths = values[some], counts[some], bin_widths(histogram.code_dtype)[codes[some]]
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


def _minimise(cost: Cost, largest: float) -> list[float]:
    """The candidates of least cost, best first; of equals, the largest, which saturates least."""
    coarse = np.arange(_HIGHEST * _STEPS, _LOWEST * _STEPS - 1, -1) / _STEPS
    costs = [cost(_at(octave, largest)) for octave in coarse]
    best = coarse[np.argsort(costs, kind="stable")[:_KEPT]]
    around = np.arange(1 - _FINE_STEPS // _STEPS, _FINE_STEPS // _STEPS) / _FINE_STEPS
    fine = np.unique(best[:, None] + around)[::-1]
    return sorted((_at(octave, largest) for octave in fine), key=cost)[:_KEPT]


def _polish(histogram: Histogram, fmt: Format, scale: float) -> float:
    """The nearest local optimum of the squared error.

    For codes q held fixed, Σ c·(v - s·q)² is least at s = Σ c·v·q / Σ c·q²; for s held fixed, the
    nearest q is best. Each half lowers the error, and so do the two in turn (Lloyd, 1982).
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


def _at(octave: float, largest: float) -> float:
    """The float32 scale that many octaves from `largest`."""
    return float(np.float32(largest * 2.0**octave))

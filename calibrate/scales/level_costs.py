"""Ranks many scales of one tensor by their cost, from sums over the histogram's bins.

Rounding is monotonic, so the bins that round to one value of the format are neighbours. With the
sums of counts, of counts times values and of counts times squares up to each bin, a scale costs two
look-ups for each value of the format instead of a pass over all bins: of 5,000 bins and 127 values
of E4M3, a twentieth of the time. Differences of sums lose some of the last digits, so the costs
rank scales; `calibrate.scales.activations` computes those of the best ones bin by bin.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.observe.compiled import compiled
from octet.numerics.formats import Float32Array, Format, grid

__all__ = ["LevelCosts"]


@dataclass(frozen=True)
class LevelCosts:
    """A tensor with `counts` int64 [n] of its magnitudes `values` float32 [n], ascending."""

    values: Float32Array
    counts: NDArray[np.int64]

    def squared_errors(self, fmt: Format, scales: Float32Array) -> NDArray[np.float64]:
        """Returns Σ countᵢ·(vᵢ - s·Q(vᵢ/s))² for each of `scales` [C]."""
        wide, counts = self.values.astype(np.float64), self.counts.astype(np.float64)
        sums = (_up_to(counts), _up_to(counts * wide), _up_to(counts * wide * wide))
        costs = np.empty(len(scales))
        _errors(self.values, *sums, _levels(fmt), scales, costs)
        return costs

    def divergences(
        self, fmt: Format, scales: Float32Array, widths: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Returns `calibrate.scales.activations.divergence` of `scales` [C], less a constant.

        `widths` [n] are those of the bins. With p the share of a bin, w its width, and P and W
        their sums over the bins that round to one value, the divergence is Σ p·ln(p/w) over bins
        minus Σ P·ln(P/W) over values.
        """
        share = self.counts / self.counts.sum()
        costs = np.empty(len(scales))
        _divergences(self.values, _up_to(share), _up_to(widths), _levels(fmt), scales, costs)
        return costs


def _up_to(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the sum before each item, and the sum of all."""
    return np.concatenate([[0.0], np.cumsum(x)])


def _levels(fmt: Format) -> Float32Array:
    """Returns the values of the format that are not negative, ascending."""
    values = grid(fmt)
    return np.unique(np.abs(values)).astype(np.float32)


@compiled
def _end_of_level(
    values: NDArray[np.float32],
    levels: NDArray[np.float32],
    level: int,
    scale: np.float32,
    start: int,
) -> int:
    """Returns the first bin from `start` on whose quotient rounds to a value above `level`.

    `level` is an index into `levels`, the format's values. A quotient in the middle of two values
    goes to the one whose code is even. Found by bisection.
    """
    stop = values.size
    if level == levels.size - 1:
        return stop
    middle = (levels[level] + levels[level + 1]) * np.float32(0.5)
    even = level % 2 == 0
    while start < stop:
        at = (start + stop) // 2
        quotient = values[at] / scale
        if quotient > middle or (quotient == middle and not even):
            stop = at
        else:
            start = at + 1
    return start


@compiled
def _errors(
    values: NDArray[np.float32],
    counts: NDArray[np.float64],
    weighted: NDArray[np.float64],
    squares: NDArray[np.float64],
    levels: NDArray[np.float32],
    scales: NDArray[np.float32],
    costs: NDArray[np.float64],
) -> None:
    """Fills `costs` [C] from the sums up to each bin: of counts, times values, times squares."""
    for c in range(scales.size):
        scale = scales[c]
        cost = 0.0
        start = 0
        for level in range(levels.size):
            stop = _end_of_level(values, levels, level, scale, start)
            if stop > start:
                real = np.float64(levels[level]) * np.float64(scale)
                error = squares[stop] - squares[start]
                error -= 2 * real * (weighted[stop] - weighted[start])
                cost += max(0.0, error + real * real * (counts[stop] - counts[start]))
            start = stop
        costs[c] = cost


@compiled
def _divergences(
    values: NDArray[np.float32],
    shares: NDArray[np.float64],
    widths: NDArray[np.float64],
    levels: NDArray[np.float32],
    scales: NDArray[np.float32],
    costs: NDArray[np.float64],
) -> None:
    """Fills `costs` [C] from the sums up to each bin: of shares, and of widths."""
    for c in range(scales.size):
        cost = 0.0
        start = 0
        for level in range(levels.size):
            stop = _end_of_level(values, levels, level, scales[c], start)
            if stop > start:
                share = shares[stop] - shares[start]
                if share > 0.0:
                    cost -= share * np.log(share / (widths[stop] - widths[start]))
            start = stop
        costs[c] = cost

"""Computes the exact squared error of scales on a weight's rows, and each group's best scale.

The arithmetic is that of `octet.numerics.scaling`: divide the float32 magnitude by the scale, round
to nearest even, saturate, multiply by the scale. Differences are squared, multiplied by the weight
of their column (1 for plain squared error) and summed in float64, always in the same order, so that
results depend neither on threads nor on the CPU.

`best_scales` returns the result of an exhaustive search, but skips candidates that cannot win. With
e the least error so far, a candidate c and all beyond it lose if

- going down, the elements that saturate cost e: (x - max·c)² of each grows as c falls. With equal
  weights, the largest magnitude alone is a bound that takes less time than it saves;
- going up, the elements that become zero cost e: an element that is zero at c is zero at any larger
  scale, and its error is its square;
- going up among powers of two, c is not the first that saturates nothing: every value of 2c's grid
  up to max·c is also on c's grid, so no element comes closer.

These also hold in floating point: division, product, square and a sum of non-negative terms in a
fixed order are all monotonic there.
"""

import numpy as np
from numpy.typing import NDArray

from calibrate.observe.compiled import compiled, inlined

__all__ = ["best_scales", "tile_errors"]

_BLOCK = 16  # elements squared before they are summed; a fixed count vectorizes
_MAGIC = np.float32(1.5 * 2**23)  # adding, then subtracting it rounds to an integer, ties to even
_SIGNIFICAND = np.uint32(0xFFF00000)  # sign, exponent, first three mantissa bits


@inlined
def _round(y: np.float32, e2m1: bool) -> np.float32:
    """Rounds `y` >= 0 to E2M1 or, otherwise, to E4M3: nearest even, saturating."""
    if e2m1:
        y = min(y, np.float32(6))
        # Steps of 0.5 below 2, of 1 below 4, of 2 above.
        step = np.float32(0.5)
        inverse = np.float32(2)
        if y >= np.float32(2):
            step = np.float32(1)
            inverse = np.float32(1)
        if y >= np.float32(4):
            step = np.float32(2)
            inverse = np.float32(0.5)
        return ((y * inverse + _MAGIC) - _MAGIC) * step
    y = min(y, np.float32(448))
    bits = np.float32(y).view(np.uint32)
    odd = (bits >> np.uint32(20)) & np.uint32(1)
    normal = np.uint32((bits + np.uint32(0x7FFFF) + odd) & _SIGNIFICAND).view(np.float32)
    subnormal = ((y * np.float32(512) + _MAGIC) - _MAGIC) * np.float32(1 / 512)
    return normal if y >= np.float32(2.0**-6) else subnormal


@inlined
def _load(
    row: NDArray[np.float32], start: int, stop: int, magnitudes: NDArray[np.float32]
) -> np.float32:
    """Fills `magnitudes` from row[start:stop], padded with zeros; returns the largest."""
    largest = np.float32(0)
    for k in range(stop - start):
        magnitudes[k] = abs(row[start + k])
        largest = max(largest, magnitudes[k])
    for k in range(stop - start, magnitudes.size):
        magnitudes[k] = np.float32(0)
    return largest


@inlined
def _errors(
    magnitudes: NDArray[np.float32],
    importance: NDArray[np.float64],
    scale: np.float32,
    e2m1: bool,
    squares: NDArray[np.float64],
) -> tuple[float, float]:
    """Returns the total error, and the part from elements that become zero, both float64."""
    error = 0.0
    lost = 0.0
    for block in range(magnitudes.size // _BLOCK):
        for k in range(_BLOCK):
            magnitude = magnitudes[block * _BLOCK + k]
            rounded = _round(magnitude / scale, e2m1)
            difference = np.float64(magnitude) - np.float64(rounded * scale)
            square = difference * difference * importance[block * _BLOCK + k]
            squares[k] = square
            squares[_BLOCK + k] = square if rounded == np.float32(0) else 0.0
        for k in range(_BLOCK):
            error += squares[k]
        for k in range(_BLOCK):
            lost += squares[_BLOCK + k]
    return error, lost


@inlined
def _saturated(
    magnitudes: NDArray[np.float32],
    importance: NDArray[np.float64],
    limit: np.float32,
    squares: NDArray[np.float64],
) -> float:
    """Returns the error of the elements above `limit`, the largest value of a scale's grid."""
    error = 0.0
    for block in range(magnitudes.size // _BLOCK):
        for k in range(_BLOCK):
            beyond = np.float64(max(magnitudes[block * _BLOCK + k], limit)) - np.float64(limit)
            squares[k] = beyond * beyond * importance[block * _BLOCK + k]
        for k in range(_BLOCK):
            error += squares[k]
    return error


@compiled
def tile_errors(
    x: NDArray[np.float32],
    scales: NDArray[np.float32],
    rows: int,
    columns: int,
    e2m1: bool,
    errors: NDArray[np.float64],
) -> None:
    """Fills `errors` [C, n, T] for candidate scales [C, ⌈n/rows⌉, T] on each tile of each row of x.

    `x` is [n, K]; T tiles of `columns` elements make up a row.
    """
    magnitudes = np.empty(-(-columns // _BLOCK) * _BLOCK, np.float32)
    equal = np.ones(magnitudes.size)
    squares = np.empty(2 * _BLOCK)
    for n in range(x.shape[0]):
        for t in range(scales.shape[2]):
            _load(x[n], t * columns, min((t + 1) * columns, x.shape[1]), magnitudes)
            for c in range(scales.shape[0]):
                scale = scales[c, n // rows, t]
                errors[c, n, t] = _errors(magnitudes, equal, scale, e2m1, squares)[0]


@compiled
def best_scales(
    x: NDArray[np.float32],
    importance: NDArray[np.float64],
    columns: int,
    candidates: NDArray[np.float32],
    powers: bool,
    e2m1: bool,
    best: NDArray[np.int16],
    errors: NDArray[np.float64],
) -> None:
    """Fills `best` [n, T] with the index of each group's best candidate; -1 if all are zero.

    `x` is [n, K] in groups of `columns`; `importance` [K] multiplies the squared errors of its
    columns. `candidates` [C] ascend; with `powers` they are powers of two. Of equal candidates, the
    one tried first wins: from the least that saturates nothing upwards, then downwards. A group
    that holds NaN gets some index. `errors` [n] receives each row's error at its best scales.
    """
    magnitudes = np.empty(-(-columns // _BLOCK) * _BLOCK, np.float32)
    weights = np.zeros(magnitudes.size)
    squares = np.empty(2 * _BLOCK)
    largest = np.float32(6) if e2m1 else np.float32(448)
    last = candidates.size - 1
    equal = importance.min() == importance.max()
    for n in range(x.shape[0]):
        errors[n] = 0.0
        for t in range(best.shape[1]):
            start = t * columns
            stop = min(start + columns, x.shape[1])
            amax = _load(x[n], start, stop, magnitudes)
            if amax == np.float32(0):
                best[n, t] = -1
                continue
            weights[: stop - start] = importance[start:stop]
            low = 0
            first = last  # becomes the least whose largest value is not below amax
            while low < first:
                middle = (low + first) // 2
                if candidates[middle] * largest >= amax:
                    first = middle
                else:
                    low = middle + 1
            least = np.inf
            best[n, t] = first  # where NaN leaves no error to compare
            for c in range(first, first + 1 if powers else last + 1):
                error, lost = _errors(magnitudes, weights, candidates[c], e2m1, squares)
                if error < least:
                    least = error
                    best[n, t] = c
                if lost >= least:
                    break
            for c in range(first - 1, -1, -1):
                limit = largest * candidates[c]
                beyond = np.float64(amax) - np.float64(limit)
                cost = beyond * beyond * weights[0]
                if not equal:
                    cost = _saturated(magnitudes, weights, limit, squares)
                if cost >= least:
                    break
                error = _errors(magnitudes, weights, candidates[c], e2m1, squares)[0]
                if error < least:
                    least = error
                    best[n, t] = c
            errors[n] += least

"""Measures the error of one quantized weight against the original, and the error to expect.

Three questions, for a weight W [N, K] stored as codes C with scales S (real = C · S):

- How large is the error: its maximum, ‖W - C·S‖ / ‖W‖, and SQNR = 10·log10(ΣW² / Σ(W - C·S)²).
- Is C the nearest code to W / S, element by element? One flipped bit in ten million shows here.
- Is S any good? The same format with scales from the absolute maximum gives an SQNR to expect;
  scales from a search are better, never much worse.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octet.storage.tensors import Tensor
from verify.checks.findings import decibels
from verify.reader.checkpoint import Coded, slabs
from verify.reader.codes import ELEMENTS, Elements, value_of

__all__ = ["Numbers", "Two", "expected_noise", "measure", "sample_rows"]

Floats = NDArray[np.float32]
Two = tuple[int, int]
_SAMPLE = 1 << 19  # elements that the expected SQNR is computed on, spread over the tensor
_LEAST = np.float32(2.0**-126)


@dataclass(frozen=True)
class Numbers:
    """Error of a weight; `expected` is in dB, `first` the first code that is not the nearest."""

    elements: int
    max_abs: float
    signal: float
    noise: float
    expected: float | None
    unrounded: int
    first: Two | None

    @property
    def sqnr(self) -> float:
        return decibels(self.signal, self.noise)


def measure(coded: Coded, original: Tensor, scales: str) -> Numbers:
    """Measures the error of `coded` against `original` [N, K].

    `scales` is the format that scales are stored in: float32, e8m0 or e4m3.
    """
    signal = noise = max_abs = largest = 0.0
    unrounded, first = 0, None
    positive = coded.scale[coded.scale > 0]
    floor = np.float32(3 * positive.min()) if positive.size else np.float32(0)
    for start, stop in slabs(coded.codes.shape):
        weight = value_of(original.dtype, original.codes[start:stop])
        codes, scale = coded.rows(start, stop)
        error = weight - coded.elements.values[codes] * scale
        signal += _squares(weight)
        noise += _squares(error)
        max_abs = max(max_abs, _top(error))
        largest = max(largest, _top(weight))
        wrong = _unrounded(weight, codes, scale, coded.elements, floor)
        count = int(np.count_nonzero(wrong))
        if count and first is None:
            row, column = np.unravel_index(int(wrong.argmax()), wrong.shape)
            first = (start + int(row), int(column))
        unrounded += count
    expected = _expected(coded, original, scales, largest, signal, noise)
    return Numbers(coded.codes.size, max_abs, signal, noise, expected, unrounded, first)


def _unrounded(
    weight: Floats, codes: NDArray[np.uint8], scale: Floats, elements: Elements, floor: np.float32
) -> NDArray[np.bool_]:
    """Marks codes that are not the nearest; with a scale of 0, weights larger than `floor`."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = weight / scale
    wrong = ~((scaled >= elements.low[codes]) & (scaled <= elements.high[codes]))
    if not scale.all():
        wrong = np.where(scale == 0, np.abs(weight) > floor, wrong)
    return wrong


def _expected(
    coded: Coded, original: Tensor, scales: str, largest: float, signal: float, noise: float
) -> float | None:
    """Returns the SQNR in dB that plain rounding would give.

    It is estimated on a sample of rows, relative to the noise of `coded` in the same rows.
    """
    if largest == 0 or not np.isfinite(noise):
        return None
    mine = theirs = total = 0.0
    for start, stop in sample_rows(coded.codes.shape, coded.tile[0]):
        weight = value_of(original.dtype, original.codes[start:stop])
        codes, scale = coded.rows(start, stop)
        total += _squares(weight)
        mine += _squares(weight - coded.elements.values[codes] * scale)
        theirs += expected_noise(weight, coded, scales, largest)
    if total == 0 or theirs == 0 or mine == 0:
        return None
    return decibels(signal, noise) - 10 * float(np.log10(theirs / mine))


def sample_rows(shape: Two, align: int) -> list[Two]:
    """Returns spans of whole tiles, spread evenly over the rows; all rows of a small tensor."""
    rows, columns = shape
    high = align if align < rows else 1  # one scale for the whole tensor: any rows will do
    count = max(1, _SAMPLE // (columns * high))
    tiles = -(-rows // high)
    if count >= tiles:
        return [(0, rows)]
    chosen = np.unique(np.linspace(0, tiles - 1, count).astype(int))
    return [(int(tile) * high, min(rows, (int(tile) + 1) * high)) for tile in chosen]


def expected_noise(weight: Floats, coded: Coded, scales: str, largest: float) -> float:
    """Returns Σ error² of plain rounding of whole tiles with scales from the absolute maximum."""
    elements = coded.elements
    high, wide = min(coded.tile[0], len(weight)), min(coded.tile[1], weight.shape[1])
    magnitude = np.abs(weight)
    if coded.tile[0] >= len(coded.codes) and coded.tile[1] >= coded.codes.shape[1]:
        amax = np.array([[largest]], np.float32)
    else:
        amax = np.maximum.reduceat(magnitude, np.arange(0, len(weight), high), axis=0)
        amax = np.maximum.reduceat(amax, np.arange(0, weight.shape[1], wide), axis=1)
    scale = np.maximum(amax / np.float32(elements.largest), _LEAST)
    if scales == "e8m0":
        scale = np.exp2(np.ceil(np.log2(scale))).astype(np.float32)
    elif scales == "e4m3":
        whole = np.float32(largest / (elements.largest * ELEMENTS["e4m3"].largest))
        scale = np.maximum(ELEMENTS["e4m3"].nearest(scale / whole), np.float32(2.0**-9)) * whole
    if len(scale) > 1:
        scale = scale.repeat(high, axis=0)[: len(weight)]
    if scale.shape[1] > 1:
        scale = scale.repeat(wide, axis=1)[:, : weight.shape[1]]
    return _squares(weight - elements.nearest(weight / scale) * scale)


def _squares(x: Floats) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        flat = x.reshape(-1)
        return float(sum(np.dot(part, part) for part in np.array_split(flat, 1 + x.size // 65536)))


def _top(x: Floats) -> float:
    return float(max(x.max(initial=0), -x.min(initial=0)))

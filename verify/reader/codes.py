"""Decodes stored codes by the definition of their format.

Shares no code with the exporters, so that a mistake there cannot hide here.

    E4M3  s eeee mmm   bias 7   (-1)^s · 2^(e-7) · (1 + m/8); e = 0: 2^-6 · m/8; 0x7F and 0xFF: NaN
    E2M1  s ee m       bias 1   0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    E8M0  eeeeeeee     bias 127 2^(e-127), unsigned; 0xFF: NaN

Sources: arXiv 2209.05433 (E4M3), "OCP Microscaling Formats (MX)" 1.0 (E2M1, E8M0).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ELEMENTS", "Elements", "bfloat16", "e4m3", "e8m0", "unpack", "value_of"]

Floats = NDArray[np.float32]
# Relative, for a quotient of two float32 that the writer may have divided differently; 2^-20 of an
# E4M3 step.
_SLACK = np.float32(2.0**-18)


@dataclass(frozen=True)
class Elements:
    """A format of elements: the value of each code, and the reals that round to it.

    `values`, `low` and `high` are float32, one for each code: x rounds to the code if
    `low <= x <= high`. The outermost intervals are unbounded, since values saturate. The interval
    of a NaN code is empty.
    """

    name: str
    values: Floats
    low: Floats
    high: Floats

    @property
    def largest(self) -> float:
        return float(np.nanmax(self.values))

    def nearest(self, x: Floats) -> Floats:
        """Rounds each of `x` to the nearest value (either one of a tie), saturating."""
        grid = np.unique(self.values[np.isfinite(self.values)])
        middle = (grid[1:] + grid[:-1]) / np.float32(2)
        return grid[np.searchsorted(middle, x)]


def _e4m3_values() -> Floats:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7) / 8.0
    magnitude = np.where(
        exponent == 0, 2.0**-6 * mantissa, 2.0 ** (exponent - 7.0) * (1 + mantissa)
    )
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


def _elements(name: str, values: Floats) -> Elements:
    grid = np.unique(values[np.isfinite(values)])  # one zero: -0 and 0 are equal
    middle = (grid[1:] + grid[:-1]) / np.float32(2)
    middle = middle.astype(np.float32)
    below = np.concatenate([[-np.inf], middle]).astype(np.float32)
    above = np.concatenate([middle, [np.inf]]).astype(np.float32)
    finite = np.isfinite(values)
    index = np.searchsorted(grid, np.where(finite, values, 0))
    low = np.where(finite, below[index] - np.abs(below[index]) * _SLACK, np.inf)
    high = np.where(finite, above[index] + np.abs(above[index]) * _SLACK, -np.inf)
    return Elements(name, values, low.astype(np.float32), high.astype(np.float32))


_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ELEMENTS = {
    "e4m3": _elements("e4m3", _e4m3_values()),
    "e2m1": _elements("e2m1", np.array(_HALF + [-x for x in _HALF], np.float32)),
}

_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpacks E2M1 codes [N, K] from bytes [N, K/2]: the low nibble is the even column."""
    codes = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(*packed.shape[:-1], -1)


def e4m3(codes: NDArray[Any]) -> Floats:
    real: Floats = ELEMENTS["e4m3"].values[codes]
    return real


def e8m0(codes: NDArray[Any]) -> Floats:
    """Returns 2^(code - 127), down to the subnormal 2^-127; NaN for 255."""
    real: Floats = _POWERS[codes]
    return real


def bfloat16(codes: NDArray[Any]) -> Floats:
    """Decodes bfloat16, the upper half of a float32."""
    return (codes.astype(np.uint32) << 16).view(np.float32)


def value_of(dtype: str, codes: NDArray[Any]) -> Floats:
    """Decodes stored numbers of a safetensors dtype to float32, by this file's own tables."""
    if dtype == "BF16":
        return bfloat16(codes)
    if dtype == "F8_E4M3":
        return e4m3(codes)
    if dtype == "F8_E8M0":
        return e8m0(codes)
    return codes.astype(np.float32)

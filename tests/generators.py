"""Enumerated test cases: whole input ranges, and the points where rounding changes its mind.

Imports nothing of ours but the format constants, so that a defect of an encoder cannot hide in its
own test data.
"""

import bisect
import functools
import itertools
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octet.numerics.formats import FORMATS, Format

FLOAT8 = [FORMATS["e4m3"], FORMATS["e5m2"]]
MX_ELEMENTS = [FORMATS["e2m1"], FORMATS["e3m2"], FORMATS["e2m3"]]  # no NaN, no Inf
SIGNED = FLOAT8 + MX_ELEMENTS
ALL_FORMATS = [*SIGNED, FORMATS["e8m0"]]

ML_DTYPES_NAME = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e2m1": "float4_e2m1fn",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e8m0": "float8_e8m0fnu",
}

# [N, K] of weights: whole tiles of 128, ragged edges, single rows and columns, less than a tile.
WEIGHT_SHAPES = [(128, 128), (256, 384), (1, 1), (1, 300), (130, 1), (129, 257), (100, 40)]


def format_id(fmt: Format) -> str:
    """The name of a parametrized case."""
    return fmt.name


def all_float16() -> NDArray[np.float16]:
    """All 65,536 float16, NaN and Inf included."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def all_bf16() -> NDArray[np.float32]:
    """All 65,536 bfloat16 as float32, NaN and Inf included."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


@functools.cache
def exact_values(fmt: Format) -> list[Fraction]:
    """The finite values of `fmt` that are not negative, ascending, as ml_dtypes has them."""
    codes = np.arange(2 ** (fmt.bits - fmt.signed), dtype=np.uint8)
    values = codes.view(getattr(ml_dtypes, ML_DTYPES_NAME[fmt.name])).astype(float)
    return [Fraction(value) for value in values[np.isfinite(values)]]


def rounding_points(fmt: Format, dtype: Any) -> NDArray[Any]:
    """Every value of `fmt`, every middle between two, and each of them ± 1 ulp of `dtype`.

    Also zero, the smallest of `dtype`, and points from the largest of `fmt` to that of `dtype`;
    all with both signs. No NaN, no Inf.
    """
    values = exact_values(fmt)
    middles = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    step = values[-1] - values[-2]
    beyond = [values[-1] + step / 2, values[-1] + step, values[-1] * 2]
    points = np.array([float(v) for v in values + middles + beyond], np.float64)
    largest = np.finfo(dtype).max
    points = points[points <= float(largest)].astype(dtype)
    edges = np.array([0, np.finfo(dtype).smallest_subnormal, largest], dtype)
    with np.errstate(over="ignore"):
        below = np.nextafter(points, dtype(-np.inf))
        above = np.nextafter(points, dtype(np.inf))
    points = np.concatenate([edges, points, below, above])
    points = points[np.isfinite(points)]
    return np.unique(
        np.concatenate([points, -points, -np.zeros(1, dtype)]).view(_bits(dtype))
    ).view(dtype)


def nearest_by_fractions(x: float, fmt: Format) -> int:
    """The code of the finite `x` in a signed `fmt`: nearest, ties to even, saturating; exact."""
    values = exact_values(fmt)
    magnitude = abs(Fraction(x))
    above = min(bisect.bisect_left(values, magnitude), len(values) - 1)
    code = min((max(above - 1, 0), above), key=lambda c: (abs(values[c] - magnitude), c % 2))
    return code | int(np.signbit(x)) << (fmt.bits - 1)


def mismatches(x: NDArray[Any], ours: NDArray[Any], theirs: NDArray[Any]) -> list[str]:
    """One line for each of the first 20 elements that differ: the input and both results."""
    wrong = np.flatnonzero(ours != theirs)[:20]
    return [
        f"{x.dtype} {x[i]!r} ({float(x[i]).hex()}): ours {ours[i]:#04x}, expected {theirs[i]:#04x}"
        for i in wrong
    ]


def _bits(dtype: Any) -> Any:
    return {2: np.uint16, 4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize]

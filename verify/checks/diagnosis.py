"""Diagnoses a weight whose error is too large, by undoing the usual mistakes.

Each is undone on some rows. If the error then falls to the expected one, the cause is found.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from octet.storage.tensors import Tensor
from verify.checks.findings import decibels
from verify.reader.checkpoint import Coded
from verify.reader.codes import value_of

__all__ = ["diagnose"]

Floats = NDArray[np.float32]
_ROWS = 128  # used to try each mistake


def diagnose(
    coded: Coded,
    original: Tensor,
    expected: float,
    others: Mapping[str, Callable[[], Tensor]],
) -> str:
    """Explains the error of `coded` in a clause; `expected` is the SQNR to reach, in dB.

    `others` are weights of the original of the same shape, which may have been written instead.
    """
    weight = _original(original)
    real = _real(coded)
    enough = expected - 3.0

    def explains(candidate: Floats, of: Floats = weight) -> bool:
        return _sqnr(of, candidate) >= enough

    for found, candidate in _candidates(coded):
        if explains(candidate):
            return found
    for name, read in others.items():
        other = _original(read())
        if other.shape == real.shape and explains(real, other):
            return f"it holds the weight of {name}"
    if original.shape[0] == original.shape[1]:
        whole = value_of(original.dtype, original.codes).T[: len(real)]
        if _aligned(real, whole) > 0.9:
            return "it is transposed"
    factor = float(np.vdot(weight, real)) / max(float(np.vdot(real, real)), 1e-300)
    if np.isfinite(factor) and factor > 0 and explains(real * np.float32(factor)):
        return f"every scale is {1 / factor:.3g} times what it should be"
    if _aligned(real, weight) > 0.9:
        if explains(_refit(weight, coded)):
            return "its codes are right and its scales are wrong"
        return "its scales are wrong: too small, and values saturate, or too large"
    if explains(_refit(weight, coded)):
        return "its codes are right and its scales are those of another tensor"
    return "it is not this weight, or its codes are in another order"


def _candidates(coded: Coded) -> Iterator[tuple[str, Floats]]:
    if coded.whole is not None:
        wrong, right = ("multiplier", "divide") if coded.divides else ("divisor", "multiply")
        yield (
            f"its global scale is written as a {wrong}, and should {right}",
            _real(replace(coded, scale=coded.scale / coded.whole / coded.whole)),
        )
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(1) / coded.scale
        yield (
            "its scales divide where they should multiply",
            _real(replace(coded, scale=inverse)),
        )
    if coded.elements.name == "e2m1":
        codes = coded.codes[:_ROWS].reshape(-1, 2)[:, ::-1].reshape(coded.codes[:_ROWS].shape)
        swapped = replace(coded, codes=np.ascontiguousarray(codes))
        yield "the two nibbles of each byte are swapped", _real(swapped)


def _original(tensor: Tensor) -> Floats:
    return value_of(tensor.dtype, tensor.codes[:_ROWS])


def _real(coded: Coded) -> Floats:
    stop = min(_ROWS, len(coded.codes))
    codes, scale = coded.rows(0, stop)
    with np.errstate(over="ignore", invalid="ignore"):
        real: Floats = coded.elements.values[codes] * scale
        return np.nan_to_num(real, posinf=0, neginf=0)


def _refit(weight: Floats, coded: Coded) -> Floats:
    """Returns the codes with the scales that fit the original best, one per tile of one row."""
    values = coded.elements.values[coded.codes[: len(weight)]]
    wide = min(coded.tile[1], values.shape[1])
    starts = np.arange(0, values.shape[1], wide)
    top = np.add.reduceat(weight * values, starts, axis=1)
    bottom = np.add.reduceat(values * values, starts, axis=1)
    scale = np.asarray(top / np.maximum(bottom, 1e-30), np.float32)
    fitted: Floats = values * scale.repeat(wide, axis=1)[:, : values.shape[1]]
    return fitted


def _sqnr(weight: Floats, real: Floats) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        error = (weight - real).astype(np.float64)
    return decibels(float(np.vdot(weight, weight)), float((error * error).sum()))


def _aligned(a: Floats, b: Floats) -> float:
    """Returns the cosine of the angle between `a` and `b`."""
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size > 0 and np.isfinite(size) else 0.0

"""Judges one tensor of a checkpoint or a graph: a quantized one by its error, others by bits."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octet.storage.tensors import Tensor
from verify.checks.diagnosis import diagnose
from verify.checks.findings import Row, Verification, layer_of
from verify.checks.numbers import Numbers
from verify.reader.checkpoint import Coded

__all__ = ["compare_copies", "judge", "row_of"]

# How far an SQNR may be below that of plain rounding, in dB. Octet's scales are at least as good.
# GPTQ and AWQ of others worsen single weights on purpose, to improve the output of the layer.
_SLACK_DB, _SLACK_OTHERS_DB = 1.0, 6.0
_LEAST_DB = 20.0  # expected if plain rounding has no error, as for a weight of zeros
_PART = 1 << 24  # values of a copied tensor to compare at a time


def compare_copies(
    name: str,
    before: Tensor,
    after: Tensor,
    found: Verification,
    hint: str = "",
    release: Callable[[], None] = lambda: None,
) -> None:
    """Counts a copied tensor in `found` if it equals the original, else adds a problem.

    `release` frees the memory of each part that has been compared.
    """
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        found.problem(
            "copies",
            name,
            f"stored as {after.dtype} {list(after.shape)}, the original is {before.dtype}"
            f" {list(before.shape)}",
        )
        return
    left, right = _bits(before.codes), _bits(after.codes)
    first, count = 0, 0
    for start in range(0, left.size, _PART):
        part = slice(start, start + _PART)
        if not np.array_equal(left[part], right[part]):
            different = np.flatnonzero(left[part] != right[part])
            first = first if count else start + int(different[0])
            count += different.size
        release()
    if not count:
        found.copied += 1
        return
    at = [int(index) for index in np.unravel_index(first, before.shape)]
    found.problem(
        "copies",
        name,
        f"{count} of {left.size} values are not the original's, the first at {at}{hint}",
    )


def row_of(tensor: str, label: str, numbers: Numbers) -> Row:
    return Row(
        tensor,
        layer_of(tensor),
        label,
        numbers.elements,
        numbers.max_abs,
        numbers.signal,
        numbers.noise,
        numbers.expected,
        numbers.unrounded,
    )


def judge(
    coded: Coded,
    original: Tensor,
    numbers: Numbers,
    *,
    ours: bool,
    others: Mapping[str, Callable[[], Tensor]],
) -> str | None:
    """Describes the fault of a weight in a clause; None if there is none.

    If `ours`, codes must be rounded to nearest, with scales as good as the absolute maximum's.
    `others` are weights of the same shape that may have been written instead.
    """
    if not np.isfinite(numbers.noise):
        return "not a number or infinite where it is dequantized: NaN codes or scales"
    expected = numbers.expected if numbers.expected is not None else _LEAST_DB
    if numbers.noise > 0 and numbers.sqnr < expected - (_SLACK_DB if ours else _SLACK_OTHERS_DB):
        cause = diagnose(coded, original, expected, others)
        return f"SQNR {numbers.sqnr:.1f} dB, expected {expected:.1f} dB: {cause}"
    if ours and numbers.unrounded:
        return (
            f"{numbers.unrounded} of {numbers.elements} codes are not the nearest to the original,"
            f" the first at {list(numbers.first or ())}: altered after quantization"
        )
    return None


def _bits(codes: NDArray[Any]) -> NDArray[Any]:
    """Views each number as one unsigned integer, so that NaN equals itself."""
    return np.ascontiguousarray(codes).reshape(-1).view(f"u{codes.dtype.itemsize}")

"""Compares torch's FP8 with Octet's codecs: what `inspect_child` computed on this machine."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from octet.hardware import inspect_child as child
from octet.numerics.bits import bf16_to_float32, float32_to_bf16
from octet.numerics.formats import E4M3, E5M2, Format, decode, encode

__all__ = ["Fp8Check", "compared"]

# Allowed errors: of the result, half a unit in the last of BF16's 8 bits; and of the sum, of which
# Hopper's tensor cores keep 13 bits, relative to the sum of the products' magnitudes.
_RESULT, _SUM = 2.0**-8, 2.0**-11


class Fp8Check(BaseModel):
    """A comparison: how many values were compared and differ, or why nothing was computed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    compared: int = 0
    different: int = 0
    problem: str = ""


def compared(found: Mapping[str, Any]) -> tuple[Fp8Check, ...]:
    """Returns the checks of what the child process computed; none if it has no torch."""
    if "matmul" not in found:
        return ()
    return (
        _matmul(found["matmul"]),
        _cache("E4M3 cache round trip", E4M3, found["cache"]["e4m3"]),
        _cache("E5M2 cache round trip", E5M2, found["cache"]["e5m2"]),
    )


def _matmul(found: Mapping[str, Any]) -> Fp8Check:
    """Compares torch's FP8 matmul with a float64 one of the same codes."""
    name = "FP8 matmul"
    if "problem" in found:
        return Fp8Check(name=name, problem=found["problem"])
    a, b = (
        decode(np.array(child.codes(rows * child.INNER, seed), np.uint8), E4M3)
        .reshape(rows, child.INNER)
        .astype(np.float64)
        for rows, seed in ((child.ROWS, 1), (child.COLUMNS, 2))
    )
    expected, sums = a @ b.T, abs(a) @ abs(b).T
    got = np.array(found["values"], np.float64).reshape(expected.shape)
    wrong = ~(abs(got - expected) <= _RESULT * abs(expected) + _SUM * sums)
    return Fp8Check(name=name, compared=expected.size, different=int(wrong.sum()))


def _cache(name: str, fmt: Format, found: Mapping[str, Any]) -> Fp8Check:
    """Compares torch's rounding to `fmt`, and its decoding, with Octet's."""
    if "problem" in found:
        return Fp8Check(name=name, problem=found["problem"])
    values = bf16_to_float32(np.arange(2**16, dtype=np.uint16))
    inside = values[abs(values) <= fmt.max]
    codes = encode(inside, fmt)
    back = float32_to_bf16(decode(codes, fmt))
    got = np.frombuffer(bytes.fromhex(found["codes"]), np.uint8)
    returned = np.array(found["back"], np.uint16)
    if len(got) != len(codes) or len(returned) != len(back):
        return Fp8Check(name=name, problem=f"{len(got)} values for {len(codes)}")
    wrong = (got != codes) | (returned != back)
    return Fp8Check(name=name, compared=len(codes), different=int(wrong.sum()))

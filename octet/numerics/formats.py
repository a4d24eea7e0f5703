"""Number formats of 4 to 8 bits: E4M3, E5M2, E2M1, E3M2, E2M3 and E8M0.

Codes are uint8, one per element, in the low bits; the sign is the top bit of a code. `encode`
rounds to nearest, ties to even, and saturates: a value beyond the largest finite one, Inf included,
becomes that one with its sign. A NaN stays a NaN, or raises NumericsError in a format without one.
Some of this differs from torch and ml_dtypes.

docs/explanation/number-formats.md has the limits, sources and differences.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from octet.errors import NumericsError, UnsupportedError, nearest
from octet.numerics.bits import bf16_to_float32

__all__ = [
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "Format",
    "decode",
    "encode",
    "format_named",
    "grid",
    "round_to",
]

Float32Array: TypeAlias = NDArray[np.float32]
Codes: TypeAlias = NDArray[np.uint8]
Scalar = TypeVar("Scalar", bound=np.generic)

_CHUNK = 1 << 15  # elements per step, so that the temporaries stay in the L2 cache


@dataclass(frozen=True)
class Format:
    """A number format: its layout, its limits and its name in torch."""

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float  # the largest finite value
    has_inf: bool
    has_nan: bool
    torch_name: str | None  # None: torch has no such dtype
    signed: bool = True

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value, floor(log2(max)): `emax_elem` of OCP MX."""
        return int(np.frexp(self.max)[1]) - 1

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** ((1 if self.signed else 0) - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value; for E8M0, which has no subnormals, `smallest_normal`."""
        return self.smallest_normal * 2.0**-self.mantissa_bits


E4M3 = Format("e4m3", 8, 4, 3, 7, 448.0, False, True, "float8_e4m3fn")
E5M2 = Format("e5m2", 8, 5, 2, 15, 57344.0, True, True, "float8_e5m2")
E2M1 = Format("e2m1", 4, 2, 1, 1, 6.0, False, False, "float4_e2m1fn_x2")
E3M2 = Format("e3m2", 6, 3, 2, 3, 28.0, False, False, None)
E2M3 = Format("e2m3", 6, 2, 3, 1, 7.5, False, False, None)
E8M0 = Format("e8m0", 8, 8, 0, 127, 2.0**127, False, True, "float8_e8m0fnu", False)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2, E2M1, E3M2, E2M3, E8M0)}


def format_named(name: str) -> Format:
    """Returns the format called `name`; UnsupportedError names the nearest known one."""
    if name not in FORMATS:
        raise UnsupportedError(f"unknown number format '{name}'{nearest(name, FORMATS)}")
    return FORMATS[name]


def encode(x: NDArray[np.floating[Any]], fmt: Format) -> Codes:
    """Rounds `x` (float16, float32 or float64, any shape) to codes of `fmt`, of the same shape.

    A float64 is rounded once, from its own value. NumericsError for a NaN if `fmt` has none.
    """
    _check(x, fmt)
    return _look_up(x, _code_table(fmt, x.dtype == np.float16))


def round_to(x: NDArray[np.floating[Any]], fmt: Format) -> Float32Array:
    """Rounds `x` to values of `fmt`: `decode(encode(x))` in one look-up."""
    _check(x, fmt)
    return _look_up(x, _value_table(fmt, x.dtype == np.float16))


def decode(codes: Codes, fmt: Format) -> Float32Array:
    """Returns the exact values of `codes` (uint8, any shape); NumericsError for too many bits."""
    try:
        return _decode_table(fmt)[codes]
    except IndexError:
        raise NumericsError(
            f"code {int(codes.max())} is not {fmt.name}: it has {fmt.bits} bits a code, "
            f"0 to {2**fmt.bits - 1}; unpack packed codes first"
        ) from None


def grid(fmt: Format) -> Float32Array:
    """Returns the finite non-negative values of `fmt`, ascending; each index is the code."""
    values = _decode_table(fmt)[: 2 ** (fmt.bits - fmt.signed)]
    return values[np.isfinite(values)]


def _check(x: NDArray[np.floating[Any]], fmt: Format) -> None:
    if x.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(f"cannot encode {x.dtype} as {fmt.name}: pass float16, float32 or float64")
    if not fmt.has_nan and np.isnan(x).any():
        raise NumericsError(
            f"NaN has no code in {fmt.name}; find where it comes from before quantizing"
        )


def _look_up(x: NDArray[np.floating[Any]], table: NDArray[Scalar]) -> NDArray[Scalar]:
    """Returns `table[key]` for each element of `x`; the key is its 16 deciding bits."""
    flat = np.ascontiguousarray(x).reshape(-1)
    out = np.empty(flat.size, table.dtype)
    for start in range(0, flat.size, _CHUNK):
        keys = _keys(flat[start : start + _CHUNK])
        # Every 16-bit key is in the table: "wrap" only spares the bounds check.
        np.take(table, keys, out=out[start : start + _CHUNK], mode="wrap")
    return out.reshape(x.shape)


def _keys(x: NDArray[np.floating[Any]]) -> NDArray[np.integer[Any]]:
    """Returns each element's index: its float16 bits, or its bfloat16 bits rounded to odd."""
    if x.dtype == np.float16:
        return x.view(np.uint16)
    if x.dtype == np.float64:
        x = _narrow(x)
    bits = x.view(np.uint32)
    keys = bits & 0xFFFF
    keys += 0xFFFF  # carries into bit 16 exactly when a lower bit was set
    keys |= bits
    keys >>= 16
    return keys.astype(np.intp)  # `take` would convert to this type itself, more slowly


def _narrow(x: NDArray[np.floating[Any]]) -> Float32Array:
    """Rounds float64 to float32 to odd, so that a later rounding to fewer bits is the only one.

    Rounding to odd sets the last bit of an inexact result (Boldo and Melquiond, 2008).
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = x.astype(np.float32)
        exact = (narrow == x) | np.isnan(x)
        away = np.abs(narrow) > np.abs(x)
    bits = narrow.view(np.uint32)
    bits -= ~exact & away  # truncated toward zero
    bits |= ~exact
    return narrow


@cache
def _decode_table(fmt: Format) -> Float32Array:
    """float32[2^bits]: the value of every code, from the definition of the format."""
    codes = np.arange(2**fmt.bits)
    if not fmt.signed:  # E8M0: no sign, no mantissa, no zero
        values = np.ldexp(1.0, codes - fmt.bias)
        values[0xFF] = np.nan
    else:
        mantissa = codes & (2**fmt.mantissa_bits - 1)
        exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
        significand = mantissa + np.where(exponent > 0, 2**fmt.mantissa_bits, 0)
        shift = np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits
        values = np.ldexp(significand.astype(np.float64), shift)
        if fmt.has_inf:  # IEEE: the last exponent holds Inf and NaN
            special = exponent == 2**fmt.exponent_bits - 1
            values[special] = np.where(mantissa[special] == 0, np.inf, np.nan)
        elif fmt.has_nan:  # E4M3: only S.1111.111
            values[codes & 0x7F == 0x7F] = np.nan
        values = np.where(codes >> (fmt.bits - 1), -values, values)
    return _frozen(values.astype(np.float32))


@cache
def _code_table(fmt: Format, half: bool) -> Codes:
    """uint8[65536]: the code of every float16 (`half`), or of every bfloat16 rounded to odd."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        inputs = patterns.view(np.float16) if half else bf16_to_float32(patterns)
        return _frozen(_encode_by_definition(inputs.astype(np.float64), fmt))


@cache
def _value_table(fmt: Format, half: bool) -> Float32Array:
    """float32[65536]: `_code_table`, decoded."""
    return _frozen(decode(_code_table(fmt, half), fmt))


def _encode_by_definition(x: NDArray[np.float64], fmt: Format) -> Codes:
    """Rounds `x` by searching the format's own values: exact and slow, for the tables."""
    values = grid(fmt).astype(np.float64)
    magnitude, negative, nan = np.abs(x), np.signbit(x), np.isnan(x)
    middles = (values[:-1] + values[1:]) / 2
    if not fmt.signed:
        middles[0] = np.nextafter(values[0], np.inf)  # as torch and ml_dtypes, see above
    codes = np.searchsorted(middles, magnitude, side="right")  # ties up
    if fmt.signed:
        tie = (codes > 0) & (middles[codes - 1] == magnitude)
        codes -= tie & (codes % 2 == 1)  # to even: a code's last bit is the mantissa's last
        codes = np.where(nan, 0x7F if fmt.has_nan else 0, codes) | (negative << (fmt.bits - 1))
    else:
        codes[(magnitude >= 1.5 * fmt.max) | (x < 0) | nan] = 0xFF
    return codes.astype(np.uint8)


def _frozen(table: NDArray[Scalar]) -> NDArray[Scalar]:
    """Returns the table as read-only, because all callers share a cached one."""
    table.flags.writeable = False
    return table

"""Encodes weights into the codes that every export stores, at memory speed.

The result equals `octet.numerics.scaling.quantize` bit for bit: the weight in float32 is divided by
its scale, rounded to nearest even and saturated. The compiled loops need no temporaries and no
table. They round a float32 to fewer mantissa bits by an integer addition to its bits, which carries
into the exponent. They round to the step of the subnormals by a float addition of 2^(23 + the
step's exponent); the last bits of the sum are then the code.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from octet.errors import NumericsError
from octet.numerics import formats, microscaling, scaling
from octet.numerics.bits import pack_e2m1
from octet.recipe import TensorScheme
from octet.storage.tensors import Tensor

__all__ = ["weight_codes"]

# (bits, shift, scale [R, G], rows per scale, columns per scale, codes) -> True if any is NaN or Inf
Kernel = Callable[[npt.NDArray[Any], int, npt.NDArray[np.float32], int, int, Any], bool]


def weight_codes(
    weight: Tensor,
    scale: npt.NDArray[np.float32],
    global_scale: npt.NDArray[np.float32] | None,
    scheme: TensorScheme,
    *,
    name: str | None = None,
) -> npt.NDArray[np.uint8]:
    """Divides `weight` [N, K] by its scales, rounds to nearest even, saturating; returns the codes.

    E4M3 codes are [N, K]; E2M1 codes are packed [N, K/2], the even column in the low half of a
    byte. Raises NumericsError, naming the tensor, for NaN or Inf, and for a scale that is not
    positive and finite.
    """
    fmt = formats.format_named(scheme.format)
    granularity = scaling.Granularity.of(scheme.granularity, scheme.group_size)
    factor = microscaling.combined(scale, global_scale)
    kernel = _kernel(fmt.name)
    if kernel is None:
        codes = scaling.quantize(weight.float32(), factor, fmt, granularity, name=name)
        return codes if fmt.bits == 8 else pack_e2m1(codes)
    rows, columns = weight.shape
    expected = granularity.scale_shape((rows, columns))
    if factor.shape != expected and not (expected == () and factor.shape == (1,)):
        raise ValueError(f"{name}: scales of shape {factor.shape}, not {expected}")
    if not (np.isfinite(factor) & (factor > 0)).all():
        raise NumericsError(f"tensor '{name}' has a scale that is not positive and finite")
    bits, shift = _bits(weight)
    codes = np.empty((rows, columns * fmt.bits // 8), np.uint8)
    tile_rows, tile_columns = granularity.rows or rows, granularity.columns or columns
    tiles = np.ascontiguousarray(factor.reshape(expected or (1, 1)))
    if kernel(bits, shift, tiles, tile_rows, tile_columns, codes):
        scaling.absmax(weight.float32(), scaling.TENSOR, name=name)  # raises, with their count
        raise AssertionError(f"{name}: NaN or Inf that a second look does not find")
    return codes


def _bits(weight: Tensor) -> tuple[npt.NDArray[Any], int]:
    """Returns the weight's codes, and the left shift that makes them the bits of a float32."""
    if weight.dtype == "BF16":
        return weight.codes, 16
    return np.ascontiguousarray(weight.float32()).view(np.uint32), 0


@cache
def _kernel(fmt: str) -> Kernel | None:
    """Compiles the encoder, cached on disk if a directory is writable; None without numba."""
    try:
        import numba
    except ImportError:  # it comes with the `export` extra
        return None
    function = {"e4m3": _encode_e4m3, "e2m1": _encode_e2m1}[fmt]
    # error_model: division does not check for 0, so that 16 run at a time.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    kernel: Kernel
    try:
        kernel = numba.njit(function, cache=True, **options)
    except RuntimeError:  # neither Octet's folder nor the user's cache is writable
        kernel = numba.njit(function, **options)
    return kernel


def _encode_e4m3(
    bits: Any, shift: int, scales: Any, tile_rows: int, tile_columns: int, codes: Any
) -> bool:
    rows, columns = bits.shape
    factor = np.empty(columns, np.float32)  # scale of each column
    tile = -1
    odd = np.uint32(0)
    for i in range(rows):
        if i // tile_rows != tile:
            tile = i // tile_rows
            for g in range(scales.shape[1]):
                factor[g * tile_columns : (g + 1) * tile_columns] = scales[tile, g]
        for j in range(columns):
            x = np.uint32(np.uint32(bits[i, j]) << np.uint32(shift))
            odd |= np.uint32((x & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
            y = np.float32(x.view(np.float32) / factor[j]).view(np.uint32)
            sign = np.uint32(y >> np.uint32(24)) & np.uint32(0x80)
            size = np.uint32(min(np.uint32(y & np.uint32(0x7FFFFFFF)), np.uint32(0x43E00000)))
            # Below 2^-6 the step is 2^-9: add 2^14 = 2^(23-9), whose bits are 0x46800000.
            steps = np.float32(size.view(np.float32) + np.float32(16384.0)).view(np.uint32)
            small = steps - np.uint32(0x46800000)
            # Otherwise 20 mantissa bits go; 120 is the difference of the biases, 127 and 7.
            even = np.uint32(size >> np.uint32(20)) & np.uint32(1)
            large = (size + np.uint32(0x7FFFF) + even - np.uint32(120 << 23)) >> np.uint32(20)
            code = small if size < np.uint32(0x3C800000) else large
            codes[i, j] = np.uint8(code | sign)
    return bool(odd != 0)


def _encode_e2m1(
    bits: Any, shift: int, scales: Any, tile_rows: int, tile_columns: int, codes: Any
) -> bool:
    rows, columns = bits.shape
    factor = np.empty(columns, np.float32)  # scale of each column
    row = np.empty(columns, np.uint8)
    pairs = row.view(np.uint16)  # little-endian: the even column in the low byte
    tile = -1
    odd = np.uint32(0)
    for i in range(rows):
        if i // tile_rows != tile:
            tile = i // tile_rows
            for g in range(scales.shape[1]):
                factor[g * tile_columns : (g + 1) * tile_columns] = scales[tile, g]
        for j in range(columns):
            x = np.uint32(np.uint32(bits[i, j]) << np.uint32(shift))
            odd |= np.uint32((x & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
            y = np.float32(x.view(np.float32) / factor[j]).view(np.uint32)
            sign = np.uint32(y >> np.uint32(28)) & np.uint32(0x8)
            size = np.uint32(min(np.uint32(y & np.uint32(0x7FFFFFFF)), np.uint32(0x40C00000)))
            # Below 1 the step is 2^-1: add 2^22 = 2^(23-1), whose bits are 0x4A800000.
            steps = np.float32(size.view(np.float32) + np.float32(4194304.0)).view(np.uint32)
            small = steps - np.uint32(0x4A800000)
            # Otherwise 22 mantissa bits go; 126 is the difference of the biases, 127 and 1.
            even = np.uint32(size >> np.uint32(22)) & np.uint32(1)
            large = (size + np.uint32(0x1FFFFF) + even - np.uint32(126 << 23)) >> np.uint32(22)
            code = small if size < np.uint32(0x3F800000) else large
            row[j] = np.uint8(code | sign)
        for j in range(columns // 2):
            codes[i, j] = np.uint8((pairs[j] & np.uint16(0x0F)) | (pairs[j] >> np.uint16(4)))
    return bool(odd != 0)

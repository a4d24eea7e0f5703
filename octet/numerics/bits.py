"""Converts bit patterns: bfloat16, E5M2 as the top byte of a half, two E2M1 codes per byte.

Unlike the rounding in `octet.numerics.formats`, no function here needs a table.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "bf16_to_float32",
    "e5m2_to_float16",
    "float32_to_bf16",
    "pack_e2m1",
    "unpack_e2m1",
]


def bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Converts bfloat16 bit patterns (uint16, any shape) to float32, exactly."""
    return np.left_shift(bits, np.uint32(16), dtype=np.uint32).view(np.float32)


def float32_to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds `x` to bfloat16 bit patterns, to nearest even; overflow gives Inf as in IEEE 754.

    A NaN keeps its sign and its upper bits and becomes quiet.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits  # a NaN may wrap around here; it is replaced below
    rounded >>= 16
    result = rounded.astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        result[nan] = (bits[nan] >> 16) | 0x0040
    return result.reshape(np.shape(x))


def e5m2_to_float16(
    codes: NDArray[np.uint8], out: NDArray[np.float16] | None = None
) -> NDArray[np.float16]:
    """Converts E5M2 codes to float16, exactly, into `out` if given.

    An E5M2 code is the top byte of a half. `codes` and `out` have the same shape and any strides,
    so they may be slices of a cache.
    """
    if out is None:
        out = np.empty(codes.shape, np.float16)
    np.left_shift(codes, np.uint16(8), out=out.view(np.uint16), dtype=np.uint16)
    return out


def pack_e2m1(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Packs E2M1 codes two per byte on the last axis, first in the low nibble: [..., K/2]."""
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack {codes.shape[-1]} E2M1 codes two a byte: odd last axis")
    packed: NDArray[np.uint8] = codes[..., 1::2] << np.uint8(4)
    packed |= codes[..., 0::2]
    return packed


def unpack_e2m1(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpacks [..., K/2] bytes to [..., K] codes; the inverse of `pack_e2m1`."""
    codes: NDArray[np.uint8] = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    np.bitwise_and(packed, 0x0F, out=codes[..., 0::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes

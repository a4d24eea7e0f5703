"""Quantize and dequantize per tensor, channel, token, block or group: pure functions.

A scale is a factor: `real = stored * scale`. Each tile of the tensor shares one scale:

| granularity | tile       | tensor   | scale, float32     | used for                           |
|-------------|------------|----------|--------------------|------------------------------------|
| TENSOR      | all of it  | any      | []                 | static weights and activations     |
| CHANNEL     | 1 by K     | [N, K]   | [N, 1]             | weights, one per output            |
| TOKEN       | 1 by K     | [..., K] | [..., 1]           | activations, at run time           |
| BLOCK       | 128 by 128 | [N, K]   | [⌈N/128⌉, ⌈K/128⌉] | weights, DeepSeek's block format   |
| group(g)    | 1 by g     | [..., K] | [..., ⌈K/g⌉]       | FP4 weights, block FP8 activations |

CHANNEL and BLOCK accept leading axes (experts), each with its own scales. Tiles at the edge of a
tensor are smaller if its size is not a multiple of the tile's.

The arithmetic is ONNX QuantizeLinear's (`saturate=1`), bit for bit: the input in float32 is divided
by the scale (not multiplied by its reciprocal, which rounds differently), then rounded to nearest
even and saturated by `formats.encode`. Dequantizing is one float32 product, as in DequantizeLinear.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from octet.errors import NumericsError
from octet.numerics.formats import Codes, Float32Array, Format, decode, encode, round_to

__all__ = [
    "BLOCK",
    "CHANNEL",
    "TENSOR",
    "TOKEN",
    "Granularity",
    "absmax",
    "checked_absmax",
    "dequantize",
    "fake_quantize",
    "group",
    "quantize",
    "scale_from_absmax",
]

FloatArray: TypeAlias = NDArray[np.floating[Any]]
Scalar = TypeVar("Scalar", bound=np.generic)
Result = TypeVar("Result", bound=np.generic)

_SLAB = 1 << 16  # elements per step, so that the temporaries stay in the L2 cache


@dataclass(frozen=True)
class Granularity:
    """The tiles whose elements share a scale: `rows` by `columns`, None for the whole axis."""

    name: Literal["tensor", "channel", "token", "block", "group"]
    rows: int | None
    columns: int | None

    @classmethod
    def of(cls, name: str, group_size: int | None = None) -> Self:
        """Returns the named granularity; `group_size` is a block's edge or a group's size."""
        if name == "tensor":
            return cls("tensor", None, None)
        if name == "channel":
            return cls("channel", 1, None)
        if name == "token":
            return cls("token", 1, None)
        if group_size is None or group_size < 1:
            raise ValueError(f"granularity '{name}' needs a group_size of at least 1")
        if name == "block":
            return cls("block", group_size, group_size)
        if name == "group":
            return cls("group", 1, group_size)
        raise ValueError(f"unknown granularity '{name}'")

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the scales' shape for a tensor of `shape`; ValueError if it has too few axes."""
        if self.rows is None:
            return ()
        least = 1 if self.name in ("token", "group") else 2
        if len(shape) < least:
            raise ValueError(f"{self.name} scales need at least {least} axes, not shape {shape}")
        columns = 1 if self.columns is None else -(-shape[-1] // self.columns)
        if self.rows == 1:
            return (*shape[:-1], columns)
        return (*shape[:-2], -(-shape[-2] // self.rows), columns)


TENSOR = Granularity.of("tensor")
CHANNEL = Granularity.of("channel")
TOKEN = Granularity.of("token")
BLOCK = Granularity.of("block", 128)


def group(size: int) -> Granularity:
    """Returns groups of `size` consecutive elements on the last axis (16 for NVFP4, 32 for MX)."""
    return Granularity.of("group", size)


def absmax(x: FloatArray, granularity: Granularity, *, name: str | None = None) -> Float32Array:
    """Returns each tile's largest magnitude, in the shape of the scales; 0 for an empty tile.

    NumericsError, naming the tensor if `name` is given, if any element is NaN or Inf.
    """
    amax = _absmax(x, granularity)
    if not np.isfinite(amax).all():
        raise _not_finite(x, name)
    return amax


def checked_absmax(amax: FloatArray) -> Float32Array:
    """Returns `amax` in float32. NumericsError unless it is finite and not negative."""
    amax = np.asarray(amax, np.float32)
    if not (np.isfinite(amax) & (amax >= 0)).all():
        raise NumericsError("amax must be finite and not negative: its tensor holds NaN or Inf")
    return amax


def scale_from_absmax(amax: FloatArray, fmt: Format) -> Float32Array:
    """Returns the scale that maps `amax` to the largest value of `fmt`: amax / fmt.max, float32.

    A tile of zeros gets 1.0, which is safe to invert and to multiply by. No scale is below 2^-126,
    the smallest normal float32, so no kernel flushes it to zero and its reciprocal is finite.
    NumericsError unless `amax` is finite and not negative.
    """
    amax = checked_absmax(amax)
    scale = np.maximum(amax / np.float32(fmt.max), np.finfo(np.float32).tiny)
    return np.where(amax == 0, np.float32(1), scale)


def quantize(
    x: FloatArray,
    scale: FloatArray,
    fmt: Format,
    granularity: Granularity,
    *,
    name: str | None = None,
) -> Codes:
    """Returns codes of `x / scale`, in the shape of `x`; `scale` has `granularity.scale_shape`.

    Values beyond `fmt.max * scale` saturate. NumericsError, naming the tensor if `name` is given,
    for NaN or Inf in `x` and for a scale that is not positive and finite.
    """
    _require_finite(x, name)
    codes = np.empty(x.shape, np.uint8)
    for part, scales, result in _slabs(x, scale, codes, granularity, name):
        result[...] = encode(_divide(part, scales), fmt)
    return codes


def dequantize(
    codes: Codes,
    scale: FloatArray,
    fmt: Format,
    granularity: Granularity,
    *,
    name: str | None = None,
) -> Float32Array:
    """Returns `decode(codes) * scale`, float32; `codes` are one per element, not packed."""
    real = np.empty(codes.shape, np.float32)
    for part, scales, result in _slabs(codes, scale, real, granularity, name):
        np.multiply(decode(part, fmt), scales, out=result)
    return real


def fake_quantize(
    x: FloatArray,
    scale: FloatArray,
    fmt: Format,
    granularity: Granularity,
    *,
    name: str | None = None,
) -> Float32Array:
    """Returns `dequantize(quantize(x))` in one pass, without storing codes."""
    _require_finite(x, name)
    real = np.empty(x.shape, np.float32)
    for part, scales, result in _slabs(x, scale, real, granularity, name):
        np.multiply(round_to(_divide(part, scales), fmt), scales, out=result)
    return real


def _divide(part: FloatArray, scales: Float32Array) -> Float32Array:
    with np.errstate(over="ignore"):  # an overflow to Inf saturates
        return part.astype(np.float32, copy=False) / scales


def _absmax(x: FloatArray, granularity: Granularity) -> Float32Array:
    """Returns each tile's largest magnitude, or NaN if the tile holds one."""
    if x.dtype == np.float16:  # numpy compares halves slowly; their bits order the same way
        bits = _reduce(np.maximum, x.view(np.uint16) & 0x7FFF, granularity)
        return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        highest = _reduce(np.maximum, x, granularity)  # two reductions need no copy of |x|
        lowest = _reduce(np.minimum, x, granularity)
        return np.asarray(np.abs(np.maximum(highest, -lowest)), np.float32)  # abs: 0, not -0


def _reduce(ufunc: np.ufunc, x: NDArray[Any], granularity: Granularity) -> Any:
    """Reduces each tile by `ufunc`, to the shape of the scales."""
    granularity.scale_shape(x.shape)  # raises ValueError for too few axes
    if granularity.rows is None:
        return ufunc.reduce(x, axis=None, initial=0)
    if granularity.rows > 1:  # rows first: whole rows are contiguous
        x = ufunc.reduceat(x, np.arange(0, x.shape[-2], granularity.rows), axis=-2)
    if granularity.columns is None:
        return ufunc.reduce(x, axis=-1, keepdims=True, initial=0)
    return ufunc.reduceat(x, np.arange(0, x.shape[-1], granularity.columns), axis=-1)


def _slabs(
    x: NDArray[Scalar],
    scale: FloatArray,
    out: NDArray[Result],
    granularity: Granularity,
    name: str | None,
) -> Iterator[tuple[NDArray[Scalar], Float32Array, NDArray[Result]]]:
    """Yields parts of whole rows of `x`, with broadcastable scales and the matching part of `out`.

    `out` is contiguous and has the shape of `x`.
    """
    scale = np.asarray(scale, np.float32)
    expected = granularity.scale_shape(x.shape)
    if scale.shape != expected and not (expected == () and scale.shape == (1,)):
        raise ValueError(
            f"{_called(name)}: {granularity.name} scales of a tensor {list(x.shape)} have shape "
            f"{list(expected)}, not {list(scale.shape)}"
        )
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise NumericsError(f"{_called(name)} has a scale that is not positive and finite")
    if not x.size:
        return
    # As [matrices, height, columns]: only BLOCK tiles span several rows.
    tile_rows = granularity.rows or 1
    columns = x.shape[-1] if x.ndim else 1
    height = x.shape[-2] if tile_rows > 1 else x.size // columns
    tensors = x.reshape(-1, height, columns)
    results = out.reshape(tensors.shape)
    scales = scale.reshape(len(tensors), -1, expected[-1]) if expected else scale.reshape(1, 1, 1)
    step = tile_rows if tile_rows > 1 else max(1, _SLAB // columns)
    for tensor, tensor_scales, result in zip(tensors, scales, results, strict=True):
        for start in range(0, height, step):
            part = slice(start, start + step)
            own = tensor_scales
            if expected:  # one row of scales per row of the part, or per row of blocks
                own = own[start // tile_rows : (start + step) // tile_rows]
            if granularity.columns is not None:
                own = own.repeat(granularity.columns, axis=1)[:, :columns]
            yield tensor[part], own, result[part]


def _require_finite(x: FloatArray, name: str | None) -> None:
    if not np.isfinite(_absmax(x, TENSOR)):
        raise _not_finite(x, name)


def _not_finite(x: FloatArray, name: str | None) -> NumericsError:
    nans, infs = int(np.isnan(x).sum()), int(np.isinf(x).sum())
    return NumericsError(
        f"{_called(name)} holds {nans} NaN and {infs} Inf among {x.size} values, and no scale "
        "can be right for it: the checkpoint must be repaired"
    )


def _called(name: str | None) -> str:
    return f"tensor '{name}'" if name else "the tensor"

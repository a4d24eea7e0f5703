"""Quantizes and dequantizes in torch, on any device, at memory speed.

Equals `octet.numerics.scaling` and `octet.numerics.microscaling` to the bit and shares their
conventions: `real = stored * scale [* global_scale]`, everything in float32, the input divided by
its scale, rounded to nearest even and saturated. A NaN stays a NaN, even if the format has none.

Gradients pass straight through: that of an input is that of its rounded value (Bengio et al.,
"Estimating or Propagating Gradients Through Stochastic Neurons", 2013).
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec

import torch
from torch import Tensor
from torch.nn.functional import pad

from octet.numerics.formats import E4M3, E5M2, FORMATS, Format
from octet.recipe import KvCacheDtype, TensorScheme

__all__ = ["fake_quantize", "power_scales", "round_cache", "round_to"]

P = ParamSpec("P")

_EXPONENT = 0x7F800000  # the exponent bits of a float32: alone, they are 2^floor(log2|x|)
_TINY = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max
_CACHE = {"e4m3": E4M3, "e5m2": E5M2}
_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


def _straight_through(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Makes a rounding function pass gradients to its first argument unchanged."""

    @wraps(function)
    def rounding(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        x = args[0]
        if not (isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()):
            return function(*args, **kwargs)
        with torch.no_grad():
            rounded = function(*args, **kwargs)
        return rounded + (x - x.detach())  # the value of `rounded`, with the gradient of `x`

    return rounding


@_straight_through
def fake_quantize(
    x: Tensor,
    scheme: TensorScheme,
    scale: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Returns `x` [..., K] as `scheme` stores it and a kernel reads it back.

    The result is a copy of the same shape and dtype. `scale` is float32: [], [N, 1], [⌈N/128⌉,
    ⌈K/128⌉] or [N, ⌈K/g⌉]; None computes it from `x`, as a dynamic scheme does. `global_scale` []
    is that of two-level schemes. In bfloat16 the product of code and scale is rounded to bfloat16
    once more.
    """
    fmt, size = FORMATS[scheme.format], scheme.group_size
    if size is None:
        if x.is_cuda and (round_rows := _on_gpu()) is not None:
            return round_rows(x, fmt, scale)
        real = x.float()
        if scale is None:
            scale = _absmax_scale(real.abs().amax(-1, keepdim=True), fmt)
        return round_to(real / scale, fmt).mul_(scale).to(x.dtype)
    real, columns = x.float(), x.shape[-1]
    short = -columns % size  # missing from a whole group, filled with zeros
    tiles = (pad(real, (0, short)) if short else real).reshape(*x.shape[:-1], -1, size)
    if scale is None:
        scale = _group_scales(tiles.abs().amax(-1), scheme, fmt, global_scale)
    elif scheme.granularity == "block":  # from one row of scales per row of blocks
        scale = scale.repeat_interleave(size, 0)[: x.shape[-2]]
    if global_scale is not None:  # dividing by this makes a group of scale 0 zero
        scale = torch.where(scale == 0, _LARGEST, scale * global_scale)
    scale = scale.unsqueeze(-1)
    rounded = round_to(tiles / scale, fmt).mul_(scale).flatten(-2)
    return rounded[..., :columns].to(x.dtype)


def fake_quantize_learned(
    x: Tensor, scheme: TensorScheme, scale: Tensor, global_scale: Tensor | None = None
) -> Tensor:
    """Does what `fake_quantize` does, with gradients of `scale` too, by LSQ's formula.

    The gradient of a rounded value by its scale is code - x / scale, or for a value that saturates
    the code (Esser et al., "Learned Step Size Quantization", arXiv 1902.08153).
    """
    rounded = fake_quantize(x, scheme, scale.detach(), global_scale)
    if not torch.is_grad_enabled():
        return rounded
    each = _per_element(scale, scheme, x.shape)
    with torch.no_grad():
        real = each if global_scale is None else each * global_scale
        inside = x.abs() <= FORMATS[scheme.format].max * real
        slope = (rounded - x.where(inside, 0.0)) / each
    return rounded + slope * (each - each.detach())  # the value of `rounded`, and a gradient


def _per_element(scale: Tensor, scheme: TensorScheme, shape: torch.Size) -> Tensor:
    """Repeats the scales of groups or blocks until there is one for each element [N, K]."""
    if scheme.group_size is None:
        return scale
    if scheme.granularity == "block":
        scale = scale.repeat_interleave(scheme.group_size, 0)[: shape[0]]
    return scale.repeat_interleave(scheme.group_size, 1)[:, : shape[1]]


@_straight_through
def round_cache(
    x: Tensor,
    kv_cache: KvCacheDtype,
    scale: Tensor,
    *,
    toward_zero: bool = False,
    reread: bool = False,
) -> Tensor:
    """Returns keys or values `x`, of any shape, as read back from a cache with `scale` [].

    `toward_zero` is how vLLM's CPU build writes an FP8 cache; everything else rounds to nearest.
    `reread` interprets the bytes as the other FP8 format: E4M3 values of 384 and more become Inf or
    NaN.
    """
    if kv_cache == "float16":
        limit = torch.finfo(torch.float16).max
        return (x.float() / scale).clamp_(-limit, limit).half().float().mul_(scale).to(x.dtype)
    rounded = round_to(x.float() / scale, _CACHE[kv_cache], toward_zero=toward_zero)
    if reread:
        written, read = _BYTES if kv_cache == "e4m3" else _BYTES[::-1]
        rounded = rounded.to(written).view(read).float()
    return rounded.mul_(scale).to(x.dtype)


def round_to(x: Tensor, fmt: Format, *, toward_zero: bool = False) -> Tensor:
    """Rounds float32 `x` to the nearest values of `fmt`, ties to even, saturating; overwrites `x`.

    `toward_zero` rounds to the nearest values that are no larger in magnitude instead.

    The step between values around x is 2^(floor(log2|x|) - mantissa bits), at least that of the
    subnormals. Dividing by a power of two and multiplying by it are exact, so the only rounding is
    that to an integer. On a CPU this is 7 times as fast as torch's own cast to E4M3; a GPU casts in
    one kernel.
    """
    x = x.clamp_(-fmt.max, fmt.max)
    if x.is_cuda and not toward_zero and fmt.torch_name in ("float8_e4m3fn", "float8_e5m2"):
        return x.copy_(x.to(getattr(torch, fmt.torch_name)))
    step = (x.view(torch.int32) & _EXPONENT).view(torch.float32)
    step = step.clamp_(min=fmt.smallest_normal).mul_(2.0**-fmt.mantissa_bits)
    x = x.div_(step)
    return (x.trunc_() if toward_zero else x.round_()).mul_(step)


@cache
def _on_gpu() -> Callable[[Tensor, Format, Tensor | None], Tensor] | None:
    """Returns `calibrate.decoder.round_rows.round_rows`, or None without Triton."""
    try:
        from calibrate.decoder.round_rows import round_rows
    except ImportError:  # torch's CUDA builds bring it, but not on every system
        return None
    return round_rows


def _absmax_scale(amax: Tensor, fmt: Format) -> Tensor:
    """Computes `octet.numerics.scaling.scale_from_absmax`."""
    # A tensor, since a GPU divides by a number by multiplying by its reciprocal, which rounds
    # differently. Filled on the device: a copy would wait for the GPU.
    scale = (amax / amax.new_full((), fmt.max)).clamp_(min=_TINY)
    return torch.where(amax == 0, 1.0, scale)


def power_scales(amax: Tensor, fmt: Format) -> Tensor:
    """Computes for each magnitude in `amax` the least power of two at which it does not saturate.

    `amax` and the scales are float32, of any shape; scales are in the range of E8M0. In E2M1, a
    magnitude below 7 times the scale does not count as saturated: it becomes 6 times the scale.
    """
    # Above 448/2^8 = 1.75, or at it for E2M1, the addend carries into the exponent.
    bits = amax.view(torch.int32) + (0x1FFFFF if fmt == E4M3 else 0x200000)
    exponent = (bits >> 23) - fmt.emax
    power = (exponent.clamp_(0, 254) << 23).view(torch.float32)
    return power.clamp_(min=2.0**-127)


def _group_scales(
    amax: Tensor, scheme: TensorScheme, fmt: Format, global_scale: Tensor | None
) -> Tensor:
    """Computes run-time scales from the groups' largest magnitudes, as engines do."""
    if scheme.scale_format == "e8m0":
        return power_scales(amax, fmt)
    if scheme.two_level:
        if global_scale is None:
            raise ValueError(f"{scheme.format} with e4m3 scales needs a global scale")
        sixth = amax.new_full((), 1.0) / fmt.max
        return round_to(amax * sixth * (torch.reciprocal(global_scale)), E4M3)
    return _absmax_scale(amax, fmt)

"""Scales of groups, stored in few bits: MX (powers of two) and NVFP4 (two levels).

| scheme | element | group | scale of a group         | global scale, one per tensor      |
|--------|---------|-------|--------------------------|-----------------------------------|
| MXFP8  | E4M3    | 32    | E8M0: 2^-127 … 2^127     | none                              |
| MXFP4  | E2M1    | 32    | E8M0                     | none                              |
| NVFP4  | E2M1    | 16    | E4M3: 0, 2^-9 … 448      | float32, amax / (6 * 448)         |

In memory every scale is a float32 factor, `real = stored * scale [* global_scale]`, whatever format
it is stored in. `combined` returns one factor for both levels, rounded to float32 as in ONNX's two
DequantizeLinear and in vLLM; `scaling.quantize`, `dequantize` and `fake_quantize` take that factor.
Quantizing divides by it. GPU kernels multiply by a reciprocal (an approximate one for NVFP4), so an
element within a unit or two in the last place of a rounding boundary may fall on its other side.

Engines compute these scales for activations at run time, and so does `calibrate.decoder.rounding`;
the rules are those of vLLM 0.32 (mxfp8_utils, mxfp4_utils, nvfp4_emulation_utils), bit for bit up
to 2^127:

- MXFP8: the smallest power of two with which the largest magnitude does not saturate,
  2^ceil(log2(amax/448)), as in ModelOpt. vLLM takes the logarithm in float32, which may round an
  amax within 2^-21 of 448·2^e down to it; no bfloat16 is that close.
- MXFP4: amax is rounded to a power of two, up if it is at least 1.75 times the lower one and down
  otherwise, then divided by 4, as in compressed-tensors. So the element that saturates at 6 is too
  large by a factor of 7/6 at most, not of 8/6 as with OCP's rule.
- NVFP4: E4M3(amax/6 / global_scale), the quotients as products with float32 reciprocals. A group
  below 2^-10 of the range gets scale 0, and its elements become 0.
"""

import numpy as np

from octet.errors import NumericsError
from octet.numerics import formats
from octet.numerics.formats import E4M3, Float32Array, Format
from octet.numerics.scaling import FloatArray, checked_absmax

__all__ = ["LEAST_E4M3", "combined", "global_scale", "power_of_two_scales"]

LEAST_E4M3 = float(formats.grid(E4M3)[1])  # 2^-9, the smallest group scale that is not 0
_LEAST_GLOBAL = 2.0**-117  # times LEAST_E4M3 it is the smallest normal float32
_FLOAT32_MAX = np.finfo(np.float32).max


def global_scale(amax: float, fmt: Format, *, largest: float = E4M3.max) -> Float32Array:
    """Returns the global scale [] of a tensor with largest magnitude `amax`.

    It is amax / (fmt.max * largest), where `largest` is the scale of the group that holds that
    magnitude: 448 by default, which uses all of E4M3. A tensor of zeros gets 1.0. NumericsError
    unless `amax` is finite and not negative.
    """
    if not (np.isfinite(amax) and amax >= 0):
        raise NumericsError(f"amax must be finite and not negative, not {amax}")
    if amax == 0:
        return np.asarray(1, np.float32)
    scale = np.float32(amax) / np.float32(fmt.max * largest)
    return np.asarray(max(scale, np.float32(_LEAST_GLOBAL)), np.float32)


def power_of_two_scales(amax: FloatArray, fmt: Format) -> Float32Array:
    """Computes E8M0 scales of groups with largest magnitude `amax`, for E4M3 or E2M1 elements.

    Follows the engines' rule, see above. A group of zeros gets 2^-127. NumericsError for a NaN or
    Inf.
    """
    amax = checked_absmax(amax)
    fraction, exponent = np.frexp(amax)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
    # 448 is 0.875 * 2^9, and 1.75 is 0.875 * 2: both formats round up from there.
    up = fraction > 0.875 if fmt == E4M3 else fraction >= 0.875
    power = exponent.astype(np.int32) - 1 - fmt.emax + up
    power = np.where(amax == 0, -127, np.clip(power, -127, 127))
    return np.ldexp(np.float32(1), power).astype(np.float32)


def combined(scale: FloatArray, global_scale: FloatArray | None) -> Float32Array:
    """Returns the positive float32 factor of both levels: scale * global_scale.

    If a group's scale is 0, the factor is the largest float32: elements divided by it round to 0.
    """
    scale = np.asarray(scale, np.float32)
    if global_scale is None:
        return scale
    product = scale * np.asarray(global_scale, np.float32)
    return np.where(scale == 0, _FLOAT32_MAX, product)

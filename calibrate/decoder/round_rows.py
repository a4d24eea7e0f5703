"""Rounds the rows of a matrix by their scales in one pass over a GPU's memory, in Triton.

torch's operators pass over it a dozen times, and rounding the inputs of a linear takes as long as
the linear itself. The arithmetic is that of `calibrate.decoder.rounding`, to the bit.
"""

# Triton compiles the function from its source; its arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from octet.numerics.formats import Format

__all__ = ["round_rows"]

_BLOCK = 4096  # elements of a row that are rounded at a time


@triton.jit
def _kernel(
    x,  # [rows, columns]
    out,
    scales,  # float32 [] or [rows], where GIVEN
    columns,
    scale_stride,
    largest,
    smallest,
    step,
    tiny,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * columns
    out += row * columns
    offsets = tl.arange(0, BLOCK)
    if GIVEN:
        scale = tl.load(scales + row * scale_stride)
    else:
        peak = tl.zeros([BLOCK], tl.int32)  # bits of magnitudes are ordered as these, NaN is last
        for first in range(0, columns, BLOCK):
            at = first + offsets
            value = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
            peak = tl.maximum(peak, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        amax = tl.max(peak, 0).to(tl.float32, bitcast=True)
        scale = tl.div_rn(amax, largest)
        scale = tl.maximum(scale, tiny, propagate_nan=tl.PropagateNan.ALL)
        scale = tl.where(amax == 0, 1.0, scale)
    for first in range(0, columns, BLOCK):
        at = first + offsets
        value = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
        code = tl.div_rn(value, scale + tl.zeros([BLOCK], tl.float32))
        code = tl.minimum(code, largest, propagate_nan=tl.PropagateNan.ALL)
        code = tl.maximum(code, -largest, propagate_nan=tl.PropagateNan.ALL)
        # The step between values is 2^(floor(log2|x|) - mantissa bits), see `round_to`.
        power = (code.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        unit = tl.maximum(power, smallest) * step
        code = libdevice.rint(tl.div_rn(code, unit)) * unit
        tl.store(out + at, (code * scale).to(out.dtype.element_ty), mask=at < columns)


def round_rows(x: torch.Tensor, fmt: Format, scale: torch.Tensor | None) -> torch.Tensor:
    """Returns `x` [..., K], on a GPU, rounded to `fmt` with `scale`, float32 [] or [N, 1].

    None gives each row the scale amax / fmt.max. The result is a copy of the same shape and dtype.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        with torch.cuda.device(x.device):
            _kernel[(x.numel() // x.shape[-1],)](
                x,
                out,
                x if scale is None else scale.contiguous(),
                x.shape[-1],
                0 if scale is None or scale.numel() == 1 else 1,
                fmt.max,
                fmt.smallest_normal,
                2.0**-fmt.mantissa_bits,
                torch.finfo(torch.float32).tiny,
                GIVEN=scale is not None,
                BLOCK=_BLOCK,
                num_warps=8,
            )
    return out

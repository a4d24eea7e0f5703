"""Counts the magnitude codes of some rows of a matrix on a GPU, in one Triton kernel.

A CUDA graph can hold it: how many rows are counted is read from the GPU's memory.
"""

# Triton compiles the function from its source; its arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

__all__ = ["count_rows", "in_order"]

_BLOCK = 1024  # values that a program counts
# Most values have codes that are close to each other. Counters that are close are in one line of
# the cache, which adds to one of them at a time. So code c has counter c * _APART mod 32768.
_APART = 2053


@triton.jit
def _kernel(
    codes,
    counts,
    tokens,
    stride,
    width,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    APART: tl.constexpr,
):
    total = tl.load(tokens)
    row = tl.program_id(0) * tl.cdiv(total, MOST)
    if row < total:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        code = tl.load(codes + row.to(tl.int64) * stride + at, mask=inside, other=0)
        ones = tl.full([BLOCK], 1, tl.int64)
        place = (code.to(tl.int32) * APART) & 0x7FFF
        tl.atomic_add(counts + place, ones, mask=inside, sem="relaxed")


def count_rows(x: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor, most: int) -> None:
    """Adds to `counts` how often each magnitude code occurs in up to `most` rows of `x`.

    `x` is float16 or bfloat16 [N, ...], `counts` int64 [32768], see `in_order`, and `tokens` int32
    [1], all on one GPU. Of the first `tokens` rows of `x`, evenly spaced ones are counted.
    """
    codes = x.reshape(len(x), -1).view(torch.int16)
    width = codes.shape[1]
    grid = (min(len(codes), most), triton.cdiv(width, _BLOCK))
    _kernel[grid](
        codes, counts, tokens, codes.stride(0), width, MOST=most, BLOCK=_BLOCK, APART=_APART
    )


def in_order(counts: torch.Tensor) -> torch.Tensor:
    """Sorts `counts` [..., 32768], as `count_rows` leaves them, by code."""
    places = torch.arange(counts.shape[-1], device=counts.device) * _APART % counts.shape[-1]
    return counts[..., places]

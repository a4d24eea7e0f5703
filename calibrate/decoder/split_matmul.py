"""Multiplies float32 matrices on a GPU's BF16 tensor cores, as exactly as in float32.

A float32 value is the exact sum of three BF16 values, each of which takes the next 8 of its 24
bits. The product of two BF16 values is exact in float32, in which tensor cores add. So activations
times a BF16 weight are three BF16 GEMMs, and times a float32 weight six: the other three have
products below 2^-24 of the result. Both take less time than cuBLAS's float32 GEMM, and a BF16
weight need not be converted. TF32, in contrast, keeps 11 of 24 bits.

Tensor cores truncate their sums, which adds up over a long row, so sums of `_TERMS` products are
added in float32. `benchmarks/split_matmul.py` compares errors and times with cuBLAS.
Source: Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations" (2019).
"""

import torch
from torch import Tensor

__all__ = ["split", "split_linear"]

PARTS = 3
_TERMS = 2048  # of a sum in a tensor core
_FEW = 1024  # rows whose parts are multiplied in one GEMM, which reads the weights once


def split(x: Tensor) -> list[Tensor]:
    """Returns three bfloat16 tensors whose sum is the float32 `x`, the largest first.

    Exact for finite magnitudes from 2^-110 to the largest of BF16.
    """
    parts, rest = [], x
    for _ in range(PARTS):
        part = rest.bfloat16()
        parts.append(part)
        rest = rest - part.float()
    return parts


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `torch.nn.functional.linear` of a float32 `x` [..., K]; returns float32 [..., N].

    `weight` [N, K] is bfloat16 or float32, `bias` float32 [N].
    """
    rows = x.reshape(-1, x.shape[-1])
    weights = [weight] if weight.dtype == torch.bfloat16 else split(weight)
    found = rows.new_zeros(len(rows), len(weight))
    parts = split(rows)
    for start in range(0, x.shape[-1], _TERMS):
        terms = slice(start, start + _TERMS)
        for number in reversed(range(len(weights))):  # small products first
            ours = [part[:, terms] for part in parts[: PARTS - number]][::-1]
            factor = weights[number][:, terms].T
            if len(rows) <= _FEW:
                found += _product(torch.cat(ours), factor).view(len(ours), *found.shape).sum(0)
            else:
                for part in ours:
                    found += _product(part, factor)
    if bias is not None:
        found += bias
    return found.view(*x.shape[:-1], len(weight))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the float32 product of two bfloat16 matrices."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()

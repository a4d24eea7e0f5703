"""Multiplies float32 matrices on a GPU's BF16 tensor cores, as exactly as in float32.

A float32 value is the exact sum of three BF16 values, each of which takes the next 8 of its 24
bits. The product of two BF16 values is exact in float32, in which tensor cores add. So activations
times a BF16 weight are three BF16 GEMMs, and times a float32 weight six: the other three have
products below 2^-24 of the result. Both take less time than cuBLAS's float32 GEMM, and a BF16
weight need not be converted. TF32, in contrast, keeps 11 of 24 bits.

Tensor cores truncate their sums, which adds up over a long row. So the largest products are summed
`_TERMS` at a time, and these sums added in float32. `benchmarks/split_matmul.py` compares errors
and times with cuBLAS.
Source: Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations" (2019).
"""

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["split", "split_linear"]

PARTS = 3
_TERMS = 1024  # of a sum in a tensor core
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
    if weight.dtype == torch.float32 and len(rows) <= _FEW:  # splitting it would take longer
        return functional.linear(x, weight, bias)
    weights = [weight] if weight.dtype == torch.bfloat16 else split(weight)
    parts = split(rows)
    found = rows.new_zeros(len(rows), len(weight))
    for number in reversed(range(len(weights))):  # small products first
        ours, factor = parts[number == 0 : PARTS - number], weights[number].T
        if len(rows) <= _FEW and ours:
            found += _product(torch.cat(ours), factor).view(len(ours), *found.shape).sum(0)
        else:
            for part in reversed(ours):
                _add_product(found, part, factor)
    found += _in_groups(parts[0], weights[0])
    if bias is not None:
        found += bias
    return found.view(*x.shape[:-1], len(weight))


def _in_groups(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the product [M, N] of `x` [M, K] and `weight` [N, K], `_TERMS` products at a time."""
    count, terms = x.shape
    groups = terms // _TERMS
    if count <= _FEW and terms == groups * _TERMS:  # in one GEMM, because launches take longer
        a = x.view(count, groups, _TERMS).transpose(0, 1)
        b = weight.reshape(-1, groups, _TERMS).permute(1, 2, 0)
        return _product(a, b).sum(0)
    found = _product(x[:, :_TERMS], weight[:, :_TERMS].T)
    for start in range(_TERMS, terms, _TERMS):
        some = slice(start, start + _TERMS)
        _add_product(found, x[:, some], weight[:, some].T)
    return found


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the float32 product of two bfloat16 matrices, or of two batches of them."""
    if a.is_cuda:
        return (torch.bmm if a.dim() > 2 else torch.mm)(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds the float32 product of two bfloat16 matrices to `total`; on a GPU in the same kernel."""
    if a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a.float() @ b.float()

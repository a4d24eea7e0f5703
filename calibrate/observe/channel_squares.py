"""Sums the squares of each channel of linears' inputs: the diagonal of XᵀX.

An error in column j of a weight reaches the output times x_j. If channels are uncorrelated, the
expected squared error of the output is Σ_j E[x_j²] · Σ_n error_nj². E[x_j²] is the diagonal of the
Hessian E[xxᵀ] of layer-wise quantization (OBC, arXiv 2208.11580; GPTQ, arXiv 2210.17323).
`calibrate.scales.weights` searches the scales of 4-bit weights by it.

Each batch's sums are float32 and are added in float64. Adding 2^9 of them is exact if they differ
by less than 2^20, so that the order of batches makes no difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ChannelSquares", "SumOfSquares"]

_BLOCK = 1 << 16  # elements that a CPU squares at a time, which stay in its cache


@dataclass(frozen=True)
class SumOfSquares:
    """The sums of squares of each channel, float64 [K], over a number of tokens."""

    sums: NDArray[np.float64]
    tokens: int

    def __add__(self, other: Self) -> "SumOfSquares":
        return SumOfSquares(self.sums + other.sums, self.tokens + other.tokens)

    def mean(self) -> NDArray[np.float32]:
        return (self.sums / self.tokens).astype(np.float32)


class ChannelSquares:
    """Sums the squares of tensors, by slot, on their device."""

    def __init__(self) -> None:
        self._parts: dict[int, list[torch.Tensor]] = {}  # float32 [K], one for each tensor
        self._tokens: dict[int, int] = {}

    def add(self, slot: int, x: torch.Tensor, lengths: Sequence[int] | None = None) -> None:
        """Adds the first `lengths[b]` rows of each `x[b]`, `x` [B, T, K]; all of [n, K] for None.

        The work may still be running on a GPU when this returns.
        """
        tokens = len(x) if lengths is None else sum(lengths)
        if lengths is not None:
            x = _without_padding(x, lengths).reshape(-1, x.shape[-1])
        self._parts.setdefault(slot, []).append(_on_gpu(x) if x.is_cuda else _on_cpu(x))
        self._tokens[slot] = self._tokens.get(slot, 0) + tokens

    def sums(self) -> dict[int, SumOfSquares]:
        """Returns the sums of every slot that was added to, on the host."""
        return {
            slot: SumOfSquares(torch.stack(parts).double().sum(0).cpu().numpy(), self._tokens[slot])
            for slot, parts in self._parts.items()
        }

    def clear(self) -> None:
        self._parts.clear()
        self._tokens.clear()


def _without_padding(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Returns `x` with zeros as padding."""
    if min(lengths) == x.shape[1]:
        return x
    x = x.clone()
    for row, length in zip(x, lengths, strict=True):
        row[length:] = 0
    return x


def _on_gpu(rows: torch.Tensor) -> torch.Tensor:
    """Sums squares in one kernel: torch's norm converts 16-bit values as it reads them."""
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float32)
    return norms.square_()


def _on_cpu(rows: torch.Tensor) -> torch.Tensor:
    total = rows.new_zeros(rows.shape[1], dtype=torch.float64)
    for part in torch.split(rows, max(1, _BLOCK // rows.shape[1])):
        total += part.float().square().sum(0)
    return total.float()

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

from calibrate.observe.compiled import compiled

__all__ = ["ChannelSquares", "SumOfSquares"]

_ROWS = 64  # that a CPU adds in float32


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
        if lengths is None:
            x, lengths = x[None], [len(x)]
        self._parts.setdefault(slot, []).append((_on_gpu if x.is_cuda else _on_cpu)(x, lengths))
        self._tokens[slot] = self._tokens.get(slot, 0) + sum(lengths)

    def sums(self) -> dict[int, SumOfSquares]:
        """Returns the sums of every slot that was added to, on the host."""
        return {
            slot: SumOfSquares(torch.stack(parts).double().sum(0).cpu().numpy(), self._tokens[slot])
            for slot, parts in self._parts.items()
        }

    def clear(self) -> None:
        self._parts.clear()
        self._tokens.clear()


def _on_gpu(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Sums squares in one kernel: torch's norm converts 16-bit values as it reads them."""
    if min(lengths) < x.shape[1]:
        x = x.clone()
        for row, length in zip(x, lengths, strict=True):
            row[length:] = 0
    rows = x.reshape(-1, x.shape[-1])
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float32)
    return norms.square_()


def _on_cpu(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    x = x.float() if x.dtype == torch.float16 else x
    sums = np.zeros(x.shape[-1])
    for row, length in zip(x, lengths, strict=True):
        real = row[:length].contiguous()
        if x.dtype == torch.bfloat16:
            _add_bf16(real.view(torch.int16).numpy().view(np.uint16), sums)
        else:
            _add_float32(real.numpy(), sums)
    return torch.from_numpy(sums.astype(np.float32))


# Both add the squares of each column of `x` [n, K] to `sums` [K], through float32 sums of few rows.


@compiled
def _add_bf16(x: NDArray[np.uint16], sums: NDArray[np.float64]) -> None:
    few = np.zeros(sums.size, np.float32)
    for start in range(0, len(x), _ROWS):
        few[:] = 0
        for row in x[start : start + _ROWS]:
            for k in range(sums.size):
                value = np.uint32(np.uint32(row[k]) << np.uint32(16)).view(np.float32)
                few[k] += value * value
        for k in range(sums.size):
            sums[k] += few[k]


@compiled
def _add_float32(x: NDArray[np.float32], sums: NDArray[np.float64]) -> None:
    few = np.zeros(sums.size, np.float32)
    for start in range(0, len(x), _ROWS):
        few[:] = 0
        for row in x[start : start + _ROWS]:
            for k in range(sums.size):
                few[k] += row[k] * row[k]
        for k in range(sums.size):
            sums[k] += few[k]

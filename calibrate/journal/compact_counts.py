"""Keeps histograms by name in little memory.

A tensor's magnitudes span 20 octaves or so and leave most of the 32,768 bins empty, but a model
with experts has more than ten thousand tensors. Their counts are therefore kept as the bins that
occur, in the smallest integers that hold them, and become arrays again one at a time, on access.
"""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.calibration import BINS

__all__ = ["CompactCounts"]


@dataclass(frozen=True)
class _Kept:
    shape: tuple[int, ...]
    bins: NDArray[np.uint16]  # [n], those that occur in any chunk, ascending
    counts: NDArray[np.unsignedinteger]  # [..., n]


class CompactCounts(MutableMapping[str, NDArray[np.int64]]):
    """A dict of counts, int64 [32768] or [chunks, 32768].

    Each is copied on writing and on reading, without loss.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    @property
    def nbytes(self) -> int:
        """Memory that the counts take, in bytes."""
        return sum(kept.bins.nbytes + kept.counts.nbytes for kept in self._kept.values())

    def __setitem__(self, name: str, counts: NDArray[np.int64]) -> None:
        bins = np.flatnonzero(counts.reshape(-1, BINS).any(axis=0))
        present = counts[..., bins]
        smallest = np.min_scalar_type(int(present.max(initial=0)))
        self._kept[name] = _Kept(counts.shape, bins.astype(np.uint16), present.astype(smallest))

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        kept = self._kept[name]
        counts = np.zeros(kept.shape, np.int64)
        counts[..., kept.bins] = kept.counts
        return counts

    def __delitem__(self, name: str) -> None:
        del self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

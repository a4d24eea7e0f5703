"""The exact distribution of a tensor's magnitudes: one counter per magnitude code."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.calibration import BINS, Observation
from octet.numerics.bits import bf16_to_float32

__all__ = ["SMALL", "CodeDtype", "Histogram", "Histograms", "bin_widths", "magnitudes"]

SMALL = 0.9  # the fraction of the non-zero values, smallest first, that count as small

CodeDtype = Literal["bfloat16", "float16"]


@dataclass(frozen=True)
class Histogram:
    """Counts by magnitude code (see `magnitudes`).

    `counts` is int64[32768]; `counts[c]` elements have magnitude code c. `mean_squares`, float32
    [K], are those of each channel, if they were observed.
    """

    counts: NDArray[np.int64]
    code_dtype: CodeDtype
    mean_squares: NDArray[np.float32] | None = None

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        return int(self.counts[0])

    def finite(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Returns the finite magnitudes that occur, ascending float32[n], and counts int64[n]."""
        return self._finite

    @cached_property
    def _finite(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        counts = self.counts[: _inf_code(self.code_dtype)]
        present = np.flatnonzero(counts)
        return magnitudes(self.code_dtype)[present], counts[present]

    @property
    def absmax(self) -> float:
        """The largest finite magnitude; 0.0 if there is none."""
        values, _ = self.finite()
        return float(values[-1]) if len(values) else 0.0

    def quantile(self, fraction: float) -> float:
        """Returns the least magnitude that at least `fraction` of finite elements do not exceed.

        This is the inverse of the empirical distribution function ("inverted_cdf" in numpy), so it
        is always a magnitude that occurs. It is 0.0 for an empty histogram.
        """
        values, counts = self.finite()
        if not len(values):
            return 0.0
        reached = np.cumsum(counts)
        rank = max(1, int(np.ceil(fraction * int(reached[-1]))))
        return float(values[np.searchsorted(reached, rank)])

    def small_limit(self) -> float:
        """Returns the largest magnitude that is small: the 90 % quantile of the non-zero ones.

        Zeros have no error that could be hidden. If they were counted, they alone would be small in
        an input that is mostly zero, and errors of the other values would not show.
        """
        counts = self.counts.copy()
        counts[0] = 0
        return Histogram(counts, self.code_dtype).quantile(SMALL)


class Histograms(Mapping[str, Histogram]):
    """The histogram of each of `observations`, over all samples, made on access.

    `counts` are int64 [32768] or [chunks, 32768]; `mean_squares` float32 [K] are of some. A model
    with experts has ten thousand histograms, which are not in memory at once.
    """

    def __init__(
        self,
        counts: Mapping[str, NDArray[np.int64]],
        observations: Mapping[str, Observation],
        mean_squares: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    ) -> None:
        self._counts, self._observations = counts, observations
        self._mean_squares = mean_squares

    def __getitem__(self, name: str) -> Histogram:
        code_dtype = self._observations[name].code_dtype
        counts = self._counts[name].reshape(-1, BINS).sum(axis=0)
        return Histogram(counts, code_dtype, self._mean_squares.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._observations)

    def __len__(self) -> int:
        return len(self._observations)


@cache
def magnitudes(code_dtype: CodeDtype) -> NDArray[np.float32]:
    """Returns float32[32768]: the value of each magnitude code, Inf and NaN included; read-only."""
    codes = np.arange(BINS, dtype=np.uint16)
    if code_dtype == "bfloat16":
        values = bf16_to_float32(codes)
    else:
        values = codes.view(np.float16).astype(np.float32)
    values.flags.writeable = False
    return values


@cache
def bin_widths(code_dtype: CodeDtype) -> NDArray[np.float64]:
    """Returns float64[n]: for each finite code, the distance to the next magnitude.

    For the last code, it is the distance to the previous one.
    """
    finite = magnitudes(code_dtype)[: _inf_code(code_dtype)].astype(np.float64)
    gaps = np.diff(finite)
    return np.append(gaps, gaps[-1])


def _inf_code(code_dtype: CodeDtype) -> int:
    return 0x7F80 if code_dtype == "bfloat16" else 0x7C00

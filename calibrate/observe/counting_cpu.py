"""Counts the 32,768 magnitude codes of 16-bit floats exactly, at memory speed on a CPU.

The magnitude code of a BF16 or FP16 number is the 15 bits below its sign, so counting codes keeps
the whole distribution of |x|. A float32 is rounded to BF16 first, to nearest even; a NaN stays a
NaN.

Several techniques make it fast. Each bin has four counters side by side, so that equal neighbours
(zeros, say) do not wait for each other's store. Counters are uint32, flushed into int64 after each
call. Float32 is rounded in blocks that stay in the L1 cache. Each thread has its own counters and
runs with the interpreter lock released. The tensor's own memory is read, and padding is skipped by
reading runs of whole rows.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.observe.channel_squares import ChannelSquares, SumOfSquares
from calibrate.observe.compiled import compiled
from octet.artifacts.calibration import BINS

__all__ = ["Counter", "CpuCounter", "make_counter"]

_LANES = 4
_BLOCK = 2048  # float32 rounded at a time: 4 KB of codes
_LONGEST = 1 << 31  # elements counted between flushes by one thread; a counter holds 2^32 - 1
_WORTHWHILE = 1 << 15  # elements per thread below which more threads do not pay off
_FIRST_SPECIAL = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # code of Inf; NaN above


class Counter(Protocol):
    """int64 histograms of magnitude codes, one per slot, to which tensors are added."""

    def add(
        self,
        slot: int,
        x: torch.Tensor,
        lengths: Sequence[int] | None = None,
        *,
        squares: bool = False,
    ) -> None:
        """Counts the first `lengths[b]` rows of each `x[b]`, `x` [B, T, ...]; all of x for None.

        `x` is bfloat16, float16 or float32 (rounded to bfloat16) and need not be contiguous. With
        `squares`, also sums the squares of each channel of these rows [K]. The work may still be
        running when this returns.
        """

    def beside(self) -> AbstractContextManager[None]:
        """Counts while a model within this context computes, if that is faster.

        Tensors added within the context must not be changed in place before it ends.
        """

    def bad(self) -> Callable[[], list[int]]:
        """Starts to find the slots that hold a NaN or an Inf, without waiting for the result.

        Returns a function that waits for what was added before, and returns their numbers in order.
        """

    def counts(self) -> NDArray[np.int64]:
        """Returns int64 [slots, 32768], on the host, of everything added so far."""

    def squares(self) -> dict[int, SumOfSquares]:
        """Returns the sums of squares by slot."""

    def clear(self) -> None:
        """Zeros every slot."""

    def close(self) -> None:
        """Releases what the counter holds; it cannot count afterwards."""


def make_counter(device: torch.device, slots: int) -> Counter:
    """Returns the counter for tensors on `device`; on a CPU it counts with torch's threads."""
    if device.type == "cuda":
        from calibrate.observe.counting_cuda import CudaCounter

        counter: Counter = CudaCounter(slots, device)
        return counter
    return CpuCounter(slots, torch.get_num_threads())


class CpuCounter:
    """Counts tensors on the CPU with `threads` threads, before `add` returns."""

    def __init__(self, slots: int, threads: int) -> None:
        self._counts = np.zeros((slots, BINS), np.int64)
        self._bad: set[int] = set()
        self._squares = ChannelSquares()
        self._tables = np.zeros((threads, BINS * _LANES), np.uint32)
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "octet-count")
        for dtype in (torch.bfloat16, torch.float32):  # compiles, or loads, both kernels
            self._add(np.zeros(BINS, np.int64), torch.zeros(1, 1, 1, dtype=dtype), [1])

    def add(
        self,
        slot: int,
        x: torch.Tensor,
        lengths: Sequence[int] | None = None,
        *,
        squares: bool = False,
    ) -> None:
        """See `Counter`; `x` is copied only if it is not contiguous."""
        if squares:
            self._squares.add(slot, x, lengths)
        if lengths is None:
            x, lengths = x.reshape(1, 1, -1), [1]
        first_special = _FIRST_SPECIAL.get(x.dtype, 0x7F80)
        before = int(self._counts[slot, first_special:].sum())
        self._add(self._counts[slot], x, lengths)
        if int(self._counts[slot, first_special:].sum()) > before:
            self._bad.add(slot)

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def bad(self) -> Callable[[], list[int]]:
        found = sorted(self._bad)
        return lambda: found

    def counts(self) -> NDArray[np.int64]:
        return self._counts.copy()

    def squares(self) -> dict[int, SumOfSquares]:
        return self._squares.sums()

    def clear(self) -> None:
        self._counts[:] = 0
        self._squares.clear()
        self._bad.clear()

    def close(self) -> None:
        self._pool.shutdown()

    def _add(self, counts: NDArray[np.int64], x: torch.Tensor, lengths: Sequence[int]) -> None:
        bits = _bits(x.contiguous())
        row = bits.size // (x.shape[0] * x.shape[1]) if bits.size else 0
        starts = np.arange(x.shape[0], dtype=np.int64) * (x.shape[1] * row)
        stops = starts + np.asarray(lengths, np.int64) * row
        kernel: Callable[..., None] = _count_rounded if bits.dtype == np.uint32 else _count_codes
        pieces = _split(starts, stops, len(self._tables))
        for start in range(0, len(pieces), len(self._tables)):
            group = pieces[start : start + len(self._tables)]
            jobs = [
                self._pool.submit(kernel, bits, *piece, table)
                for piece, table in zip(group[1:], self._tables[1:], strict=False)
            ]
            kernel(bits, *group[0], self._tables[0])
            for job in jobs:
                job.result()
            for table, _ in zip(self._tables, group, strict=False):
                _flush(table, counts)


def _bits(x: torch.Tensor) -> NDArray[Any]:
    """Returns the memory of a contiguous tensor as flat uint16, or uint32 for float32."""
    flat = x.detach().reshape(-1)
    if x.dtype == torch.float32:
        return flat.numpy().view(np.uint32)
    if x.dtype in (torch.bfloat16, torch.float16):
        return flat.view(torch.int16).numpy().view(np.uint16)
    raise TypeError(f"cannot count {x.dtype}")


def _split(
    starts: NDArray[np.int64], stops: NDArray[np.int64], threads: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Cuts the runs [start, stop) into equal pieces, one per thread and none over the limit."""
    sizes = stops - starts
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    count = max(min(threads, total // _WORTHWHILE), -(-total // _LONGEST), 1)
    cuts = [total * index // count for index in range(count + 1)]
    pieces = []
    for low, high in pairwise(cuts):
        # In the order of the runs, run r covers elements [ends[r] - sizes[r], ends[r]).
        head = np.clip(low - (ends - sizes), 0, sizes)
        tail = np.clip(high - (ends - sizes), 0, sizes)
        some = head < tail
        pieces.append(((starts + head)[some], (starts + tail)[some]))
    return pieces


# In these three, indices are unsigned and arrays are cut to what a loop walks over: otherwise numba
# allows for negative indices at each access, which keeps the compiler from vectorising.


@compiled
def _increment(codes: NDArray[np.uint16], table: NDArray[np.uint32]) -> None:
    """Counts `codes`, ignoring the sign bit, into `table` [32768 x 4 lanes]."""
    mask, one = np.uint16(0x7FFF), np.uint32(1)
    body = len(codes) // 4 * 4
    for i in range(np.uint64(0), np.uint64(body), np.uint64(4)):
        table[np.uint64(codes[i] & mask) * np.uint64(4)] += one
        table[np.uint64(codes[i + np.uint64(1)] & mask) * np.uint64(4) + np.uint64(1)] += one
        table[np.uint64(codes[i + np.uint64(2)] & mask) * np.uint64(4) + np.uint64(2)] += one
        table[np.uint64(codes[i + np.uint64(3)] & mask) * np.uint64(4) + np.uint64(3)] += one
    for code in codes[body:]:
        table[np.uint64(code & mask) * np.uint64(4)] += one


@compiled
def _round(bits: NDArray[np.uint32], codes: NDArray[np.uint16]) -> None:
    """Rounds float32 `bits` to BF16 magnitude codes, to nearest even, without branch or table."""
    for i in range(len(bits)):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        upper = magnitude >> np.uint32(16)
        # Half of the last place less one, plus the last bit that is kept: ties go to even.
        rounded = (magnitude + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
        nan = magnitude > np.uint32(0x7F800000)
        codes[i] = np.uint16(upper | np.uint32(0x40)) if nan else np.uint16(rounded)


@compiled
def _count_codes(
    bits: NDArray[np.uint16],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    table: NDArray[np.uint32],
) -> None:
    for run in range(len(starts)):
        _increment(bits[starts[run] : stops[run]], table)


@compiled
def _count_rounded(
    bits: NDArray[np.uint32],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    table: NDArray[np.uint32],
) -> None:
    block = np.empty(_BLOCK, np.uint16)
    for run in range(len(starts)):
        for start in range(starts[run], stops[run], _BLOCK):
            part = bits[start : min(start + _BLOCK, stops[run])]
            codes = block[: len(part)]
            _round(part, codes)
            _increment(codes, table)


@compiled
def _flush(table: NDArray[np.uint32], counts: NDArray[np.int64]) -> None:
    for code in range(BINS):
        lanes = np.int64(table[4 * code]) + np.int64(table[4 * code + 1])
        lanes += np.int64(table[4 * code + 2]) + np.int64(table[4 * code + 3])
        counts[code] += lanes
    table[:] = 0

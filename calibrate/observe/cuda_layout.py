"""Cuts a tensor on a GPU to what one launch takes, and describes its layout to histogram.cu."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

__all__ = ["MAX_BATCHES", "VECTOR", "Layout", "batched", "layout_of", "pieces"]

# These two are also in histogram.cu.
MAX_BATCHES = 256
VECTOR = 16  # bytes of a load

_LONGEST = 1 << 31  # elements per launch: a 32-bit counter in shared memory cannot overflow


@dataclass(frozen=True)
class Layout:
    """Describes where the kernel finds `x`'s elements; strides in elements, see histogram.cu."""

    x: torch.Tensor
    lengths: Sequence[int]
    unit: int
    batch_stride: int
    runs: int = 1
    run_stride: int = 0
    rows_outer: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of `x` that are read."""
        return sum(self.lengths) * self.unit * self.runs * self.x.element_size()


def batched(x: torch.Tensor, lengths: Sequence[int] | None) -> tuple[torch.Tensor, Sequence[int]]:
    """Returns `x` as [B, T, ...] with a length for each of B; None takes all of it."""
    if lengths is None:
        if x.is_contiguous() and x.numel():
            x = x.reshape(1, -1, 1)
        while x.dim() < 3:
            x = x[None]
        lengths = [x.shape[1]] * x.shape[0]
    elif len(lengths) != x.shape[0] or max(lengths, default=0) > x.shape[1]:
        raise ValueError(f"lengths {list(lengths)} do not fit a tensor of {list(x.shape)}")
    return x, lengths


def pieces(x: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
    """Cuts `x` [B, T, ...] along B, and along T if it must, to what one launch takes."""
    if not x.numel():
        return
    row = x[0, 0].numel()
    times = max(1, _LONGEST // row)
    batches = min(MAX_BATCHES, max(1, times // x.shape[1]))
    for b in range(0, x.shape[0], batches):
        some = lengths[b : b + batches]
        if x.shape[1] <= times:
            yield x[b : b + batches], some
            continue
        for t in range(0, max(some), times):
            part = x[b : b + batches, t : t + times]
            yield part, [min(max(length - t, 0), part.shape[1]) for length in some]


def layout_of(x: torch.Tensor, lengths: Sequence[int]) -> Layout | None:
    """Returns how the kernel reads `x` [B, T, ...]; None if that needs a copy."""
    width = VECTOR // x.element_size()
    batch_stride, time_stride = x.stride(0), x.stride(1)
    unit = 1  # consecutive elements at one time
    outer: list[tuple[int, int]] = []  # (stride, size) of axes that are not among them
    for stride, size in sorted(zip(x.stride()[2:], x.shape[2:], strict=True)):
        if size == 1:
            continue
        if stride == unit:
            unit *= size
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0], outer[-1][1] * size)
        else:
            outer.append((stride, size))
    layout = Layout(x, lengths, unit, batch_stride)
    if x.data_ptr() % x.element_size():
        return None
    if not outer and (time_stride == unit or x.shape[1] == 1):
        if batch_stride == x.shape[1] * unit and min(lengths) == x.shape[1]:
            return replace(layout, lengths=[sum(lengths)])
        return layout
    if not outer:  # rows of a wider matrix
        layout = replace(layout, runs=1, run_stride=time_stride, rows_outer=True)
    elif len(outer) == 1 and time_stride == unit:  # heads, each with all its rows
        layout = replace(layout, runs=outer[0][1], run_stride=outer[0][0])
    else:
        return None
    # With more than one run, each must start and end at a whole vector.
    steps = [x.data_ptr() // x.element_size(), unit, layout.run_stride]
    if x.shape[0] > 1:
        steps.append(batch_stride)
    return None if any(step % width for step in steps) else layout

"""Counts magnitude codes on an NVIDIA GPU: one kernel per tensor, each element read once.

`CudaCounter` implements `calibrate.observe.counting_cpu.Counter` and equals `CpuCounter` bin for
bin. The kernel, histogram.cu, is compiled for the GPU at hand by `calibrate.observe.cuda_kernels`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.observe.channel_squares import ChannelSquares, SumOfSquares
from calibrate.observe.cuda_kernels import THREADS, Arguments, kernels_of
from calibrate.observe.cuda_layout import VECTOR, Layout, batched, layout_of, pieces
from octet.artifacts.calibration import BINS
from octet.errors import UnsupportedError

__all__ = ["CudaCounter"]

_WORTHWHILE = 2 * THREADS * VECTOR  # bytes of a tensor for which one more block pays off
_HELD = 6  # tensors that wait to be counted beside a model: those of one decoder layer
_FIRST_SPECIAL = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F80}


class CudaCounter:
    """Counts tensors on one GPU, on torch's current stream; `add` returns at once.

    Within `beside` it counts on a stream of its own, of lower priority than the model's. GEMMs
    leave no space for its counters on a multiprocessor, but their last wave of blocks rarely fills
    the GPU, and counting uses the rest.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        if device.type != "cuda" or torch.version.cuda is None:
            raise UnsupportedError(f"device {device} has no CUDA: count on the CPU instead")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._kernels = kernels_of(index)
        self._squares = ChannelSquares()
        try:
            self._counts = torch.zeros(slots, BINS, dtype=torch.int64, device=self.device)
            self._bad = torch.zeros(slots, dtype=torch.int32, device=self.device)
        except torch.OutOfMemoryError:
            size = f"{slots * BINS * 8 / 1e9:.2g} GB"
            raise UnsupportedError(
                f"{self.device} has no memory for {slots} histograms ({size}): free some there, or"
                " calibrate with --device cpu"
            ) from None
        self._compute_stream = torch.cuda.Stream(self.device, priority=-1)
        self._count_stream = torch.cuda.Stream(self.device, priority=0)
        self._separate = False  # whether counting has a stream of its own, see `beside`
        self._held: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """See `Counter`; within the block, another stream is the current one."""
        caller = torch.cuda.current_stream(self.device)
        self._compute_stream.wait_stream(caller)
        self._count_stream.wait_stream(caller)
        self._separate = True
        try:
            with torch.cuda.stream(self._compute_stream):
                yield
        finally:
            self._separate = False
            caller.wait_stream(self._compute_stream)
            caller.wait_stream(self._count_stream)
            # Safe only now: the next block's work waits for the caller's stream, which has waited.
            self._held.clear()

    def add(
        self,
        slot: int,
        x: torch.Tensor,
        lengths: Sequence[int] | None = None,
        *,
        squares: bool = False,
    ) -> None:
        """See `Counter`. `x` is copied only if its strides are neither rows nor heads of rows."""
        if x.device != self.device or x.dtype not in _FIRST_SPECIAL:
            raise TypeError(f"cannot count {x.dtype} on {x.device} with a counter on {self.device}")
        x = x.detach()
        with torch.cuda.device(self.device), self._stream(x):
            if squares:
                self._squares.add(slot, x, lengths)
            for piece, rows in pieces(*batched(x, lengths)):
                layout = layout_of(piece, rows) or layout_of(piece.contiguous(), rows)
                assert layout is not None  # contiguous elements are always read
                self._launch(slot, layout)

    @contextmanager
    def _stream(self, x: torch.Tensor) -> Iterator[None]:
        """Selects the stream to count `x` on, ordered after all work that computed it."""
        if not self._separate:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._count_stream.wait_stream(current)
        with torch.cuda.stream(self._count_stream):
            yield
        # The memory of x must not be given to another tensor while it is read. record_stream would
        # ensure that too, but the host runs far ahead of the GPU and would keep allocating memory.
        self._held.append((x, self._count_stream.record_event()))
        if len(self._held) > _HELD:
            _, counted = self._held[0]
            current.wait_event(counted)
            self._held.popleft()

    def bad(self) -> Callable[[], list[int]]:
        copied = torch.empty_like(self._bad, device="cpu", pin_memory=True)
        copied.copy_(self._bad, non_blocking=True)
        done = torch.cuda.current_stream(self.device).record_event()

        def found() -> list[int]:
            done.synchronize()
            return [slot for slot, bad in enumerate(copied.tolist()) if bad]

        return found

    def counts(self) -> NDArray[np.int64]:
        return self._counts.cpu().numpy()

    def squares(self) -> dict[int, SumOfSquares]:
        return self._squares.sums()

    def clear(self) -> None:
        self._squares.clear()
        self._counts.zero_()
        self._bad.zero_()

    def close(self) -> None:
        self._counts = self._counts.new_empty(0, BINS)
        self._bad = self._bad.new_empty(0)

    def _launch(self, slot: int, layout: Layout) -> None:
        x = layout.x
        arguments = Arguments(
            data=x.data_ptr(),
            counts=self._counts.data_ptr() + slot * BINS * 8,
            bad=self._bad.data_ptr() + slot * 4,
            batch_stride=layout.batch_stride,
            run_stride=layout.run_stride,
            batches=len(layout.lengths),
            runs=layout.runs,
            unit=layout.unit,
            rows_outer=layout.rows_outer,
            first_special=_FIRST_SPECIAL[x.dtype],
            lengths=tuple(layout.lengths),
        )
        blocks = max(-(-layout.size_bytes // _WORTHWHILE), 1)
        self._kernels.launch(
            "count_float" if x.dtype == torch.float32 else "count_half",
            min(blocks, self._kernels.blocks),
            arguments,
            torch.cuda.current_stream(self.device).cuda_stream,
        )

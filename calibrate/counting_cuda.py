"""Counts of magnitude codes on an NVIDIA GPU: one kernel a tensor, each element read once.

The kernel (histogram.cu) is compiled at run time by NVRTC for the GPU at hand, without nvcc or a
build step, and its machine code is kept in the user's cache directory. `CudaCounter` implements
`calibrate.counting.Counter` and equals `CpuCounter` bin for bin.
"""

import ctypes
import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octet.calibration import BINS
from octet.errors import UnsupportedError

__all__ = ["CudaCounter", "compile_kernels", "parts_for"]

# These three are also in histogram.cu.
_THREADS = 1024
_MAX_BATCHES = 256
_VECTOR = 16  # bytes of a load

_LONGEST = 1 << 31  # elements of one launch: a 32-bit counter in shared memory cannot overflow
_WORTHWHILE = 2 * _THREADS * _VECTOR  # bytes of a tensor for which one more block pays
_HELD = 6  # tensors that wait to be counted beside a model: those of one decoder layer
_FIRST_SPECIAL = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F80}


class CudaCounter:
    """Counts tensors on one GPU, on torch's current stream; `add` returns at once.

    Within `beside` it counts on a stream of its own, of a lower priority than the model's: the
    matrix products leave no room for its counters on a multiprocessor, but their last wave of
    blocks rarely fills the GPU, and counting fills it.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        if device.type != "cuda" or torch.version.cuda is None:
            raise UnsupportedError(f"device {device} has no CUDA: count on the CPU instead")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._counts = torch.zeros(slots, BINS, dtype=torch.int64, device=self.device)
        self._bad = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self._kernels = _kernels(index)
        self._front = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._behind = torch.cuda.Stream(self.device, priority=0)  # type: ignore[no-untyped-call]
        self._aside = False
        self._held: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """See `Counter`; the current stream is another one within the block."""
        caller = torch.cuda.current_stream(self.device)
        self._front.wait_stream(caller)
        self._behind.wait_stream(caller)
        self._aside = True
        try:
            with torch.cuda.stream(self._front):
                yield
        finally:
            self._aside = False
            caller.wait_stream(self._front)
            caller.wait_stream(self._behind)
            # Only now: the caller's stream, on which the next block's work waits, has waited.
            self._held.clear()

    def add(
        self,
        slot: int,
        x: torch.Tensor,
        lengths: Sequence[int] | None = None,
        *,
        channel_max: torch.Tensor | None = None,
    ) -> None:
        """See `Counter`. `x` is copied only if its strides are neither rows nor heads of rows.

        `channel_max`, int32 [K] for `x` [..., K], is raised to the largest code of each channel
        among the counted rows, in the same pass.
        """
        if x.device != self.device or x.dtype not in _FIRST_SPECIAL:
            raise TypeError(f"cannot count {x.dtype} on {x.device} with a counter on {self.device}")
        x = x.detach()
        channels = 1 if channel_max is None else len(channel_max)
        with torch.cuda.device(self.device), self._stream(x):
            for piece, rows in _pieces(*_batched(x, lengths, channels)):
                self._add(slot, piece, rows, channel_max)

    @contextmanager
    def _stream(self, x: torch.Tensor) -> Iterator[None]:
        """The stream to count `x` on, behind all that computed it."""
        if not self._aside:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._behind.wait_stream(current)
        with torch.cuda.stream(self._behind):
            yield
        # The memory of x must not be given to another tensor while it is read. record_stream would
        # see to it too, but the host runs far ahead of the GPU and would take new memory all along.
        self._held.append((x, self._behind.record_event()))
        if len(self._held) > _HELD:
            _, counted = self._held[0]
            current.wait_event(counted)
            self._held.popleft()

    def bad(self) -> list[int]:
        return [slot for slot, bad in enumerate(self._bad.tolist()) if bad]

    def counts(self) -> NDArray[np.int64]:
        return self._counts.cpu().numpy()

    def clear(self) -> None:
        self._counts.zero_()
        self._bad.zero_()

    def close(self) -> None:
        self._counts = self._counts.new_empty(0, BINS)
        self._bad = self._bad.new_empty(0)

    def _add(
        self,
        slot: int,
        x: torch.Tensor,
        lengths: Sequence[int],
        channel_max: torch.Tensor | None,
    ) -> None:
        wanted = channel_max is not None
        layout = _layout(x, lengths, channels=wanted)
        if layout is None:
            x = x.contiguous()
            layout = _layout(x, lengths, channels=wanted)
        if layout is None and channel_max is not None:  # rows are no whole vectors
            _raise_channel_max(channel_max, x, lengths)
            self._add(slot, x, lengths, None)
        else:
            assert layout is not None  # contiguous elements are always read
            self._launch(slot, layout, channel_max)

    def _launch(self, slot: int, layout: "_Layout", channel_max: torch.Tensor | None) -> None:
        x = layout.x
        channels = 0 if channel_max is None else len(channel_max)
        arguments = _Arguments(
            data=x.data_ptr(),
            counts=self._counts.data_ptr() + slot * BINS * 8,
            bad=self._bad.data_ptr() + slot * 4,
            channel_max=0 if channel_max is None else channel_max.data_ptr(),
            batch_stride=layout.batch_stride,
            run_stride=layout.run_stride,
            batches=len(layout.lengths),
            runs=layout.runs,
            unit=layout.unit,
            rows_outer=layout.rows_outer,
            first_special=_FIRST_SPECIAL[x.dtype],
            channels=channels,
            lengths=tuple(layout.lengths),
        )
        size_bytes = sum(layout.lengths) * layout.unit * layout.runs * x.element_size()
        row_bytes = channels * x.element_size()
        blocks = max(-(-size_bytes // _WORTHWHILE), -(-row_bytes // (_THREADS * _VECTOR)), 1)
        name = "count_float" if x.dtype == torch.float32 else "count_half"
        self._kernels.launch(
            name if channel_max is None else f"{name}_max",
            min(blocks, self._kernels.blocks),
            arguments,
            torch.cuda.current_stream(self.device).cuda_stream,
        )


class _Arguments(ctypes.Structure):
    """`struct Arguments` of histogram.cu."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("bad", ctypes.c_void_p),
        ("channel_max", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("run_stride", ctypes.c_int64),
        ("batches", ctypes.c_uint32),
        ("runs", ctypes.c_uint32),
        ("unit", ctypes.c_uint32),
        ("rows_outer", ctypes.c_uint32),
        ("first_special", ctypes.c_uint32),
        ("channels", ctypes.c_uint32),
        ("lengths", ctypes.c_uint32 * _MAX_BATCHES),
    )


@dataclass(frozen=True)
class _Layout:
    """Where the kernel finds the elements of `x`; strides in elements, see histogram.cu."""

    x: torch.Tensor
    lengths: Sequence[int]
    unit: int
    batch_stride: int
    runs: int = 1
    run_stride: int = 0
    rows_outer: bool = False


def _batched(
    x: torch.Tensor, lengths: Sequence[int] | None, channels: int = 1
) -> tuple[torch.Tensor, Sequence[int]]:
    """`x` as [B, T, ...] with a length for each of B; rows of `channels` if it makes none."""
    if lengths is None:
        if x.is_contiguous() and x.numel():
            x = x.reshape(1, -1, channels)
        while x.dim() < 3:
            x = x[None]
        lengths = [x.shape[1]] * x.shape[0]
    elif len(lengths) != x.shape[0] or max(lengths, default=0) > x.shape[1]:
        raise ValueError(f"lengths {list(lengths)} do not fit a tensor of {list(x.shape)}")
    return x, lengths


def _pieces(
    x: torch.Tensor, lengths: Sequence[int]
) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
    """`x` [B, T, ...] cut along B, and along T where it must be, to what one launch takes."""
    if not x.numel():
        return
    row = x[0, 0].numel()
    times = max(1, _LONGEST // row)
    batches = min(_MAX_BATCHES, max(1, times // x.shape[1]))
    for b in range(0, x.shape[0], batches):
        some = lengths[b : b + batches]
        if x.shape[1] <= times:
            yield x[b : b + batches], some
            continue
        for t in range(0, max(some), times):
            part = x[b : b + batches, t : t + times]
            yield part, [min(max(length - t, 0), part.shape[1]) for length in some]


def _layout(x: torch.Tensor, lengths: Sequence[int], *, channels: bool = False) -> _Layout | None:
    """How the kernel reads `x` [B, T, ...]; None if it cannot without a copy.

    `channels`: for a maximum of each channel, which needs rows of whole vectors.
    """
    width = _VECTOR // x.element_size()
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
    layout = _Layout(x, lengths, unit, batch_stride)
    steps = [x.data_ptr() // x.element_size(), unit]  # must be multiples of a vector for some
    if x.data_ptr() % x.element_size():
        return None
    if x.shape[0] > 1:
        steps.append(batch_stride)
    if not outer and (time_stride == unit or x.shape[1] == 1):
        if channels and (
            any(s % width for s in [*steps, x.shape[-1]]) or not x[0, 0].is_contiguous()
        ):
            return None
        if batch_stride == x.shape[1] * unit and min(lengths) == x.shape[1]:
            return replace(layout, lengths=[sum(lengths)])
        return layout
    if channels:
        return None
    if not outer:  # rows of a wider matrix
        layout = replace(layout, runs=1, run_stride=time_stride, rows_outer=True)
    elif len(outer) == 1 and time_stride == unit:  # heads, each with all its rows
        layout = replace(layout, runs=outer[0][1], run_stride=outer[0][0])
    else:
        return None
    return None if any(step % width for step in [*steps, layout.run_stride]) else layout


def _raise_channel_max(channel_max: torch.Tensor, x: torch.Tensor, lengths: Sequence[int]) -> None:
    for row, length in zip(x, lengths, strict=True):
        if length:
            codes = row[:length].reshape(-1, x.shape[-1])
            codes = codes.bfloat16() if codes.dtype == torch.float32 else codes
            largest = (codes.view(torch.int16).int() & 0x7FFF).amax(0)
            torch.maximum(channel_max, largest, out=channel_max)


class _Kernels:
    """The kernels of one GPU, loaded into torch's context there."""

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute
        self._driver = driver
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # makes torch's context, if nothing has yet
            device = _checked(driver.cuCtxGetDevice())

            def read(which: Any) -> int:
                return int(_checked(driver.cuDeviceGetAttribute(which, device)))

            available = read(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            name = torch.cuda.get_device_name(index)
            self.parts = parts_for(available, name)
            self.blocks = max(
                1, read(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) // self.parts
            )
            self._shared_bytes = 4 * BINS // self.parts
            self._functions = self._load(torch.cuda.get_device_capability(index))

    def _load(self, capability: tuple[int, int]) -> dict[str, Any]:
        driver = self._driver
        code = compile_kernels(capability, self.parts)
        module = _checked(driver.cuModuleLoadData(code))
        functions = {}
        for name in ("count_half", "count_float", "count_half_max", "count_float_max"):
            function = _checked(driver.cuModuleGetFunction(module, name.encode()))
            dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, dynamic, self._shared_bytes))
            functions[name] = function
        return functions

    def launch(self, name: str, blocks: int, arguments: _Arguments, stream: int) -> None:
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _checked(
            self._driver.cuLaunchKernel(
                self._functions[name],
                *(blocks, self.parts, 1),
                *(_THREADS, 1, 1),
                self._shared_bytes,
                stream,
                ctypes.addressof(pointers),
                0,
            )
        )


@cache
def _kernels(index: int) -> _Kernels:
    _require_bindings()
    return _Kernels(index)


def parts_for(shared_bytes: int, gpu: str) -> int:
    """Between how many blocks the 128 KB of counters are split, given one block's shared memory."""
    for parts in (1, 2, 4):
        if 4 * BINS // parts <= shared_bytes:
            return parts
    raise UnsupportedError(
        f"{gpu} gives a block {shared_bytes / 1024:g} KB of shared memory, and counting needs"
        f" {4 * BINS // 4 // 1024} KB: run the model on the CPU"
    )


def compile_kernels(capability: tuple[int, int], parts: int) -> bytes:
    """Machine code of histogram.cu for a compute capability; PTX if NVRTC is older than the GPU.

    Kept in the user's cache directory, under the hash of all that it depends on.
    """
    _require_bindings()
    from cuda.bindings import nvrtc

    source = (resources.files("calibrate") / "histogram.cu").read_bytes()
    version = _checked(nvrtc.nvrtcVersion())
    known = _checked(nvrtc.nvrtcGetSupportedArchs())
    wanted = 10 * capability[0] + capability[1]
    nearest = max((arch for arch in known if arch <= wanted), default=None)
    if nearest is None:
        raise UnsupportedError(
            f"CUDA {version[0]}.{version[1]} compiles for compute capability {min(known) / 10} and"
            f" above, and this GPU has {wanted / 10}: install an older CUDA build of torch"
        )
    native = nearest == wanted
    options = [
        f"--gpu-architecture={'sm' if native else 'compute'}_{nearest}",
        "--std=c++17",
        f"-DPARTS={parts}",
    ]
    key = hashlib.sha256(repr((source, version, options)).encode()).hexdigest()
    path = _cache_directory() / f"histogram-{key[:32]}.{'cubin' if native else 'ptx'}"
    with suppress(OSError):
        return path.read_bytes()
    code = _compile(nvrtc, source, options, native)
    with suppress(OSError):  # a cache that cannot be written costs half a second a process
        _write_whole(path, code)
    return code


def _compile(nvrtc: Any, source: bytes, options: list[str], native: bool) -> bytes:
    program = _checked(nvrtc.nvrtcCreateProgram(source, b"histogram.cu", 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"histogram.cu: {log.decode().strip()}")
        kind = "CUBIN" if native else "PTX"
        code: bytes = b" " * _checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program))
        _checked(getattr(nvrtc, f"nvrtcGet{kind}")(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "octet" / "kernels"


def _write_whole(path: Path, data: bytes) -> None:
    """Writes `data` to `path` so that no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _require_bindings() -> None:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the library itself is not found
        why = " ".join(str(error).split())
        raise UnsupportedError(
            f"counting on a GPU needs cuda-bindings and NVRTC ({why}): pip install 'octet[gpu]'"
        ) from None


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call of cuda-bindings returned beside its status; RuntimeError if that is not 0."""
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)

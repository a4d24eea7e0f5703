"""One GPU through cuda-bindings: its memory, one stream that orders all work, and timing.

No array library is needed to run an engine: memory is addresses, and the callers know the shapes.
Everything here is asynchronous except `synchronize`, in which the host waits.
"""

import ctypes
import weakref
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octet.errors import BackendError, ConfigError, UnsupportedError
from serve.runner.protocol import RunnerLost

__all__ = ["Event", "Gpu", "Memory", "PinnedMemory", "aligned", "checked"]

_ALIGNMENT = 256  # bytes; the alignment of cudaMalloc, which TensorRT may expect of an address
_GRANULE = 2 << 20  # device memory is allocated in multiples of this
_PAGE = 64 << 10  # page-locked memory is allocated in multiples of this


class Gpu:
    """Device `index` and its stream. Calls from a thread other than the last need `activate`."""

    def __init__(self, index: int = 0) -> None:
        """Raises UnsupportedError if there is no such GPU, or no cuda-bindings."""
        self.runtime = _runtime()
        self.index = index
        status, count = self.runtime.cudaGetDeviceCount()
        if status.value != 0 or count <= index:
            why = status.name if status.value != 0 else f"this machine has {count}"
            raise UnsupportedError(f"no NVIDIA GPU {index} to run an engine on ({why})")
        self.activate()
        attribute = self.runtime.cudaDeviceAttr
        major, minor = (
            checked(self.runtime.cudaDeviceGetAttribute(which, index))
            for which in (
                attribute.cudaDevAttrComputeCapabilityMajor,
                attribute.cudaDevAttrComputeCapabilityMinor,
            )
        )
        self.capability: tuple[int, int] = (int(major), int(minor))
        self.stream = int(checked(self.runtime.cudaStreamCreate()))

    @property
    def target(self) -> str:
        """The GPU's architecture, such as "sm89"."""
        return f"sm{self.capability[0]}{self.capability[1]}"

    @property
    def free_bytes(self) -> int:
        return int(checked(self.runtime.cudaMemGetInfo())[0])

    def activate(self) -> None:
        """Makes this the GPU of the calling thread."""
        checked(self.runtime.cudaSetDevice(self.index))

    def copy_in(self, to: int, source: "PinnedMemory", nbytes: int) -> None:
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        checked(self.runtime.cudaMemcpyAsync(to, source.address, nbytes, kind, self.stream))

    def copy_out(self, to: "PinnedMemory", source: int, nbytes: int) -> None:
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        checked(self.runtime.cudaMemcpyAsync(to.address, source, nbytes, kind, self.stream))

    def zero(self, address: int, *, pitch: int, width: int, height: int) -> None:
        """Zeroes the first `width` bytes of each of `height` rows that lie `pitch` bytes apart."""
        runtime = self.runtime
        if width == pitch:  # CUDA takes no pitch of 2 GiB or more
            checked(runtime.cudaMemsetAsync(address, 0, width * height, self.stream))
        elif width:
            checked(runtime.cudaMemset2DAsync(address, pitch, 0, width, height, self.stream))

    def synchronize(self) -> None:
        """Waits for all work.

        Raises RunnerLost if the work failed: CUDA returns the same error from then on.
        """
        try:
            checked(self.runtime.cudaStreamSynchronize(self.stream))
        except BackendError as error:
            raise RunnerLost(f"the GPU failed ({error}); restart this process") from None


class Memory:
    """Bytes on the GPU, freed with this object; growing them by `reserve` discards the content."""

    def __init__(self, gpu: Gpu, nbytes: int = 0) -> None:
        """Raises ConfigError if the GPU has not enough memory left."""
        self._gpu = gpu
        self.address = self.nbytes = 0
        self._free: Any = None
        self.reserve(nbytes)

    def reserve(self, nbytes: int) -> int:
        """Returns the address of at least `nbytes`; valid until the next call."""
        if nbytes > self.nbytes or not self.address:
            runtime = self._gpu.runtime
            if self._free is not None:
                self._free()
                self.address = self.nbytes = 0
            size = -(-max(nbytes, 1) // _GRANULE) * _GRANULE
            free = self._gpu.free_bytes
            status, address = runtime.cudaMalloc(size)
            if status.value == runtime.cudaError_t.cudaErrorMemoryAllocation.value:
                raise ConfigError(
                    f"the GPU has {free / 2**30:.1f} GiB of memory left and needs"
                    f" {size / 2**30:.1f} more: serve fewer slots or a shorter context"
                )
            self.address, self.nbytes = int(checked((status, address))), size
            self._free = weakref.finalize(self, runtime.cudaFree, self.address)
            self._free.atexit = False  # the end of the process frees all memory
        return self.address


class PinnedMemory:
    """Page-locked host memory, which the GPU reads and writes by itself."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.address = self.nbytes = 0
        self._free: Any = None

    def reserve(self, nbytes: int) -> None:
        """Makes it at least `nbytes` long. Growing discards the content and invalidates arrays."""
        if nbytes > self.nbytes:
            runtime = self._gpu.runtime
            if self._free is not None:
                self._free()
                self.address = self.nbytes = 0
            size = -(-nbytes // _PAGE) * _PAGE
            self.address, self.nbytes = int(checked(runtime.cudaMallocHost(size))), size
            self._free = weakref.finalize(self, runtime.cudaFreeHost, self.address)
            self._free.atexit = False

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Returns the bytes from `offset` on as an array; valid until `reserve` grows them."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        assert offset + nbytes <= self.nbytes
        buffer = (ctypes.c_uint8 * nbytes).from_address(self.address + offset)
        return np.frombuffer(buffer, dtype).reshape(shape)


class Event:
    """A moment in the stream's work."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._handle = int(checked(gpu.runtime.cudaEventCreate()))
        weakref.finalize(self, gpu.runtime.cudaEventDestroy, self._handle).atexit = False

    def record(self) -> None:
        checked(self._gpu.runtime.cudaEventRecord(self._handle, self._gpu.stream))

    def since_s(self, earlier: "Event") -> float:
        """Returns seconds since `earlier`, to 0.5 µs, once the stream has reached both events."""
        elapsed = self._gpu.runtime.cudaEventElapsedTime(earlier._handle, self._handle)
        return float(checked(elapsed)) / 1e3


def aligned(nbytes: int) -> int:
    """Returns `nbytes` rounded up to where the next tensor may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def checked(result: tuple[Any, ...]) -> Any:
    """Returns a cuda-bindings call's results without its status. Raises BackendError if not 0."""
    status, *values = result
    if status.value != 0:
        raise BackendError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _runtime() -> ModuleType:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise UnsupportedError(
            f"running an engine needs an NVIDIA GPU and cuda-bindings ({error}):"
            " pip install cuda-bindings nvidia-cuda-nvrtc"
        ) from None
    module: ModuleType = runtime
    return module

"""A GPU of this machine's memory behind cuda-bindings' calls: what runs on it is not pretended.

As on a GPU, nothing asynchronous happens before the stream is waited for: it is put off until then,
and sees the memory of that moment. Every address must lie in an allocation of the right kind and
size, and the kernels of cache.cu are done by NumPy.
"""

import ctypes
import json
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve.tensorrt.kernels import Arguments

__all__ = ["FakeGpu"]


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100
    cudaErrorIllegalAddress = 700


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class cudaDeviceAttr(IntEnum):
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


Status = tuple[Any, ...]
OK = cudaError_t.cudaSuccess


class FakeGpu:
    """Stands for the modules `runtime` and `driver` of cuda.bindings."""

    cudaError_t, cudaMemcpyKind, cudaDeviceAttr = cudaError_t, cudaMemcpyKind, cudaDeviceAttr

    def __init__(
        self, capability: tuple[int, int] = (8, 9), *, devices: int = 1, memory: int = 1 << 30
    ) -> None:
        self.capability, self.devices, self.memory = capability, devices, memory
        self.launches: list[str] = []  # names of kernels, in the order of their launch
        self.fails: cudaError_t = OK  # what every call reports from then on
        self.first: str | None = None  # the only call that does so before the stream is waited for
        self._blocks: dict[int, tuple[Any, int, str]] = {}  # address -> buffer, size, kind
        self._work: list[Callable[[], None]] = []
        self._events: dict[int, float] = {}
        self._functions: dict[int, tuple[str, dict[str, int]]] = {}

    # Memory, as the fake engine and tests see it.

    def view(self, address: int, nbytes: int, kind: str = "device") -> NDArray[np.uint8]:
        """The bytes there, which must be allocated."""
        for start, (buffer, size, of) in self._blocks.items():
            if start <= address and address + nbytes <= start + size:
                assert of == kind, f"{of} memory where {kind} memory is meant"
                array: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8)
                return array[address - start : address - start + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} are not {kind} memory")

    def status(self, call: str) -> cudaError_t:
        """What the call of that name reports: an error of what went before, or none."""
        return self.fails if self.first in (None, call) else OK

    def put_off(self, work: Callable[[], None]) -> None:
        """Until the stream is waited for."""
        self._work.append(work)

    @property
    def allocated(self) -> int:
        return sum(size for _, size, kind in self._blocks.values() if kind == "device")

    def _run(self) -> None:
        work, self._work = self._work, []
        for item in work:
            item()

    def _allocate(self, size: int, kind: str) -> int:
        buffer = (ctypes.c_uint8 * (size + 256))()
        ctypes.memset(buffer, 0xA5, len(buffer))  # whoever reads what nobody wrote should notice
        address = -(-ctypes.addressof(buffer) // 256) * 256
        inner = (ctypes.c_uint8 * size).from_address(address)
        inner._whole = buffer  # type: ignore[attr-defined]
        self._blocks[address] = (inner, size, kind)
        return address

    # cuda.bindings.runtime

    def cudaGetDeviceCount(self) -> Status:
        return (OK, self.devices) if self.devices else (cudaError_t.cudaErrorNoDevice, None)

    def cudaSetDevice(self, device: int) -> Status:
        assert device < self.devices
        return (self.status("cudaSetDevice"),)

    def cudaDeviceGetAttribute(self, attr: cudaDeviceAttr, device: int) -> Status:
        return OK, self.capability[attr - cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor]

    def cudaMemGetInfo(self) -> Status:
        return self.status("cudaMemGetInfo"), self.memory - self.allocated, self.memory

    def cudaMalloc(self, size: int) -> Status:
        if (status := self.status("cudaMalloc")) != OK:
            return status, None
        if self.allocated + size > self.memory:
            return cudaError_t.cudaErrorMemoryAllocation, None
        return OK, self._allocate(size, "device")

    def cudaMallocHost(self, size: int) -> Status:
        if (status := self.status("cudaMallocHost")) != OK:
            return status, None
        return OK, self._allocate(size, "pinned")

    def cudaFree(self, devPtr: int) -> Status:
        self._run()  # it waits for what is going on
        del self._blocks[devPtr]
        return (OK,)

    cudaFreeHost = cudaFree

    def cudaStreamCreate(self) -> Status:
        return OK, 7

    def cudaStreamSynchronize(self, stream: int) -> Status:
        assert stream == 7
        self._run()
        self.first = None
        return (self.fails,)

    def cudaMemcpyAsync(
        self, dst: int, src: int, count: int, kind: cudaMemcpyKind, stream: int
    ) -> Status:
        sides = {1: ("device", "pinned"), 2: ("pinned", "device")}[kind]
        if (status := self.status(kind.name)) != OK:
            return (status,)
        to, source = self.view(dst, count, sides[0]), self.view(src, count, sides[1])
        self.put_off(lambda: np.copyto(to, source))
        return (OK,)

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: int) -> Status:
        whole = self.view(devPtr, count)
        self.put_off(lambda: whole.fill(value))
        return (self.status("cudaMemsetAsync"),)

    def cudaMemset2DAsync(
        self,
        devPtr: int,
        pitch: int,
        value: int,
        width: int,
        height: int,
        stream: int,
    ) -> Status:
        if (status := self.status("cudaMemset2DAsync")) != OK:
            return (status,)
        if width > pitch or pitch >= 1 << 31 or height < 1:
            return (cudaError_t.cudaErrorInvalidValue,)
        whole = self.view(devPtr, pitch * (height - 1) + width)

        def fill() -> None:
            for row in range(height):
                whole[row * pitch : row * pitch + width] = value

        self.put_off(fill)
        return (OK,)

    def cudaEventCreate(self) -> Status:
        self._events[len(self._events) + 100] = 0.0
        return OK, len(self._events) + 99

    def cudaEventRecord(self, event: int, stream: int) -> Status:
        self.put_off(lambda: self._events.update({event: time.perf_counter()}))
        return (OK,)

    def cudaEventElapsedTime(self, start: int, end: int) -> Status:
        assert not self._work, "the stream has not been waited for"
        return OK, (self._events[end] - self._events[start]) * 1e3

    def cudaEventDestroy(self, event: int) -> Status:
        return (OK,)

    # cuda.bindings.driver

    def cuModuleLoadData(self, image: bytes) -> Status:
        return OK, json.loads(image)

    def cuModuleGetFunction(self, module: dict[str, int], name: bytes) -> Status:
        handle = len(self._functions) + 1
        self._functions[handle] = (name.decode(), module)
        return OK, handle

    def cuLaunchKernel(
        self,
        f: int,
        *dimensions: int,  # of the grid, of a block
    ) -> Status:
        *sizes, shared, stream, parameters, extra = dimensions
        assert len(sizes) == 6 and min(sizes) >= 1 and (shared, stream, extra) == (0, 7, 0)
        (pointer,) = (ctypes.c_void_p * 1).from_address(parameters)
        arguments = Arguments.from_buffer_copy(
            (ctypes.c_uint8 * ctypes.sizeof(Arguments)).from_address(pointer)
        )
        name, sizes_of = self._functions[f]
        if (status := self.status(f"cuLaunchKernel {name}")) != OK:
            return (status,)
        self.launches.append(name)
        self.put_off(lambda: getattr(self, f"_{name}")(arguments, sizes_of))
        return (OK,)

    def _gather(self, a: Arguments, sizes: dict[str, int]) -> None:
        slots, window, where = self._slots(a, sizes), self._window(a, sizes), self._where(a)
        assert window is not None
        for row, (slot, _) in enumerate(where):
            window[:, row] = slots[slot, :, :, : a.live]

    def _append(self, a: Arguments, sizes: dict[str, int]) -> None:
        slots, window, where = self._slots(a, sizes), self._window(a, sizes), self._where(a)
        shape = (a.tensors, a.batch, a.heads, a.count, a.dim)
        rows = self._array(a.rows, shape, sizes["present"], a.rows_stride)
        codes = (rows >> 8 * (sizes["present"] - sizes["cache"])).astype(f"u{sizes['cache']}")
        for row, (slot, length) in enumerate(where):
            slots[slot, :, :, length : length + a.count] = codes[:, row]
            if window is not None:
                fitting = max(0, min(a.count, a.live - length))
                window[:, row, :, length : length + fitting] = codes[:, row, :, :fitting]

    def _where(self, a: Arguments) -> list[list[int]]:
        rows: list[list[int]] = (
            self.view(a.where, 16 * a.batch).view(np.int64).reshape(-1, 2).tolist()
        )
        return rows

    def _slots(self, a: Arguments, sizes: dict[str, int]) -> NDArray[Any]:
        slots = 1 + max(slot for slot, _ in self._where(a))
        shape = (slots, a.tensors, a.heads, a.positions, a.dim)
        return self._array(a.slots, shape, sizes["cache"])

    def _window(self, a: Arguments, sizes: dict[str, int]) -> NDArray[Any] | None:
        if not a.window:
            return None
        shape = (a.tensors, a.batch, a.heads, a.live, a.dim)
        return self._array(a.window, shape, sizes["cache"], a.window_stride)

    def _array(
        self, address: int, shape: tuple[int, ...], item: int, stride: int | None = None
    ) -> NDArray[Any]:
        """Unsigned integers of `item` bytes there; `stride` of them are between two of axis 0."""
        inner = int(np.prod(shape[1:]))
        stride = inner if stride is None else stride
        flat = self.view(address, ((shape[0] - 1) * stride + inner) * item).view(f"u{item}")
        strides = [stride * item, *np.empty(shape[1:], f"u{item}").strides]
        return np.lib.stride_tricks.as_strided(flat, shape, strides)


def fake_code(capability: Any, cache: int, present: int, word: int) -> bytes:
    """In the place of machine code: what `FakeGpu` must know of the kernels."""
    return json.dumps({"cache": cache, "present": present, "word": word}).encode()

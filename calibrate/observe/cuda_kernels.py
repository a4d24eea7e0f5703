"""Compiles the counting kernel for one GPU at run time, caches it, loads it and launches it.

NVRTC compiles histogram.cu without nvcc or a build step. The machine code is kept in the user's
cache directory; each file starts with the SHA-256 of its code. An empty or damaged file is not
loaded but compiled again.
"""

import ctypes
import hashlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from calibrate.observe.cuda_layout import MAX_BATCHES
from octet.artifacts.calibration import BINS
from octet.errors import UnsupportedError
from octet.hardware.nvrtc import (
    CudaError,
    Target,
    architectures,
    checked,
    compile_source,
    load_nvrtc,
)

__all__ = ["THREADS", "Arguments", "Kernels", "compile_kernels", "kernels_of", "parts_for"]

THREADS = 1024  # per block; also in histogram.cu
_NEEDS = ("counting on a GPU", "'octet-llm[gpu]'")
_DIGEST_BYTES = hashlib.sha256().digest_size


class Arguments(ctypes.Structure):
    """Mirrors `struct Arguments` of histogram.cu."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("bad", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("run_stride", ctypes.c_int64),
        ("batches", ctypes.c_uint32),
        ("runs", ctypes.c_uint32),
        ("unit", ctypes.c_uint32),
        ("rows_outer", ctypes.c_uint32),
        ("first_special", ctypes.c_uint32),
        ("lengths", ctypes.c_uint32 * MAX_BATCHES),
    )


class Kernels:
    """The kernels of one GPU, loaded into torch's context there."""

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute
        self._driver = driver
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # makes torch's context, if nothing has yet
            device = checked(driver.cuCtxGetDevice())

            def read(which: Any) -> int:
                return int(checked(driver.cuDeviceGetAttribute(which, device)))

            available = read(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            name = torch.cuda.get_device_name(index)
            self.parts = parts_for(available, name)
            self.blocks = max(
                1, read(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) // self.parts
            )
            self._shared_bytes = 4 * BINS // self.parts
            module = load_module(driver, torch.cuda.get_device_capability(index), self.parts)
            self._functions = {
                name: self._function(module, name) for name in ("count_half", "count_float")
            }

    def _function(self, module: Any, name: str) -> Any:
        driver = self._driver
        function = checked(driver.cuModuleGetFunction(module, name.encode()))
        dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, dynamic, self._shared_bytes))
        return function

    def launch(self, name: str, blocks: int, arguments: Arguments, stream: int) -> None:
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        checked(
            self._driver.cuLaunchKernel(
                self._functions[name],
                *(blocks, self.parts, 1),
                *(THREADS, 1, 1),
                self._shared_bytes,
                stream,
                ctypes.addressof(pointers),
                0,
            )
        )


@cache
def kernels_of(index: int) -> Kernels:
    """Returns the kernels of GPU `index`, loaded once per process."""
    load_nvrtc(*_NEEDS)
    return Kernels(index)


def parts_for(shared_bytes: int, gpu: str) -> int:
    """Returns how many blocks share the 128 KB of counters, given one block's shared memory."""
    for parts in (1, 2, 4):
        if 4 * BINS // parts <= shared_bytes:
            return parts
    raise UnsupportedError(
        f"{gpu} gives a block {shared_bytes / 1024:g} KB of shared memory, and counting needs"
        f" {4 * BINS // 4 // 1024} KB: run the model on the CPU"
    )


def load_module(driver: Any, capability: tuple[int, int], parts: int) -> Any:
    """Loads the kernels into the current context; compiles them anew if the cached code fails."""
    with suppress(CudaError):
        return checked(driver.cuModuleLoadData(compile_kernels(capability, parts)))
    try:
        return checked(driver.cuModuleLoadData(compile_kernels(capability, parts, fresh=True)))
    except CudaError as error:
        from cuda.bindings import nvrtc

        def dotted(major: int, minor: int) -> str:
            return f"{major}.{minor}"

        version = checked(driver.cuDriverGetVersion())
        raise UnsupportedError(
            f"the NVIDIA driver (CUDA {dotted(version // 1000, version % 1000 // 10)}) does not"
            f" load what NVRTC {dotted(*checked(nvrtc.nvrtcVersion()))} compiled ({error}): update"
            " the driver, or calibrate with --device cpu"
        ) from None


def compile_kernels(capability: tuple[int, int], parts: int, *, fresh: bool = False) -> bytes:
    """Compiles histogram.cu for a compute capability; to PTX if NVRTC is older than the GPU.

    The code is kept in the user's cache directory, under the hash of all that it depends on;
    `fresh` compiles even if it is there.
    """
    nvrtc = load_nvrtc(*_NEEDS)
    source = (resources.files("calibrate.observe") / "histogram.cu").read_bytes()
    version = checked(nvrtc.nvrtcVersion())
    known = architectures(nvrtc)
    target = Target.nearest(known, capability)
    if target is None:
        raise UnsupportedError(
            f"CUDA {version[0]}.{version[1]} compiles for compute capability {min(known) / 10} and"
            f" above, and this GPU has {capability[0]}.{capability[1]}: install an older CUDA build"
            " of torch"
        )
    options = ["--std=c++17", f"-DPARTS={parts}"]
    key = hashlib.sha256(repr((source, version, [target.option, *options])).encode()).hexdigest()
    path = _cache_directory() / f"histogram-{key[:32]}.{target.kind}"
    if not fresh and (kept := _read_kept(path)) is not None:
        return kept
    code = compile_source(nvrtc, "histogram.cu", source, target, options)
    with suppress(OSError):  # a cache that cannot be written costs half a second per process
        _keep(path, code)
    return code


def _cache_directory() -> Path:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home has no cache: nothing can be read or written here
        home = Path(os.devnull)
    return home / "octet" / "kernels"


def _read_kept(path: Path) -> bytes | None:
    """Returns the code in `path`; None if there is none, or it is not what was written."""
    with suppress(OSError):
        data = path.read_bytes()
        digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() == digest:
            return code
    return None


def _keep(path: Path, code: bytes) -> None:
    """Writes the SHA-256 of `code`, then `code`, to `path`, atomically even in a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(hashlib.sha256(code).digest() + code)
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise

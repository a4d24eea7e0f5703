"""The two kernels of cache.cu, compiled by NVRTC for the present GPU when an engine is loaded."""

import ctypes
from importlib import resources

from octet.errors import UnsupportedError
from octet.hardware.nvrtc import Target, architectures, compile_source, load_nvrtc
from serve.tensorrt.gpu import Gpu, checked

__all__ = ["Arguments", "Kernels", "compile_kernels"]

_THREADS = 256  # per block
_MAX_BLOCKS = 1 << 16  # with more items than this allows, a thread handles several
_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}


class Arguments(ctypes.Structure):
    """`struct Arguments` of cache.cu."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("window", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("where", ctypes.c_void_p),
        ("tensors", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("positions", ctypes.c_int64),
        ("live", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("window_stride", ctypes.c_int64),
        ("rows_stride", ctypes.c_int64),
    )


class Kernels:
    """`gather` and `append` for elements of these sizes, on the stream of `gpu`."""

    def __init__(self, gpu: Gpu, *, cache_bytes: int, present_bytes: int, dim: int) -> None:
        """Raises UnsupportedError if NVRTC is not installed or does not know the GPU."""
        from cuda.bindings import driver

        self._driver, self._gpu = driver, gpu
        self._word = word_bytes(cache_bytes * dim)
        self._cache_bytes = cache_bytes
        code = compile_kernels(gpu.capability, cache_bytes, present_bytes, self._word)
        module = checked(driver.cuModuleLoadData(code))
        self._functions = {
            name: checked(driver.cuModuleGetFunction(module, name.encode()))
            for name in ("gather", "append")
        }

    def gather(self, arguments: Arguments) -> None:
        a = arguments
        width = a.dim * self._cache_bytes // self._word
        self._launch("gather", a, a.tensors * a.batch * a.heads * a.live * width)

    def append(self, arguments: Arguments) -> None:
        a = arguments
        self._launch("append", a, a.tensors * a.batch * a.heads * a.count * a.dim)

    def _launch(self, name: str, arguments: Arguments, items: int) -> None:
        if not items:
            return
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        checked(
            self._driver.cuLaunchKernel(
                self._functions[name],
                *(min(-(-items // _THREADS), _MAX_BLOCKS), 1, 1),
                *(_THREADS, 1, 1),
                0,
                self._gpu.stream,
                ctypes.addressof(pointers),
                0,
            )
        )


def word_bytes(row_bytes: int) -> int:
    """Returns the size of the widest type that divides a row; memory favours 16 bytes per load."""
    return next(size for size in (16, 8, 4, 2, 1) if row_bytes % size == 0)


def compile_kernels(
    capability: tuple[int, int], cache_bytes: int, present_bytes: int, word: int
) -> bytes:
    """Compiles to machine code, or to PTX if NVRTC is older than the GPU. Takes about 0.1 s."""
    nvrtc = load_nvrtc("running an engine", "cuda-bindings nvidia-cuda-nvrtc")
    known = architectures(nvrtc)
    target = Target.nearest(known, capability)
    if target is None:
        raise UnsupportedError(
            f"NVRTC compiles for sm{min(known)} and above, and this GPU is"
            f" sm{10 * capability[0] + capability[1]}: install an older nvidia-cuda-nvrtc"
        )
    sizes = {"CACHE": cache_bytes, "PRESENT": present_bytes, "WORD": word}
    options = [f"-D{name}={_TYPES[size]}" for name, size in sizes.items()]
    source = (resources.files("serve") / "tensorrt" / "cache.cu").read_bytes()
    return compile_source(nvrtc, "cache.cu", source, target, options)

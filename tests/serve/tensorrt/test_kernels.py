"""The kernels that move cache rows: their source run on this CPU, compiled for GPUs, and on one.

    pytest -m gpu tests/serve/tensorrt/test_kernels.py

needs an NVIDIA GPU, cuda-bindings and NVRTC, and no TensorRT.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octet.errors import UnsupportedError
from serve.tensorrt.gpu import Event, Gpu, Memory, PinnedMemory
from serve.tensorrt.kernels import Arguments, Kernels, compile_kernels, word_bytes
from tests.serve.fake_gpu import FakeGpu

# Bytes of an element in the cache and in new rows: an E5M2, an E4M3, a float16 cache.
SIZES = [(1, 2), (1, 1), (2, 2)]
DIMS = [64, 80, 6, 1]  # words of 16, 16, 2 and 1 bytes for codes
SLOTS, TENSORS, HEADS, POSITIONS = 5, 4, 3, 70

# What a GPU has and a CPU has not; a block of 32 threads, and 3 of them.
PRELUDE = """
#include <cstddef>
#define __global__
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim = {32}, gridDim = {3};
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
"""
LAUNCH = """
#define LAUNCH(kernel)                                                     \\
    extern "C" void run_##kernel(Arguments* a) {                           \\
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)         \\
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) \\
                kernel(*a);                                                \\
    }
LAUNCH(gather)
LAUNCH(append)
"""
TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}


class Case:
    """Memory for one call of each kernel, of random bytes, and what NumPy makes of it."""

    def __init__(self, cache: int, present: int, dim: int, live: int, count: int) -> None:
        chance = np.random.default_rng(dim + live + count)
        self.where = np.array([[3, 5], [0, 0], [4, 63]], np.int64)
        batch = len(self.where)

        def memory(shape: tuple[int, ...], item: int) -> np.ndarray:
            return chance.integers(0, 256 ** min(item, 2), shape).astype(f"u{item}")

        inner = batch * HEADS * live * dim
        self.stride = -(-inner * cache // 256) * 256 // cache
        self.rows_inner = batch * HEADS * count * dim
        self.rows_stride = -(-self.rows_inner * present // 256) * 256 // present
        self.slots = memory((SLOTS, TENSORS, HEADS, POSITIONS, dim), cache)
        self.window = memory((TENSORS * self.stride,), cache)
        self.rows = memory((TENSORS * self.rows_stride,), present)
        self.sizes = {"cache": cache, "present": present}
        self.arguments = {
            "tensors": TENSORS,
            "batch": batch,
            "heads": HEADS,
            "positions": POSITIONS,
            "live": live,
            "count": count,
            "dim": dim,
            "window_stride": self.stride,
            "rows_stride": self.rows_stride,
        }

    def expected(self) -> list[np.ndarray]:
        """Slots and window after a gather and an append, by `FakeGpu`, in copies."""
        fake, arrays, addresses = FakeGpu(), {}, {}
        for name in ("slots", "window", "rows", "where"):
            array = getattr(self, name)
            _, addresses[name] = fake.cudaMalloc(max(array.nbytes, 1))
            arrays[name] = fake.view(addresses[name], array.nbytes)
            arrays[name][:] = array.reshape(-1).view(np.uint8)
        a = Arguments(**addresses, **self.arguments)
        fake._gather(a, self.sizes)
        fake._append(a, self.sizes)
        return [arrays["slots"], arrays["window"]]


@pytest.fixture(scope="module")
def on_this_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, int], None]:
    """Runs the source's two kernels over a case's own memory."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, to run the kernels' source without a GPU")
    directory = tmp_path_factory.mktemp("kernels")
    source = (resources.files("serve") / "tensorrt" / "cache.cu").read_text()
    (directory / "cache.cpp").write_text(PRELUDE + source + LAUNCH)
    libraries: dict[tuple[int, int, int], Any] = {}

    def run(case: Case, word: int) -> None:
        key = (case.sizes["cache"], case.sizes["present"], word)
        if key not in libraries:
            path = directory / f"{'-'.join(map(str, key))}.so"
            names = zip(("CACHE", "PRESENT", "WORD"), key, strict=True)
            defines = [f"-D{name}={TYPES[size]}" for name, size in names]
            flags = ["-O1", "-w", "-shared", "-fPIC", *defines, "-o", str(path)]
            subprocess.run([compiler, *flags, str(directory / "cache.cpp")], check=True)
            libraries[key] = ctypes.CDLL(str(path))
        addresses = {
            name: getattr(case, name).ctypes.data for name in ("slots", "window", "rows", "where")
        }
        arguments = Arguments(**addresses, **case.arguments)
        libraries[key].run_gather(ctypes.byref(arguments))
        libraries[key].run_append(ctypes.byref(arguments))

    return run


def compare(case: Case, expected: list[np.ndarray]) -> None:
    for name, bytes_ in zip(("slots", "window"), expected, strict=True):
        found = getattr(case, name).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(found, bytes_, err_msg=name)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("cache", "present"), SIZES)
def test_the_source_does_what_numpy_does(
    on_this_cpu: Callable[[Case, int], None], cache: int, present: int, dim: int
) -> None:
    for live, count in ((64, 1), (70, 3), (6, 2)):
        case = Case(cache, present, dim, live, count)
        expected = case.expected()
        on_this_cpu(case, word_bytes(cache * dim))
        compare(case, expected)


def test_a_word_divides_a_row() -> None:
    assert [word_bytes(size) for size in (64, 80, 24, 12, 6, 3)] == [16, 16, 8, 4, 2, 1]


@pytest.mark.parametrize("word", [1, 2, 16])
@pytest.mark.parametrize(("cache", "present"), SIZES)
def test_it_compiles_for_gpus_of_every_generation(cache: int, present: int, word: int) -> None:
    """With the NVRTC that is installed: machine code where it knows the GPU, and PTX if not."""
    word = max(word, cache)
    for capability in ((8, 9), (9, 0), (12, 0)):
        code = compile_kernels(capability, cache, present, word)
        assert code.startswith(b"\x7fELF") and b"gather" in code and b"append" in code
    newer = compile_kernels((99, 9), cache, present, word)
    assert b".visible .entry gather" in newer


def test_a_gpu_too_old_for_nvrtc_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"NVRTC compiles for sm\d+ and above.*is sm10"):
        compile_kernels((1, 0), 1, 2, 16)


@pytest.fixture
def gpu() -> Gpu:
    """The GPU of this machine."""
    try:
        return Gpu()
    except UnsupportedError as error:
        pytest.skip(f"{error}; there: pytest -m gpu tests/serve/tensorrt/{Path(__file__).name}")


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("cache", "present"), SIZES)
def test_a_gpu_does_what_numpy_does(gpu: Gpu, cache: int, present: int, dim: int) -> None:
    kernels = Kernels(gpu, cache_bytes=cache, present_bytes=present, dim=dim)
    for live, count in ((64, 1), (70, 3), (6, 2)):
        case = Case(cache, present, dim, live, count)
        expected = case.expected()
        there, pinned = {}, {}
        for name in ("slots", "window", "rows", "where"):
            array = getattr(case, name)
            there[name], pinned[name] = Memory(gpu, array.nbytes), PinnedMemory(gpu)
            pinned[name].reserve(array.nbytes)
            pinned[name].array(0, array.shape, array.dtype)[...] = array
            gpu.copy_in(there[name].address, pinned[name], array.nbytes)
        addresses = {name: memory.address for name, memory in there.items()}
        arguments = Arguments(**addresses, **case.arguments)
        kernels.gather(arguments)
        kernels.append(arguments)
        for name in ("slots", "window"):
            gpu.copy_out(pinned[name], there[name].address, getattr(case, name).nbytes)
        gpu.synchronize()
        for name in ("slots", "window"):
            array = getattr(case, name)
            array[...] = pinned[name].array(0, array.shape, array.dtype)
        compare(case, expected)


@pytest.mark.gpu
def test_rows_on_a_gpu_are_cleared_and_times_are_measured(gpu: Gpu) -> None:
    memory, pinned = Memory(gpu, 1 << 20), PinnedMemory(gpu)
    pinned.reserve(1 << 20)
    values = pinned.array(0, (1 << 20,), np.uint8)
    values[:] = 7
    first, last = Event(gpu), Event(gpu)
    first.record()
    gpu.copy_in(memory.address, pinned, 1 << 20)
    gpu.zero(memory.address + 256, pitch=1024, width=256, height=1000)
    last.record()
    gpu.copy_out(pinned, memory.address, 1 << 20)
    gpu.synchronize()
    rows = values.reshape(1024, 1024)
    assert not rows[:1000, 256:512].any()
    assert (rows[:, :256] == 7).all() and (rows[:, 512:] == 7).all() and (rows[1000:] == 7).all()
    assert 0 < last.since_s(first) < 1

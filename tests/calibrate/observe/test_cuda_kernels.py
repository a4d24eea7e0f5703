"""Kernels are compiled, kept and loaded without a GPU here; NVRTC needs none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import calibrate.observe.cuda_kernels as cuda_kernels
from calibrate.observe.cuda_kernels import compile_kernels, load_module, parts_for
from octet.errors import UnsupportedError
from octet.hardware.nvrtc import load_nvrtc

ARCHITECTURES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)]
ELF = b"\x7fELF"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled code is kept."""
    try:
        load_nvrtc("this", "it")
    except UnsupportedError:
        pytest.skip("needs no GPU but NVRTC: pip install cuda-bindings nvidia-cuda-nvrtc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "octet" / "kernels"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What NVRTC compiled, in order."""
    results: list[bytes] = []
    original = cuda_kernels.compile_source

    def compile_(*arguments: Any) -> bytes:
        results.append(original(*arguments))
        return results[-1]

    monkeypatch.setattr(cuda_kernels, "compile_source", compile_)
    return results


@pytest.mark.parametrize("capability", ARCHITECTURES, ids=str)
def test_compiles_once_for_each_architecture(
    capability: tuple[int, int], kept: Path, compiled: list[bytes]
) -> None:
    codes = [compile_kernels(capability, parts) for parts in (1, 2, 4)]
    for code in codes:
        assert code[:4] == ELF
        assert all(name in code for name in (b"count_half", b"count_float"))
    assert len(list(kept.iterdir())) == 3
    assert [compile_kernels(capability, parts) for parts in (1, 2, 4)] == codes
    assert compiled == codes


@pytest.mark.parametrize("damage", ["empty", "cut", "one bit"])
def test_what_is_damaged_in_the_cache_is_compiled_again(
    damage: str, kept: Path, compiled: list[bytes]
) -> None:
    code = compile_kernels((9, 0), 1)
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path.write_bytes({"empty": b"", "cut": whole[:-100], "one bit": flipped}[damage])
    assert compile_kernels((9, 0), 1) == code
    assert len(compiled) == 2
    assert path.read_bytes() == whole
    assert list(kept.iterdir()) == [path]


def test_compiles_where_no_cache_can_be_written(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_kernels((9, 0), 1)[:4] == ELF


def test_compiles_for_a_user_without_a_home(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert compile_kernels((9, 0), 1)[:4] == ELF


def test_falls_back_to_ptx_for_a_gpu_newer_than_the_compiler(kept: Path) -> None:
    assert b".target sm_" in compile_kernels((99, 0), 1)
    with pytest.raises(UnsupportedError, match=r"this GPU has 2\.0"):
        compile_kernels((2, 0), 1)


class FakeDriver:
    """A driver that refuses the first `failures` modules it is given."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self.given: list[bytes] = []

    def cuModuleLoadData(self, code: bytes) -> tuple[Any, ...]:
        self.given.append(code)
        bad = len(self.given) <= self._failures
        status = SimpleNamespace(value=200, name="CUDA_ERROR_INVALID_IMAGE")
        return (status, None) if bad else (SimpleNamespace(value=0), "module")

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return SimpleNamespace(value=0), 12_040


@pytest.mark.parametrize("failures", [0, 1])
def test_code_that_does_not_load_is_compiled_once_more(
    failures: int, kept: Path, compiled: list[bytes]
) -> None:
    driver = FakeDriver(failures)
    assert load_module(driver, (9, 0), 1) == "module"
    assert driver.given == compiled
    assert len(compiled) == 1 + failures


def test_a_driver_that_loads_no_code_is_named(kept: Path, compiled: list[bytes]) -> None:
    with pytest.raises(UnsupportedError) as error:
        load_module(FakeDriver(9), (9, 0), 1)
    assert len(compiled) == 2
    told = str(error.value)
    assert told.startswith("the NVIDIA driver (CUDA 12.4) does not load what NVRTC ")
    assert "CUDA_ERROR_INVALID_IMAGE" in told
    assert told.endswith("update the driver, or calibrate with --device cpu")


def test_splits_the_counters_where_a_block_has_less_shared_memory() -> None:
    kib = 1024
    sizes = {227: 1, 163: 1, 128: 1, 99: 2, 64: 2, 48: 4, 32: 4}
    for size, parts in sizes.items():
        assert parts_for(size * kib, "a GPU") == parts
    with pytest.raises(UnsupportedError, match="a GPU gives a block 16 KB of shared memory"):
        parts_for(16 * kib, "a GPU")

"""Compiling for a GPU that is not there: NVRTC needs none."""

import sys

import pytest

from octet.errors import UnsupportedError
from octet.hardware.nvrtc import Target, architectures, compile_source, load_nvrtc

KNOWN = [75, 80, 90, 120]


@pytest.mark.parametrize(
    ("capability", "option", "kind"),
    [
        ((9, 0), "--gpu-architecture=sm_90", "cubin"),
        ((8, 9), "--gpu-architecture=compute_80", "ptx"),
        ((99, 0), "--gpu-architecture=compute_120", "ptx"),
    ],
)
def test_a_gpu_gets_its_own_code_or_the_nearest_older_ptx(
    capability: tuple[int, int], option: str, kind: str
) -> None:
    target = Target.nearest(KNOWN, capability)
    assert target is not None and (target.option, target.kind) == (option, kind)
    assert Target.nearest(KNOWN, (7, 0)) is None


def test_a_mistake_in_the_source_is_told_with_its_line() -> None:
    try:
        nvrtc = load_nvrtc("this", "it")
    except UnsupportedError:
        pytest.skip("needs no GPU but NVRTC: pip install cuda-bindings nvidia-cuda-nvrtc")
    target = Target(architectures(nvrtc)[0], native=True)
    with pytest.raises(RuntimeError, match=r"(?s)^some\.cu: some\.cu\(2\): error: .*undefined"):
        compile_source(nvrtc, "some.cu", b"__global__ void f(int* x) {\n*x = y; }", target, [])


def test_without_the_packages_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        UnsupportedError, match=r"^counting needs .*: pip install 'octet-llm\[gpu\]'$"
    ):
        load_nvrtc("counting", "'octet-llm[gpu]'")

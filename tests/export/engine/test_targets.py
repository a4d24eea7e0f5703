"""Tests which builder is chosen for which GPUs, and the errors where none can build."""

import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from export.engine import library as tensorrt_library
from export.engine.library import RTX, TENSORRT, Gpu, Name, choose, find_gpu, load
from export.engine.targets import capability, check_names, check_recipe_on, resolve_targets
from export.source import Source
from octet.errors import UnsupportedError

H200, ADA = Gpu("NVIDIA H200", "sm90"), Gpu("NVIDIA L4", "sm89")


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TensorRT on this machine, which is a Linux one."""
    for name in ("tensorrt", "tensorrt_bindings", "tensorrt_rtx", "tensorrt_rtx_bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(platform, "system", lambda: "Linux")


def test_targets_are_normalized_and_kept_once() -> None:
    assert check_names([" SM89", "sm120", "sm89"]) == ["sm89", "sm120"]
    assert check_names(["sm89", " sm120", ""]) == ["sm89", "sm120"]
    with pytest.raises(
        UnsupportedError, match=r"--target names no GPU; leave it out, or give names"
    ):
        check_names([" ", ""])


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("sm999", r"TensorRT-RTX: unknown target 'sm999'; did you mean 'sm89'\?"),
        ("turing", "TensorRT-RTX: unknown target 'turing'; known: sm120, sm121, sm89$"),
        ("sm75", "target sm75: compute capability 7.5 has no FP8, .* for sm89, sm120, sm121"),
        ("sm86", "target sm86: compute capability 8.6 has no FP8"),
    ],
)
def test_names_that_are_no_targets(target: str, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        resolve_targets(RTX, check_names(["sm89", target]), None, ["fp8"])


def test_a_compute_capability_has_one_digit_after_the_point() -> None:
    assert [capability(name) for name in ("sm89", "sm90", "sm120")] == ["8.9", "9.0", "12.0"]


def test_rtx_is_not_for_data_centre_gpus() -> None:
    with pytest.raises(UnsupportedError, match=r"sm90: TensorRT-RTX does not run on .* 9\.0; .*"):
        resolve_targets(RTX, ["sm89", "sm90"], None, ["fp8"])


def test_tensorrt_takes_the_gpu_that_is_here_and_no_other_name() -> None:
    assert resolve_targets(TENSORRT, ["sm90"], H200, ["fp8"]) == ["sm90"]
    with pytest.raises(UnsupportedError, match=r"target sm999: .* \(NVIDIA H200, sm90\); leave"):
        resolve_targets(TENSORRT, ["sm999"], H200, ["fp8"])


FP8_ON = "the recipes fp8, fp8-static and fp8-block run on"


@pytest.mark.parametrize(
    ("recipe", "builder", "target", "said"),
    [
        (
            "nvfp4",
            RTX,
            "sm89",
            "recipe nvfp4 needs FP4, which target sm89 with compute capability 8.9 does not have:"
            " it begins with 10.0, such as --builder tensorrt-rtx --target sm120;"
            f" {FP8_ON} sm89",
        ),
        (
            "mxfp8",
            RTX,
            "sm89",
            "recipe mxfp8 has MXFP8, which TensorRT-RTX takes but multiplies in FP16 after decoding"
            f" it in every step; {FP8_ON} sm89",
        ),
        (
            "mxfp8",
            RTX,
            "sm120",
            "recipe mxfp8 has MXFP8, which TensorRT-RTX takes but multiplies in FP16 after decoding"
            " it in every step; the recipes fp8, fp8-static, fp8-block and nvfp4 run on sm120",
        ),
        (
            "mxfp8",
            TENSORRT,
            "sm90",
            "recipe mxfp8 needs MXFP8, which target sm90 with compute capability 9.0 does not have:"
            f" it begins with 10.0, with --builder tensorrt there (not tried); {FP8_ON} sm90",
        ),
        (
            "mxfp4",
            RTX,
            "sm89",
            "recipe mxfp4 has MXFP4, and TensorRT has no operator that rounds inputs to it;"
            f" {FP8_ON} sm89",
        ),
    ],
)
def test_a_refused_recipe_names_what_is_taken(
    recipe: str, builder: Name, target: str, said: str, calibrations: dict[str, Path]
) -> None:
    source = Source.open(calibrations[recipe])
    with pytest.raises(UnsupportedError) as caught:
        check_recipe_on(builder, [target], None, source)
    assert str(caught.value) == said
    if "tensorrt-rtx" in said:  # what it names is taken
        check_recipe_on(RTX, ["sm120"], None, source)
    check_recipe_on(builder, [target], None, Source.open(calibrations["fp8"]))


@pytest.mark.parametrize(
    ("gpu", "kinds", "targets"),
    [
        (None, ["fp8"], ["sm89", "sm120"]),
        (None, ["fp8", "nvfp4"], ["sm120"]),
        (ADA, ["fp8"], ["sm89"]),
    ],
)
def test_what_rtx_builds_for_unasked(gpu: Gpu | None, kinds: list, targets: list[str]) -> None:
    assert resolve_targets(RTX, None, gpu, kinds) == targets


def test_auto_is_tensorrt_where_it_can_build(
    nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose("auto", None, targets=False) == RTX
    assert choose("auto", ADA, targets=False) == RTX
    assert choose("auto", H200, targets=False) == TENSORRT, "the only one for it, so be told"
    assert choose("auto", H200, targets=True) == RTX, "a build for another GPU"
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__spec__=None))  # type: ignore[arg-type]
    assert choose("auto", None, targets=False) == RTX, "it needs a GPU"
    assert choose("auto", ADA, targets=False) == TENSORRT


def test_tensorrt_needs_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="--builder tensorrt-rtx builds without one"):
        choose("tensorrt", None, targets=False)


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        (None, r"without a GPU, as here: pip install 'octet-llm\[tensorrt-rtx\]'$"),
        (ADA, r"for NVIDIA L4 \(sm89\): pip install 'octet-llm\[tensorrt-rtx\]'$"),
        (
            H200,
            r"H200 \(sm90\): pip install 'octet-llm\[tensorrt\]' --extra-index-url https://pypi",
        ),
    ],
)
def test_one_line_says_what_to_install_here(nothing: None, gpu: Gpu | None, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        load(choose("auto", gpu, targets=False), gpu, auto=True)


def test_nothing_is_to_be_installed_on_a_mac(
    nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(UnsupportedError, match="made for Linux and Windows, not for Darwin"):
        load(RTX, None, auto=True)


def test_the_one_that_was_asked_for_is_named(nothing: None) -> None:
    with pytest.raises(UnsupportedError, match=r"^TensorRT-RTX is not installed: pip install"):
        load(RTX, H200)


def test_an_old_one_is_refused(nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(__version__="10.9.0.34")
    monkeypatch.setitem(sys.modules, "tensorrt", old)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"TensorRT 10\.9\.0\.34 is older than 10\.13"):
        load(TENSORRT, H200)


def test_one_that_cannot_be_loaded_says_why(nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise OSError("libnvinfer.so.10: cannot\nopen")

    monkeypatch.setattr(tensorrt_library.importlib, "import_module", fails)
    with pytest.raises(UnsupportedError, match=r"cannot be loaded: libnvinfer\.so\.10: cannot op"):
        load(TENSORRT, H200)


def test_the_gpu_is_the_drivers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __init__(self, path: str) -> None:
            assert "cuda" in path

        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGet(self, device: object, ordinal: int) -> int:
            return 0

        def cuDeviceGetName(self, name: object, size: int, device: object) -> int:
            name.value = b"NVIDIA H200"  # type: ignore[attr-defined]
            return 0

        def cuDeviceGetAttribute(self, value: object, which: int, device: object) -> int:
            value._obj.value = {75: 9, 76: 0}[which]  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr("export.engine.library.ctypes.CDLL", Driver)
    assert find_gpu() == H200
    monkeypatch.setattr(Driver, "cuInit", lambda self, flags: 100)  # CUDA_ERROR_NO_DEVICE
    assert find_gpu() is None


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise OSError(path)

    monkeypatch.setattr("export.engine.library.ctypes.CDLL", missing)
    assert find_gpu() is None

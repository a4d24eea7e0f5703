"""What `octet serve` makes of an export: one backend, or ways of serving it in their order."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import serve.settings
from octet.errors import ConfigError
from octet.hardware.devices import find_device
from octet.recipe import Recipe
from serve.config import EmbeddedConfig, GatewayConfig, ManagedConfig
from serve.settings import Options, settings_of
from serve.vllm.command import Gpu, Installed
from tests.serve.vllm.exports import write_export

H100 = Gpu("NVIDIA H100", (9, 0), memory=80_000, free=79_500)
B200 = Gpu("NVIDIA B200", (10, 0), memory=180_000, free=179_000)


@pytest.fixture
def exports(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A calibration, its checkpoint and its ONNX export, beside each other, on an H100."""
    source = {"source": str(tiny_model)}
    made = write_export(
        tmp_path / "calibration", tiny_model, "m", kind="calibration", details=source
    )
    own = {"calibration": made.identity}
    write_export(tmp_path / "checkpoint", tiny_model, "m", tensor_parallel=1, **own)
    target = {"target": "onnxruntime"}
    write_export(tmp_path / "onnx", tiny_model, "m", kind="onnx", details=target, **own)
    write_export(tmp_path / "other", tiny_model, "m", kind="onnx", details=target)
    on(monkeypatch, H100)
    return tmp_path


def on(monkeypatch: pytest.MonkeyPatch, *found: Gpu) -> None:
    """The machine has these GPUs, and vLLM 0.24."""
    monkeypatch.setattr(serve.settings, "gpus", lambda: list(found))
    devices = [find_device(gpu.name) for gpu in found]
    monkeypatch.setattr(serve.settings, "local_devices", lambda: devices)
    vllm = Installed(("vllm",), "0.24.0")
    monkeypatch.setattr(serve.settings, "find_vllm", lambda **_: vllm)


def ways(settings: GatewayConfig) -> Sequence[str]:
    return settings.models["m"].in_order("m")


def managed(settings: GatewayConfig, pool: str) -> ManagedConfig:
    (backend,) = settings.all_pools[pool].backends
    assert isinstance(backend, ManagedConfig)
    return backend


def test_a_checkpoint_is_one_managed_backend(exports: Path) -> None:
    options = Options(options=("--seed", "1"), environment={"A": "b"}, python=Path("/opt/python"))
    settings = settings_of(exports / "checkpoint", None, options)
    assert ways(settings) == ("m",)
    backend = managed(settings, "m")
    assert backend.artifact == exports / "checkpoint" and backend.python == Path("/opt/python")
    assert backend.options == ("--seed", "1") and backend.environment == {"A": "b"}
    assert settings.all_pools["m"].proof.activations is None


def test_an_onnx_export_names_its_precision(exports: Path, tiny_model: Path) -> None:
    settings = settings_of(exports / "onnx", None, Options())
    assert settings.all_pools["m"].precision == "fp8"
    details = {"target": "onnxruntime", "quantized": False}
    baseline = write_export(exports / "b", tiny_model, "m", kind="onnx", details=details)
    assert not baseline.details["quantized"]
    settings = settings_of(exports / "b", None, Options())
    assert settings.all_pools["m"].precision == "original"


def test_fallback_goes_from_native_to_onnx(exports: Path, tiny_model: Path) -> None:
    settings = settings_of(exports / "checkpoint", None, Options(fallback=True))
    assert ways(settings) == ("native", "weight-only", "original", "onnx")
    assert settings.models["m"].one_at_a_time
    pools = settings.all_pools
    assert pools["native"].proof.activations == "quantized"
    assert pools["weight-only"].proof.activations == "original"
    assert managed(settings, "weight-only").weight_only
    assert not managed(settings, "native").weight_only
    assert managed(settings, "original").artifact == tiny_model
    assert managed(settings, "original").model == "m"  # not the directory's name
    original = pools["original"].proof
    assert (original.weights, original.kv_cache) == ("original", "float16")
    (embedded,) = pools["onnx"].backends
    assert isinstance(embedded, EmbeddedConfig) and embedded.path == exports / "onnx"


@pytest.mark.parametrize("way", ["native", "weight-only", "original", "onnx"])
def test_a_way_can_be_forced(way: Any, exports: Path) -> None:
    assert ways(settings_of(exports / "checkpoint", None, Options(way=way))) == (way,)
    options = Options(way=way, fallback=True)
    assert ways(settings_of(exports / "checkpoint", None, options))[0] == way


def test_a_way_that_the_machine_does_not_have_is_left_out(
    exports: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    write_export(exports / "fp4", tiny_model, "m", tensor_parallel=1, recipe=Recipe.load("nvfp4"))
    options = Options(fallback=True)
    assert ways(settings_of(exports / "fp4", None, options)) == ("weight-only",)
    assert "no nvfp4 kernel that rounds activations on" in caplog.text
    assert "original is left out: the original model is not known" in caplog.text
    on(monkeypatch, B200)
    assert ways(settings_of(exports / "fp4", None, options))[0] == "native"
    with pytest.raises(ConfigError, match="there is no ONNX export beside"):
        settings_of(exports / "fp4", None, Options(way="onnx"))


@pytest.mark.parametrize(
    ("gpu", "algorithm", "exact", "warning"),
    [
        (H100, "recover", [], "trained for another arithmetic of nvfp4 than vLLM's on H100, which"),
        (B200, "recover", ["nvfp4"], "which rounds its activations"),
        (H100, "recover", ["nvfp4"], ""),
        (B200, "recover", [], ""),
        (B200, "gptq", ["nvfp4"], "measured for another arithmetic of nvfp4 than vLLM's on B200"),
        (H100, "gptq", ["nvfp4"], ""),
        (H100, "gptq", [], ""),  # what it serves is more exact than what was measured
    ],
)
def test_weights_of_another_gpus_arithmetic_are_named(
    gpu: Gpu,
    algorithm: str,
    exact: list[str],
    warning: str,
    exports: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on(monkeypatch, gpu)
    details = {"algorithm": algorithm, "runs_weight_only": exact}
    recipe = Recipe.load("nvfp4")
    write_export(
        exports / "fp4", tiny_model, "m", tensor_parallel=1, recipe=recipe, details=details
    )
    settings_of(exports / "fp4", None, Options())
    assert warning in caplog.text and bool(warning) == (" --for '" in caplog.text)


def test_a_directory_of_exports_is_served_by_what_can_run(
    exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*, python: Path | None) -> Installed:
        if not installed:
            raise ConfigError("no vLLM")
        return Installed(("vllm",), None)

    cases: list[tuple[bool, list[Gpu], Options, bool]] = [
        (True, [H100], Options(), True),
        (False, [H100], Options(), False),
        (True, [], Options(), False),  # on a CPU the embedded engine is faster
        (True, [], Options(python=Path("python")), True),
        (True, [], Options(way="original"), True),
        (True, [H100], Options(way="onnx"), False),
    ]
    for installed, found, options, vllm in cases:
        on(monkeypatch, *found)
        monkeypatch.setattr(serve.settings, "find_vllm", find)
        settings = settings_of(exports, None, options)
        (backend,) = settings.all_pools[ways(settings)[0]].backends
        assert isinstance(backend, ManagedConfig) == vllm, (installed, found, options)
    installed = False
    with pytest.raises(ConfigError, match="no vLLM"):
        settings_of(exports, None, Options(python=Path("python")))


def test_what_cannot_be_served_is_refused(exports: Path) -> None:
    with pytest.raises(ConfigError, match="is a calibration; what is served here is a checkpoint"):
        settings_of(exports / "calibration", None)
    with pytest.raises(ConfigError, match="is an onnx export, which vLLM does not serve"):
        settings_of(exports / "onnx", None, Options(options=("--seed", "1")))

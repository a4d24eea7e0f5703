"""The command that starts vLLM: where it is found, and its flags for an artifact and a machine."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from octet.errors import ConfigError
from serve.vllm.command import (
    Gpu,
    Installed,
    cache_variables,
    find_vllm,
    gpus,
    gpus_at_rest,
    machine_flags,
    value_of,
    weight_only_flags,
)
from tests.serve.vllm.exports import write_export

H100 = Gpu("NVIDIA H100", (9, 0), memory=80_000, free=79_500)


@pytest.fixture
def export(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    def export(serve_with: str = "--kv-cache-dtype fp8_e5m2", tensor_parallel: int = 1) -> Path:
        path = tmp_path / f"export-{tensor_parallel}{serve_with[-4:]}"
        if not path.exists():
            write_export(path, tiny_model, "mine", serve_with, tensor_parallel)
        return path

    return export


def test_flags_fit_the_artifact_and_the_machine(export: Callable[..., Path]) -> None:
    assert machine_flags(export(), [], []) == ["--max-model-len", "auto"]
    assert machine_flags(export(), [H100], []) == [
        *("--max-model-len", "auto", "--attention-backend", "FLASHINFER"),
    ]
    assert machine_flags(export("--kv-cache-dtype fp8_e4m3"), [H100], []) == [
        *("--max-model-len", "auto")
    ]
    half = Gpu("NVIDIA H100", (9, 0), memory=80_000, free=40_000)
    flags = machine_flags(export(), [half], ["--max-model-len=8192"])
    assert flags == ["--attention-backend", "FLASHINFER", "--gpu-memory-utilization", "0.48"]


def test_another_tensor_parallelism_is_refused(export: Callable[..., Path]) -> None:
    two = export(tensor_parallel=2)
    assert machine_flags(two, [H100, H100], [])
    with pytest.raises(ConfigError, match=r"for tensor parallelism 2, and this machine has 1 GPU:"):
        machine_flags(two, [H100], [])
    for options in (["--tensor-parallel-size", "4"], ["--tensor-parallel-size=4"], ["-tp", "4"]):
        with pytest.raises(ConfigError, match="exported for tensor parallelism 2, not 4: export"):
            machine_flags(two, [H100] * 4, options)


def test_caches_are_kept_where_something_can_be_written(tmp_path: Path) -> None:
    kept = tmp_path / "new" / "cache"
    assert cache_variables(kept)["VLLM_CACHE_ROOT"] == f"{kept}/vllm" and kept.is_dir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(ConfigError, match=rf"^--cache {path}: .*; choose another$"):
            cache_variables(path)


def test_the_values_of_options() -> None:
    options = ["--a", "1", "--b=2", "--c"]
    assert [value_of(name, options) for name in ("--a", "--b", "--c", "--d")] == [
        "1",
        "2",
        "",
        None,
    ]


def test_a_version_that_is_not_tested_is_a_warning() -> None:
    assert (
        Installed(("vllm",), "0.24.0").problem == "" == Installed(("vllm",), "0.32.0+cpu").problem
    )
    for version in ("0.23.1", "0.40.0", "nightly"):
        assert "is not a version that Octet was tested with" in Installed((), version).problem
    assert "could not be read" in Installed(("vllm",), None).problem


def test_weight_only_takes_the_option_where_vllm_has_it() -> None:
    assert (
        weight_only_flags(Installed((), "0.24.0")) == [] == weight_only_flags(Installed((), None))
    )
    assert weight_only_flags(Installed((), "0.32.0")) == ["--linear-backend", "marlin"]


def test_vllm_is_found_in_the_environment_of_a_python(tmp_path: Path) -> None:
    package = tmp_path / "vllm-0.24.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = find_vllm(python=python)
    assert found.version == "0.24.0"
    assert found.words[0] == str(python) and found.words[-1] == "--model"
    with pytest.raises(ConfigError, match="has no vLLM"):
        find_vllm(python=Path(sys.executable))
    with pytest.raises(ConfigError, match="no such program"):
        find_vllm(python=tmp_path / "missing")


def test_gpus_are_those_that_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 9.0, 143771, 143000'\necho 'X, [N/A], 1, 1'\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus({}) == [Gpu("NVIDIA H200", (9, 0), 143_771, 143_000)]
    assert gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    readings = tmp_path / "free"
    readings.write_text("90\n100\n100\n")
    command.write_text(
        f'#!/bin/sh\necho "X, 9.0, 100, $(head -1 {readings})"\nsed -i 1d {readings}\n'
    )
    monkeypatch.setattr("serve.vllm.command._SETTLING_S", 0.0)
    assert gpus_at_rest() == [Gpu("X", (9, 0), 100, 100)]  # a process has just ended
    command.write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert gpus({}) == []

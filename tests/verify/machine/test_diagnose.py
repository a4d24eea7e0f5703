"""Tests the verdicts of `octet doctor` on stacks in the form that `octet doctor --json` prints.

h100 was recorded there, and its verdicts confirmed by starting vLLM (all but `fp8-block`'s:
benchmarks/results/doctor_confirm-h100.json). The other stacks are written by hand, from what
drivers and packages report on such machines.
"""

from pathlib import Path
from typing import Any

import pytest

from export.checkpoint.write import export_checkpoint
from octet.errors import ArtifactError, ConfigError
from octet.hardware.machine import Machine
from octet.recipe import ScaleMethod
from tests.export.conftest import calibration_in_blocks
from tests.fp8_blocks import FP8, quantize_in_blocks
from verify.machine.diagnose import diagnose
from verify.machine.diagnosis import Diagnosis
from verify.machine.target import judge_artifact, judge_configuration

STACKS = Path(__file__).parent / "stacks"
ALL_WEIGHT_ONLY = dict.fromkeys(
    ("fp8", "fp8-static", "fp8-block", "mxfp8", "mxfp4", "nvfp4"), "weight-only"
)


def stack(name: str, **changes: Any) -> Machine:
    return Machine.load(STACKS / f"{name}.json").model_copy(update=changes)


def outcomes(found: Diagnosis, kind: str) -> dict[str, str]:
    """What vLLM does with each recipe, or cache."""
    rows = (row for row in found.rows if row.engine.startswith("vllm") and row.kind == kind)
    return {row.name: row.outcome for row in rows}


@pytest.mark.parametrize(
    ("name", "weights", "caches"),
    [
        (
            "t4",
            ALL_WEIGHT_ONLY | {"mxfp4": "refused"},
            {"e5m2": "refused", "e4m3": "refused", "float16": "native"},
        ),
        ("a100", ALL_WEIGHT_ONLY, dict.fromkeys(("e5m2", "e4m3", "float16"), "native")),
        (
            "l40s",
            ALL_WEIGHT_ONLY | dict.fromkeys(("fp8", "fp8-static", "fp8-block"), "native"),
            dict.fromkeys(("e5m2", "e4m3", "float16"), "native"),
        ),
        (
            "h100",
            ALL_WEIGHT_ONLY | dict.fromkeys(("fp8", "fp8-static", "fp8-block"), "native"),
            dict.fromkeys(("e5m2", "e4m3", "float16"), "native"),
        ),
        (
            "b200",
            dict.fromkeys(ALL_WEIGHT_ONLY, "native"),
            {"e5m2": "refused", "e4m3": "native", "float16": "native"},
        ),
        (
            "mi300x",
            dict.fromkeys(("fp8", "fp8-static", "fp8-block"), "native")
            | {"mxfp8": "emulated", "mxfp4": "refused", "nvfp4": "emulated"},
            {"e5m2": "refused", "e4m3": "native", "float16": "native"},
        ),
    ],
)
def test_what_each_stack_does(name: str, weights: dict[str, str], caches: dict[str, str]) -> None:
    found = diagnose(stack(name))
    assert outcomes(found, "weights") == weights
    assert outcomes(found, "cache") == caches
    assert not found.findings and found.exit_code == 0
    for row in found.rows:  # what vLLM does not run natively has a remedy
        assert row.outcome == "native" or row.remedy or row.engine.startswith("onnx"), row


@pytest.mark.parametrize(
    ("name", "level", "text", "remedy"),
    [
        ("old-driver", "error", "driver 535.183.06 is too old for torch's CUDA 13.0", "580"),
        ("no-flashinfer", "warning", "refuses E5M2 caches", "pip install flashinfer-python"),
        ("two-kinds", "warning", "1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100", "VISIBLE_DEVICES"),
        ("unknown-gpu", "warning", "RTX A5000): not in Octet's table; judged by", "octet verify"),
        ("unknown-vllm", "warning", "vLLM 0.47.0 is not known (0.24 to 0.33", "octet verify URL"),
    ],
)
def test_what_is_to_repair(name: str, level: str, text: str, remedy: str) -> None:
    found = diagnose(stack(name))
    (finding,) = found.findings
    assert finding.level == level and text in finding.text and remedy in finding.remedy
    assert found.exit_code == (level == "error")


def test_an_unknown_gpu_says_what_its_capability_implies() -> None:
    (finding,) = diagnose(stack("unknown-gpu")).findings
    assert finding.text.endswith("its capability 8.6, as A10: FP8 weights run weight-only")
    gpu = stack("unknown-gpu").gpus[0].model_copy(update={"name": "B900", "capability": "14.0"})
    future = diagnose(stack("unknown-gpu", gpus=(gpu,)))
    assert set(outcomes(future, "weights").values()) == {"unknown"}
    assert "FP8 weights are unknown" in future.findings[0].text


def test_each_kind_of_gpu_has_its_own_column() -> None:
    rows = diagnose(stack("two-kinds")).rows
    found = {row.device: row.outcome for row in rows if row.name == "fp8"}
    assert found == {"H100": "native", "A100 80GB": "weight-only"}


def test_a_gpu_that_is_broken_hot_or_silent() -> None:
    gpu = stack("l40s").gpus[0].model_copy(update={"ecc_errors": 3, "throttled": ("power brake",)})
    found = diagnose(stack("l40s", gpus=(gpu,), gpu_problem=""))
    assert [finding.level for finding in found.findings] == ["error", "warning"]
    assert "3 uncorrected memory errors" in found.findings[0].text
    silent = diagnose(stack("l40s", gpus=(), gpu_problem="nvidia-smi: no answer within 25 s"))
    assert "the GPUs do not answer: nvidia-smi" in next(iter(silent.of("error"))).text


def test_a_build_for_gpus_without_one() -> None:
    (finding,) = diagnose(stack("l40s", gpus=())).findings
    assert finding.level == "error" and "CUDA 13.0, and there is no GPU" in finding.text


def test_ports_disks_and_codecs() -> None:
    machine = stack("l40s")
    taken = machine.ports[0].model_copy(update={"problem": "in use"})
    assert diagnose(stack("l40s", ports=(taken,))).exit_code == 0
    wanted = diagnose(stack("l40s", ports=(taken,)), wanted_ports=[8000])
    assert wanted.exit_code == 1 and wanted.findings[0].text == "port 8000: in use"
    full = tuple(x.model_copy(update={"free": 2**29}) for x in machine.folders)
    (finding,) = diagnose(stack("l40s", folders=full)).findings
    assert "0.5 GiB free of the 2 GiB" in finding.text and "VLLM_CACHE_ROOT" in finding.remedy
    sealed = tuple(x.model_copy(update={"writable": False}) for x in machine.folders)
    assert diagnose(stack("l40s", folders=sealed)).exit_code == 1
    first, *rest = machine.environment.checks
    other = (first.model_copy(update={"different": 2}), *rest)
    wrong = machine.environment.model_copy(update={"checks": other})
    (finding,) = diagnose(stack("l40s", environment=wrong)).findings
    assert finding.text == "FP8 matmul: 2 of 1536 values differ from Octet's codecs"


@pytest.fixture(scope="module")
def checkpoints(calibrations: dict[str, Path], tmp_path_factory: Any) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for recipe in ("fp8", "nvfp4"):
        made[recipe] = root / recipe
        export_checkpoint(calibrations[recipe], made[recipe], kv_cache="e5m2")
    return made


@pytest.mark.parametrize(
    ("name", "recipe", "said", "code"),
    [
        ("l40s", "fp8", None, 0),
        ("l40s", "nvfp4", "runs, but weight-only", 1),
        ("a100", "fp8", "runs, but weight-only", 1),
        ("t4", "fp8", "does not start (FP8 KV cache is not supported", 1),
        ("b200", "fp8", "does not start (AssertionError", 1),
        ("no-flashinfer", "fp8", "does not start (AssertionError", 1),
        ("mi300x", "fp8", "Unsupported data type of kv cache: fp8_e5m2", 1),
    ],
)
def test_whether_an_export_runs(
    checkpoints: dict[str, Path], name: str, recipe: str, said: str | None, code: int
) -> None:
    targets, findings = judge_artifact(checkpoints[recipe], stack(name))
    assert len(targets) == 1 and targets[0].runs == ("does not start" not in str(findings))
    assert int(any(finding.level == "error" for finding in findings)) == code
    assert said is None or said in findings[0].text
    if targets[0].runs:
        assert targets[0].command.endswith("--kv-cache-dtype fp8_e5m2")
        assert "attention by FLASHINFER" in targets[0].sentence


def test_a_checkpoint_in_fp8_blocks_is_judged_by_its_weights(
    tiny_model: Path, tmp_path: Path
) -> None:
    quantize_in_blocks(tiny_model, tmp_path / "fp8", FP8)
    native, _ = judge_artifact(tmp_path / "fp8", stack("l40s"))
    plain, _ = judge_artifact(tiny_model, stack("l40s"))
    assert "fp8-block weights" in native[0].sentence and "fp8" not in plain[0].sentence
    hopper, _ = judge_artifact(tmp_path / "fp8", stack("h100"))
    keep = "VLLM_USE_DEEP_GEMM_E8M0=0 vllm serve "
    assert hopper[0].command.startswith(keep) and native[0].command.startswith("vllm serve ")


@pytest.mark.parametrize(("method", "kept"), [("max", False), ("mse", True)])
def test_the_variable_is_shown_for_blocks_that_it_keeps(
    tiny_model: Path, tmp_path: Path, method: ScaleMethod, kept: bool
) -> None:
    calibration_in_blocks(tmp_path / "cal", tiny_model, method)
    export_checkpoint(tmp_path / "cal", tmp_path / "out", kv_cache="e5m2")
    (hopper,), _ = judge_artifact(tmp_path / "out", stack("h100"))
    assert hopper.command.startswith("VLLM_USE_DEEP_GEMM_E8M0=0 vllm serve ") == kept
    assert "vllm serve " in hopper.command


def test_an_export_needs_vllm(checkpoints: dict[str, Path]) -> None:
    environment = stack("l40s").environment.model_copy(update={"packages": {}})
    targets, findings = judge_artifact(checkpoints["fp8"], stack("l40s", environment=environment))
    assert targets[0].engine == "vllm (not installed: as 0.33)" and targets[0].runs
    assert "vLLM, which serves it, is not installed in /opt/vllm/bin" in findings[0].text
    assert findings[0].level == "error" and "--python PATH" in findings[0].remedy


def test_weights_that_do_not_fit(checkpoints: dict[str, Path]) -> None:
    small = stack("l40s").gpus[0].model_copy(update={"memory": 2**16})
    _, findings = judge_artifact(checkpoints["fp8"], stack("l40s", gpus=(small,)))
    assert "do not fit" in findings[-1].text and "tensor-parallel" in findings[-1].remedy


def test_an_onnx_export_needs_its_runtime(decoders: dict[str, Path]) -> None:
    targets, findings = judge_artifact(decoders["fp8"], stack("l40s"))
    assert not targets and "onnxruntime is not installed in /opt/vllm" in findings[0].text
    packages = stack("l40s").environment.packages | {"onnxruntime": "1.31.1"}
    environment = stack("l40s").environment.model_copy(update={"packages": packages})
    targets, findings = judge_artifact(decoders["fp8"], stack("l40s", environment=environment))
    assert targets[0].device == "CPU with AMX" and targets[0].runs and not findings


def test_what_cannot_be_read_is_refused(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ArtifactError, match="no such directory"):
        judge_artifact(tmp_path / "missing", stack("l40s"))
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"manifest\.json: altered"):
        judge_artifact(tmp_path, stack("l40s"))
    (tmp_path / "machine.json").write_text('{"gpus": 3}')
    with pytest.raises(ConfigError, match="not a recorded machine"):
        Machine.load(tmp_path / "machine.json")


def test_the_backends_of_a_configuration(
    tmp_path: Path, checkpoints: dict[str, Path], decoders: dict[str, Path]
) -> None:
    config = tmp_path / "octet.yaml"
    config.write_text(
        f"""
        models: {{m: {{pool: gpu, fallback: [cpu]}}}}
        pools:
          gpu:
            backends: [{{type: vllm, url: "http://10.0.0.5:8000"}}]
            proof: {{golden: {checkpoints["nvfp4"]}, device: h100}}
          cpu: {{backends: [{{type: embedded, path: {decoders["fp8"]}}}]}}
        """
    )
    targets, findings = judge_configuration(config, stack("l40s"))
    assert [target.device for target in targets] == ["H100"]
    assert "runs, but weight-only" in findings[0].text
    assert "onnxruntime is not installed" in findings[1].text

"""What TensorRT-RTX accepts and refuses, for the real thing; run with -s to see its words.

The refusals shape the engine's graph. When a new release lifts one, its test fails, and the graph
may become simpler or faster.
"""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from octet.artifact import Manifest
from octet.recipe import Recipe
from tests.export.conftest import make_calibration

REPOSITORY = Path(__file__).parents[2]

ACCEPTED = ("fp8_linear", "fp8_block_linear", "attention", "uint8_input")
REFUSED = {
    "fp8_linear_sm80": "HW-specific datatypes: fp8_e4m3",
    "fp8_block_linear_transposed": "CHECK(is_constant()) failed",
    "fp8_per_token": "has datatype FP8 but is not produced by",
    "attention_past": "only supports Attention nodes with one output",
    "attention_softcap": "softcap is not supported",
    "attention_valid_length": "would drop a part of the graph: Unused Input",
    "e5m2_input": "Failed to convert ONNX",
    "uint8_concat": "unsupported input type of UINT8",
}


@pytest.fixture(scope="module")
def outcomes(tensorrt_rtx_python: Path) -> dict[str, str]:
    """Name of a small graph to "built", or the one line that the user would get."""
    found = subprocess.run(
        [tensorrt_rtx_python, "-m", "tests.integration.tensorrt_graphs"],
        check=True,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    outcomes: dict[str, str] = json.loads(found.stdout)
    assert outcomes.keys() == {*ACCEPTED, *REFUSED}
    return outcomes


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_engine_graph_relies_on_is_built(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "built"


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_graph_avoids_is_still_refused(outcomes: dict[str, str], name: str) -> None:
    print(outcomes[name])
    assert REFUSED[name] in outcomes[name]
    assert "\n" not in outcomes[name]


def build(python: Path, calibration: Path, out: Path, target: str) -> subprocess.CompletedProcess:
    command = [python, "-m", "octet", "build-engine", calibration, "--target", target, "-o", out]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.fixture(scope="module")
def calibration(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "calibration"
    return make_calibration(path, tiny_model, Recipe.load("fp8-static"))


def test_the_engine_says_what_it_is(
    calibration: Path, tensorrt_rtx_python: Path, tmp_path: Path
) -> None:
    plans = []
    for name in ("first", "second"):
        result = build(tensorrt_rtx_python, calibration, tmp_path / name, "sm120,sm89")
        assert result.returncode == 0, result.stderr
        plans.append(hashlib.sha256((tmp_path / name / "model.plan").read_bytes()).hexdigest())
    print(f"two builds give {'the same' if plans[0] == plans[1] else 'different'} bytes")
    manifest = Manifest.load(tmp_path / "first", "engine")
    assert manifest.calibration == Manifest.load(calibration, "calibration").identity
    details = manifest.details
    assert details["targets"] == ["sm120", "sm89"]
    assert details["builder"]["name"] == "TensorRT-RTX"
    assert manifest.software["tensorrt_rtx"] == details["builder"]["version"]
    assert details["profiles"]["decode"]["input_ids"] == [[1, 1], [4, 1], [16, 1]]
    # 7 linears in each of 2 layers, and the head in FP16.
    assert (details["precision"]["fp8_matmuls"], details["precision"]["matmuls"]) == (14, 15)
    assert {"golden.json", "config.json", "tokenizer.json"} < manifest.files.keys()
    assert not [name for name in manifest.files if name.endswith(".onnx")]


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100"])
def test_a_target_without_fp8_engines_is_refused(
    calibration: Path, tensorrt_rtx_python: Path, tmp_path: Path, target: str
) -> None:
    result = build(tensorrt_rtx_python, calibration, tmp_path / "engine", target)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and target in result.stderr
    assert not list(tmp_path.iterdir())

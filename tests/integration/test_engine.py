"""TensorRT-RTX builds every graph that we export for TensorRT; run with -s for sizes and times.

What it accepts and refuses of small graphs shapes the engine's graph. When a new release lifts a
refusal, or multiplies in 8 bits what it did not, a test here fails, and the graph may become
simpler or faster.
"""

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octet.artifacts.manifest import Manifest
from octet.recipe import Override, Recipe
from tests.export.conftest import make_calibration
from tests.integration import billion
from tests.models import KNOWN, write_model

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "python-lm" / "model"

# How the product of a small graph runs, or that a graph without one is built.
ACCEPTED = {
    "fp8_linear": "fp8",
    "fp8_linear_by_row": "fp8",
    "nvfp4_linear": "fp4",
    "attention": "built",
    "e4m3_cache": "built",
    "uint8_input": "built",
    # Taken, but decoded to FP16 before the product: why blocks are multiplied one by one, and why
    # the recipe mxfp8 is refused.
    "fp8_block_operator": "float16",
    "mxfp8_linear": "float16",
}
REFUSED = {
    "fp8_linear_sm80": "HW-specific datatypes: fp8_e4m3",
    "fp8_block_linear": "CHECK(is_constant()) failed",
    "fp8_per_token_cast": "has datatype FP8 but is not produced by",
    "fp8_per_token_operator": "No blocked dimension found",
    "fp8_per_group_operator": "block_size 128 is not supported",
    "nvfp4_linear_sm89": "HW-specific datatypes: fp4_e2m1",
    "nvfp4_linear_to_float16": "No matching rules found for input operand types",
    "mxfp8_linear_e8m0": "Failed to import initializer: ws",
    "attention_past": "only supports Attention nodes with one output",
    "attention_softcap": "softcap is not supported",
    "attention_valid_length": "would drop a part of the graph: Unused Input",
    "e4m3_cache_scatter": "cache has type FP8 but must have type Float, Half, or BFloat16",
    "e5m2_input": "Failed to convert ONNX",
    "uint8_concat": "unsupported input type of UINT8",
}


def run(python: Path, module: str, told: str = "") -> Any:
    found = subprocess.run(
        [python, "-m", module],
        check=True,
        cwd=REPOSITORY,
        input=told,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(found.stdout)


@pytest.fixture(scope="module")
def outcomes(tensorrt_rtx_python: Path) -> dict[str, str]:
    """Name of a small graph to how it runs, or the one line that the user would get."""
    outcomes: dict[str, str] = run(tensorrt_rtx_python, "tests.integration.tensorrt_graphs")
    assert outcomes.keys() == {*ACCEPTED, *REFUSED}
    return outcomes


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_engine_graph_relies_on_runs_so(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == ACCEPTED[name]


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_graph_avoids_is_still_refused(outcomes: dict[str, str], name: str) -> None:
    print(outcomes[name])
    assert REFUSED[name] in outcomes[name]
    assert "\n" not in outcomes[name]


def build_all(python: Path, jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Details of each engine, one line of figures printed for each."""
    started = time.monotonic()
    built: dict[str, dict[str, Any]] = run(
        python, "tests.integration.engine_builds", json.dumps(jobs)
    )
    seconds = time.monotonic() - started
    print(f"\n{len(jobs)} engines in {seconds:.0f} s, graphs included")
    for name, details in built.items():
        assert "error" not in details, f"{name}: {details['error']}"
        precision = details["precision"]
        print(
            f"{name:34} {','.join(details['targets']):11} {details['plan_bytes'] / 1e6:8.1f} MB"
            f" {details['build_seconds']:6.1f} s {precision['fp8_matmuls']:4} fp8"
            f" {precision['fp4_matmuls']:4} fp4 of {precision['matmuls']:4},"
            f" scratch {details['scratch_bytes'] / 1e6:6.1f} MB,"
            f" peak {details['peak_bytes'] / 1e9:4.1f} GB"
        )
    return built


def check(details: Mapping[str, Any], layers: int, recipe: str, kv_cache: str) -> None:
    """All 7 linears of each layer run in the recipe's bits; both profiles are there."""
    precision = details["precision"]
    assert precision["of"] == "the compiled engine, layer by layer"
    bits = "fp4" if recipe == "nvfp4" else "fp8"
    assert set(precision["products"].values()) == {bits}
    assert len(precision["products"]) == precision[f"{bits}_matmuls"] == 7 * layers
    assert precision["matmuls"] == 7 * layers + 1, "and the head, in FP16"
    assert details["profiles"].keys() == {"prefill", "decode"}
    assert details["kv_cache"]["dtype"] == kv_cache
    assert details["status"] == "built, unproven: nothing has executed it"


RECIPES = ("fp8", "fp8-static", "fp8-block", "nvfp4")
CACHES = ("e5m2", "e4m3", "float16")
E4M3_SCALES = {f"model.layers.{i}.self_attn.{x}_scale_e4m3": 0.05 for i in range(6) for x in "kv"}


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the example model, in each recipe."""
    root = tmp_path_factory.mktemp("example")
    return {
        name: make_calibration(root / name, EXAMPLE, Recipe.load(name), scales=E4M3_SCALES)
        for name in (*RECIPES, "mxfp8", "mxfp4")
    }


def test_the_example_model_in_every_recipe_and_cache(
    tensorrt_rtx_python: Path, calibrations: dict[str, Path]
) -> None:
    cases = {f"{recipe}, {kv}": (recipe, kv) for recipe in RECIPES for kv in CACHES}
    jobs = {
        name: {"calibration": str(calibrations[recipe]), "kv_cache": kv}
        for name, (recipe, kv) in cases.items()
    }
    built = build_all(tensorrt_rtx_python, jobs)
    for name, (recipe, kv) in cases.items():
        check(built[name], 6, recipe, kv)
        targets = ["sm120"] if recipe == "nvfp4" else ["sm89", "sm120"]
        assert built[name]["targets"] == targets


def test_every_architecture(tensorrt_rtx_python: Path, tmp_path: Path) -> None:
    """FP8 in attention and NVFP4 in the MLP: a mixed recipe, which takes each linear's own form."""
    fp8, nvfp4 = Recipe.load("fp8"), Recipe.load("nvfp4")
    override = Override(match="*.mlp.*", weights=nvfp4.weights, activations=nvfp4.activations)
    mixed = fp8.model_copy(update={"name": "mixed", "overrides": (override,)})
    jobs = {}
    for name, (kind, settings) in KNOWN.items():
        if kind in ("mixtral", "qwen3_moe"):
            continue
        model = write_model(tmp_path / name / "model", kind, **settings)
        calibration = make_calibration(tmp_path / name / "calibration", model, mixed)
        jobs[name] = {"calibration": str(calibration), "targets": ["sm120"]}
    for name, details in build_all(tensorrt_rtx_python, jobs).items():
        products = details["precision"]["products"]
        assert len(products) == 2 * (4 if name.startswith("phi3") else 7)
        for linear, precision in products.items():
            assert precision == ("fp4" if ".mlp." in linear else "fp8"), f"{name}: {linear}"


# Of a billion parameters: every recipe, every cache, and one engine for two GPUs.
LARGE = {
    "fp8": ("e5m2", ["sm89", "sm120"]),
    "fp8-static": ("float16", ["sm89"]),
    "fp8-block": ("e5m2", ["sm120"]),
    "nvfp4": ("e4m3", ["sm120"]),
}


def test_a_model_of_a_billion_parameters(
    tensorrt_rtx_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("billion")
    model = billion.write_checkpoint(root / "model")
    jobs = {}
    for recipe, (kv_cache, targets) in LARGE.items():
        calibration = billion.calibrate(root / recipe, model, Recipe.load(recipe))
        jobs[recipe] = {
            "calibration": str(calibration),
            "kv_cache": kv_cache,
            "targets": targets,
        }
    try:
        built = build_all(tensorrt_rtx_python, jobs)
    finally:
        (model / "model.safetensors").unlink()
    for recipe, details in built.items():
        check(details, 16, recipe, LARGE[recipe][0])
        assert details["max_length"] == 8192, "of the model's 131072"
        weights = 973e6 * (0.5 if recipe == "nvfp4" else 1)  # of equal scales, a plan keeps one
        content = weights + 525e6  # FP16 embeddings, which are the head's too
        assert content < details["plan_bytes"] < 1.1 * content
        assert details["scratch_bytes"] < 1e9


def octet(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "octet", "build-engine", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_the_command_writes_an_engine_that_says_what_it_is(
    calibrations: dict[str, Path], tensorrt_rtx_python: Path, tmp_path: Path
) -> None:
    manifests = []
    for name in ("first", "second"):
        arguments = (calibrations["fp8"], "--target", "sm120,sm89", "-o", tmp_path / name)
        result = octet(tensorrt_rtx_python, *arguments)
        assert result.returncode == 0, result.stderr
        manifests.append(Manifest.load(tmp_path / name, "engine"))
    first, second = manifests
    assert first.calibration == Manifest.load(calibrations["fp8"], "calibration").identity
    assert first.details["targets"] == ["sm120", "sm89"]
    assert first.details["builder"]["name"] == "TensorRT-RTX"
    assert first.software["tensorrt_rtx"] == first.details["builder"]["version"]
    assert first.details["status"].startswith("built, unproven: ")
    assert {"golden.json", "config.json", "tokenizer.json"} < first.files.keys()
    assert not [name for name in first.files if ".onnx" in name]
    assert first.details["graph_sha256"] == second.details["graph_sha256"]
    same = first.files["model.plan"] == second.files["model.plan"]
    print(f"two builds of one graph give {'the same' if same else 'different'} plans")


@pytest.mark.parametrize(
    ("recipe", "target", "said"),
    [
        ("fp8", "sm80", "target sm80: unknown|compute capability 8.0 has no FP8"),
        ("fp8", "sm90", "target sm90: TensorRT-RTX does not run on compute capability 9.0"),
        ("fp8", "sm100", "target sm100: TensorRT-RTX does not run on compute capability 10.0"),
        ("nvfp4", "sm89", "needs FP4, which target sm89 with compute capability 8.9 does not have"),
        ("mxfp8", "sm120", "TensorRT-RTX takes but multiplies in FP16"),
        ("mxfp4", "sm120", "TensorRT has no operator that rounds inputs to it"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(
    calibrations: dict[str, Path],
    tensorrt_rtx_python: Path,
    tmp_path: Path,
    recipe: str,
    target: str,
    said: str,
) -> None:
    arguments = (calibrations[recipe], "--target", target, "-o", tmp_path / "engine")
    result = octet(tensorrt_rtx_python, *arguments)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and any(part in result.stderr for part in said.split("|"))
    assert not list(tmp_path.iterdir())

"""Provenance: what a manifest says, and that nothing but the inputs decides a byte of an export."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import GOLDEN_FILE
from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.artifacts.scenarios import SCENARIOS_FILE, ScenarioSet
from octet.artifacts.serving_path import EXPECTED_FILE, Expectation, ExpectedSet, ServingPath
from octet.model.checkpoint import Checkpoint, sha256_file
from octet.recipe import KvCacheDtype, Recipe
from tests.export.conftest import make_calibration
from tests.export.reproduce import BACKENDS, CHECKPOINTS, GRAPHS
from tests.shared import Shared

ROOT = Path(__file__).parents[2]
# Of each export: the recipe, and the packages beside numpy that had a part in its bytes.
CASES = {
    **{
        f"checkpoint-{form}-{name}": (name, {"numba"})
        for form, x in CHECKPOINTS.items()
        for name in x
    },
    **{f"onnx-{target}-{name}": (name, {"onnx"}) for target, x in GRAPHS.items() for name in x},
    **{f"triton-{backend}": ("fp8", {BACKENDS[backend]}) for backend in BACKENDS},
}
EXPECTED = ExpectedSet(
    recipe="any",
    expectations=tuple(
        Expectation(path=ServingPath(kv_cache=cache), mean=0.01, low=0.005, high=0.02, prompts=1)
        for cache in get_args(KvCacheDtype)
    ),
)


@pytest.fixture(scope="module")
def calibrated(tiny_model: Path, shared: Shared) -> Path:
    """A calibration of each recipe, with scales of either cache and an expectation."""
    return shared.directory("reproducible", lambda root: write_calibrations(root, tiny_model))


def write_calibrations(root: Path, model: Path) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_scale_e4m3": 0.125
        for layer in (0, 1)
        for kind in "kv"
    }
    for recipe in CHECKPOINTS["compressed-tensors"]:
        plain = root / "plain" / recipe
        found = Calibration.load(make_calibration(plain, model, Recipe.load(recipe), scales=scales))
        told = ScenarioSet(found.golden.weights_sha256, recipe, {})
        files = {EXPECTED_FILE: EXPECTED.to_json(), SCENARIOS_FILE: told.save}
        Calibration.save(
            root / recipe, found.manifest, {}, {}, found.scales, found.golden, extra_files=files
        )


@pytest.fixture(scope="module")
def twice(calibrated: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Every export, by two processes that differ in all that should not matter."""
    outs = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("elsewhere") / "second"
    for seed, out in enumerate(outs):
        environment = os.environ | {
            "PYTHONHASHSEED": str(seed + 1),
            "PYTHONPATH": str(ROOT),
            "TZ": ("UTC", "Asia/Tokyo")[seed],
            "NUMBA_NUM_THREADS": str(seed + 1),
            "OMP_NUM_THREADS": str(seed + 1),
        }
        command = [sys.executable, "-m", "tests.export.reproduce", str(calibrated), str(out)]
        subprocess.run(command, env=environment, check=True, timeout=1800)
    return outs


def files_of(path: Path) -> dict[str, str]:
    return {
        file.relative_to(path).as_posix(): sha256_file(file)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("name", CASES)
def test_two_exports_of_the_same_inputs_are_the_same_bytes(
    name: str, twice: tuple[Path, Path]
) -> None:
    first, second = (files_of(out / name) for out in twice)
    assert len(first) > 5 and MANIFEST_FILE in first
    assert first == second
    modes = [
        {file.relative_to(out / name): file.stat().st_mode for file in (out / name).rglob("*")}
        for out in twice
    ]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("name", CASES)
def test_a_manifest_says_what_an_export_was_made_of(
    name: str, twice: tuple[Path, Path], calibrated: Path, tiny_model: Path
) -> None:
    manifest = Manifest.load(twice[0] / name)
    kind = name.partition("-")[0]
    recipe, packages = CASES[name]
    origin = Calibration.load(calibrated / recipe).manifest
    assert manifest.kind == kind and manifest.calibration == origin.identity
    checkpoint = Checkpoint.open(tiny_model)
    assert manifest.model.files == checkpoint.weight_hashes
    assert manifest.model.tokenizer == checkpoint.tokenizer_hashes
    assert manifest.recipe == Recipe.load(recipe)
    assert manifest.files == {
        file: digest for file, digest in files_of(twice[0] / name).items() if file != MANIFEST_FILE
    }
    assert {"python", "octet", "numpy"} | packages <= manifest.software.keys()
    ranges = manifest.details["expected_divergence"]
    assert list(ranges.values()) == [{"low": 0.005, "mean": 0.01, "high": 0.02}]
    assert manifest.details["predicted"] is True
    for file in (GOLDEN_FILE, SCENARIOS_FILE):
        assert (twice[0] / name / file).read_bytes() == (calibrated / recipe / file).read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_an_export_holds_no_place_and_no_time(
    name: str, twice: tuple[Path, Path], calibrated: Path, tiny_model: Path
) -> None:
    places = [str(path) for path in (*twice, calibrated, tiny_model, ROOT, Path.home())]
    host = re.compile(rf"\b{re.escape(socket.gethostname())}\b")
    for file in (twice[0] / name).rglob("*"):
        if not file.is_file() or file.name == "tokenizer.json":
            continue
        content = file.read_bytes()
        for place in places:
            assert place.encode() not in content, f"{file.name} holds {place}"
        if file.suffix in (".json", ".pbtxt"):
            assert not host.search(content.decode()), file.name
        if file.name == MANIFEST_FILE:
            text = content.decode()
            assert not re.search(r"20\d\d-\d\d-\d\d|\d\d:\d\d:\d\d", text), "a time"
            assert not [value for value in strings(json.loads(text)) if value.startswith("/")]


def strings(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, dict):
        return [text for value in content.values() for text in strings(value)]
    return [text for item in content for text in strings(item)] if isinstance(content, list) else []

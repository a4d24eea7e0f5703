"""Calibrations of the tiny model, made without the calibrate stage, and what they export to."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from export.onnx import export_onnx
from octet import scaling
from octet.artifact import Manifest, ModelIdentity, software
from octet.calibration import Calibration
from octet.checkpoint import Checkpoint
from octet.formats import E4M3
from octet.golden import GoldenRecord, GoldenSet
from octet.recipe import Recipe

RECIPES = ("fp8", "fp8-static", "fp8-block")


def make_calibration(
    path: Path,
    model: Path,
    recipe: Recipe,
    *,
    scales: Mapping[str, float | np.ndarray] | None = None,
    drop: str | None = None,
) -> Path:
    """Saves weight scales from the absolute maximum, and plausible input scales.

    `scales` replaces some, `drop` leaves one out.
    """
    checkpoint = Checkpoint.open(model)
    granularity = scaling.Granularity.of(recipe.weights.granularity, recipe.weights.group_size)
    found: dict[str, np.ndarray] = {}
    for linear in checkpoint.spec.linears():
        weight = checkpoint.read(f"{linear.name}.weight").float32()
        amax = scaling.absmax(weight, granularity)
        found[f"{linear.name}.weight_scale"] = scaling.scale_from_absmax(amax, E4M3)
        if not recipe.activations.dynamic:
            found[f"{linear.name}.input_scale"] = np.array(8.0 / 448, np.float32)
    for index in range(checkpoint.spec.layers):
        for kind in "kv":
            found[f"model.layers.{index}.self_attn.{kind}_scale"] = np.array(1, np.float32)
    for name, value in (scales or {}).items():
        found[name] = np.array(value, np.float32)
    found.pop(drop or "", None)
    record = GoldenRecord(
        prompt="a",
        prompt_token_ids=(5,),
        top_token_ids=(1, 2),
        top_logprobs=(-0.1, -3.0),
        continuation_token_ids=(1,),
    )
    golden = GoldenSet(weights_sha256="0", compute_dtype="float32", software={}, records=(record,))
    manifest = Manifest(
        kind="calibration",
        model=ModelIdentity.of(checkpoint),
        recipe=recipe,
        details={"source": str(model)},
        software=software(),
    )
    Calibration.save(path, manifest, {}, {}, found, golden)
    return path


@pytest.fixture(scope="session")
def calibrations(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    """A calibration of the tiny model for each preset recipe."""
    root = tmp_path_factory.mktemp("calibrations")
    return {name: make_calibration(root / name, tiny_model, Recipe.load(name)) for name in RECIPES}


@pytest.fixture(scope="session")
def decoders(
    tmp_path_factory: pytest.TempPathFactory, calibrations: dict[str, Path]
) -> dict[str, Path]:
    """The ONNX export of each calibration, and `full`: the one without quantization."""
    root = tmp_path_factory.mktemp("decoders")
    for name, calibration in calibrations.items():
        export_onnx(calibration, root / name)
    export_onnx(calibrations["fp8"], root / "full", quantize=False)
    return {name: root / name for name in (*RECIPES, "full")}

"""Calibrations of the tiny model, made without the calibrate stage, and what they export to."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from calibrate.scales.weights import weight_scales
from export.onnx.write import export_onnx
from octet.artifacts.calibration import WEIGHTS_FILE
from octet.model.checkpoint import Checkpoint
from octet.model.spec import Linear
from octet.numerics import microscaling, scaling
from octet.numerics.formats import E4M3, FORMATS, Float32Array, round_to
from octet.recipe import Recipe, ScaleMethod, TensorScheme
from octet.storage.tensors import Tensor, write_tensors
from tests.calibrations import save_calibration
from tests.shared import Shared

RECIPES = ("fp8", "fp8-static", "fp8-block")
GROUPED = ("mxfp8", "mxfp4", "nvfp4")


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """The references are small; threads that wait for each other on a busy machine cost more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_calibration(
    path: Path,
    model: Path,
    recipe: Recipe,
    *,
    scales: Mapping[str, float | np.ndarray] | None = None,
    drop: str | None = None,
    changed: Mapping[str, Tensor] | None = None,
) -> Path:
    """Saves weight scales from the absolute maximum, and plausible input scales.

    `scales` replaces some, `drop` leaves one out. `changed` are tensors that an algorithm changed.
    """
    checkpoint = Checkpoint.open(model)
    found: dict[str, np.ndarray] = {}
    for linear in checkpoint.spec.linears():
        schemes = recipe.scheme_of(linear.name)
        if schemes is not None:
            found |= plausible_scales(checkpoint, linear, *schemes)
    for index in range(checkpoint.spec.layers):
        for kind in "kv":
            found[f"model.layers.{index}.self_attn.{kind}_scale"] = np.array(1, np.float32)
    for name, value in (scales or {}).items():
        found[name] = np.array(value, np.float32)
    found.pop(drop or "", None)
    extra: dict[str, str | Path] = {}
    if changed is not None:
        extra[WEIGHTS_FILE] = path.with_suffix(".safetensors")
        write_tensors(path.with_suffix(".safetensors"), changed)
    return save_calibration(path, checkpoint, recipe, found, extra)


def calibration_in_blocks(path: Path, model: Path, method: ScaleMethod) -> Path:
    """`fp8-block` with the scales that `calibrate` derives by `method`: powers of two by `max`."""
    preset = Recipe.load("fp8-block")
    weights = preset.weights.model_copy(update={"method": method})
    recipe = preset.model_copy(update={"weights": weights})
    found = weight_scales(Checkpoint.open(model), recipe)
    scales = {f"{name}.weight_scale": weight.scale for name, weight in found}
    return make_calibration(path, model, recipe, scales=scales)


def plausible_scales(
    checkpoint: Checkpoint, linear: Linear, weights: TensorScheme, inputs: TensorScheme
) -> dict[str, Float32Array]:
    """Those of one linear, as if inputs were up to 8."""
    name, fmt = linear.name, FORMATS[weights.format]
    shared = [  # linears that share an input share scales of whole tensors
        checkpoint.read(f"{item.name}.weight").float32()
        for item in checkpoint.spec.linears()
        if item.input == linear.input
    ]
    weight = checkpoint.read(f"{name}.weight").float32()
    granularity = scaling.Granularity.of(weights.granularity, weights.group_size)
    amax = scaling.absmax(weight, granularity)
    if weights.granularity == "tensor":
        amax = np.max([scaling.absmax(item, granularity) for item in shared])
    found: dict[str, Float32Array] = {}
    if weights.two_level:
        factor = microscaling.global_scale(max(float(abs(x).max()) for x in shared), fmt)
        found[f"{name}.weight_global_scale"] = factor
        found[f"{name}.weight_scale"] = round_to(amax / np.float32(fmt.max) / factor, E4M3)
    elif weights.scale_format == "e8m0":
        found[f"{name}.weight_scale"] = microscaling.power_of_two_scales(amax, fmt)
    else:
        found[f"{name}.weight_scale"] = scaling.scale_from_absmax(amax, fmt)
    if not inputs.dynamic:
        found[f"{name}.input_scale"] = np.array(8.0 / 448, np.float32)
    elif inputs.two_level:
        found[f"{name}.input_global_scale"] = microscaling.global_scale(8.0, FORMATS[inputs.format])
    return found


@pytest.fixture(scope="session")
def calibrations(tiny_model: Path, shared: Shared) -> dict[str, Path]:
    """A calibration of the tiny model for each preset recipe."""

    def build(root: Path) -> None:
        for name in (*RECIPES, *GROUPED):
            make_calibration(root / name, tiny_model, Recipe.load(name))

    return named(shared.directory("export-calibrations", build))


@pytest.fixture(scope="session")
def graphs(calibrations: dict[str, Path], shared: Shared) -> dict[str, Path]:
    """The ONNX export of each recipe, the one for TensorRT as `<recipe>-tensorrt`, and `full`: one
    without quantization."""

    def build(root: Path) -> None:
        for recipe, calibration in calibrations.items():
            export_onnx(calibration, root / recipe)
            if recipe != "mxfp4":  # TensorRT has no operator that rounds inputs to it
                export_onnx(calibration, root / f"{recipe}-tensorrt", target="tensorrt")
        export_onnx(calibrations["fp8"], root / "full", quantize=False)

    return named(shared.directory("export-graphs", build))


@pytest.fixture(scope="session")
def decoders(graphs: dict[str, Path]) -> dict[str, Path]:
    """Those of recipes in FP8 for ONNX Runtime, and `full`."""
    return {name: graphs[name] for name in (*RECIPES, "full")}


def named(root: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(root.iterdir())}

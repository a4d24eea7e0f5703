"""Scales are held to the calibration, to the last bit; some of them are in no weight."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest, write_artifact
from octet.recipe import Recipe
from tests.export.conftest import make_calibration
from tests.export.handmade import E4M3_SCHEME, FORMATS, Tensors, write_handmade
from verify.artifact import verify

LAYER = "model.layers.1"
DOWN = f"{LAYER}.mlp.down_proj"


def test_a_scale_of_an_e5m2_cache_that_calibration_has_may_not_be_missing(
    tiny_model: Path, tmp_path: Path
) -> None:
    calibration = calibrated(tmp_path / "cal", tiny_model, "fp8", k_scale_e5m2=0.5)
    path = write_handmade(tmp_path / "out", tiny_model, "ct-channel", details={"kv_cache": "e5m2"})
    made_from(path, calibration)
    (problem,) = verify(path, calibration=calibration).problems
    assert problem.where == f"{LAYER}.self_attn.k_scale"
    assert "missing: calibration has 0.5 for e5m2, and engines put 1.0 there" in problem.what


def calibrated(path: Path, model: Path, recipe: str, **scales: float) -> Path:
    """A calibration with these scales of layer 1's cache, and 2 for those of layer 0."""
    known = {f"{LAYER}.self_attn.{name}": value for name, value in scales.items()}
    return make_calibration(path, model, Recipe.load(recipe), scales=known)


def made_from(export: Path, calibration: Path) -> None:
    """Rewrites an export's manifest, as if `calibration` had been its source."""
    identity = Calibration.load(calibration).manifest.identity
    manifest = Manifest.load(export)
    with write_artifact(export, force=True) as writer:
        for file in export.iterdir():
            if file.name != "manifest.json":
                (writer.path / file.name).write_bytes(file.read_bytes())
        golden = (calibration / "golden.json").read_bytes()
        (writer.path / "golden.json").write_bytes(golden)
        writer.finish(manifest.model_copy(update={"calibration": identity}))


def test_a_cache_scale_of_the_other_format_is_named(tiny_model: Path, tmp_path: Path) -> None:
    calibration = calibrated(
        tmp_path / "cal", tiny_model, "fp8", k_scale_e4m3=0.25, k_scale_e5m2=0.5, v_scale_e4m3=0.125
    )

    def scales(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["kv_cache_scheme"] = E4M3_SCHEME
        for layer in ("model.layers.0", LAYER):
            tensors[f"{layer}.self_attn.k_scale"] = torch.tensor([0.5])
            tensors[f"{layer}.self_attn.v_scale"] = torch.tensor([8.0])

    path = write_handmade(tmp_path / "out", tiny_model, "ct-channel", damage=scales)
    made_from(path, calibration)
    found = {p.where: p.what for p in verify(path, calibration=calibration).problems}
    assert "it is the scale for an E5M2 cache" in found[f"{LAYER}.self_attn.k_scale"]
    assert "it divides, and should multiply" in found[f"{LAYER}.self_attn.v_scale"]


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("ct-channel", "weight_scale"),
        ("ct-block", "weight_scale"),
        ("ct-nvfp4", "weight_global_scale"),
        ("ct-nvfp4", "input_global_scale"),
        ("modelopt-nvfp4", "weight_scale_2"),
    ],
)
def test_the_last_bits_of_a_scale_are_compared_with_the_calibration(
    form: str, name: str, tiny_model: Path, tmp_path: Path
) -> None:
    """No weight moves by as much as its rounding."""
    calibration = calibrated(tmp_path / "cal", tiny_model, FORMATS[form].recipe)
    sound = write_handmade(tmp_path / "sound", tiny_model, form)
    made_from(sound, calibration)
    assert verify(sound, calibration=calibration).problems == []

    def nudge(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors[f"{DOWN}.{name}"] = tensors[f"{DOWN}.{name}"] * (1 + 2**-20)

    path = write_handmade(tmp_path / "out", tiny_model, form, damage=nudge)
    assert verify(path, model=tiny_model).problems == []
    made_from(path, calibration)
    (problem,) = verify(path, calibration=calibration).problems
    assert problem.where == f"{DOWN}.{name}" and "calibration has" in problem.what


@pytest.mark.parametrize(
    ("form", "name", "what"),
    [
        ("ct-static", "input_scale", "this format wants the reciprocal"),
        ("modelopt-fp8", "input_scale", "this format wants the reciprocal"),
    ],
)
def test_an_input_scale_is_compared_with_the_calibration(
    form: str, name: str, what: str, tiny_model: Path, tmp_path: Path
) -> None:
    calibration = calibrated(tmp_path / "cal", tiny_model, "fp8-static")

    def invert(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors[f"{DOWN}.{name}"] = 1 / tensors[f"{DOWN}.{name}"]

    sound = write_handmade(tmp_path / "sound", tiny_model, form)
    made_from(sound, calibration)
    assert verify(sound, calibration=calibration).problems == []
    path = write_handmade(tmp_path / "out", tiny_model, form, damage=invert)
    made_from(path, calibration)
    (problem,) = verify(path, calibration=calibration).problems
    assert problem.where == f"{DOWN}.{name}" and what in problem.what

"""Tests what every export carries of its source."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from export.checkpoint.write import export_checkpoint
from export.onnx.write import export_onnx
from export.source import Source
from export.triton.write import export_triton
from octet.recipe import Recipe
from octet.storage.tensors import Tensor, TensorFile, write_tensors
from tests.export.conftest import make_calibration


@pytest.fixture
def doubtful(tmp_path: Path, tiny_model: Path) -> Path:
    """A calibration of a model with a tensor that its config.json does not describe."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    shard = TensorFile.open(tiny_model / "model.safetensors")
    tensors = {name: shard.read(name) for name in shard.names}
    tensors["model.extra.weight"] = Tensor("F32", np.zeros((2, 2), np.float32))
    write_tensors(model / "model.safetensors", tensors)
    return make_calibration(tmp_path / "calibration", model, Recipe.load("fp8"))


def test_what_is_doubtful_about_a_model_is_in_the_manifest(doubtful: Path, tmp_path: Path) -> None:
    (warning,) = Source.open(doubtful).manifest("engine", {}).details["warnings"]
    assert warning.startswith("config.json does not describe model.extra.weight")
    exports = {"checkpoint": export_checkpoint, "onnx": export_onnx, "triton": export_triton}
    for kind, export in exports.items():
        manifest = export(doubtful, tmp_path / kind)
        assert (manifest.kind, manifest.details["warnings"]) == (kind, [warning])


def test_of_a_model_without_doubts_nothing_is_said(calibrations: dict[str, Path]) -> None:
    assert "warnings" not in Source.open(calibrations["fp8"]).manifest("onnx", {}).details

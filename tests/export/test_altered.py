"""A file that is written to between its hash and its last byte read: no export comes of it."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export.checkpoint.write import export_checkpoint
from export.engine import build as engine
from export.engine.build import build_engine
from export.onnx.graph import Graph
from export.onnx.write import export_onnx
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.storage.tensors import write_tensors
from tests.export import fake_tensorrt
from tests.export.conftest import make_calibration

NORM = "model.norm.weight"


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")


def replace(path: Path) -> None:
    """With a copy that even has the old one's time."""
    copy = path.with_suffix(".new")
    shutil.copy2(path, copy)
    os.replace(copy, path)


def remove(path: Path) -> None:
    path.unlink()


def export_engine(calibration: Path, out: Path) -> Manifest:
    return build_engine(calibration, out, targets=["sm89"])


@pytest.fixture
def calibration(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model of its own, one of whose tensors an algorithm changed; TensorRT is the fake."""
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake_tensorrt)
    monkeypatch.setattr(fake_tensorrt, "behaviour", fake_tensorrt.Behaviour())
    monkeypatch.setattr(engine, "find_gpu", lambda: None)
    model = shutil.copytree(tiny_model, tmp_path / "model")
    changed = {NORM: Checkpoint.open(model).read(NORM)}
    (tmp_path / "made").mkdir()
    return make_calibration(
        tmp_path / "made" / "calibration", model, Recipe.load("fp8"), changed=changed
    )


@pytest.mark.parametrize("export", [export_onnx, export_engine])
@pytest.mark.parametrize("alter", [write_in_place, replace, remove])
@pytest.mark.parametrize(
    "file",
    ["model/model.safetensors", "model/tokenizer.json", "made/calibration/weights.safetensors"],
)
def test_it_is_refused_and_nothing_is_left(
    calibration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    export: Callable[[Path, Path], Manifest],
    alter: Callable[[Path], None],
    file: str,
) -> None:
    saved = Graph.save

    def save(graph: Graph, directory: Path, **options: int) -> Path:
        alter(tmp_path / file)
        return saved(graph, directory, **options)

    monkeypatch.setattr(Graph, "save", save)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ArtifactError, match=rf"{file} was altered while it was read") as caught:
        export(calibration, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_of_a_checkpoint_the_same(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards are hashed on the way; what an algorithm changed is not."""

    def write(path: Path, *args: Any, **options: Any) -> str:
        write_in_place(calibration / "weights.safetensors")
        return write_tensors(path, *args, **options)

    monkeypatch.setattr("export.checkpoint.write.write_tensors", write)
    with pytest.raises(ArtifactError, match=r"weights\.safetensors was altered while it was read"):
        export_checkpoint(calibration, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("export", [export_onnx, export_engine, export_checkpoint])
def test_reading_a_file_is_no_alteration(
    calibration: Path, tmp_path: Path, export: Callable[[Path, Path], Manifest]
) -> None:
    export(calibration, tmp_path / "out")
    assert Manifest.load(tmp_path / "out").model.name == "model"

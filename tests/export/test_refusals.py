"""Tests that a calibration or checkpoint that cannot be exported is refused in one line."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from export.checkpoint.write import export_checkpoint
from export.onnx.write import export_onnx
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError, CheckpointError, ExportError, UnsupportedError
from octet.recipe import Recipe, TensorScheme
from octet.storage.tensors import Tensor, write_tensors
from tests.export.conftest import make_calibration

Q_PROJ = "model.layers.0.self_attn.q_proj"
EXPORTS = (export_checkpoint, export_onnx)


def assert_refused(
    error: type[Exception],
    match: str,
    calibration: Path,
    directory: Path,
    exports: tuple[Callable[..., Manifest], ...] = EXPORTS,
) -> None:
    before = sorted(directory.iterdir())
    for export in exports:
        with pytest.raises(error, match=match) as caught:
            export(calibration, directory / "out")
        assert "\n" not in str(caught.value)
        assert sorted(directory.iterdir()) == before


def test_a_path_that_is_no_calibration(tmp_path: Path, tiny_model: Path) -> None:
    assert_refused(ArtifactError, "no such directory", tmp_path / "nowhere", tmp_path)
    assert_refused(ArtifactError, "not an Octet artifact", tiny_model, tmp_path)


def test_another_kind_of_artifact(tmp_path: Path, decoders: dict[str, Path]) -> None:
    assert_refused(ArtifactError, "is an ONNX export, not a calibration", decoders["fp8"], tmp_path)


def test_a_checkpoint_that_has_moved(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    make_calibration(tmp_path / "cal", model, Recipe.load("fp8"))
    model.rename(tmp_path / "moved")
    assert_refused(
        ArtifactError, "is not there; say where with --model", tmp_path / "cal", tmp_path
    )
    export_checkpoint(tmp_path / "cal", tmp_path / "out", model=tmp_path / "moved")


@pytest.mark.parametrize("known", ["both hashes", "SHA-256 alone", "no xxhash package"])
def test_a_checkpoint_altered_after_calibration(
    tmp_path: Path, tiny_model: Path, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    if known == "SHA-256 alone":
        monkeypatch.setitem(sys.modules, "xxhash", None)
    make_calibration(tmp_path / "cal", model, Recipe.load("fp8"))
    checksums = Manifest.load(tmp_path / "cal").model.checksums
    assert ("model.safetensors" in checksums) == (known != "SHA-256 alone")
    monkeypatch.undo()
    if known == "no xxhash package":
        monkeypatch.setitem(sys.modules, "xxhash", None)
    export_checkpoint(tmp_path / "cal", tmp_path / "same")
    shutil.rmtree(tmp_path / "same")
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    match = r"model\.safetensors has changed since calibration"
    assert_refused(ArtifactError, match, tmp_path / "cal", tmp_path)


def test_a_truncated_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    make_calibration(tmp_path / "cal", model, Recipe.load("fp8"))
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-1000])
    assert_refused(CheckpointError, "truncated or altered", tmp_path / "cal", tmp_path)


def test_an_altered_calibration(tmp_path: Path, tiny_model: Path) -> None:
    make_calibration(tmp_path / "cal", tiny_model, Recipe.load("fp8"))
    (tmp_path / "cal" / "golden.json").write_text("{}")
    assert_refused(ArtifactError, r"golden\.json: altered", tmp_path / "cal", tmp_path)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.ones((3, 1), np.float32), r"has shape \[3, 1\], recipe fp8 needs \[256, 1\]"),
        (np.full((256, 1), np.nan, np.float32), "is not positive and finite"),
        (np.zeros((256, 1), np.float32), "is not positive and finite"),
    ],
)
def test_scales_that_cannot_be_used(
    value: np.ndarray, match: str, tmp_path: Path, tiny_model: Path
) -> None:
    make_calibration(
        tmp_path / "cal", tiny_model, Recipe.load("fp8"), scales={f"{Q_PROJ}.weight_scale": value}
    )
    assert_refused(ArtifactError, match, tmp_path / "cal", tmp_path)


def test_a_missing_scale(tmp_path: Path, calibrations: dict[str, Path], tiny_model: Path) -> None:
    make_calibration(
        tmp_path / "cal", tiny_model, Recipe.load("fp8-static"), drop=f"{Q_PROJ}.input_scale"
    )
    match = rf"{Q_PROJ}\.input_scale is missing"
    assert_refused(ArtifactError, match, tmp_path / "cal", tmp_path)


def test_a_combination_that_vllm_does_not_serve(tmp_path: Path, tiny_model: Path) -> None:
    recipe = Recipe(
        name="odd",
        weights=TensorScheme(granularity="block", group_size=128),
        activations=TensorScheme(granularity="tensor"),
    )
    make_calibration(tmp_path / "cal", tiny_model, recipe)
    match = rf"recipe odd: {Q_PROJ} has fp8 block weights with tensor activations"
    assert_refused(UnsupportedError, match, tmp_path / "cal", tmp_path, (export_checkpoint,))


def test_a_full_disk(
    tmp_path: Path, calibrations: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr("export.source.shutil.disk_usage", lambda _: usage)
    assert_refused(ExportError, r"needs 0\.1 GB, 0\.0 GB are free", calibrations["fp8"], tmp_path)


def test_an_existing_export_is_replaced_only_with_force(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    export_checkpoint(calibrations["fp8"], tmp_path / "out")
    assert_refused(ArtifactError, "add --force", calibrations["fp8-static"], tmp_path)
    export_checkpoint(calibrations["fp8-static"], tmp_path / "out", force=True)
    assert Manifest.load(tmp_path / "out").recipe.name == "fp8-static"


def test_an_export_interrupted_between_shards_leaves_nothing(
    tmp_path: Path, calibrations: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path, tensors: dict[str, Tensor], *_: object, **__: object) -> None:
        write_tensors(path, dict(list(tensors.items())[:1]))
        raise KeyboardInterrupt

    monkeypatch.setattr("export.checkpoint.write.write_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(calibrations["fp8"], tmp_path / "out")
    assert not list(tmp_path.iterdir())

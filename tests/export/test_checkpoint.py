"""The compressed-tensors checkpoint: configuration, tensors, shards, refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from export.checkpoint import export_checkpoint
from octet.artifact import Manifest
from octet.checkpoint import Checkpoint
from octet.errors import ArtifactError, CheckpointError, ExportError, UnsupportedError
from octet.recipe import Recipe, TensorScheme
from octet.tensors import Tensor, write_tensors
from tests.export.conftest import RECIPES, make_calibration
from tests.references import round_weight

STRATEGIES = {  # recipe: weights, activations, dynamic
    "fp8": ("channel", "token", True),
    "fp8-static": ("tensor", "tensor", False),
    "fp8-block": ("block", "group", True),
}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_configuration_is_what_vllm_reads(
    recipe: str, tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    export_checkpoint(calibrations[recipe], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    weights, activations, dynamic = STRATEGIES[recipe]
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == "float-quantized"
    assert config["ignore"] == ["lm_head"]
    assert config["kv_cache_scheme"] is None
    group = config["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == weights
    assert group["input_activations"]["strategy"] == activations
    assert group["input_activations"]["dynamic"] is dynamic
    if recipe == "fp8-block":
        assert group["weights"]["block_structure"] == [128, 128]
        assert group["input_activations"]["group_size"] == 128


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensors_are_quantized_or_copied_bit_for_bit(
    recipe: str, tmp_path: Path, calibrations: dict[str, Path], tiny_model: Path
) -> None:
    export_checkpoint(calibrations[recipe], tmp_path / "out")
    before = safetensors.torch.load_file(tiny_model / "model.safetensors")
    after = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    linears = {linear.name for linear in Checkpoint.open(tiny_model).spec.linears()}
    for name, tensor in before.items():
        module = name.removesuffix(".weight")
        if module not in linears:
            assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
            continue
        stored, scale = after[name], after[f"{name}_scale"]
        assert stored.dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.float32
        granularity = STRATEGIES[recipe][0]
        shapes = {"tensor": (1,), "channel": (tensor.shape[0], 1), "block": None}
        if shapes[granularity]:
            assert tuple(scale.shape) == shapes[granularity]
        real = stored.float() * _spread(scale, tensor, granularity)
        assert torch.equal(real, round_weight(tensor.float(), scale, granularity))
        assert (f"{module}.input_scale" in after) is (recipe == "fp8-static")
    assert not any(name.endswith(("k_scale", "v_scale")) for name in after)


def _spread(scale: torch.Tensor, weight: torch.Tensor, granularity: str) -> torch.Tensor:
    if granularity != "block":
        return scale
    rows, columns = weight.shape
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def test_cache_scales_are_written_only_where_they_are_not_one(
    tmp_path: Path, tiny_model: Path
) -> None:
    name = "model.layers.1.self_attn.k_scale"
    make_calibration(tmp_path / "cal", tiny_model, Recipe.load("fp8"), scales={name: 0.5})
    export_checkpoint(tmp_path / "cal", tmp_path / "out")
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert [n for n in tensors if n.endswith(("k_scale", "v_scale"))] == [name]
    assert tensors[name].tolist() == [0.5]


def shard(model: Path, out: Path) -> Path:
    """The same checkpoint in two shards with an index."""
    shutil.copytree(model, out)
    (out / "model.safetensors").unlink()
    checkpoint = Checkpoint.open(model)
    names = checkpoint.tensor_names
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        write_tensors(out / file, {name: checkpoint.read(name) for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def test_shards_keep_their_names_and_the_index_lists_the_scales(
    tmp_path: Path, tiny_model: Path, calibrations: dict[str, Path]
) -> None:
    model = shard(tiny_model, tmp_path / "sharded")
    make_calibration(tmp_path / "cal", model, Recipe.load("fp8"))
    manifest = export_checkpoint(tmp_path / "cal", tmp_path / "out")
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} < set(
        manifest.files
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    merged = Checkpoint.open(tmp_path / "out")
    assert set(index["weight_map"]) == set(merged.tensor_names)
    export_checkpoint(calibrations["fp8"], tmp_path / "whole")
    whole = Checkpoint.open(tmp_path / "whole")
    for name in whole.tensor_names:
        np.testing.assert_array_equal(whole.read(name).codes, merged.read(name).codes)


def test_the_directory_serves_by_itself(
    tmp_path: Path, calibrations: dict[str, Path], tiny_model: Path
) -> None:
    manifest = export_checkpoint(calibrations["fp8"], tmp_path / "out")
    names = {path.name for path in Checkpoint.open(tiny_model).tokenizer_files}
    names |= {"config.json", "golden.json", "model.safetensors", "generation_config.json"}
    assert manifest.files.keys() == names
    assert Manifest.load(tmp_path / "out", "checkpoint") == manifest
    assert manifest.calibration == Manifest.load(calibrations["fp8"]).identity


# Bad input: one line, nothing left


def assert_refused(
    error: type[Exception], match: str, calibration: Path, directory: Path, **options: object
) -> None:
    before = sorted(directory.iterdir())
    with pytest.raises(error, match=match) as caught:
        export_checkpoint(calibration, directory / "out", **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert sorted(directory.iterdir()) == before


def test_a_path_that_is_no_calibration(tmp_path: Path, tiny_model: Path) -> None:
    assert_refused(ArtifactError, "no such directory", tmp_path / "nowhere", tmp_path)
    assert_refused(ArtifactError, "not an Octet artifact", tiny_model, tmp_path)


def test_another_kind_of_artifact(tmp_path: Path, decoders: dict[str, Path]) -> None:
    assert_refused(ArtifactError, "is a onnx, not a calibration", decoders["fp8"], tmp_path)


def test_a_checkpoint_that_has_moved(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    make_calibration(tmp_path / "cal", model, Recipe.load("fp8"))
    model.rename(tmp_path / "moved")
    assert_refused(
        ArtifactError, "is not there; say where with --model", tmp_path / "cal", tmp_path
    )
    export_checkpoint(tmp_path / "cal", tmp_path / "out", model=tmp_path / "moved")


def test_a_checkpoint_altered_after_calibration(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    make_calibration(tmp_path / "cal", model, Recipe.load("fp8"))
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
    match = "recipe odd: block weights with tensor activations"
    assert_refused(UnsupportedError, match, tmp_path / "cal", tmp_path)


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


def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, calibrations: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path, tensors: dict[str, Tensor], metadata: object) -> None:
        write_tensors(path, dict(list(tensors.items())[:1]))
        raise KeyboardInterrupt

    monkeypatch.setattr("export.checkpoint.write_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(calibrations["fp8"], tmp_path / "out")
    assert not list(tmp_path.iterdir())

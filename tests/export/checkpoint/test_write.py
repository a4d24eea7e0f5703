"""The compressed-tensors export: tensors, configuration, and what vLLM would refuse."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from calibrate.options import Options
from calibrate.pipeline import run
from export.checkpoint.write import export_checkpoint
from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest
from octet.errors import UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from tests.export.conftest import make_calibration

LAYER = "model.layers.1"


def expand(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale of any of the recipes, for each element of a weight."""
    if scale.numel() == 1 or scale.shape[1] == 1:
        return scale.expand(shape)
    rows, columns = shape
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


@pytest.mark.parametrize(
    ("recipe", "scale_shape"), [("fp8", (128, 1)), ("fp8-static", (1,)), ("fp8-block", (1, 2))]
)
def test_weights_are_the_originals_rounded_to_fp8(
    recipe: str,
    scale_shape: tuple[int, ...],
    calibrations: dict[str, Path],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    export_checkpoint(calibrations[recipe], tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    original = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert tensors[f"{LAYER}.self_attn.k_proj.weight_scale"].shape == scale_shape
    assert tensors[f"{LAYER}.self_attn.k_proj.weight_scale"].dtype == torch.float32
    quantized = [name for name in tensors if tensors[name].dtype == torch.float8_e4m3fn]
    assert len(quantized) == 2 * 7
    for name in quantized:
        scale = expand(tensors[f"{name}_scale"], tensors[name].shape)
        weight = original[name].float()
        expected = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(tensors[name].view(torch.uint8), expected.view(torch.uint8)), name
        error = (tensors[name].float() * scale - weight).norm() / weight.norm()
        assert error < 0.03, name
    static = {name for name in tensors if name.endswith("input_scale")}
    assert len(static) == (14 if recipe == "fp8-static" else 0)
    kept = tensors.keys() - static - set(quantized) - {f"{name}_scale" for name in quantized}
    for name in kept:
        assert torch.equal(tensors[name], original[name]), name
    assert any("layernorm" in name for name in kept) and "model.embed_tokens.weight" in kept


def test_linears_that_are_fused_share_a_scale_per_tensor(
    tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    few = {"count": 128, "max_length": 32, "predict": False}
    recipe = Recipe.load("fp8-static")
    run(Options(model=tiny_model, samples=tiny_samples, out=tmp_path / "cal", recipe=recipe, **few))
    export_checkpoint(tmp_path / "cal", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for kind in ("weight_scale", "input_scale"):
        q, k, v = (tensors[f"{LAYER}.self_attn.{p}_proj.{kind}"] for p in "qkv")
        assert q == k == v
        gate, up = (tensors[f"{LAYER}.mlp.{p}_proj.{kind}"] for p in ("gate", "up"))
        assert gate == up


def test_the_configuration_asks_for_no_cache_scheme(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    manifest = export_checkpoint(calibrations["fp8-block"], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["kv_cache_scheme"] is None and quantization["ignore"] == ["lm_head"]
    group = quantization["config_groups"]["group_0"]
    assert group["weights"]["block_structure"] == [128, 128]
    assert (group["input_activations"]["strategy"], group["input_activations"]["group_size"]) == (
        "group",
        128,
    )
    assert manifest.details["serve_with"] == "--kv-cache-dtype fp8_e5m2"
    assert "### Assistant:" in (tmp_path / "out" / "chat_template.jinja").read_text()


def test_an_export_is_traced_to_its_calibration_and_carries_its_golden_records(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    export_checkpoint(calibrations["fp8"], tmp_path / "a")
    export_checkpoint(calibrations["fp8"], tmp_path / "b")
    manifest = Manifest.load(tmp_path / "a", "checkpoint")
    assert manifest.identity == Manifest.load(tmp_path / "b").identity
    assert manifest.calibration == Calibration.load(calibrations["fp8"]).manifest.identity
    golden = (calibrations["fp8"] / "golden.json").read_bytes()
    assert (tmp_path / "a" / "golden.json").read_bytes() == golden
    assert (tmp_path / "a" / "tokenizer.json").exists()


def test_a_sharded_checkpoint_stays_sharded(
    tiny_model: Path, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="700KB")
    for file in tiny_model.glob("tokenizer*"):
        (tmp_path / "sharded" / file.name).write_bytes(file.read_bytes())
    make_calibration(tmp_path / "cal", tmp_path / "sharded", Recipe.load("fp8"))
    export_checkpoint(tmp_path / "cal", tmp_path / "out")
    export_checkpoint(calibrations["fp8"], tmp_path / "single")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        shard.path.name for shard in Checkpoint.open(tmp_path / "sharded").shards
    }
    single = load_file(tmp_path / "single" / "model.safetensors")
    assert index["weight_map"].keys() == single.keys()
    for name, file in index["weight_map"].items():
        found = load_file(tmp_path / "out" / file)[name]
        assert torch.equal(found.view(torch.uint8), single[name].view(torch.uint8)), name


def test_cache_scales_are_written_in_pairs_where_one_is_not_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    name = f"{LAYER}.self_attn.k_scale"
    make_calibration(tmp_path / "cal", tiny_model, Recipe.load("fp8"), scales={name: 2.0})
    export_checkpoint(tmp_path / "cal", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: t.tolist() for n, t in tensors.items() if n.endswith(("k_scale", "v_scale"))} == {
        name: [2.0],
        name.replace("k_scale", "v_scale"): [1.0],
    }


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ("fp8", {"exclude": ("*.k_proj",)}, r"0\.self_attn\.k_proj full precision: engines run"),
    ],
)
def test_what_vllm_would_refuse_is_refused_first(
    base: str,
    change: dict[str, object],
    message: str,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    recipe = Recipe.load(base).model_copy(update=change)
    make_calibration(tmp_path / "cal", tiny_model, recipe)
    with pytest.raises(UnsupportedError, match=message):
        export_checkpoint(tmp_path / "cal", tmp_path / "out")
    assert not (tmp_path / "out").exists()

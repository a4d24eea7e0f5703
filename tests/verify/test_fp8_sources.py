"""A checkpoint in FP8 blocks is calibrated, exported and verified without its original."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.decoder.loading import load_model
from calibrate.options import Options
from calibrate.pipeline import run
from export.checkpoint.write import export_checkpoint
from export.onnx.write import export_onnx
from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from tests.export.conftest import make_calibration
from tests.fp8_blocks import FP8, LLM_COMPRESSOR, quantize_in_blocks
from tests.models import write_model
from verify.artifact import verify
from verify.proof_pack import PackOptions, open_pair, write_pack

Tensors = Mapping[str, torch.Tensor]
BLOCK = Recipe.load("fp8-block").model_copy(update={"kv_cache": "float16"})


def contents(path: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in path.glob("*.safetensors") for name, x in load_file(file).items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclass(frozen=True)
class World:
    """The tiny model in FP8 blocks, what it decodes to as a checkpoint, and its calibration."""

    source: Path
    decoded: Path
    calibration: Path
    real: Tensors


def calibrate(model: Path, samples: Path, out: Path, recipe: Recipe) -> Path:
    settings: dict[str, Any] = {"max_length": 32, "predict": False}
    run(Options(model=model, samples=samples, out=out, recipe=recipe, **settings))
    return out


@pytest.fixture(scope="module")
def world(tiny_model: Path, tiny_samples: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    path = tmp_path_factory.mktemp("sources")
    real = quantize_in_blocks(tiny_model, path / "source", FP8, scales=torch.bfloat16)
    (path / "decoded").mkdir()
    for file in tiny_model.iterdir():
        (path / "decoded" / file.name).write_bytes(file.read_bytes())
    weights = contents(tiny_model) | {name: x.bfloat16() for name, x in real.items()}
    save_file(weights, path / "decoded" / "model.safetensors", {"format": "pt"})
    recipe = Recipe.load("fp8-block")
    calibration = calibrate(path / "source", tiny_samples, path / "calibration", recipe)
    return World(path / "source", path / "decoded", calibration, real)


@pytest.mark.parametrize("layout", ["fp8", "compressed-tensors"])
def test_blocks_are_exported_as_they_are(layout: Any, world: World, tmp_path: Path) -> None:
    export_checkpoint(world.calibration, tmp_path / "out", format=layout, kv_cache="float16")
    before, after = contents(world.source), contents(tmp_path / "out")
    suffix = "scale_inv" if layout == "fp8" else "scale"
    renamed = {
        name.replace("weight_scale_inv", f"weight_{suffix}"): x for name, x in before.items()
    }
    assert renamed.keys() == after.keys()
    assert all(same(after[name], x) for name, x in renamed.items())
    assert sum(x.dtype == torch.float8_e4m3fn for x in after.values()) == 14
    assert after[f"model.layers.0.self_attn.q_proj.weight_{suffix}"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == layout
    assert "scale_fmt" not in config["quantization_config"]  # these are no powers of two
    found = verify(tmp_path / "out", model=world.source, calibration=world.calibration)
    assert found.problems == [] and len(found.rows) == 14
    assert all(row.sqnr > 45 for row in found.rows)  # of BF16; new scales would have 31.5


def test_the_reference_is_the_decoded_model(
    world: World, tiny_samples: Path, tmp_path: Path
) -> None:
    same_model = calibrate(
        world.decoded, tiny_samples, tmp_path / "calibration", Recipe.load("fp8-block")
    )
    one, two = (Calibration.load(x) for x in (world.calibration, same_model))
    assert one.golden.records == two.golden.records
    assert [*one.histograms] == [*two.histograms]
    assert all((one.histograms[name] == two.histograms[name]).all() for name in one.histograms)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    assert (one.scales[name] == contents(world.source)[f"{name}_inv"].float().numpy()).all()
    assert (one.scales[name] != two.scales[name]).all()  # those of the decoded are half as large
    files = Manifest.load(world.calibration, "calibration").model.files
    assert files == Checkpoint.open(world.source).weight_hashes


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_other_formats_are_made_from_the_decoded_weights(
    recipe: str, world: World, tmp_path: Path
) -> None:
    for name in ("source", "decoded"):
        model = getattr(world, name)
        make_calibration(tmp_path / f"{name}-cal", model, Recipe.load(recipe))
        export_checkpoint(tmp_path / f"{name}-cal", tmp_path / name)
    one, two = contents(tmp_path / "source"), contents(tmp_path / "decoded")
    assert one.keys() == two.keys()
    assert all(same(one[name], two[name]) for name in one)
    found = verify(tmp_path / "source", model=world.source)
    assert found.problems == [] and len(found.rows) == 14


def test_a_linear_that_the_recipe_leaves_out_is_exported_in_bf16(
    world: World, tmp_path: Path
) -> None:
    recipe = BLOCK.model_copy(update={"exclude": (*BLOCK.exclude, "*.o_proj")})
    make_calibration(tmp_path / "cal", world.source, recipe)
    export_checkpoint(tmp_path / "cal", tmp_path / "out")
    after = contents(tmp_path / "out")
    name = "model.layers.1.self_attn.o_proj.weight"
    assert same(after[name], world.real[name].bfloat16()) and f"{name}_scale" not in after
    assert verify(tmp_path / "out", model=world.source).problems == []


def test_what_an_algorithm_changed_is_quantized_again(world: World, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(world.source)
    scales = {
        name: contents(world.source)[f"{name}_inv"].float().numpy()
        for name in (f"{linear.name}.weight_scale" for linear in checkpoint.spec.linears())
    }
    name = "model.layers.1.self_attn.q_proj.weight"
    changed = {name: checkpoint.read(name).times_power(-1)}
    make_calibration(tmp_path / "cal", world.source, BLOCK, scales=scales, changed=changed)
    export_checkpoint(tmp_path / "cal", tmp_path / "out", format="fp8")
    before, after = contents(world.source), contents(tmp_path / "out")
    assert {x for x in before if not same(after[x], before[x])} == {name, f"{name}_scale_inv"}
    scale = before[f"{name}_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    halved = world.real[name].bfloat16().float() / 2 / scale
    assert same(after[name], halved.to(torch.float8_e4m3fn))


def test_modelopt_has_the_same_codes_and_scales_in_float32(world: World, tmp_path: Path) -> None:
    export_checkpoint(world.calibration, tmp_path / "out", format="modelopt", kv_cache="float16")
    before, after = contents(world.source), contents(tmp_path / "out")
    for name in world.real:
        assert same(after[name], before[name])
        scale = after[f"{name}_scale"]
        assert scale.dtype == torch.float32
        assert torch.equal(scale.reshape(-1), before[f"{name}_scale_inv"].float().reshape(-1))
    assert verify(tmp_path / "out", model=world.source).problems == []


def test_a_graph_says_nothing_of_the_blocks_it_was_made_from(world: World, tmp_path: Path) -> None:
    make_calibration(tmp_path / "cal", world.source, Recipe.load("fp8"))
    export_onnx(tmp_path / "cal", tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert verify(tmp_path / "out", model=world.source).problems == []


def test_experts_and_shards(tmp_path: Path) -> None:
    """Scales are in another shard than their weights."""
    sizes = {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 128}
    model = write_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=1, **sizes)
    layout = LLM_COMPRESSOR | {"ignore": ["lm_head", "re:.*gate$"]}
    quantize_in_blocks(model, tmp_path / "fp8", layout)
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    (tmp_path / "fp8" / "model.safetensors").unlink()
    shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        shards["b.safetensors" if name.endswith("scale") else "a.safetensors"][name] = tensor
    for name, held in shards.items():
        save_file(held, tmp_path / "fp8" / name, {"format": "pt"})
    index = {"weight_map": {x: name for name, held in shards.items() for x in held}}
    (tmp_path / "fp8" / "model.safetensors.index.json").write_text(json.dumps(index))
    source = Checkpoint.open(tmp_path / "fp8")
    blocks = {
        f"{linear.name}.weight_scale": tensors[f"{linear.name}.weight_scale"].numpy()
        for linear in source.spec.linears()
    }
    make_calibration(tmp_path / "cal", tmp_path / "fp8", BLOCK, scales=blocks)
    export_checkpoint(tmp_path / "cal", tmp_path / "out")
    after = contents(tmp_path / "out")
    assert after.keys() == tensors.keys() and len(blocks) == 4 + 3 * 8
    assert all(same(after[name], tensors[name]) for name in tensors)
    listed = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert listed["weight_map"].keys() == tensors.keys()
    found = verify(tmp_path / "out", model=tmp_path / "fp8")
    assert found.problems == [] and all(row.sqnr > 45 for row in found.rows)


def test_transformers_runs_the_decoded_model(world: World) -> None:
    ids = torch.arange(5, 37)[None]
    with torch.no_grad():
        found, expected = (
            load_model(Checkpoint.open(path), "float32")(ids).logits
            for path in (world.source, world.decoded)
        )
    assert torch.equal(found, expected)


def test_a_scale_that_was_altered_is_noticed(world: World, tmp_path: Path) -> None:
    for file in world.source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] *= 2
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"model.safetensors has changed since calibration"):
        export_checkpoint(world.calibration, tmp_path / "out", model=tmp_path)


def test_verify_finds_a_scale_that_was_not_copied(world: World, tmp_path: Path) -> None:
    export_checkpoint(world.calibration, tmp_path / "out", format="fp8", kv_cache="float16")
    tensors = contents(tmp_path / "out")
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] *= 1.5
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    what = [x.where for x in verify(tmp_path / "out", model=world.source).problems]
    assert "model.layers.1.mlp.up_proj.weight" in what


def test_a_proof_pack_takes_it_as_the_original(
    world: World, tiny_samples: Path, tmp_path: Path
) -> None:
    """The golden records are those of the decoded model; it is also what the server may serve."""
    packs = []
    for original in (world.source, world.decoded):
        out = tmp_path / original.name
        options = PackOptions(
            original=original, quantized=world.source, samples=tiny_samples, out=out
        )
        write_pack(open_pair(options), options)
        packs.append(json.loads((out / "golden.json").read_text("utf-8")))
    assert packs[0].pop("weights_sha256") != packs[1].pop("weights_sha256")
    assert packs[0] == packs[1]

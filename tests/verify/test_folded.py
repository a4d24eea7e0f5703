"""A model whose keys and values fit no FP8 cache is served without a scale, from end to end."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.rescale import rescale
from export.checkpoint.write import export_checkpoint
from export.onnx.write import export_onnx
from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest
from octet.artifacts.serving_path import ExpectedSet
from octet.recipe import Recipe
from octet.storage.tensors import TensorFile
from tests.models import KNOWN, scale_tensors, write_model
from verify.artifact import verify
from verify.next_tokens import add_divergence

FP8 = Recipe.load("fp8")
# Of each, layer 1's keys are 2^-28 and its values 2^-24 of what they were, and queries and outputs
# make up for it. Recipes whose scales are per tensor or of inputs, and that quantize no attention.
CASES = {
    "llama-biases": (("k_proj", "q_proj"), FP8),
    "qwen3": (("k_norm", "q_norm"), Recipe.load("fp8-static")),
    "qwen2": (
        ("k_proj", "q_proj"),
        FP8.model_copy(update={"exclude": (*FP8.exclude, "*.self_attn.*")}),
    ),
}


@dataclass(frozen=True)
class World:
    """A model, one with small keys and values that computes the same, and their calibrations."""

    usual: Calibration
    model: Path
    folded: Calibration
    modules: tuple[str, str]


@pytest.fixture(scope="module", params=CASES)
def world(
    request: pytest.FixtureRequest, tiny_samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> World:
    (keys, queries), recipe = CASES[request.param]
    powers = {keys: -28, queries: 28, "v_proj": -24, "o_proj.weight": 24}
    directory = tmp_path_factory.mktemp("folded")
    kind, settings = KNOWN[request.param]
    original = write_model(directory / "original", kind, **settings)

    scaled = {f"layers.1.self_attn.{part}": power for part, power in powers.items()}
    model = scale_tensors(original, directory / "small", scaled)
    found = []
    for path in (original, model):
        out = directory / f"{path.name}-calibration"
        calibration = run(
            Options(
                model=path,
                samples=tiny_samples,
                out=out,
                recipe=recipe,
                count=128,
                dtype="float32",
            )
        )
        assert calibration is not None
        found.append(calibration)
    return World(found[0], model, found[1], (keys, queries))


def test_the_calibration_needs_no_scale_and_predicts_the_same(world: World) -> None:
    folded, usual = world.folded, world.usual
    scales = {x: y for x, y in folded.scales.items() if x.endswith(("v_scale", "k_scale"))}
    assert scales and all(scale == 1 for scale in scales.values())
    assert folded.manifest.folds.keys() == {"model.layers.1"}
    assert usual.manifest.folds == {} and "folded" not in usual.manifest.details
    assert [x.tops for x in folded.golden.records] == [x.tops for x in usual.golden.records]
    expected = ExpectedSet.load(usual.path)
    for item in ExpectedSet.load(folded.path).expectations:
        same = expected.find(item.path)
        assert same is not None and same.low <= item.mean <= same.high, item.path.label
    report = json.loads((folded.path / "report.json").read_text())
    lines = report["facts"]["folded"]
    assert lines[0].endswith(f"folded into {world.modules[0]} and {world.modules[1]}")
    assert not [x for x in report["warnings"] if "scale" in x]


def test_a_checkpoint_holds_the_same_codes_and_no_cache_scale(world: World, tmp_path: Path) -> None:
    files = []
    for name, calibration in (("usual", world.usual), ("folded", world.folded)):
        export_checkpoint(calibration.path, tmp_path / name)
        files.append(TensorFile.open(tmp_path / name / "model.safetensors"))
    usual, folded = files
    assert usual.names == folded.names
    assert not [x for x in folded.names if x.endswith(("k_scale", "v_scale"))]
    powers = world.folded.manifest.folds["model.layers.1"]
    attention = "model.layers.1.self_attn"
    shared = world.folded.manifest.recipe.weights.granularity == "tensor"
    net = {x: powers["k"] - 28 for x in world.modules[:1]}
    net |= {world.modules[1]: 28 - powers["k"]}
    net |= {"v_proj": powers["v"] - 24, "o_proj": 24 - powers["v"]}
    for name in usual.names:
        before, after = usual.read(name), folded.read(name)
        module, _, kind = name.removeprefix(f"{attention}.").rpartition(".")
        if shared and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            continue  # one scale for three: what one of them has moved, moves the others' codes
        moved = net.get(module, 0) if not name.endswith("o_proj.bias") else 0
        quantized = f"{name.removesuffix('.weight')}.weight_scale" in usual.names
        if kind == "weight_scale" or (kind in ("weight", "bias") and not quantized):
            before = before.times_power(moved)
        elif kind == "input_scale" and module == "o_proj":
            before = before.times_power(powers["v"] - 24)
        np.testing.assert_array_equal(after.codes, before.codes, err_msg=name)


@pytest.mark.parametrize("given", ["model", "calibration"])
def test_verify_knows_what_was_folded(world: World, given: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_checkpoint(world.folded.path, out)
    inputs = {"model": world.model, "calibration": world.folded.path}
    found = verify(out, **{given: inputs[given]})
    add_divergence(found)
    assert found.problems == [] and found.exit_code == 0 and found.unchecked == []
    assert found.divergence is not None and found.divergence.inside
    modules = " and ".join(world.modules)
    assert [x for x in found.notes if x.startswith("K of layer 1 ") and x.endswith(modules)]
    assert [x for x in found.notes if x.startswith("V of layer 1 ") and "o_proj" in x]


def test_weights_that_are_not_those_folded_are_found_out(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_checkpoint(world.folded.path, tmp_path / "out")
    monkeypatch.setattr(Manifest, "folds", {"model.layers.1": {"k": 1}})
    found = verify(tmp_path / "out", model=world.model)
    wrong = {problem.where.rpartition(".")[0].rpartition(".")[2] for problem in found.problems}
    assert wrong == {*world.modules, "v_proj", "o_proj"}


def test_a_manifest_with_impossible_powers_is_refused(world: World) -> None:
    content = world.folded.manifest.model_dump()
    for folded in ({"model.layers.1": {"k": 1000}}, {"model.layers.1": {"k": "1"}}, {"x": 1}):
        with pytest.raises(ValueError, match="folded"):
            Manifest.model_validate(content | {"details": {"folded": folded}})


def test_another_cache_and_format_keep_what_was_folded(world: World, tmp_path: Path) -> None:
    cache = world.folded.manifest.recipe.model_copy(update={"kv_cache": "e4m3"})
    rescaled = rescale(world.folded.path, tmp_path / "e4m3", recipe=cache, predict=False)
    assert rescaled.manifest.folds == world.folded.manifest.folds
    export_checkpoint(rescaled.path, tmp_path / "checkpoint")
    assert verify(tmp_path / "checkpoint", calibration=rescaled.path).problems == []
    export_onnx(world.folded.path, tmp_path / "graph")
    found = verify(tmp_path / "graph", model=world.model)
    add_divergence(found)
    assert found.problems == [] and found.divergence is not None and found.divergence.inside


def test_a_layer_that_cannot_be_folded_keeps_its_scales_and_warns(
    tiny_samples: Path, tmp_path: Path
) -> None:
    """Its norm makes q, k and v small: k_proj could grow only at the expense of q_proj."""
    original = write_model(tmp_path / "original", "llama")
    model = scale_tensors(original, tmp_path / "small", {"layers.1.input_layernorm": -30})
    calibration = run(
        Options(
            model=model,
            samples=tiny_samples,
            out=tmp_path / "calibration",
            recipe=FP8,
            count=128,
            dtype="float32",
            predict=False,
        )
    )
    assert calibration is not None and calibration.manifest.folds.keys() <= {"model.layers.1"}
    assert "k" not in calibration.manifest.folds.get("model.layers.1", {})
    warnings = calibration.manifest.details["warnings"]
    about = [line for line in warnings if "E5M2 cache" in line or "cache scale" in line]
    (warning,) = (line for line in about if "layers.1.self_attn.key" in line)
    assert len(about) == len({line.partition(" reaches")[0] for line in about})
    assert "not folded into the weights (model.layers.1.self_attn.q_proj.weight would be" in warning
    export_checkpoint(calibration.path, tmp_path / "out")
    names = TensorFile.open(tmp_path / "out" / "model.safetensors").names
    assert [x for x in names if x.endswith("k_scale")] == ["model.layers.1.self_attn.k_scale"]
    assert verify(tmp_path / "out", calibration=calibration.path).problems == []

"""Transformer Engine's `_extra_state`: what is taken from it, and what is refused.

`data/te-2.20.2.pt` and `data/te-1.13.pt` were written by the `get_extra_state` of those releases,
from histories of three steps on a CPU: `linear` has 9 and 7 as its input's amaxes, `mlp` 11 and 10
for its first GEMM and 21 and 20 for its second; `unused` ran no step.
"""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.rescale import rescale
from calibrate.scales.transformer_engine import TrainedInputs
from octet.artifacts.calibration import WEIGHTS_FILE, Calibration
from octet.artifacts.manifest import write_artifact
from octet.errors import ConfigError
from octet.model.checkpoint import Checkpoint
from octet.recipe import PRESETS, Recipe
from octet.storage.tensors import write_tensors
from tests.command import octet

DATA = Path(__file__).parents[1] / "data"
STATIC = PRESETS["fp8-static"]
LAYER = "model.layers.{}."
BY_FLAVOUR = {
    "accelerate": {"self_attn.q_proj": "linear", "mlp.up_proj": "linear", "mlp.down_proj": "mlp"},
    "megatron": {"self_attention.linear_qkv": "linear", "mlp.linear_fc2": "mlp"},
    "te": {"self_attention.layernorm_qkv": "linear", "layernorm_mlp": "mlp"},
}
PREFIX = {"accelerate": "module.model.layers.", "megatron": "decoder.layers.", "te": "layers."}


def states(version: str = "2.20.2") -> dict[str, Any]:
    # The older ones are BytesIO, which torch loads only if allowed.
    loaded: dict[str, Any] = torch.load(DATA / f"te-{version}.pt", weights_only=False)
    return loaded


def written(path: Path, flavour: str, version: str = "2.20.2") -> Path:
    """A state dict of a training of two layers, its weights left out."""
    made = {
        f"{PREFIX[flavour]}{layer}.{module}._extra_state": states(version)[state]
        for layer in range(2)
        for module, state in BY_FLAVOUR[flavour].items()
    }
    torch.save(made | {"embedding.word_embeddings.weight": torch.zeros(2)}, path)
    return path


@pytest.mark.parametrize("version", ["2.20.2", "1.13"])
@pytest.mark.parametrize(
    ("flavour", "expected"),
    [
        ("accelerate", {"self_attn.q_proj": 9, "mlp.gate_proj": 9, "mlp.down_proj": 11}),
        ("megatron", {"self_attn.q_proj": 9, "mlp.down_proj": 11}),
        ("te", {"self_attn.q_proj": 9, "mlp.gate_proj": 11, "mlp.down_proj": 21}),
    ],
)
def test_each_input_gets_the_largest_amax_of_its_history(
    checkpoint: Checkpoint, tmp_path: Path, version: str, flavour: str, expected: dict[str, float]
) -> None:
    found = TrainedInputs.read(written(tmp_path / "te.pt", flavour, version), checkpoint.spec)
    assert found.steps == 3
    assert found.amaxes == {
        f"{LAYER.format(layer)}{name}.input": amax
        for layer in range(2)
        for name, amax in expected.items()
    }


def test_a_calibration_takes_them_and_says_so(calibration: Calibration, tmp_path: Path) -> None:
    file = written(tmp_path / "te.pt", "megatron")
    plain = rescale(calibration.path, tmp_path / "plain", recipe=STATIC, predict=False)
    taken = rescale(calibration.path, tmp_path / "out", recipe=STATIC, te_state=file, predict=False)
    changed = {
        name
        for name, scale in taken.scales.items()
        if not np.array_equal(scale, plain.scales[name])
    }
    assert changed == {
        f"{LAYER.format(layer)}{name}.input_scale"
        for layer in range(2)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
    }
    for name in changed:
        amax = 11 if "down_proj" in name else 9
        assert taken.scales[name] == np.float32(amax) / np.float32(448)
    assert taken.manifest.details["te_state"] == {"inputs": 4, "steps": 3}
    again = rescale(taken.path, tmp_path / "again", recipe=STATIC, predict=False)
    assert "te_state" not in again.manifest.details  # these are the samples's
    first, second, *_ = taken.manifest.details["warnings"]
    assert f"last 3 steps of a training, from {file}" in first
    assert second.startswith("4 activations have no amax history") and "o_proj.input" in second
    report = json.loads((taken.path / "report.json").read_text())
    assert report["convergence"] is None  # the samples did not decide these scales


def test_the_margin_is_the_recipes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    activations = STATIC.activations.model_copy(update={"margin": 2})
    recipe = STATIC.model_copy(update={"activations": activations})
    found = TrainedInputs.read(written(tmp_path / "te.pt", "te"), checkpoint.spec)
    scales = found.scales(checkpoint.spec, recipe)
    assert scales["model.layers.1.mlp.down_proj.input_scale"] == np.float32(21 / 448) * 4
    shared = found.scales(checkpoint.spec, PRESETS["nvfp4"])
    assert shared["model.layers.1.mlp.down_proj.input_global_scale"] == np.float32(21 / 2688)


def test_samples_beyond_the_trainings_amax_are_reported(
    calibration: Calibration, tmp_path: Path
) -> None:
    state = {"amax_history_fwd": torch.tensor([[1e-3, 1.0, 0.0], [np.inf, 1.0, 0.0]])}
    file = tmp_path / "te.pt"
    raw = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    torch.save({"model.layers.1.mlp.down_proj._extra_state": raw}, file)
    taken = rescale(calibration.path, tmp_path / "out", recipe=STATIC, te_state=file, predict=False)
    warning = next(x for x in taken.manifest.details["warnings"] if "exceed" in x)
    assert "in 1 activations, most in model.layers.1.mlp.down_proj.input" in warning
    report = json.loads((taken.path / "report.json").read_text())
    assert report["tensors"]["model.layers.1.mlp.down_proj.input"]["chosen"]["saturated"] > 0.1


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("inner", [True, False])
def test_code_in_a_file_is_not_run(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    value: Any = Attack()
    if inner:
        raw = bytearray(pickle.dumps({"amax_history_fwd": value}))
        value = torch.frombuffer(raw, dtype=torch.uint8)
    torch.save({"model.layers.0.mlp.down_proj._extra_state": value}, "te.pt")
    with pytest.raises(ConfigError, match=r"^te\.pt: .*") as error:
        TrainedInputs.read(Path("te.pt"), checkpoint.spec)
    assert not Path("attacked").exists()
    if inner:
        assert "names posix.mkdir, which is not data" in str(error.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "no amax history of this model's linear layers"),
        ({"model.layers.0.mlp.down_proj._extra_state": "mxfp8"}, "Only DelayedScaling has one"),
        ({"model.layers.0.mlp.down_proj._extra_state": "unused"}, "no amax history"),
        ({"layers.9.mlp.linear_fc2._extra_state": "linear"}, "no amax history"),
        ({"layers.0.layernorm_mlp._extra_state": "linear"}, "not 3 amaxes for each of 2 GEMMs"),
    ],
)
def test_a_file_without_a_history_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, entries: dict[str, str], message: str
) -> None:
    torch.save({key: states()[name] for key, name in entries.items()}, tmp_path / "te.pt")
    with pytest.raises(ConfigError, match=message):
        TrainedInputs.read(tmp_path / "te.pt", checkpoint.spec)


@pytest.mark.parametrize("damage", ["cut", "text", "list", "state"])
def test_a_damaged_file_is_refused_in_one_line(
    checkpoint: Checkpoint, tmp_path: Path, damage: str
) -> None:
    path = written(tmp_path / "te.pt", "te")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:500])
    elif damage == "text":
        path.write_text("scale: 1")
    elif damage == "list":
        torch.save([1], path)
    else:
        torch.save({"layers.0.layernorm_mlp._extra_state": states()["mlp"][:900]}, path)
    with pytest.raises(ConfigError) as error:
        TrainedInputs.read(path, checkpoint.spec)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (PRESETS["fp8"], "scales activations at run time"),
        (
            STATIC.model_copy(
                update={"activations": STATIC.activations.model_copy(update={"method": "mse"})}
            ),
            "by method mse",
        ),
    ],
)
def test_a_recipe_without_such_scales_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, recipe: Recipe, message: str
) -> None:
    found = TrainedInputs.read(written(tmp_path / "te.pt", "te"), checkpoint.spec)
    with pytest.raises(ConfigError, match=message):
        found.scales(checkpoint.spec, recipe)


def test_changed_weights_are_refused(
    calibration: Calibration, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """SmoothQuant, for one, divides activations by what it multiplies weights with."""
    changed = tmp_path / "changed"
    with write_artifact(changed) as writer:
        for name in calibration.manifest.files:
            shutil.copyfile(calibration.path / name, writer.path / name)
        name = "model.layers.0.mlp.down_proj.weight"
        write_tensors(writer.path / WEIGHTS_FILE, {name: checkpoint.read(name)})
        writer.finish(calibration.manifest)
    file = written(tmp_path / "te.pt", "te")
    with pytest.raises(ConfigError, match=r"changed: its weights were changed after the training"):
        rescale(changed, tmp_path / "out", recipe=STATIC, te_state=file, predict=False)


def test_the_command(calibration: Calibration, tmp_path: Path) -> None:
    file = written(tmp_path / "te.pt", "te")
    out = tmp_path / "out"
    options = ["--recipe", "fp8-static", "--te-state", str(file), "--no-predict", "-o", str(out)]
    done = octet("rescale", str(calibration.path), *options)
    assert done.returncode == 0, done.stderr
    assert "last 3 steps of a training" in " ".join((done.stdout + done.stderr).split())
    assert Calibration.load(out).manifest.details["te_state"]["steps"] == 3

"""A weight that a GPU holds has the scales and the error of the one in its file."""

import numpy as np
import pytest
import torch

import calibrate.scales.held_weight as module
from calibrate.decoder.loading import to_torch
from calibrate.decoder.weights import LayerWeights
from calibrate.scales.held_weight import HeldWeight
from calibrate.scales.weights import Held, weight_scales
from octet.errors import NumericsError
from octet.model.checkpoint import Checkpoint
from octet.recipe import PRESETS, Recipe
from tests.models import write_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Rows and columns that are no multiple of a block's edge."""
    sizes = {"hidden_size": 192, "intermediate_size": 416, "head_dim": 64}
    return Checkpoint.open(write_model(tmp_path_factory.mktemp("m") / "m", "llama", **sizes))


def recipe_of(preset: str) -> Recipe:
    recipe = PRESETS[preset]
    weights = recipe.weights.model_copy(update={"method": "max"})
    return Recipe(name=preset, weights=weights, activations=recipe.activations)


@pytest.mark.parametrize("slab", [5000, 1 << 24])
@pytest.mark.parametrize("preset", PRESETS)
def test_scales_are_the_same_and_errors_nearly(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, preset: str, slab: int
) -> None:
    monkeypatch.setattr(module, "_SLAB", slab)
    compare(checkpoint, preset, lambda name: to_torch(checkpoint.read(name), torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs an NVIDIA GPU; there: pytest -m gpu tests/calibrate/scales/test_held_weight.py",
)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_gpus_scales_are_those_of_the_files(checkpoint: Checkpoint, preset: str) -> None:
    compare(checkpoint, preset, LayerWeights(checkpoint, "cuda").weight)


def compare(checkpoint: Checkpoint, preset: str, held: Held) -> None:
    recipe = recipe_of(preset)
    expected = dict(weight_scales(checkpoint, recipe))
    found = dict(weight_scales(checkpoint, recipe, held))
    assert found.keys() == expected.keys()
    for name, scale in found.items():
        np.testing.assert_array_equal(scale.scale, expected[name].scale)
        np.testing.assert_array_equal(scale.global_scale, expected[name].global_scale)
        assert scale.scale.dtype == expected[name].scale.dtype
        assert scale.sqnr_db == pytest.approx(expected[name].sqnr_db, abs=1e-9)


def test_nan_is_counted() -> None:
    values = torch.ones(8, 32)
    values[3, 4] = values[7, 0] = torch.nan
    weight = HeldWeight("w", values, PRESETS["fp8"].weights)
    with pytest.raises(NumericsError, match="'w' holds 2 NaN and 0 Inf among 256"):
        assert weight.tile_absmax is None


def test_a_cpu_holds_none(checkpoint: Checkpoint) -> None:
    assert LayerWeights(checkpoint).weight("model.layers.0.mlp.up_proj.weight") is None

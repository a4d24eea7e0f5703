"""Tests the arguments of ModelOpt's algorithms, and their refusals, without ModelOpt itself.

`tests/integration/test_modelopt.py` runs the real thing.
"""

import sys

import numpy as np
import pytest
import torch

from calibrate.algorithms.modelopt import apply_algorithm, unpadded
from calibrate.algorithms.modelopt_backend import Rounding, update_blockwise
from calibrate.decoder.rounding import fake_quantize
from calibrate.samples.batches import Batch
from calibrate.scales.weights import scale_of_weight
from octet.errors import UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.recipe import PRESETS, Recipe
from octet.storage.tensors import Tensor


def test_without_modelopt_the_error_says_what_to_install(
    checkpoint: Checkpoint, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    expected = r"^algorithm gptq needs nvidia-modelopt: pip install 'octet-llm\[modelopt\]'$"
    with pytest.raises(UnsupportedError, match=expected):
        apply_algorithm(checkpoint, "gptq", PRESETS["fp8"], [batch], dtype="float32")


def test_awq_is_refused_where_no_weight_has_four_bits(checkpoint: Checkpoint, batch: Batch) -> None:
    with pytest.raises(UnsupportedError, match=r"recipe fp8: awq is for weights of 4 bits .*mxfp4"):
        apply_algorithm(checkpoint, "awq", PRESETS["fp8"], [batch], dtype="float32")


def test_a_recipe_that_quantizes_nothing_is_refused(checkpoint: Checkpoint, batch: Batch) -> None:
    nothing = PRESETS["fp8-static"].model_copy(update={"exclude": ("*",)})
    with pytest.raises(UnsupportedError, match="smoothquant is for linears to quantize"):
        apply_algorithm(checkpoint, "smoothquant", nothing, [batch], dtype="float32")


def test_experts_are_refused_before_anything_is_loaded(
    checkpoint: Checkpoint, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.algorithms.modelopt.load_model", None)
    spec = checkpoint.spec.model_copy(update={"experts": 4, "sparse_layers": (0, 1)})
    mixture = Checkpoint(checkpoint.path, checkpoint.config, spec, checkpoint.shards)
    with pytest.raises(UnsupportedError, match="do not support experts"):
        apply_algorithm(mixture, "gptq", PRESETS["fp8"], [batch], dtype="float32")


def test_rows_go_together_without_padding_and_lose_less_than_a_tenth() -> None:
    lengths = (40, 100, 97, 91, 90, 3)
    token_ids = torch.arange(600).reshape(6, 100) + 1
    for row, length in enumerate(lengths):
        token_ids[row, length:] = 0
    parts = list(unpadded(Batch(token_ids, lengths, ("",) * 6)))
    assert [tuple(part.shape) for part in parts] == [(3, 91), (1, 90), (1, 40), (1, 3)]
    assert all((part != 0).all() for part in parts)
    assert torch.equal(parts[0][2], token_ids[3, :91])


def gptq(weight: torch.Tensor, factor: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """The update from its definition, in blocks of one column: round the whole matrix, take one
    column, spread its error over those to its right."""
    weight = weight.clone()
    for i in range(weight.shape[1]):
        rounded = fake_quantize(weight, rounding.scheme, rounding.scale, rounding.global_scale)
        error = (weight[:, i] - rounded[:, i]) / factor[i, i]
        weight[:, i:] -= error[:, None] * factor[i, i:]
        weight[:, i] = rounded[:, i]
    return weight


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=list(PRESETS))
def test_the_columnwise_update_is_gptqs(recipe: Recipe) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(512, 160) @ torch.randn(160, 160)).double()
    hessian = inputs.T @ inputs
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(160)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True).float()
    weight = torch.randn(144, 160) * 0.05
    found = scale_of_weight("weight", Tensor.of(weight.numpy()), recipe.weights)
    shared = found.global_scale
    rounding = Rounding(
        recipe.weights,
        scale=torch.from_numpy(np.asarray(found.scale)),
        global_scale=None if shared is None else torch.from_numpy(np.asarray(shared)),
    )
    moved = weight.clone()
    update_blockwise(moved, factor, 128, rounding)
    # Sums in another order: now and then a value goes to the other side of a rounding boundary,
    # and its row differs from there on.
    rows = (moved - gptq(weight, factor, rounding)).abs().amax(dim=1)
    assert (rows < 1e-5).float().mean() > 0.8
    # It is on the grid, and errs less on these inputs than rounding to nearest.
    on_grid = fake_quantize(moved, recipe.weights, rounding.scale, rounding.global_scale)
    assert torch.equal(on_grid, moved)
    nearest = fake_quantize(weight, recipe.weights, rounding.scale, rounding.global_scale)

    def error(changed: torch.Tensor) -> float:
        return float((inputs @ (changed - weight).double().T).square().mean())

    assert error(moved) < 0.8 * error(nearest)

"""A simulated mixture computes with each expert's own scales, on weights and on inputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoder.loading import load_model
from calibrate.observe.histogram import Histogram
from calibrate.observe.sweep import observe_checkpoint
from calibrate.quality.divergence import Reference
from calibrate.quality.sensitivity import measure_sensitivity
from calibrate.samples.batches import Batch
from calibrate.scales.derive import Quantization, derive_scales
from calibrate.scales.expert_fallback import with_fallback
from calibrate.simulate.model import module_schemes, simulate, simulate_modules
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.numerics import scaling
from octet.numerics.formats import E4M3
from octet.recipe import Recipe
from tests.models import write_model

Scales = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def moe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    kind = request.param
    return Checkpoint.open(write_model(tmp_path_factory.mktemp("moe") / kind, kind))


def calibrated(
    checkpoint: Checkpoint, recipe: Recipe, batch: Batch, min_tokens: int = 1
) -> tuple[Quantization, Any]:
    """The recipe applied to `batch`, and the facts of experts that it hardly reaches."""
    observed = observe_checkpoint(checkpoint, [batch], dtype="float32")
    counts, facts = with_fallback(checkpoint.spec, observed.histograms, min_tokens)
    histograms = {name: Histogram(x.sum(axis=0), "bfloat16") for name, x in counts.items()}
    return derive_scales(checkpoint, recipe, histograms), facts


def block(
    checkpoint: Checkpoint, scales: Scales, layer: int, x: np.ndarray, route: tuple[Any, Any]
) -> np.ndarray:
    """The sparse block of `layer` on x [n, H], by numpy: per-tensor E4M3, token by expert.

    `route` is, for each token, its experts [n, k] and their weights [n, k].
    """
    spec: ModelSpec = checkpoint.spec

    def linear(name: str, rows: np.ndarray) -> np.ndarray:
        weight = checkpoint.read(f"{name}.weight").float32()
        pair = ((rows, "input_scale"), (weight, "weight_scale"))
        rounded = [
            scaling.fake_quantize(x, scales[f"{name}.{kind}"], E4M3, scaling.TENSOR).astype(float)
            for x, kind in pair
        ]
        return (rounded[0] @ rounded[1].T).astype(np.float32)

    out = np.zeros(x.shape)
    for expert in range(spec.experts):
        token, rank = np.nonzero(route[0] == expert)
        if not len(token):
            continue
        gate, up, down = (
            f"{spec.experts_of(spec.layer(layer))}.{expert}.{projection}"
            for projection in spec.expert_projections
        )
        g = linear(gate, x[token])
        hidden = g / (1 + np.exp(-g)) * linear(up, x[token])
        out[token] += linear(down, hidden) * route[1][token, rank, None]
    return out


def test_each_expert_is_rounded_by_its_own_scales(moe: Checkpoint, batch: Batch) -> None:
    spec, recipe = moe.spec, Recipe.load("fp8-static")
    scales = calibrated(moe, recipe, batch)[0].scales
    inputs = {
        float(scales[f"{linear.name}.input_scale"])
        for linear in spec.linears()
        if ".experts." in linear.name
    }
    assert len(inputs) > 2 * spec.layers  # more than one a layer and projection
    model = load_model(moe, "float32")
    seen: list[Any] = []
    hooks = []
    for layer in model.model.layers:
        hooks.append(layer.mlp.register_forward_hook(lambda _, i, o: seen.append((i[0], o))))
        hooks.append(layer.mlp.gate.register_forward_hook(lambda _, i, o: seen.append(o)))
    with torch.inference_mode(), simulate(model, spec, recipe, scales):
        model.model(batch.token_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for index in range(spec.layers):  # the router's call ends before that of the block around it
        (_, weights, chosen), (x, out) = seen[2 * index : 2 * index + 2]
        flat = x.flatten(0, 1).numpy()
        expected = block(moe, scales, index, flat, (chosen.numpy(), weights.numpy()))
        error = np.abs(out.flatten(0, 1).numpy() - expected).max() / np.abs(expected).max()
        # Float32 products in another order: rarely, a value rounds to the other side.
        assert error < 0.02, index
        typical = np.abs(out.flatten(0, 1).numpy() - expected).mean() / np.abs(expected).mean()
        assert typical < 1e-4, index


def test_experts_that_saw_little_are_served_with_the_scale_of_all(
    moe: Checkpoint, batch: Batch
) -> None:
    spec = moe.spec
    short = Batch(batch.token_ids[:1, :1], (1,), batch.origins[:1])  # most experts see nothing
    found, facts = calibrated(moe, Recipe.load("fp8-static"), short, min_tokens=2)
    scales = found.scales
    assert {item["tokens"] for item in facts["fallback"]} == {0, 1}
    assert len(facts["fallback"]) == spec.layers * spec.experts
    for layer in range(spec.layers):
        for projection in spec.expert_projections:
            names = [
                f"{spec.experts_of(spec.layer(layer))}.{expert}.{projection}"
                for expert in range(spec.experts)
            ]
            assert len({float(scales[f"{name}.input_scale"]) for name in names}) == 1
            weights = {float(scales[f"{name}.weight_scale"]) for name in names}
            assert len(weights) > 1  # from each expert's own weights


def test_the_model_is_as_before_afterwards(moe: Checkpoint, batch: Batch, tmp_path: Path) -> None:
    recipe = Recipe.load("fp8-static")
    scales = calibrated(moe, recipe, batch)[0].scales
    model = load_model(moe, "float32")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with simulate(model, moe.spec, recipe, scales):
        changed = [n for n, t in model.state_dict().items() if not torch.equal(t, before[n])]
    assert any(name.endswith("experts.gate_up_proj") for name in changed)
    assert not any(name.endswith("mlp.gate.weight") for name in changed)  # the router
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_experts_of_a_layer_are_one_unit(moe: Checkpoint, batch: Batch) -> None:
    """It is measured from its own layer on, and equal to a pass through the whole model."""
    spec, recipe = moe.spec, Recipe.load("fp8-static")
    quantization, _ = calibrated(moe, recipe, batch)
    scales = quantization.scales
    model = load_model(moe, "float32")
    reference = Reference(model, spec, [batch])
    found = measure_sensitivity(model, quantization, reference)
    units = {unit.name: unit for unit in found.units}
    for layer in range(spec.layers):
        prefix = spec.experts_of(spec.layer(layer))
        (unit,) = [unit for name, unit in units.items() if name.startswith(prefix)]
        expected = [x.name for x in spec.linears(layer) if ".experts." in x.name]
        assert sorted(unit.linears) == sorted(expected)
        alone = module_schemes(spec, recipe, unit.linears)
        with simulate_modules(model, spec, alone, scales, None):
            cost = reference.compare()
        assert 0 < unit.kl == pytest.approx(cost.kl, rel=1e-3)
        ratios = (unit.input_sqnr_db, unit.weight_sqnr_db, unit.output_sqnr_db)
        assert all(ratio is not None and 20 < ratio < 50 for ratio in ratios)

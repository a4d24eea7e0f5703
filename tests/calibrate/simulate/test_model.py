"""A simulated model computes as served, and afterwards as before."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoder.experts import expert_weights
from calibrate.decoder.rounding import fake_quantize
from calibrate.scales.weights import scale_of_weight
from calibrate.simulate.model import simulate, simulate_modules, with_power_scales
from octet.numerics import microscaling, scaling
from octet.numerics.formats import E5M2, FORMATS, round_to
from octet.numerics.scaling import Granularity
from octet.recipe import PRESETS, Recipe
from octet.storage.tensors import Tensor, write_tensors
from tests.calibrate.bench import Bench, make_bench, recipe_with
from tests.models import write_model
from tests.references import Reference, divergence


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Bench:
    return make_bench(tiny_model)


@torch.inference_mode()
def logits_of(bench: Bench) -> torch.Tensor:
    return bench.model(bench.batches[0].token_ids, use_cache=False).logits


def state(model: Any) -> dict[str, int]:
    return {name: id(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kv_cache", ["e5m2", "float16"])
@pytest.mark.parametrize("preset", ["fp8", "fp8-static", "fp8-block"])
def test_it_computes_what_an_independent_implementation_does(
    preset: str, kv_cache: Any, tiny_model: Path, bench: Bench, tmp_path: Path
) -> None:
    recipe = recipe_with(preset, kv_cache=kv_cache)
    scales = bench.scales(recipe)
    (tmp_path / "manifest.json").write_text(json.dumps({"recipe": recipe.model_dump(mode="json")}))
    tensors = {name: Tensor.of(np.asarray(scale)) for name, scale in scales.items()}
    write_tensors(tmp_path / "scales.safetensors", tensors)
    ids = bench.batches[0].token_ids
    with simulate(bench.model, bench.checkpoint.spec, recipe, scales):
        ours = logits_of(bench)
    theirs = Reference(tiny_model, tmp_path, kv_cache).logits(ids)
    plain = Reference(tiny_model).logits(ids)
    # Sums in another order move a value over a rounding boundary now and then.
    assert divergence(theirs, ours).mean() < 0.1 * divergence(plain, ours).mean()


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_those_that_octet_scaling_decodes(preset: str, bench: Bench) -> None:
    recipe = Recipe.load(preset)
    scales = bench.scales(recipe)
    name = "model.layers.1.mlp.down_proj"
    weight = bench.checkpoint.read(f"{name}.weight").float32()
    factor = microscaling.combined(
        scales[f"{name}.weight_scale"], scales.get(f"{name}.weight_global_scale")
    )
    granularity = Granularity.of(recipe.weights.granularity, recipe.weights.group_size)
    fmt = FORMATS[recipe.weights.format]
    expected = scaling.fake_quantize(weight, factor, fmt, granularity)
    with simulate(bench.model, bench.checkpoint.spec, recipe, scales):
        held = bench.model.get_submodule(name).weight.detach().numpy().copy()
        moved = logits_of(bench)
    assert np.array_equal(held, expected)
    assert not torch.equal(moved, logits_of(bench))


def test_afterwards_the_model_is_the_very_same(bench: Bench) -> None:
    recipe = Recipe.load("fp8-static")
    before, parameters = logits_of(bench), state(bench.model)
    with simulate(bench.model, bench.checkpoint.spec, recipe, bench.scales(recipe)):
        assert state(bench.model) != parameters
    assert state(bench.model) == parameters
    assert torch.equal(logits_of(bench), before)


def test_an_exception_inside_or_a_missing_scale_leaves_nothing_behind(bench: Bench) -> None:
    recipe = Recipe.load("fp8-static")
    before, parameters = logits_of(bench), state(bench.model)
    scales = bench.scales(recipe)
    with (
        pytest.raises(ZeroDivisionError),
        simulate(bench.model, bench.checkpoint.spec, recipe, scales),
    ):
        raise ZeroDivisionError
    del scales["model.layers.1.mlp.down_proj.input_scale"]
    with (
        pytest.raises(KeyError, match=r"layers\.1\.mlp\.down_proj\.input_scale"),
        simulate(bench.model, bench.checkpoint.spec, recipe, scales),
    ):
        pass
    assert state(bench.model) == parameters
    assert torch.equal(logits_of(bench), before)


def test_excluded_linears_stay_and_others_take_their_override(bench: Bench) -> None:
    excluded, other = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"
    plain = Recipe.load("fp8-static")
    fp8 = Recipe.load("fp8")
    override = {"match": other, "weights": fp8.weights, "activations": fp8.activations}
    recipe = recipe_with("fp8-static", exclude=(excluded,), overrides=(override,))
    scales, before = bench.scales(recipe), state(bench.model)
    with simulate(bench.model, bench.checkpoint.spec, recipe, scales):
        after = state(bench.model)
        weight = bench.model.get_submodule(other).weight.detach()
    assert after[f"{excluded}.weight"] == before[f"{excluded}.weight"]
    assert scales[f"{other}.weight_scale"].shape == (256, 1)
    original = bench.model.get_submodule(other).weight.detach().numpy()
    channel = scaling.fake_quantize(
        original, scales[f"{other}.weight_scale"], FORMATS["e4m3"], scaling.CHANNEL
    )
    assert np.array_equal(weight.numpy(), channel)
    assert f"{other}.input_scale" not in scales
    assert f"{other}.input_scale" in bench.scales(plain)


def test_a_cache_holds_rounded_keys_and_decodes_as_a_whole_pass(bench: Bench) -> None:
    recipe = Recipe.load("fp8")
    ids = bench.batches[0].token_ids[:1, :20]
    with (
        torch.inference_mode(),
        simulate(bench.model, bench.checkpoint.spec, recipe, bench.scales(recipe)),
    ):
        whole = bench.model(ids, use_cache=False).logits[0, -1]
        first = bench.model(ids[:, :-1], use_cache=True)
        cache = first.past_key_values
        step = bench.model(ids[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1]
    keys = cache.layers[0].keys.numpy()
    assert keys.shape[2] == 20
    assert np.array_equal(round_to(keys, E5M2), keys)  # its scale is 1
    assert torch.allclose(step, whole, atol=0.05 * whole.abs().max().item())


def test_experts_are_quantized_one_by_one(tmp_path: Path) -> None:
    bench = make_bench(write_model(tmp_path / "moe", "qwen3_moe"), samples=8, length=32)
    spec, recipe = bench.checkpoint.spec, Recipe.load("fp8")
    scales = bench.scales(recipe)
    layer = bench.model.get_submodule("model.layers.1")
    before = expert_weights(layer, "model.layers.1", spec)
    name = "model.layers.1.mlp.experts.3.up_proj"
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(name: str, x: torch.Tensor, rounded: torch.Tensor, index: Any) -> None:
        if index is not None:
            seen[name] = (x, rounded)

    schemes = {linear.name: recipe.scheme_of(linear.name) for linear in spec.linears()}
    parameters, unchanged = state(bench.model), bench.reference.compare()
    with simulate_modules(bench.model, spec, schemes, scales, None, watch=watch):
        after = expert_weights(layer, "model.layers.1", spec)[name].numpy().copy()
        cost = bench.reference.compare()
    expected = scaling.fake_quantize(
        before[name].numpy(), scales[f"{name}.weight_scale"], FORMATS["e4m3"], scaling.CHANNEL
    )
    assert np.array_equal(after, expected)
    x, rounded = seen["model.layers.1.mlp.experts.3.gate_proj.input"]
    assert torch.equal(fake_quantize(x, recipe.activations), rounded)
    assert state(bench.model) == parameters
    assert cost.kl > 1e-4
    # Not run one by one, sums are in another order: not zero, but nothing beside quantization.
    assert unchanged.kl < 1e-6


def test_blocks_are_encoded_again_with_the_least_powers_of_two_that_hold_them() -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(200, 300, generator=generator) * torch.logspace(-6, 2, 300)
    weight[:128, 128:256] = 0
    weight[3, 5], weight[130:, 256:] = 448 * 2.0**-9, 2.0**-9  # amax is a code of its scale
    schemes = {name: PRESETS[name].pairs[0] for name in ("fp8", "fp8-block")}
    expert = "model.layers.0.mlp.experts.3.up_proj"
    schemes[expert] = schemes["fp8-block"]
    found = with_power_scales(dict.fromkeys(schemes, weight), schemes)
    assert found["fp8"] is weight and found[expert] is weight
    for rows in (slice(0, 128), slice(128, 200)):
        for columns in (slice(0, 128), slice(128, 256), slice(256, 300)):
            block = weight[rows, columns].numpy()
            scale = 2.0 ** np.ceil(np.log2(max(np.abs(block).max(), 1e-4) / 448))
            expected = round_to(block / np.float32(scale), FORMATS["e4m3"]) * np.float32(scale)
            assert np.array_equal(found["fp8-block"][rows, columns].numpy(), expected)
    again = with_power_scales(found, {name: schemes["fp8-block"] for name in found})
    assert torch.equal(again["fp8-block"], found["fp8-block"])  # nothing is lost any more


def test_blocks_with_scales_of_the_recipe_are_not_changed_again() -> None:
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(200, 300, generator=generator) * torch.logspace(-3, 2, 300)
    weight[3, 5], weight[130:, 256:] = 448 * 2.0**-9, 0
    schemes = {"x": PRESETS["fp8-block"].pairs[0]}
    scale = scale_of_weight("x", Tensor.of(weight.numpy()), schemes["x"][0]).scale
    stored = fake_quantize(weight, schemes["x"][0], torch.from_numpy(scale))
    assert not torch.equal(stored, weight)
    assert torch.equal(with_power_scales({"x": stored}, schemes)["x"], stored)

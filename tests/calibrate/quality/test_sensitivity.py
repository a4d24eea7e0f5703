"""Each unit alone: what it costs, and why, in figures that a direct computation confirms."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoder.partial import Tail
from calibrate.journal.steps import Steps
from calibrate.observe.histogram import SMALL
from calibrate.quality.divergence import Reference
from calibrate.quality.sensitivity import Sensitivity, measure_sensitivity, measurements
from calibrate.simulate.model import module_schemes, simulate, simulate_modules
from octet.numerics import scaling
from octet.numerics.formats import E4M3
from octet.recipe import Recipe
from tests.calibrate.bench import Bench, make_bench, recipe_with
from tests.models import write_model
from tests.outliers import write_outlier_checkpoint


@pytest.fixture(scope="module")
def bench(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The tiny model with massive activations before both blocks of layer 1."""
    path = tmp_path_factory.mktemp("outliers") / "model"
    write_outlier_checkpoint(tiny_model, path, layers=[1], factor=2**17)
    return make_bench(path, samples=8, length=40)


def measure(bench: Bench, recipe: Recipe, **options: Any) -> Sensitivity:
    return measure_sensitivity(bench.model, bench.quantization(recipe), bench.reference, **options)


@pytest.fixture(scope="module")
def static(bench: Bench) -> Sensitivity:
    return measure(bench, recipe_with("fp8-static", kv_cache="e4m3"))


def test_units_are_what_shares_an_input_in_order_and_what_recipes_exclude(
    static: Sensitivity,
) -> None:
    assert [unit.name for unit in static.units] == [
        "model.embed_tokens",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.gate_up_proj",
        "model.layers.1.mlp.down_proj",
        "lm_head",
        "kv_cache",
    ]
    qkv = static.units[1]
    assert [name.rpartition(".")[2] for name in qkv.linears] == ["q_proj", "k_proj", "v_proj"]
    assert qkv.weights == (256 + 128 + 128) * 256
    assert {unit.format for unit in static.units} == {"fp8-static", "e4m3"}
    assert all(unit.kl > 0 for unit in static.units)


def test_the_small_values_name_exactly_the_injured_units(static: Sensitivity) -> None:
    """The whole input's ratio sees nothing: the massive channels carry the energy."""
    inputs = {unit.name: unit for unit in static.units if unit.input_sqnr_db is not None}
    hidden = [name for name, unit in inputs.items() if unit.input_small_sqnr_db < 20]
    assert hidden == ["model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"]
    assert all(unit.input_sqnr_db > 30 for unit in inputs.values())
    for name in hidden:
        healthy = static.kl_of(name.replace("layers.1", "layers.0"))
        assert static.kl_of(name) > 2 * healthy


def test_every_figure_of_a_unit_is_what_a_direct_computation_gives(
    bench: Bench, static: Sensitivity
) -> None:
    recipe = recipe_with("fp8-static", kv_cache="e4m3")
    name = "model.layers.1.mlp.down_proj"
    scales, unit = bench.scales(recipe), next(u for u in static.units if u.name == name)
    rows: list[np.ndarray] = []
    linear = bench.model.get_submodule(name)
    handle = linear.register_forward_pre_hook(
        lambda _, args: rows.extend(
            x[:n].numpy() for x, n in zip(args[0], batch.lengths, strict=True)
        )
    )
    with torch.inference_mode():
        for batch in bench.batches:
            bench.model(batch.token_ids, use_cache=False)
    handle.remove()
    x = np.concatenate(rows)
    rounded = scaling.fake_quantize(x, scales[f"{name}.input_scale"], E4M3, scaling.TENSOR)
    weight = linear.weight.detach().numpy()
    codes = scaling.fake_quantize(weight, scales[f"{name}.weight_scale"], E4M3, scaling.TENSOR)

    def sqnr_db(exact: np.ndarray, noisy: np.ndarray) -> float:
        exact, noisy = exact.astype(np.float64), noisy.astype(np.float64)
        return 10 * np.log10((exact**2).sum() / ((exact - noisy) ** 2).sum())

    small = np.abs(x) <= np.quantile(np.abs(x[x != 0]), SMALL)
    assert unit.input_sqnr_db == pytest.approx(sqnr_db(x, rounded), abs=0.01)
    # The histogram's quantile is that of values rounded to bfloat16.
    assert unit.input_small_sqnr_db == pytest.approx(sqnr_db(x[small], rounded[small]), abs=0.1)
    assert unit.weight_sqnr_db == pytest.approx(sqnr_db(weight, codes), abs=0.01)
    assert unit.output_sqnr_db == pytest.approx(sqnr_db(x @ weight.T, rounded @ codes.T), abs=0.01)
    schemes = module_schemes(bench.checkpoint.spec, recipe, [name])
    with simulate_modules(bench.model, bench.checkpoint.spec, schemes, scales, None):
        whole = bench.reference.compare()
    assert unit.kl == pytest.approx(whole.kl, rel=1e-6)  # from its own layer, or from the first


def test_all_is_the_recipe_as_it_is_served(bench: Bench, static: Sensitivity) -> None:
    recipe = recipe_with("fp8-static", kv_cache="e4m3")
    with simulate(bench.model, bench.checkpoint.spec, recipe, bench.scales(recipe)):
        assert bench.reference.compare() == static.all


def test_lm_head_and_embeddings_cost_what_rounding_them_does(
    bench: Bench, static: Sensitivity
) -> None:
    """Independently: float64 logits of the reference's hidden states and a rounded head."""
    table = bench.model.lm_head.weight.detach()
    hidden = torch.cat(bench.reference.hidden)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    p = (hidden.double() @ table.double().T).log_softmax(-1)
    q = (rounded(hidden).double() @ rounded(table).double().T).log_softmax(-1)
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    assert static.kl_of("lm_head") == pytest.approx(expected, rel=0.01)
    assert static.units[0].input_sqnr_db is None  # embeddings are looked up, not multiplied
    assert 25 < static.units[0].weight_sqnr_db < 40


@pytest.mark.parametrize("preset", ["fp8-block", "mxfp8", "nvfp4"])
def test_every_preset_can_be_measured_and_the_model_is_as_before(preset: str, bench: Bench) -> None:
    recipe, done = Recipe.load(preset), []
    found = measure(bench, recipe, advance=done.append)
    tokens = sum(batch.tokens for batch in bench.batches)
    assert sum(done) == tokens * measurements(bench.quantization(recipe))
    assert all(unit.kl > 0 for unit in found.units)
    assert bench.reference.compare().kl == 0
    data = found.as_json()
    assert data["tokens"] == tokens and data["samples"] == 8
    assert data["all"]["kl"] == found.all.kl
    assert len(data["units"]) == len(found.units)


def test_the_progress_of_a_continued_measurement_counts_what_was_kept_at_once(
    bench: Bench, static: Sensitivity, tmp_path: Path
) -> None:
    recipe, steps = recipe_with("fp8-static", kv_cache="e4m3"), Steps(tmp_path, {})
    tokens = sum(batch.tokens for batch in bench.batches)
    done: list[int] = []

    def interrupt(more: int) -> None:
        done.append(more)
        if sum(done) > 7.5 * tokens:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(bench, recipe, advance=interrupt, steps=steps)
    done = []
    assert measure(bench, recipe, advance=done.append, steps=steps) == static
    assert done[0] == 7 * tokens
    assert sum(done) == tokens * measurements(bench.quantization(recipe))


def test_the_rest_of_a_model_is_the_model(bench: Bench) -> None:
    tail = Tail(bench.model, bench.checkpoint.spec, bench.batches)
    for layer in range(bench.checkpoint.spec.layers):
        tail.move_to(layer)
        with torch.inference_mode():
            for index, hidden in enumerate(bench.reference.hidden):
                assert torch.equal(tail.states(index), hidden)
    with pytest.raises(ValueError, match="cannot go back"):
        tail.move_to(0)
    assert len(bench.model.model.layers) == bench.checkpoint.spec.layers


def test_experts_are_one_unit_a_layer(tmp_path: Path) -> None:
    bench = make_bench(write_model(tmp_path / "moe", "qwen3_moe"), samples=8, length=32)
    bench.reference = Reference(bench.model, bench.checkpoint.spec, bench.batches)
    found = measure(bench, recipe_with("fp8", kv_cache="float16"))
    names = [unit.name for unit in found.units if unit.name.startswith("model.layers.0")]
    assert names == [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.experts",
    ]
    experts = found.units[3]
    assert len(experts.linears) == 3 * 8
    for ratio in (experts.input_sqnr_db, experts.weight_sqnr_db, experts.output_sqnr_db):
        assert 20 < ratio < 45
    assert found.units[-1].name == "lm_head"  # a float16 cache is no unit

"""A budget is met, at the least bytes, by what is injured; or it is said why it cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.decoder.loading import load_model
from calibrate.quality.budget import Budget, Limit, check_reachable, choose
from calibrate.quality.divergence import Reference, evaluation_batches
from calibrate.quality.fused_units import find_units
from calibrate.quality.precision_levels import build_recipe, levels_above, total_bytes, weight_bytes
from calibrate.quality.sensitivity import measure_sensitivity
from calibrate.samples.batches import Batch
from calibrate.samples.tokens import load_tokenizer
from calibrate.scales.derive import derive_scales
from calibrate.simulate.model import simulate, simulate_modules
from export.checkpoint.fused import groups_by_kernel
from octet.errors import ConfigError
from octet.model.checkpoint import Checkpoint
from octet.recipe import PRESETS, Recipe
from tests.calibrate.bench import Bench, histograms_of, make_bench, recipe_with, sample_logits
from tests.calibrate.runs import batches_from
from tests.models import write_model
from tests.outliers import write_outlier_checkpoint


@pytest.fixture(scope="module")
def bench(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path = tmp_path_factory.mktemp("outliers") / "model"
    write_outlier_checkpoint(tiny_model, path, layers=[1], factor=2**17)
    return make_bench(path, samples=8, length=40)


def find(bench: Bench, recipe: Recipe, limit: str, **options: Any) -> Budget:
    common = (bench.model, bench.quantization(recipe))
    sensitivity = measure_sensitivity(*common, bench.reference)
    parsed = Limit.parse(limit)
    return choose(
        *common, sensitivity, parsed, bench.reference, evaluated_on="held-out samples", **options
    )


@pytest.mark.parametrize(
    ("text", "metric", "value"),
    [
        ("kl=0.005", "kl", 0.005),
        ("kl=5e-3", "kl", 0.005),
        (" ppl = 1% ", "perplexity", 0.01),
        ("ppl=.5%", "perplexity", 0.005),
    ],
)
def test_a_budget_is_read_as_written(text: str, metric: str, value: float) -> None:
    limit = Limit.parse(text)
    assert (limit.metric, limit.value) == (metric, value)
    assert Limit.parse(str(limit)) == limit


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("0.005", "write kl=0.005"),
        ("loss=1", "write kl=0.005"),
        ("kl", "write kl=0.005"),
        ("kl=1%", "kl is in nats"),
        ("ppl=0.01", "ppl is a percentage, such as ppl=1%"),
        ("kl=1e-9", "at least 1e-06"),
        ("ppl=0.00001%", "at least 0.0001%"),
        ("kl=0", "'0' is not a positive number"),
        ("kl=-1", "'-1' is not a positive number"),
        ("kl=nan", "'nan' is not a positive number"),
        ("kl=1e999", "is not a positive number"),
        ("ppl=%", "'' is not a positive number"),
    ],
)
def test_a_budget_that_cannot_be_read_says_how_to_write_it(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        Limit.parse(text)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_a_budget_is_met_by_the_injured_units_and_a_fresh_measurement_agrees(
    bench: Bench,
) -> None:
    recipe = recipe_with("fp8-static", kv_cache="float16")
    plain = find(bench, recipe, "kl=100")
    assert plain.chosen == () and plain.recipe == recipe and len(plain.curve) == 1
    limit = 0.3 * plain.curve[0].kl
    found = find(bench, recipe, f"kl={limit:.6f}")
    assert found.met and found.reached <= found.bound <= found.limit.value
    injured = ["model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"]
    assert [unit for unit, _ in found.chosen] == injured

    # Again from the files: the recipe's own scales, a model loaded anew, whole logits in float64.
    model = load_model(Checkpoint.open(bench.checkpoint.path), "float32")
    scales = derive_scales(bench.checkpoint, found.recipe, bench.histograms).scales
    before = sample_logits(model, bench.batches)
    with simulate(model, bench.checkpoint.spec, found.recipe, scales):
        after = sample_logits(model, bench.batches)
    p, q = (torch.cat(logits).log_softmax(-1) for logits in (before, after))
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert kl < limit
    assert kl == pytest.approx(found.reached, rel=0.02)


def test_perplexity_is_limited_likewise(bench: Bench) -> None:
    recipe = recipe_with("mxfp4", kv_cache="float16")
    found = find(bench, recipe, "ppl=0.5%")
    assert found.met and found.bound <= 0.005
    first, last = found.curve[0], found.curve[-1]
    assert first.bound > 0.005 and last.bound == found.bound
    assert {to for _, to in found.chosen} <= {"mxfp8", "bfloat16"}
    assert found.recipe.name == "mxfp4-ppl0.5%"


def test_each_step_costs_bytes_and_the_last_resort_is_the_original(bench: Bench) -> None:
    recipe, done = recipe_with("nvfp4", kv_cache="float16"), []
    found = find(bench, recipe, "kl=1e-6", advance=done.append)
    sizes = [step.weight_bytes for step in found.curve]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)
    assert found.met and found.bound < 1e-6  # what rounding keys and values to float16 costs
    assert {to for _, to in found.chosen} == {"bfloat16"} and len(found.chosen) == 8
    assert "fp8" in {step.to for step in found.curve}
    files = sum(path.stat().st_size for path in bench.checkpoint.path.glob("*.safetensors"))
    assert sizes[-1] == pytest.approx(files, rel=0.001)
    tokens = sum(batch.tokens for batch in bench.batches)
    assert sum(done) % tokens == 0 and sum(done) // tokens >= len(found.curve) - 1
    assert bench.reference.compare().kl == 0
    data = found.as_json()
    assert data["curve"][0]["promoted"] is None
    assert data["limit"] == 1e-6 and data["metric"] == "kl" and data["units"] == 8


def test_a_cache_over_the_budget_is_refused_with_what_would_do(bench: Bench) -> None:
    fp8 = bench.quantization(recipe_with("fp8"))
    limit = Limit.parse("kl=1e-6")
    with pytest.raises(ConfigError) as caught:
        check_reachable(bench.model, fp8, limit, bench.reference)
    message = str(caught.value)
    assert "budget kl=1e-06: the e5m2 cache alone costs" in message
    assert "kv_cache: e4m3, which alone costs" in message and "\n" not in message
    assert "more held-out samples" not in message
    with simulate_modules(bench.model, bench.checkpoint.spec, {}, fp8.scales, "e5m2"):
        cost = bench.reference.compare()
    between = Limit("kl", (cost.kl + cost.kl_bound) / 2)
    with pytest.raises(ConfigError, match="more held-out samples than these 8 would narrow"):
        check_reachable(bench.model, fp8, between, bench.reference)
    check_reachable(bench.model, fp8.with_cache("float16"), limit, bench.reference)
    enough = Limit.parse("kl=10")
    check_reachable(bench.model, fp8, enough, bench.reference)


@pytest.mark.parametrize("kv_cache", ["float16", "e5m2"])
def test_too_few_samples_for_a_bound_are_refused(bench: Bench, kv_cache: str) -> None:
    batch = Batch(torch.arange(1, 57).reshape(7, 8), (8,) * 7, ("row",) * 7)
    reference = Reference(bench.model, bench.checkpoint.spec, [batch])
    recipe, limit = recipe_with("fp8", kv_cache=kv_cache), Limit.parse("kl=10")
    with pytest.raises(ConfigError, match=r"7 held-out samples .*give 8 or more") as caught:
        check_reachable(bench.model, bench.quantization(recipe), limit, reference)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_example_with_massive_activations_comes_back_within_one_percent(
    example_model: Path, example_samples: Path, tmp_path: Path
) -> None:
    """`fp8-static` alone loses over 1 % of held-out perplexity; the report shows why; a budget of
    1 % brings it back, by the injured layers and few others."""
    path = tmp_path / "model"
    injured = write_outlier_checkpoint(example_model, path, layers=(1, 3), factor=2**16)
    checkpoint = Checkpoint.open(path)
    tokenizer = load_tokenizer(checkpoint)

    model = load_model(checkpoint, "float32")
    batches = batches_from(example_samples / "calibration.jsonl", 32, tokenizer)
    histograms = histograms_of(checkpoint, batches, "float32")
    judged = batches_from(example_samples / "heldout.jsonl", 128, tokenizer)
    held_out = evaluation_batches(judged, 4096)
    reference = Reference(model, checkpoint.spec, held_out)
    recipe = recipe_with("fp8-static", kv_cache="float16")
    common = (model, derive_scales(checkpoint, recipe, histograms))
    sensitivity = measure_sensitivity(*common, reference)
    assert sensitivity.all.log_ratio - 2 * sensitivity.all.log_ratio_error > 0.01
    seen = {
        f"{unit.linears[0]}.input"
        for unit in sensitivity.units
        if unit.input_small_sqnr_db is not None and unit.input_small_sqnr_db < 20
    }
    assert seen == set(injured)
    limit = Limit.parse("ppl=1%")
    found = choose(*common, sensitivity, limit, reference, evaluated_on="held-out samples")
    assert found.met and found.reached < found.bound <= 0.01
    first = {unit.name: f"{unit.linears[0]}.input" for unit in sensitivity.units if unit.linears}
    promoted = [first[step.promoted] for step in found.curve if step.promoted]
    assert set(promoted[:2]) <= seen  # the injured first
    assert len(found.chosen) <= 8  # of 24
    assert found.curve[-1].weight_bytes < 1.4 * found.curve[0].weight_bytes
    scales = derive_scales(checkpoint, found.recipe, histograms).scales
    with simulate(model, checkpoint.spec, found.recipe, scales):
        assert reference.compare().change < 0.01


@pytest.mark.parametrize(
    ("preset", "above"),
    [
        ("nvfp4", ["fp8", "bfloat16"]),
        ("mxfp4", ["mxfp8", "bfloat16"]),
        ("fp8-static", ["fp8", "bfloat16"]),
        ("fp8", ["bfloat16"]),
        ("fp8-block", ["bfloat16"]),
        ("mxfp8", ["bfloat16"]),
    ],
)
def test_one_format_up(preset: str, above: list[str]) -> None:
    recipe = PRESETS[preset]
    levels = levels_above((recipe.weights, recipe.activations))
    assert [level.name for level in levels] == above


def test_bytes_are_those_of_codes_and_scales(bench: Bench) -> None:
    linear = next(bench.checkpoint.spec.linears())  # q_proj, 256 by 256
    sizes = {
        name: weight_bytes(linear, (recipe.weights, recipe.activations))
        for name, recipe in PRESETS.items()
    }
    elements = 256 * 256
    assert sizes == {
        "fp8": elements + 4 * 256,
        "fp8-static": elements + 4,
        "fp8-block": elements + 4 * 4,
        "mxfp8": elements + elements // 32,
        "mxfp4": elements // 2 + elements // 32,
        "nvfp4": elements // 2 + elements // 16 + 4,
    }
    assert weight_bytes(linear, None) == 2 * elements
    assert total_bytes(bench.checkpoint.spec, {}) == 2 * bench.model.num_parameters()


def test_a_recipe_names_experts_by_one_pattern(tmp_path: Path) -> None:
    spec = Checkpoint.open(write_model(tmp_path / "moe", "mixtral")).spec
    recipe = Recipe.load("nvfp4")
    units = {unit.name: unit for unit in find_units(spec, recipe)}
    up, original = levels_above((recipe.weights, recipe.activations))
    experts = "model.layers.1.block_sparse_moe.experts"
    for level in (up, original):
        built = build_recipe(recipe, [(units[experts], level)], "mixed")
        patterns = [override.match for override in built.overrides] or [built.exclude[-1]]
        assert patterns == [f"{experts}.*"]
        for group in groups_by_kernel(spec.linears()):  # as an export requires
            assert len({str(built.scheme_of(linear.name)) for linear in group}) == 1
        assert built.scheme_of(f"{experts}.3.w2") == level.pair
        own = recipe.weights, recipe.activations
        assert built.scheme_of("model.layers.0.block_sparse_moe.experts.3.w1") == own

"""Tests predictions: conforming implementations lie within the predicted range."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from calibrate.golden import golden_set
from calibrate.simulate import predict as predict_module
from calibrate.simulate.model import (
    decoded_weights,
    module_schemes,
    simulate_modules,
    with_power_scales,
)
from calibrate.simulate.predict import predict, scenarios, serving_paths
from calibrate.simulate.run import Answers
from calibrate.simulate.scales import DeviceScales
from octet.artifacts.golden import GoldenSet
from octet.artifacts.scenarios import Scenario
from octet.artifacts.serving_path import Expectation, ServingPath
from octet.hardware.devices import find_device
from octet.model.checkpoint import Checkpoint
from octet.proof.declared import vllm_path
from octet.proof.expected_range import expectations
from octet.recipe import PRESETS, KvCacheDtype
from octet.storage.tensors import Tensor, write_tensors
from tests.calibrate.bench import Bench, make_bench, recipe_with
from tests.models import write_model
from tests.plain_divergence import plain_divergence
from tests.references import Reference

LENGTHS = (4, 9, 9, 17, 30, 44, 60, 61)


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Bench:
    return make_bench(tiny_model)


@pytest.fixture(scope="module")
def golden(bench: Bench) -> GoldenSet:
    return golden_of(bench.checkpoint)


def golden_of(checkpoint: Checkpoint) -> GoldenSet:
    generator = torch.Generator().manual_seed(3)
    vocabulary = checkpoint.spec.vocab_size
    prompts = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]
    return golden_set(checkpoint, [("", ids) for ids in prompts])


def mean_of(golden: GoldenSet, logits: Sequence[torch.Tensor]) -> float:
    """The mean top-20 KL of the logits [V] after each prompt."""
    found = []
    for record, row in zip(golden.records, logits, strict=True):
        top = row.double().log_softmax(-1).topk(20)
        served = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        found.append(plain_divergence(record.top, served))
    return float(np.mean(found))


@torch.inference_mode()
def simulated(bench: Bench, golden: GoldenSet, preset: str, path: ServingPath) -> float:
    """The same by the whole model in memory, each prompt by itself."""
    recipe = recipe_with(preset, kv_cache=path.kv_cache)
    schemes = module_schemes(bench.checkpoint.spec, recipe)
    with simulate_modules(
        bench.model, bench.checkpoint.spec, schemes, bench.scales(recipe), path.kv_cache
    ):
        rows = [
            bench.model(torch.tensor([x.prompt_token_ids]), use_cache=False).logits[0, -1]
            for x in golden.records
        ]
    return mean_of(golden, rows)


@pytest.mark.parametrize("kv_cache", ["e5m2", "e4m3", "float16"])
@pytest.mark.parametrize("preset", ["fp8-static", "nvfp4"])
def test_layer_by_layer_costs_what_the_whole_model_costs(
    preset: str, kv_cache: KvCacheDtype, bench: Bench, golden: GoldenSet
) -> None:
    """Of another cache than the recipe's too."""
    recipe = recipe_with(preset, kv_cache="e5m2")
    path = ServingPath(kv_cache=kv_cache, compute="float32")
    expected = predict(bench.checkpoint, recipe, bench.scales(recipe), golden, [path])
    (found,) = expected.expectations
    assert found.path == path and found.prompts == len(golden.records)
    assert found.low < found.mean < found.high
    assert found.holds(simulated(bench, golden, preset, path))


def test_an_independent_implementation_is_within_the_range(
    bench: Bench, golden: GoldenSet, tiny_model: Path, tmp_path: Path
) -> None:
    recipe = recipe_with("fp8", kv_cache="e5m2")
    scales = bench.scales(recipe)
    (tmp_path / "manifest.json").write_text(json.dumps({"recipe": recipe.model_dump(mode="json")}))
    tensors = {name: Tensor.of(np.asarray(scale)) for name, scale in scales.items()}
    write_tensors(tmp_path / "scales.safetensors", tensors)
    path = ServingPath(kv_cache="e5m2", compute="float32")
    expected = predict(bench.checkpoint, recipe, scales, golden, [path]).find(path)
    assert expected is not None
    for reorder in (False, True):
        other = Reference(tiny_model, tmp_path, "e5m2", reorder=reorder)
        rows = [other.logits(torch.tensor([x.prompt_token_ids]))[0, -1] for x in golden.records]
        assert expected.holds(mean_of(golden, rows))


def test_each_rounding_costs_what_it_should(bench: Bench, golden: GoldenSet) -> None:
    recipe = recipe_with("fp8", kv_cache="e5m2")
    exact: dict[str, Any] = {"compute": "float32"}
    nothing: dict[str, Any] = {"weights": False, "activations": False}
    paths = {
        "none": ServingPath(kv_cache="float16", **nothing, **exact),
        "bfloat16": ServingPath(kv_cache="float16", **nothing),
        "cache": ServingPath(kv_cache="e5m2", **nothing, **exact),
        "truncated": ServingPath(kv_cache="e5m2", kv_rounding="truncate", **nothing, **exact),
        "e4m3": ServingPath(kv_cache="e4m3", **nothing, **exact),
        "e4m3 truncated": ServingPath(kv_cache="e4m3", kv_rounding="truncate", **nothing, **exact),
        "queries": ServingPath(kv_cache="e4m3", queries=True, **nothing, **exact),
        "weights": ServingPath(kv_cache="float16", activations=False, **exact),
        "both": ServingPath(kv_cache="float16", **exact),
    }
    expected = predict(bench.checkpoint, recipe, bench.scales(recipe), golden, list(paths.values()))
    kl = {name: expectation(expected.find(path)).mean for name, path in paths.items()}
    assert kl["none"] < 1e-6  # FP16 holds what BF16 weights give nearly to the bit
    assert kl["none"] < kl["bfloat16"] < kl["weights"] < kl["both"]
    assert kl["none"] < kl["e4m3"] < kl["queries"]
    assert kl["e4m3"] < kl["cache"] < kl["truncated"]
    assert 1.5 * kl["e4m3"] < kl["e4m3 truncated"]


def expectation(found: Expectation | None) -> Expectation:
    assert found is not None
    return found


def test_weights_may_come_from_elsewhere(bench: Bench, golden: GoldenSet) -> None:
    """The original's, say, in place of the quantized ones: then they cost nothing."""
    recipe, asked = recipe_with("fp8", kv_cache="e5m2"), []
    path = ServingPath(kv_cache="float16", activations=False, compute="float32")

    def weights(name: str) -> np.ndarray | None:
        asked.append(name)
        if name.endswith("q_proj"):
            return None
        return bench.checkpoint.read(f"{name}.weight").float32()

    scales = bench.scales(recipe)
    of_recipe = predict(bench.checkpoint, recipe, scales, golden, [path])
    of_file = predict(bench.checkpoint, recipe, scales, golden, [path], weights=weights)
    only_q = recipe_with("fp8", exclude=("*[kvo]_proj", "*.mlp.*"))
    alone = predict(bench.checkpoint, only_q, bench.scales(only_q), golden, [path])
    assert asked == [linear.name for linear in bench.checkpoint.spec.linears()]
    assert of_file.expectations[0].mean == pytest.approx(alone.expectations[0].mean, rel=1e-3)
    assert of_file.expectations[0].mean < 0.5 * of_recipe.expectations[0].mean


def test_neither_company_nor_memory_changes_a_prediction(
    bench: Bench, golden: GoldenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means are the same bits; ranges are pooled over what is predicted together."""
    recipe = recipe_with("fp8", kv_cache="e5m2")
    scales, told = bench.scales(recipe), []
    paths = serving_paths(recipe)
    together = predict(bench.checkpoint, recipe, scales, golden, advance=told.append)
    assert [x.path for x in together.expectations] == list(paths)
    assert sum(told) == sum(LENGTHS)
    monkeypatch.setattr("calibrate.simulate.run._STATES_BYTES", 1)
    assert predict(bench.checkpoint, recipe, scales, golden) == together
    alone = predict(bench.checkpoint, recipe, scales, golden, paths[3:4])
    assert alone.expectations[0].mean == together.expectations[3].mean


def test_experts_are_predicted_too(tmp_path: Path) -> None:
    bench = make_bench(write_model(tmp_path / "moe", "qwen3_moe"), samples=8, length=32)
    golden = golden_of(bench.checkpoint)
    recipe = recipe_with("fp8", kv_cache="float16")
    path = ServingPath(kv_cache="float16", compute="float32")
    expected = predict(bench.checkpoint, recipe, bench.scales(recipe), golden, [path])
    assert expected.expectations[0].holds(simulated(bench, golden, "fp8", path))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kv_cache", ["e5m2", "e4m3", "float16"])
def test_what_engines_do_is_predicted(preset: str, kv_cache: KvCacheDtype) -> None:
    paths = serving_paths(recipe_with(preset, kv_cache=kv_cache))
    assert len(set(paths)) == len(paths)
    assert (paths[0].kv_cache, paths[0].kv_rounding) == (kv_cache, "nearest")
    assert paths[0].weights and paths[0].activations
    assert {path.kv_cache for path in paths} == {"e5m2", "e4m3", "float16"}  # export --kv
    weight_only = {path.kv_cache for path in paths if not path.activations}
    hopper, cpu = find_device("h100"), find_device("cpu-avx512")
    if preset in ("mxfp4", "mxfp8", "nvfp4"):  # Marlin, on Hopper
        assert weight_only == {"e5m2", "e4m3", "float16"}
    # An export may choose any cache: what ONNX Runtime computes with it, and vLLM.
    pair = (PRESETS[preset].weights, PRESETS[preset].activations)
    caches: tuple[KvCacheDtype, ...] = ("e5m2", "e4m3", "float16")
    for cache in caches:
        assert ServingPath(kv_cache=cache, compute="float32") in paths
        assert vllm_path(pair, cache, hopper, "0.24.0") in paths
        path = vllm_path(pair, cache, hopper, "0.24.0", attention="FLASHINFER")
        assert path in paths
        if preset == "fp8":  # the one that vLLM multiplies on a CPU
            assert vllm_path(pair, cache, cpu, "0.32.0") in paths


def test_a_range_holds_what_another_implementation_finds() -> None:
    """Prompts whose divergences scatter by unlike amounts, as measured on the example.

    The range is made from two repeats of four paths, and a third repeat is drawn.
    """
    rng = np.random.default_rng(0)
    paths = [ServingPath(kv_cache=kv) for kv in ("e5m2", "e4m3", "float16")]
    paths.append(ServingPath(kv_cache="e5m2", kv_rounding="truncate"))
    inside = total = 0
    widths = []
    for _ in range(300):
        level = rng.lognormal(0, 1, 64) * 0.01
        scatter = rng.lognormal(-0.5, 1, 64)
        draws = level * rng.lognormal(-(scatter**2) / 2, scatter, (len(paths), 3, 64))
        found = dict(zip(paths, draws[:, :2], strict=True))
        for expected, third in zip(expectations(found), draws[:, 2], strict=True):
            inside += expected.holds(third.mean())
            total += 1
            widths.append(np.log(expected.high / expected.low))
    assert 0.9 < inside / total < 0.999
    assert np.median(widths) < 2.5


def test_a_record_with_any_answer_that_is_no_number_is_none(
    bench: Bench, golden: GoldenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN at its last position alone, too: probability nought of every token it would seem."""
    recipe = recipe_with("fp8")
    path = Scenario(path=ServingPath(kv_cache=recipe.kv_cache))
    runs = predict_module.simulated

    def broken(*args: Any, **options: Any) -> Iterator[list[Answers]]:
        for together in runs(*args, **options):
            for run in together:
                run.hidden[np.flatnonzero(run.records == 2)[-1]] = torch.nan
            yield together

    monkeypatch.setattr(predict_module, "simulated", broken)
    scales = bench.scales(recipe)
    found = scenarios(bench.checkpoint, recipe, scales, golden, [path]).logprobs[path]
    assert np.isnan(found[:, 2]).all()
    assert np.isfinite(np.delete(found, 2, axis=1)).all()


def test_scales_of_powers_of_two_are_of_weights_and_of_activations(
    bench: Bench, golden: GoldenSet
) -> None:
    recipe = recipe_with("fp8-block")
    scales, spec = bench.scales(recipe), bench.checkpoint.spec
    schemes, device = module_schemes(spec, recipe), DeviceScales(scales, torch.device("cpu"))

    def encoded_again(name: str) -> NDArray[np.float32]:
        weight = torch.from_numpy(bench.checkpoint.read(f"{name}.weight").float32())
        decoded = decoded_weights({name: weight}, schemes, device)
        return with_power_scales(decoded, schemes)[name].numpy()

    stored, rounded = ServingPath(kv_cache="e5m2"), ServingPath(kv_cache="e5m2", power_scales=True)
    inputs = recipe.activations.model_copy(update={"scale_format": "e8m0"})
    other = recipe.model_copy(update={"activations": inputs})
    by_hand = predict(bench.checkpoint, other, scales, golden, [stored], weights=encoded_again)
    found = predict(bench.checkpoint, recipe, scales, golden, [stored, rounded])
    assert found.expectations[1].mean == by_hand.expectations[0].mean
    assert found.expectations[1].mean != found.expectations[0].mean

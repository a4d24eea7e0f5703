"""A scenario says what the whole model says, served so; a fault what its scales or bytes make."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from calibrate.golden import golden_set
from calibrate.simulate import faults as simulate_faults
from calibrate.simulate import schedule as simulate_runs
from calibrate.simulate.model import module_schemes, simulate_modules
from calibrate.simulate.packed import Pack
from calibrate.simulate.predict import scenarios
from calibrate.simulate.schedule import REPEATS, fault_records
from octet.artifacts.golden import POSITIONS, GoldenSet
from octet.artifacts.scenarios import SCENARIOS_FILE, Fault, FaultKind, Scenario, ScenarioSet
from octet.artifacts.serving_path import ServingPath
from octet.numerics import scaling
from octet.numerics.formats import E4M3
from octet.numerics.scaling import Granularity
from octet.recipe import KvCacheDtype, Recipe
from tests.calibrate.bench import Bench, make_bench, recipe_with
from tests.models import KNOWN, UNDESCRIBED, rewrite_model, write_model

LENGTHS = (3, 4, 5, 9, 9, 12, 17, 20, 30, 44)
EXACT: dict[str, Any] = {"compute": "float32"}
CLOSE = 2e-3  # nats that sums in another order may move a log-probability by


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Bench:
    return make_bench(tiny_model)


@pytest.fixture(scope="module")
def golden(bench: Bench) -> GoldenSet:
    generator = torch.Generator().manual_seed(3)
    vocabulary = bench.checkpoint.spec.vocab_size
    prompts = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]
    return golden_set(bench.checkpoint, [("", ids) for ids in prompts])


def one(
    bench: Bench, golden: GoldenSet, recipe: Recipe, scales: Any, path: ServingPath, **fault: Any
) -> np.ndarray:
    """[records, positions, tokens] of its first repeat."""
    asked = Scenario(path=path, fault=Fault(**fault) if fault else None)
    found = scenarios(bench.checkpoint, recipe, scales, golden, [asked])
    return found.logprobs[asked][0]


@torch.inference_mode()
def whole_model(model: Any, golden: GoldenSet) -> np.ndarray:
    """The same of the model as it computes now, each sequence by itself."""
    found = np.full((len(golden.records), POSITIONS, 20), np.nan)
    for row, record in enumerate(golden.records):
        ids = [*record.prompt_token_ids, *record.continuation_token_ids]
        logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
        for position, top in enumerate(record.tops):
            at = len(record.prompt_token_ids) - 1 + position
            found[row, position] = logprobs[at, list(top.token_ids)].numpy()
    return found


def test_what_is_not_quantized_says_what_the_reference_says(
    bench: Bench, golden: GoldenSet
) -> None:
    """At every position, for every token, in its order."""
    path = ServingPath(weights=False, activations=False, kv_cache="float16", **EXACT)
    recipe = recipe_with("fp8")
    found = one(bench, golden, recipe, bench.scales(recipe), path)
    tops = [[top.logprobs for top in record.tops] for record in golden.records]
    np.testing.assert_allclose(found, np.array(tops), atol=CLOSE)


CACHE_FAULTS: dict[FaultKind, Callable[[str], float | str]] = {
    "k_scale_dropped": lambda letter: 1.0 if letter == "k" else "e4m3",
    "v_scale_dropped": lambda letter: 1.0 if letter == "v" else "e4m3",
    "kv_scales_dropped": lambda letter: 1.0,
    "kv_scales_swapped": lambda letter: "e5m2",
}


@pytest.mark.parametrize("kind", CACHE_FAULTS)
@pytest.mark.parametrize("own", [True, False])
def test_a_cache_with_wrong_scales(
    kind: FaultKind, own: bool, bench: Bench, golden: GoldenSet
) -> None:
    """Of the recipe's own cache, and of another: scales are so small that none of them is 1."""
    recipe = recipe_with("fp8", kv_cache="e4m3" if own else "e5m2")
    scales = dict(bench.scales(recipe))
    for name in list(scales):
        if name.endswith(("k_scale_e5m2", "v_scale_e5m2")):
            scales[name] = np.float32(2.0**-7 if ".k_" in name else 64.0)
    path = ServingPath(activations=False, kv_cache="e4m3", **EXACT)
    found = one(bench, golden, recipe, scales, path, kind=kind)
    patched = dict(scales)
    for index in range(bench.checkpoint.spec.layers):
        for letter in "kv":
            name = f"{bench.checkpoint.spec.layer(index)}.self_attn.{letter}_scale"
            taken = CACHE_FAULTS[kind](letter)
            value = scales[f"{name}_{taken}"] if isinstance(taken, str) else np.float32(taken)
            patched[name] = np.asarray(value)
    schemes = module_schemes(bench.checkpoint.spec, recipe)
    with weights_alone(bench, schemes, patched, "e4m3"):
        theirs = whole_model(bench.model, golden)
    np.testing.assert_allclose(found, theirs, atol=CLOSE)
    honest = one(bench, golden, recipe, scales, path)
    assert np.abs(found - honest).max() > 2 * CLOSE


@contextmanager
def weights_alone(bench: Bench, schemes: Any, scales: Any, kv_cache: Any) -> Iterator[None]:
    """The whole model with quantized weights and cache, and inputs as they are."""
    with (
        quantized_weights(bench, schemes, scales),
        simulate_modules(bench.model, bench.checkpoint.spec, {}, scales, kv_cache),
    ):
        yield


@contextmanager
def quantized_weights(bench: Bench, schemes: Any, scales: Any) -> Iterator[None]:
    kept = {name: x.clone() for name, x in bench.model.state_dict().items()}
    for name in schemes:
        weight = bench.model.get_submodule(name).weight
        scale = scales[f"{name}.weight_scale"]
        granularity = Granularity.of(schemes[name][0].granularity)
        codes = scaling.fake_quantize(weight.detach().numpy(), scale, E4M3, granularity)
        with torch.no_grad():
            weight.copy_(torch.from_numpy(codes))
    yield
    bench.model.load_state_dict(kept)


def test_static_scales_of_inputs_dropped(bench: Bench, golden: GoldenSet) -> None:
    recipe = recipe_with("fp8-static", kv_cache="float16")
    scales = bench.scales(recipe)
    path = ServingPath(kv_cache="float16", **EXACT)
    found = one(bench, golden, recipe, scales, path, kind="input_scales_dropped")
    ones = {
        n: np.ones((), np.float32) if n.endswith("input_scale") else x for n, x in scales.items()
    }
    schemes = module_schemes(bench.checkpoint.spec, recipe)
    with simulate_modules(bench.model, bench.checkpoint.spec, schemes, ones, "float16"):
        theirs = whole_model(bench.model, golden)
    # Rounding is chaotic: close on the whole, and far from what is served with the scales.
    honest = one(bench, golden, recipe, scales, path)
    assert np.abs(found - theirs).mean() < 0.2 * np.abs(found - honest).mean()


UNSCALED = {"rope_type": "default"}
ROPE: list[tuple[str, FaultKind, dict[str, Any]]] = [  # a model, a fault, what is read instead
    ("llama3-rope", "rope_parameters_dropped", UNSCALED | {"rope_theta": 10_000.0}),
    ("llama3-rope", "rope_scaling_dropped", UNSCALED | {"rope_theta": 500_000.0}),
    ("llama-yarn", "rope_parameters_dropped", UNSCALED | {"rope_theta": 10_000.0}),
    (
        "phi3-longrope",
        "rope_parameters_dropped",
        UNSCALED | {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    ),
]


@pytest.mark.parametrize(("model", "kind", "read"), ROPE)
def test_rope_without_its_parameters(
    model: str, kind: FaultKind, read: dict[str, Any], golden: GoldenSet, tmp_path: Path
) -> None:
    """As transformers computes the same weights with another config.json."""
    architecture, settings = (KNOWN | UNDESCRIBED)[model]
    own = make_bench(write_model(tmp_path / "own", architecture, **settings), samples=2)
    other = rewrite_model(tmp_path / "own", tmp_path / "other", rope_parameters=read)
    recipe = recipe_with("fp8", kv_cache="float16")
    scales = own.scales(recipe)
    path = ServingPath(activations=False, kv_cache="float16", **EXACT)
    found = one(own, golden, recipe, scales, path, kind=kind)
    faulty = make_bench(other, samples=2)
    schemes = module_schemes(faulty.checkpoint.spec, recipe)
    with weights_alone(faulty, schemes, scales, "float16"):
        theirs = whole_model(faulty.model, golden)
    np.testing.assert_allclose(found, theirs, atol=CLOSE)
    # The fault shows, and is gone with the run that had it.
    honest = one(own, golden, recipe, scales, path)
    assert np.abs(found - honest).max() > 2 * CLOSE
    both = [Scenario(path=path, fault=Fault(kind=kind)), Scenario(path=path)]
    together = scenarios(own.checkpoint, recipe, scales, golden, both).logprobs
    np.testing.assert_array_equal(together[both[1]][0], honest)


class Reread(DynamicCache):
    """Keys and values as bytes of one format, taken for those of another."""

    def __init__(self, bench: Bench, scales: Any, written: torch.dtype, read: torch.dtype) -> None:
        super().__init__()
        self.spec, self.scales, self.formats = bench.checkpoint.spec, scales, (written, read)

    def update(self, key: Any, value: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        written, read = self.formats
        most = torch.finfo(written).max
        found = []
        for letter, x in zip("kv", (key, value), strict=True):
            scale = float(self.scales[f"{self.spec.layer(layer_idx)}.self_attn.{letter}_scale"])
            codes = (x / scale).clamp(-most, most).to(written)
            found.append(codes.view(read).to(x.dtype) * scale)
        return tuple(found)


@pytest.mark.parametrize("cache", ["e5m2", "e4m3"])
def test_bytes_of_one_cache_read_as_the_other(
    cache: KvCacheDtype, bench: Bench, golden: GoldenSet
) -> None:
    """Written with the recipe's scales, whichever format they are written in."""
    recipe = recipe_with("fp8", kv_cache="e5m2")
    scales = dict(bench.scales(recipe))
    for name in list(scales):
        if name.endswith((".k_scale", ".v_scale")):  # neither 1 nor those of the other format
            scales[name] = np.asarray(scales[name] * (0.25 if ".k_" in name else 0.5))
    path = ServingPath(activations=False, kv_cache=cache, **EXACT)
    found = one(bench, golden, recipe, scales, path, kind="kv_bytes_reread")
    formats = torch.float8_e5m2, torch.float8_e4m3fn
    written, read = formats if cache == "e5m2" else formats[::-1]
    schemes = module_schemes(bench.checkpoint.spec, recipe)

    def model(ids: torch.Tensor, *, use_cache: bool) -> Any:
        rereading = Reread(bench, scales, written, read)
        return bench.model(ids, past_key_values=rereading, use_cache=True)

    with quantized_weights(bench, schemes, scales):
        theirs = whole_model(model, golden)
    assert np.isfinite(found).all()
    # A key that falls on the other side of a boundary moves far, and what follows with it.
    assert np.median(np.abs(found - theirs)) < CLOSE
    assert np.abs(found - one(bench, golden, recipe, scales, path)).mean() > 20 * CLOSE


@pytest.mark.parametrize("preset", ["fp8", "fp8-static", "fp8-block", "mxfp8", "nvfp4"])
def test_a_fault_of_one_layer_is_the_same_from_the_start(
    preset: str, bench: Bench, golden: GoldenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, in company or alone."""
    recipe = recipe_with(preset, kv_cache="e5m2")
    scales = bench.scales(recipe)
    path = ServingPath(kv_cache="e5m2")
    faults = [
        Fault(kind="weight_scales_scaled", layer=layer, factor=factor)
        for layer in (0, 1)
        for factor in (0.5, 2.0)
    ]
    chosen = [Scenario(path=path), *(Scenario(path=path, fault=fault) for fault in faults)]
    together = scenarios(bench.checkpoint, recipe, scales, golden, chosen).logprobs
    monkeypatch.setattr("calibrate.simulate.run._STATES_BYTES", 1)
    apart = scenarios(bench.checkpoint, recipe, scales, golden, chosen).logprobs
    monkeypatch.setattr(simulate_runs, "_first_layer", lambda scenario: 0)
    whole = scenarios(bench.checkpoint, recipe, scales, golden, chosen).logprobs
    for scenario in chosen:
        np.testing.assert_array_equal(together[scenario], apart[scenario])
        np.testing.assert_array_equal(together[scenario], whole[scenario])
    found = [x[0].tobytes() for x in together.values()]
    assert len(set(found)) == len(found)


def test_scales_are_made_once_for_all_layers(
    bench: Bench, golden: GoldenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the whole model: of experts, many thousands."""
    made: list[Scenario] = []
    faulty_scales = simulate_faults.faulty_scales

    def counting(scales: Any, recipe: Recipe, scenario: Scenario) -> Any:
        made.append(scenario)
        return faulty_scales(scales, recipe, scenario)

    monkeypatch.setattr(simulate_faults, "faulty_scales", counting)
    recipe = recipe_with("fp8", kv_cache="e5m2")
    path = ServingPath(kv_cache="e5m2")
    faults: list[FaultKind] = ["k_scale_dropped", "v_scale_dropped"]
    chosen = [Scenario(path=path), *(Scenario(path=path, fault=Fault(kind=x)) for x in faults)]
    scenarios(bench.checkpoint, recipe, bench.scales(recipe), golden, chosen)
    assert made == chosen


def test_embeddings_are_let_go_once_the_first_layer_has_them(
    bench: Bench, golden: GoldenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the hidden states, whose memory is limited."""
    made: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []
    embed, finish = Pack.embed, Pack.finish

    def embedded(*args: Any) -> torch.Tensor:
        found = embed(*args)
        made.append(weakref.ref(found))
        return found

    def finished(*args: Any) -> torch.Tensor:
        left.append(sum(x() is not None for x in made))
        return finish(*args)

    monkeypatch.setattr(Pack, "embed", embedded)
    monkeypatch.setattr(Pack, "finish", finished)
    recipe = recipe_with("fp8", kv_cache="e5m2")
    one(bench, golden, recipe, bench.scales(recipe), ServingPath(kv_cache="e5m2"))
    assert made and left and not any(left)


def test_faults_run_on_some_records(
    bench: Bench, golden: GoldenSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(simulate_runs, "FAULT_RECORDS", 4)
    recipe = recipe_with("fp8", kv_cache="e5m2")
    path = ServingPath(kv_cache="e5m2")
    honest = Scenario(path=path)
    fault = Scenario(path=path, fault=Fault(kind="weight_scales_dropped"))
    told: list[int] = []
    found = scenarios(
        bench.checkpoint, recipe, bench.scales(recipe), golden, [fault, honest], advance=told.append
    )
    assert list(found.logprobs) == [fault, honest] and found.paths == (path,)
    assert found.logprobs[honest].shape == (REPEATS, len(LENGTHS), POSITIONS, 20)
    assert np.isfinite(found.logprobs[honest]).all()
    simulated = np.isfinite(found.logprobs[fault][0]).all(axis=(1, 2))
    assert np.flatnonzero(simulated).tolist() == fault_records(golden) == [0, 3, 6, 9]
    assert np.isnan(found.logprobs[fault][0][~simulated]).all()
    assert sum(told) == sum(LENGTHS)
    found.save(tmp_path)
    assert (tmp_path / SCENARIOS_FILE).stat().st_size < 4 * 3 * len(LENGTHS) * POSITIONS * 20 + 2048
    again = ScenarioSet.load(tmp_path, golden)
    np.testing.assert_array_equal(again.logprobs[fault], found.logprobs[fault])


def test_an_answer_that_is_no_number_is_left_out(bench: Bench, golden: GoldenSet) -> None:
    """E4M3 of 384 and more, read as E5M2, is none."""
    recipe = recipe_with("fp8", kv_cache="e4m3")
    fault = Scenario(
        path=ServingPath(kv_cache="e4m3", **EXACT), fault=Fault(kind="kv_bytes_reread")
    )
    scales = {n: x / 99 if n.endswith("k_scale") else x for n, x in bench.scales(recipe).items()}
    found = scenarios(bench.checkpoint, recipe, scales, golden, [fault])
    assert not found.logprobs

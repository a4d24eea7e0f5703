"""Scales follow the recipe: shapes, sharing, and the cache's rules."""

import copy
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.journal.distributed import Group
from calibrate.observe.histogram import Histogram
from calibrate.scales.derive import (
    check_alive,
    check_finite,
    derive_scales,
    input_scales,
    kv_scale,
    kv_scales,
    weight_scales,
)
from octet.errors import ConfigError, NumericsError
from octet.model.checkpoint import Checkpoint
from octet.numerics import formats, scaling
from octet.recipe import PRESETS, Override, Recipe, TensorScheme
from octet.storage.tensors import TensorFile, write_tensors
from tests.calibrate.contents import count_reference
from tests.calibrate.runs import with_code


def histogram_of(*values: float) -> Histogram:
    return Histogram(count_reference(torch.tensor(values)), "bfloat16")


def recipe_of(**weights: Any) -> Recipe:
    tensor = TensorScheme(granularity="tensor")
    return Recipe(name="test", weights=TensorScheme(**weights), activations=tensor)


def stored(checkpoint: Checkpoint, linear: str) -> np.ndarray:
    return checkpoint.read(f"{linear}.weight").float32()


def test_channel_scales_map_each_rows_largest_to_448(checkpoint: Checkpoint) -> None:
    scales = dict(weight_scales(checkpoint, Recipe.load("fp8")))
    assert set(scales) == {linear.name for linear in checkpoint.spec.linears()}
    for linear in checkpoint.spec.linears():
        amax = np.abs(stored(checkpoint, linear.name)).max(axis=1, keepdims=True)
        assert scales[linear.name].scale.shape == (linear.out_features, 1)
        np.testing.assert_array_equal(scales[linear.name].scale, amax / np.float32(448))


def test_tensor_scales_are_shared_by_what_is_fused(checkpoint: Checkpoint) -> None:
    scales = dict(weight_scales(checkpoint, Recipe.load("fp8-static")))
    for fused in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        names = [f"model.layers.0.{fused[0]}.{projection}_proj" for projection in fused[1]]
        amax = max(np.abs(stored(checkpoint, name)).max() for name in names)
        for name in names:
            assert scales[name].scale.shape == ()
            assert scales[name].scale == np.float32(amax) / np.float32(448)


def test_block_scales(checkpoint: Checkpoint) -> None:
    scales = dict(weight_scales(checkpoint, Recipe.load("fp8-block")))
    weight = stored(checkpoint, "model.layers.1.mlp.down_proj")
    blocks = np.abs(weight).reshape(2, 128, 4, 128).max(axis=(1, 3))
    scale = scales["model.layers.1.mlp.down_proj"].scale
    least = 2.0 ** np.ceil(np.log2(blocks / np.float32(448)))  # at which nothing saturates
    np.testing.assert_array_equal(scale, least)


@pytest.mark.parametrize(
    "weights",
    [
        {"granularity": "tensor"},
        {"granularity": "channel"},
        {"granularity": "block", "group_size": 128},
    ],
    ids=lambda weights: weights["granularity"],
)
def test_mse_lowers_the_error_of_every_weight(
    checkpoint: Checkpoint, weights: dict[str, Any]
) -> None:
    by_max = dict(weight_scales(checkpoint, recipe_of(**weights)))
    by_mse = dict(weight_scales(checkpoint, recipe_of(**weights, method="mse")))
    granularity = scaling.Granularity.of(weights["granularity"], weights.get("group_size"))
    shared = "model.layers.0.self_attn.o_proj"  # by itself in its group
    error = {}
    for method, scales in (("max", by_max), ("mse", by_mse)):
        weight, scale = stored(checkpoint, shared), scales[shared].scale
        back = scaling.fake_quantize(weight, scale, formats.E4M3, granularity)
        error[method] = float(((back - weight).astype(np.float64) ** 2).sum())
        signal = float((weight.astype(np.float64) ** 2).sum())
        expected = 10 * np.log10(signal / error[method])
        assert scales[shared].sqnr_db == pytest.approx(expected, abs=1e-3)
    assert error["mse"] < error["max"]
    assert all(by_mse[name].scale.shape == by_max[name].scale.shape for name in by_max)


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        ("*.dwn_proj", r"exclude: no linear .*'\*\.dwn_proj'; did you mean '\*\.down_proj'\?"),
        ("model.layers.0.self_attn.qproj", r"did you mean 'model\.layers\.0\.self_attn\.q_proj'"),
        ("model.layers.7.*", r"no linear of the model matches 'model\.layers\.7\.\*'"),
        ("§", r"known: \*\.down_proj, \*\.gate_proj, \*\.k_proj"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(
    checkpoint: Checkpoint, exclude: str, message: str
) -> None:
    fp8 = Recipe.load("fp8")
    excluding = fp8.model_copy(update={"exclude": (*fp8.exclude, exclude)})
    with pytest.raises(ConfigError, match=message) as error:
        excluding.check_patterns(checkpoint.spec.linear_names)
    assert "\n" not in str(error.value)
    override = Override(match=exclude, weights=fp8.weights, activations=fp8.activations)
    overriding = fp8.model_copy(update={"overrides": (override,)})
    with pytest.raises(ConfigError, match=r"overrides\.0\.match: no linear of the model matches"):
        derive_scales(checkpoint, overriding, {})


def test_patterns_that_match_and_those_of_every_recipe_are_fine(checkpoint: Checkpoint) -> None:
    fp8 = Recipe.load("fp8")
    override = Override(match="*.q_proj", weights=fp8.weights, activations=fp8.activations)
    exclude = (*fp8.exclude, "lm_head", "*.embed_tokens", "model.layers.[01].mlp.*")
    recipe = fp8.model_copy(update={"exclude": exclude, "overrides": (override,)})
    names = checkpoint.spec.linear_names
    recipe.check_patterns(names)  # "*.gate" and "*.router" of the defaults match nothing
    fp8.model_copy(update={"kv_cache": "e4m3"}).check_patterns(names)


def whole_histograms(checkpoint: Checkpoint, *values: float) -> dict[str, Histogram]:
    """The same histogram for everything that a checkpoint's calibration observes."""
    names = {linear.input for linear in checkpoint.spec.linears()}
    layers = [f"{checkpoint.spec.layer(i)}.self_attn" for i in range(checkpoint.spec.layers)]
    names |= {f"{layer}.{kind}" for layer in layers for kind in ("key", "value")}
    return {name: histogram_of(*values) for name in names}


@pytest.mark.parametrize("preset", PRESETS)
def test_derived_scales_are_what_a_calibration_names(checkpoint: Checkpoint, preset: str) -> None:
    recipe = PRESETS[preset]
    found = derive_scales(checkpoint, recipe, whole_histograms(checkpoint, 1.0, 7.0))
    wanted = {}
    for linear in checkpoint.spec.linears():
        shape = (linear.out_features, linear.in_features)
        granularity = scaling.Granularity.of(recipe.weights.granularity, recipe.weights.group_size)
        wanted[f"{linear.name}.weight_scale"] = granularity.scale_shape(shape)
        if recipe.weights.two_level:
            wanted[f"{linear.name}.weight_global_scale"] = ()
            wanted[f"{linear.name}.input_global_scale"] = ()
        if recipe.activations.granularity == "tensor":
            wanted[f"{linear.name}.input_scale"] = ()
    for index in range(checkpoint.spec.layers):
        for kind in "kv":
            for cache in ("", "_e4m3", "_e5m2"):
                wanted[f"{checkpoint.spec.layer(index)}.self_attn.{kind}_scale{cache}"] = ()
    assert {name: scale.shape for name, scale in found.scales.items()} == wanted
    assert all(scale.dtype == np.float32 for scale in found.scales.values())
    assert set(found.weights) == {linear.name for linear in checkpoint.spec.linears()}


def test_the_global_scale_of_inputs_uses_all_of_e4m3(checkpoint: Checkpoint) -> None:
    histograms = whole_histograms(checkpoint, 1.0, 7.0)
    scales = derive_scales(checkpoint, Recipe.load("nvfp4"), histograms).scales
    name = "model.layers.0.mlp.up_proj.input_global_scale"
    assert scales[name] == np.float32(7) / np.float32(448 * 6)


def test_overrides_decide_what_is_known_of_inputs(checkpoint: Checkpoint) -> None:
    static, fp8 = Recipe.load("fp8-static"), Recipe.load("fp8")
    override = Override(match="*.0.*_proj", weights=fp8.weights, activations=fp8.activations)
    recipe = static.model_copy(update={"overrides": (override,)})
    found = input_scales(checkpoint, recipe, whole_histograms(checkpoint, 1.0))
    assert found and all(name.startswith("model.layers.1.") for name in found)


def test_an_input_that_is_always_zero_is_refused_by_name(checkpoint: Checkpoint) -> None:
    histograms = whole_histograms(checkpoint, 1.0)
    check_alive(checkpoint, Recipe.load("fp8"), histograms)
    histograms["model.layers.1.mlp.down_proj.input"] = histogram_of(0.0, 0.0, -0.0)
    with pytest.raises(
        NumericsError, match=r"layers\.1\.mlp\.down_proj was zero in all 3 elements"
    ):
        check_alive(checkpoint, Recipe.load("fp8"), histograms)
    excluded = Recipe.load("fp8").model_copy(update={"exclude": ("model.layers.1.mlp.*",)})
    check_alive(checkpoint, excluded, histograms)


def test_excluded_linears_get_no_scales(checkpoint: Checkpoint) -> None:
    base = Recipe.load("fp8-static")
    recipe = base.model_copy(update={"exclude": ("*.down_proj", "*.q_proj")})
    histograms = {x.input: histogram_of(1.0, 7.0) for x in checkpoint.spec.linears()}
    weights = dict(weight_scales(checkpoint, recipe))
    inputs = input_scales(checkpoint, recipe, histograms)
    for name in weights:
        assert not name.endswith(("down_proj", "q_proj"))
    assert set(inputs) == {f"{name}.input_scale" for name in weights}
    # What is left of a fused group still shares its scale.
    k, v = (f"model.layers.0.self_attn.{x}_proj" for x in "kv")
    assert weights[k].scale == weights[v].scale


def test_input_scales_only_for_static_recipes(checkpoint: Checkpoint) -> None:
    histograms = {x.input: histogram_of(1.0, 7.0) for x in checkpoint.spec.linears()}
    assert input_scales(checkpoint, Recipe.load("fp8"), histograms) == {}
    static = input_scales(checkpoint, Recipe.load("fp8-static"), histograms)
    assert len(static) == 7 * checkpoint.spec.layers
    assert all(scale == np.float32(7 / 448) for scale in static.values())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, 20.0), 1.0),  # ordinary
        ((0.0,), 1.0),
        ((1.0, 57_344.0), 1.0),  # the largest E5M2 itself
        ((1.0, 114_688.0), 2.0),  # would saturate
        ((3e-6, 1e-6, 2e-6), 2.0**-34),  # all below the smallest subnormal: would be zero
    ],
)
def test_an_e5m2_cache_keeps_scale_one_unless_it_would_lose(
    values: tuple[float, ...], expected: float
) -> None:
    assert kv_scale(histogram_of(*values), "e5m2") == expected


def test_other_caches() -> None:
    assert kv_scale(histogram_of(1.0, 20.0), "float16") == 1.0
    assert kv_scale(histogram_of(1.0, 448.0), "e4m3") == 1.0
    assert kv_scale(histogram_of(1.0, 20.0), "e4m3") == np.float32(20 / 448)


def test_every_layer_has_cache_scales(checkpoint: Checkpoint) -> None:
    layers = [f"model.layers.{i}.self_attn" for i in range(checkpoint.spec.layers)]
    histograms = {f"{x}.{kind}": histogram_of(1.0) for x in layers for kind in ("key", "value")}
    scales = kv_scales(checkpoint, Recipe.load("fp8"), histograms)
    own = {f"{x}.{scale}" for x in layers for scale in ("k_scale", "v_scale")}
    assert {name for name in scales if name.endswith("_scale")} == own
    assert all(scales[name].shape == () and scales[name] == 1.0 for name in own)


@pytest.mark.parametrize("kv_cache", ["e5m2", "e4m3", "float16"])
def test_scales_of_every_cache_come_with_any(kv_cache: Any, checkpoint: Checkpoint) -> None:
    """So that an export can choose another cache; those without a suffix are of the recipe's."""
    layers = [f"model.layers.{i}.self_attn" for i in range(checkpoint.spec.layers)]
    histograms = {f"{x}.key": histogram_of(1.0, 224.0) for x in layers}
    histograms |= {f"{x}.value": histogram_of(1.0, 112.0) for x in layers}
    recipe = Recipe.load("fp8").model_copy(update={"kv_cache": kv_cache})
    scales = kv_scales(checkpoint, recipe, histograms)
    first = {k.removeprefix(f"{layers[0]}."): float(v) for k, v in scales.items() if layers[0] in k}
    assert first == {
        "k_scale": 0.5 if kv_cache == "e4m3" else 1.0,
        "v_scale": 0.25 if kv_cache == "e4m3" else 1.0,
        "k_scale_e4m3": 0.5,
        "v_scale_e4m3": 0.25,
        "k_scale_e5m2": 1.0,
        "v_scale_e5m2": 1.0,
    }
    histograms |= {f"{x}.query": histogram_of(1.0, 448.0) for x in layers}
    more = kv_scales(checkpoint, recipe, histograms)
    assert more.keys() - scales.keys() == {f"{x}.q_scale_e4m3" for x in layers}
    assert more[f"{layers[1]}.q_scale_e4m3"] == 1.0


def test_weights_are_read_once_to_be_checked_and_hashed(tiny_model: Path, tmp_path: Path) -> None:
    expected = Checkpoint.open(tiny_model).weight_hashes
    copy = Checkpoint.open(shutil.copytree(tiny_model, tmp_path / "model"))
    name = "model.norm.weight"
    write_tensors(tmp_path / "changes", {name: copy.read(name)})
    changed = copy.with_changes(tmp_path / "changes")
    check_finite(copy)
    for shard in copy.shards:
        shard.path.unlink()
    assert copy.weight_hashes == changed.weight_hashes == expected


@pytest.mark.parametrize("code", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_the_last_element_of_a_large_tensor_is_checked(
    tiny_model: Path, tmp_path: Path, code: int
) -> None:
    name = "model.embed_tokens.weight"
    broken = with_code(tiny_model, tmp_path / "broken", name, (-1, -1), code)
    assert broken.read(name).codes.nbytes > 1 << 20
    with pytest.raises(NumericsError, match=name):
        check_finite(broken)


class InThreads(Group):
    """One of two ranks, which are threads; `given` is what each gives, `meet` where they wait."""

    world = 2

    def __init__(self, rank: int, given: list[Any], meet: threading.Barrier) -> None:
        self.rank, self._given, self._meet = rank, given, meet

    def gather(self, item: Any) -> list[Any]:
        self._given[self.rank] = item
        self._meet.wait(60)
        found = [copy.deepcopy(x) for x in self._given]
        self._meet.wait(60)
        return found


@pytest.mark.parametrize("broken", [False, True])
def test_ranks_share_the_files_that_they_read(
    tiny_model: Path, tmp_path: Path, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two files each rank reads one, and both know the hashes, and what is wrong in either."""
    name, last = "model.norm.weight", "model-2.safetensors"
    whole = with_code(tiny_model, tmp_path / "whole", name, -1, 0x7FC0 if broken else 0x3F80)
    model = shutil.copytree(whole.path, tmp_path / "model")
    (model / "model.safetensors").unlink()
    where = {x: last if x == name else "model-1.safetensors" for x in whole.tensor_names}
    for file in set(where.values()):
        write_tensors(model / file, {x: whole.read(x) for x in where if where[x] == file})
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    expected = Checkpoint.open(model).weight_hashes
    read: list[str] = []
    scan = TensorFile.scan
    monkeypatch.setattr(
        TensorFile, "scan", lambda self, *args: read.append(self.path.name) or scan(self, *args)
    )
    given, meet = [None, None], threading.Barrier(2)

    def check(rank: int) -> dict[str, str]:
        checkpoint = Checkpoint.open(model)
        check_finite(checkpoint, group=InThreads(rank, given, meet))
        return checkpoint.weight_hashes

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(check, rank) for rank in range(2)]
        if broken:
            errors = [rank.exception() for rank in ranks]
            known = [x for x in errors if isinstance(x, NumericsError) and name in str(x)]
            assert [x.printed_elsewhere for x in known] == [False, True]
        else:
            assert [rank.result() for rank in ranks] == [expected] * 2
    assert sorted(read) == ["model-1.safetensors", last]

"""Tests what vLLM does with each recipe: the rows of docs/compatibility.md."""

from typing import Any

import pytest

from octet.artifacts.serving_path import ServingPath
from octet.proof.declared import vllm_path
from octet.recipe import PRESETS


def path_of(preset: str | None, *args: Any, **more: Any) -> ServingPath:
    recipe = None if preset is None else PRESETS[preset]
    pair = None if recipe is None else (recipe.weights, recipe.activations)
    return vllm_path(pair, *args, **more)


@pytest.mark.parametrize("preset", PRESETS)
def test_hopper_multiplies_fp8_and_decodes_all_else(preset: str) -> None:
    path = path_of(preset, "e5m2", "sm90")
    assert path.weights and path.activations == preset.startswith("fp8")
    assert (path.kv_cache, path.kv_rounding, path.compute) == ("e5m2", "nearest", "bfloat16")
    assert not path.queries


def test_queries_are_rounded_where_flash_attention_meets_e4m3() -> None:
    assert path_of("fp8", "e4m3", "sm90").queries
    assert not path_of("fp8", "e4m3", "sm90", attention="FLASHINFER").queries
    assert not path_of("fp8", "float16", "sm90", attention="FLASH_ATTN").queries
    assert not path_of("fp8", "e4m3", "cpu").queries


def test_the_cpu_truncates_fp8_caches_alone() -> None:
    for kv_cache, rounding in (("e5m2", "truncate"), ("e4m3", "truncate"), ("float16", "nearest")):
        path = path_of("fp8", kv_cache, "cpu")
        assert path.kv_rounding == rounding and path.activations


def test_amx_decodes_weights_that_are_not_per_channel() -> None:
    assert path_of("fp8", "e5m2", "cpu", amx=True).activations
    assert not path_of("fp8-static", "e5m2", "cpu", amx=True).activations
    assert not path_of("fp8-block", "e5m2", "cpu", amx=True).activations


def test_in_full_precision_the_cache_alone_is_rounded() -> None:
    path = path_of(None, "e5m2", "cpu")
    assert not path.weights and not path.activations

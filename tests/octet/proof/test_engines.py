"""Tests what vLLM does with each recipe: the rows of docs/compatibility.md."""

from typing import Any

import pytest

from octet.artifacts.serving_path import ServingPath
from octet.errors import UnsupportedError
from octet.hardware.devices import find_device
from octet.proof.declared import vllm_path
from octet.recipe import PRESETS

GPU, CPU = ("h100", "0.24.0"), ("cpu-avx512", "0.32.0")
AMX = ("cpu-amx", "0.32.0")


def path_of(preset: str | None, cache: Any, machine: tuple[str, str], **more: Any) -> ServingPath:
    recipe = None if preset is None else PRESETS[preset]
    pair = None if recipe is None else (recipe.weights, recipe.activations)
    return vllm_path(pair, cache, find_device(machine[0]), machine[1], **more)


@pytest.mark.parametrize("preset", PRESETS)
def test_hopper_multiplies_fp8_and_decodes_all_else(preset: str) -> None:
    path = path_of(preset, "e5m2", GPU)
    assert path.weights and path.activations == preset.startswith("fp8")
    assert (path.kv_cache, path.kv_rounding, path.compute) == ("e5m2", "nearest", "bfloat16")
    assert not path.queries


@pytest.mark.parametrize("preset", PRESETS)
def test_blackwell_multiplies_all_of_them_and_ampere_none(preset: str) -> None:
    assert path_of(preset, "float16", ("b200", "0.24.0")).activations
    assert not path_of(preset, "float16", ("a100", "0.24.0")).activations


def test_queries_are_rounded_where_flash_attention_meets_e4m3() -> None:
    assert path_of("fp8", "e4m3", GPU).queries
    assert not path_of("fp8", "e4m3", GPU, attention="FLASHINFER").queries
    assert not path_of("fp8", "float16", GPU, attention="FLASH_ATTN").queries
    assert not path_of("fp8", "e4m3", CPU).queries


def test_the_cpu_truncates_fp8_caches_alone() -> None:
    for kv_cache, rounding in (("e5m2", "truncate"), ("e4m3", "truncate"), ("float16", "nearest")):
        path = path_of("fp8", kv_cache, CPU)
        assert path.kv_rounding == rounding and path.activations


def test_amx_decodes_weights_in_blocks() -> None:
    assert path_of("fp8", "e5m2", AMX).activations
    assert not path_of("fp8-block", "e5m2", AMX).activations
    assert not path_of("fp8", "e5m2", ("cpu-amx", "0.33.0")).activations


def test_in_full_precision_the_cache_alone_is_rounded() -> None:
    path = path_of(None, "e5m2", CPU)
    assert not path.weights and not path.activations


def test_what_is_refused_has_no_path() -> None:
    with pytest.raises(UnsupportedError, match="static_scaled_fp8_quant"):
        path_of("fp8-static", "e5m2", AMX)
    with pytest.raises(UnsupportedError, match="T4, fp8:channel/token weights, e5m2"):
        path_of("fp8", "e5m2", ("t4", "0.24.0"))

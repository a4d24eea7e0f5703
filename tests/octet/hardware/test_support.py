"""Tests the hardware model: what a GPU does with each recipe and cache, and where that was seen."""

import itertools
import re
from typing import Any

import pytest

from octet.errors import ConfigError
from octet.hardware.devices import devices, find_device, host_capability, read_table
from octet.hardware.support import (
    ENGINES,
    Numerics,
    attention_of,
    known_versions,
    numerics,
    support,
    version_known,
)
from octet.recipe import PRESETS, Recipe


def asked(device: str, recipe: str | None, cache: Any = "float16", **more: Any) -> Any:
    version = more.pop("version", "0.24.0")
    return support(find_device(device), more.pop("engine", "vllm"), version, recipe, cache, **more)


@pytest.mark.parametrize(
    ("device", "recipe", "weights"),
    [
        ("t4", "fp8", "weight-only"),
        ("t4", "mxfp4", "refused"),
        ("a100", "fp8", "weight-only"),
        ("a100", "nvfp4", "weight-only"),
        ("l40s", "fp8-block", "native"),
        ("l40s", "nvfp4", "weight-only"),
        ("h100", "fp8", "native"),
        ("h200", "mxfp8", "weight-only"),
        ("b200", "nvfp4", "native"),
        ("b300", "mxfp8", "native"),
        ("rtx 5090", "nvfp4", "native"),
        ("rtx 5090", "mxfp4", "unknown"),
        ("mi300x", "fp8", "native"),
        ("mi300x", "nvfp4", "emulated"),
        ("mi300x", "mxfp4", "refused"),
        ("mi355x", "mxfp8", "native"),
        ("gaudi3", "fp8", "unknown"),
        ("cpu-avx512", "fp8", "native"),
        ("cpu-avx512", "fp8-block", "refused"),
        ("cpu-amx", "fp8-block", "weight-only"),
    ],
)
def test_weights_run_as_the_device_can(device: str, recipe: str, weights: str) -> None:
    assert asked(device, recipe).weights == weights


@pytest.mark.parametrize(
    ("device", "cache", "outcome", "attention"),
    [
        ("t4", "e4m3", "refused", "TRITON_ATTN"),
        ("a100", "e5m2", "native", "FLASHINFER"),
        ("h100", "e5m2", "native", "FLASHINFER"),
        ("h100", "e4m3", "native", "FLASH_ATTN"),
        ("b200", "e4m3", "native", "FLASHINFER"),
        ("b200", "e5m2", "refused", "FLASHINFER"),
        ("mi300x", "e5m2", "refused", "ROCM_ATTN"),
        ("cpu", "e5m2", "refused", "CPU_ATTN"),
    ],
)
def test_caches_run_with_the_backend_that_vllm_selects(
    device: str, cache: str, outcome: str, attention: str
) -> None:
    found = asked(device, "fp8", cache)
    assert (found.cache, found.attention) == (outcome, attention)


def test_without_flashinfer_an_e5m2_cache_is_refused_with_a_remedy() -> None:
    found = asked("l40s", "fp8", "e5m2", missing=["flashinfer"])
    assert found.attention == "TRITON_ATTN" and found.outcome == "refused"
    assert "AssertionError" in found.message and "flashinfer-python" in found.remedy
    assert attention_of(find_device("h100"), "vllm", "0.24", "e4m3", ["flashinfer"]) == "FLASH_ATTN"


def test_versions_differ() -> None:
    assert asked("h100", "fp8", "e5m2", version="0.24.0").runs
    assert asked("h100", "fp8", "e5m2", version="0.32.0+cu130").outcome == "refused"
    assert asked("l40s", "fp8-block", version="0.28.0").weights == "native"
    assert asked("l40s", "fp8-block", version="0.29.0").weights == "weight-only"
    assert asked("l40s", "fp8-block", version=None).weights == "unknown"
    assert asked("l40s", "fp8", version=None).weights == "native"


def test_an_unknown_version_is_not_guessed() -> None:
    found = asked("h100", "fp8", version="0.99.0")
    assert found.outcome == "unknown" and "0.99.0 is not known; 0.24 to" in found.message
    assert not version_known("vllm", "nightly")


def test_what_was_measured_is_told_from_what_was_read() -> None:
    assert asked("h100", "fp8", "e5m2").measured
    assert not asked("h100", "fp8", version="0.33.0").measured
    assert not asked("b200", "nvfp4").measured
    assert "nvfp4" in " ".join(asked("b200", "nvfp4").sources)


def test_a_checkpoint_with_cache_scales_takes_no_e5m2() -> None:
    found = asked("h100", "fp8", "e5m2", format="modelopt")
    assert found.message == "fp8_e5m2 kv-cache is not supported with fp8 checkpoints."
    assert asked("a100", "fp8", format="modelopt").weights == "refused"


def test_the_worst_linear_of_a_mixture_decides() -> None:
    mixed = {"name": "mixed", **PRESETS["fp8"].model_dump(include={"weights", "activations"})}
    other = PRESETS["nvfp4"].model_dump(include={"weights", "activations"})
    recipe = Recipe.model_validate(mixed | {"overrides": [{"match": "*.down_proj", **other}]})
    found = support(find_device("h100"), "vllm", "0.24", recipe, "float16")
    assert found.weights == "weight-only"


def test_every_way_that_conforms() -> None:
    h100, b200 = find_device("h100"), find_device("b200")
    assert set(numerics(h100, "vllm", "0.24", "fp8", "e4m3")) == {
        Numerics(True, "nearest", True),
        Numerics(True, "nearest", False),
    }
    assert numerics(h100, "vllm", None, "nvfp4", "float16") == (Numerics(False, "nearest", False),)
    assert numerics(b200, "vllm", None, "nvfp4", "float16") == (Numerics(True, "nearest", False),)
    assert numerics(find_device("t4"), "vllm", None, "fp8", "e5m2") == ()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("sm_87", "compute capability 8.7"),
    ],
)
def test_devices_are_found_by_a_drivers_name(name: str, found: str) -> None:
    assert find_device(name).name == found


def test_every_device_is_found_by_its_own_name() -> None:
    for device in (*devices(), find_device("8.7"), find_device("gfx1100")):
        assert find_device(device.name) == device


def test_an_unknown_gpu_is_judged_by_its_capability() -> None:
    orin = find_device("8.7")
    assert orin.memory is None and support(orin, "vllm", "0.24", "fp8", "float16").runs
    assert support(find_device("13.0"), "vllm", "0.24", "fp8", "float16").outcome == "unknown"
    with pytest.raises(ConfigError, match=r"compute capability.*did you mean 'h100'"):
        find_device("h1000")


def test_a_cpus_flags_say_what_it_is() -> None:
    assert host_capability("fpu avx512f amx_tile") == "cpu-amx"
    assert host_capability("fpu avx512f") == "cpu-avx512" and host_capability("avx2") == "cpu"


def test_the_table_answers_everything_and_names_its_sources() -> None:
    table = read_table("support.yaml")
    for rule in itertools.chain(table["attention"], table["weights"], table["caches"]):
        assert rule["source"].partition(": ")[0] in table["sources"], rule
        assert rule.get("outcome") != "refused" or rule.get("message") or rule.get("remedy"), rule
        assert re.fullmatch(r"[\d.]*|[\w*?-]+", rule.get("device", "").replace("..", ".")), rule
    for device, engine in itertools.product(devices(), ENGINES):
        for version, recipe in itertools.product(known_versions(engine), (*PRESETS, None)):
            found = support(device, engine, version, recipe, "e4m3")
            assert not found.runs or found.sources

"""Tests which serving paths conform to a backend's declared configuration."""

from typing import Any

import numpy as np
import pytest

from octet.artifacts.scenarios import Fault, Scenario, ScenarioSet
from octet.artifacts.serving_path import ServingPath
from octet.hardware.devices import find_device
from octet.proof.declared import declared_paths
from octet.recipe import PRESETS

NEAREST = ServingPath(kv_cache="e5m2")
FLOAT32 = ServingPath(kv_cache="e5m2", compute="float32")
TRUNCATED = ServingPath(kv_cache="e5m2", kv_rounding="truncate")
WEIGHTS = ServingPath(kv_cache="e5m2", activations=False)
BARE = ServingPath(kv_cache="e5m2", weights=False, activations=False)
E4M3 = ServingPath(kv_cache="e4m3", queries=True)
SET = ScenarioSet(
    "w",
    "fp8",
    {
        Scenario(path=path): np.zeros((2, 1, 1, 1), np.float32)
        for path in (NEAREST, FLOAT32, TRUNCATED, WEIGHTS, BARE, E4M3)
    }
    | {
        Scenario(path=NEAREST, fault=Fault(kind="kv_bytes_reread")): np.zeros(
            (1, 1, 1, 1), np.float32
        )
    },
)
FP8 = PRESETS["fp8"]


def test_without_an_engine_every_path_with_such_weights_and_cache_is() -> None:
    found = declared_paths(SET, FP8, "e5m2")
    assert found.paths == (NEAREST, FLOAT32, TRUNCATED, WEIGHTS)
    assert found.label == "fp8 weights, e5m2 cache"


def test_an_engine_takes_its_own() -> None:
    assert declared_paths(SET, FP8, "e5m2", engine="vllm-gpu").paths == (NEAREST, FLOAT32)
    assert declared_paths(SET, FP8, "e5m2", engine="vllm-cpu").paths == (TRUNCATED,)
    assert declared_paths(SET, FP8, "e5m2", engine="onnxruntime").paths == (NEAREST, FLOAT32)
    assert declared_paths(SET, FP8, "e4m3", engine="vllm-gpu").paths == (E4M3,)
    assert declared_paths(SET, FP8, "e4m3", engine="vllm-cpu").paths == ()


@pytest.mark.parametrize(
    ("device", "preset", "paths"),
    [
        ("h100", "fp8", (NEAREST, FLOAT32)),  # weight-only does not conform there
        ("l40s", "fp8", (NEAREST, FLOAT32)),
        ("a100", "fp8", (WEIGHTS,)),
        ("h100", "nvfp4", (WEIGHTS,)),
        ("rtx 5090", "nvfp4", (NEAREST, FLOAT32)),
        ("cpu-avx512", "fp8", (NEAREST, FLOAT32, TRUNCATED)),  # ONNX Runtime, vLLM
    ],
)
def test_the_device_decides_without_an_engine(device: str, preset: str, paths: Any) -> None:
    found = declared_paths(SET, PRESETS[preset], "e5m2", device=find_device(device))
    assert found.paths == paths
    assert found.label == f"{preset} weights, e5m2 cache on {find_device(device).name}"


def test_a_b200_multiplies_in_4_bits() -> None:
    b200 = find_device("b200")
    natively = ServingPath(kv_cache="e4m3", queries=True)
    found = declared_paths(SET, PRESETS["nvfp4"], "e4m3", engine="vllm-gpu", device=b200)
    assert found.paths == (natively,)
    assert found.label == "nvfp4 weights, e4m3 cache, vllm-gpu on B200"


def test_a_gpu_without_a_name_is_hopper_or_later() -> None:
    fp4 = declared_paths(SET, PRESETS["nvfp4"], "e5m2", engine="vllm-gpu")
    assert fp4.paths == (NEAREST, FLOAT32, WEIGHTS)  # Blackwell multiplies, Hopper decodes
    assert WEIGHTS not in declared_paths(SET, FP8, "e5m2", engine="vllm-gpu").paths


def test_what_the_model_does_not_know_conforms_in_any_way() -> None:
    found = declared_paths(SET, FP8, "e5m2", device=find_device("gaudi3"))
    assert found.paths == (NEAREST, FLOAT32, TRUNCATED, WEIGHTS)
    assert found.label.endswith("on Gaudi 3 (how that rounds is not known: any way conforms)")


def test_declared_activations_tell_native_from_weight_only() -> None:
    native = declared_paths(SET, FP8, "e5m2").rounding("quantized")
    assert native.paths == (NEAREST, FLOAT32, TRUNCATED)
    assert native.label == "fp8 weights, e5m2 cache, activations rounded"
    weight_only = declared_paths(SET, FP8, "e5m2").rounding("original")
    assert weight_only.paths == (WEIGHTS,)
    assert weight_only.label == "fp8 weights, e5m2 cache, weight-only"
    original = declared_paths(SET, FP8, "e5m2", weights="original").rounding("quantized")
    assert original.paths == (BARE,)


@pytest.mark.parametrize(
    ("engine", "device", "conforms"),
    [
        (None, None, True),
        ("vllm-gpu", None, True),
        ("vllm-gpu", "h200", True),
        (None, "b200", True),
        ("vllm-gpu", "l40s", False),
        ("vllm-cpu", None, False),
        ("onnxruntime", None, False),
        ("tensorrt", "h100", False),
        (None, "cpu-avx512", False),
    ],
)
def test_scales_are_powers_of_two_only_where_deep_gemm_runs(
    engine: Any, device: str | None, conforms: bool
) -> None:
    rounded = NEAREST.model_copy(update={"power_scales": True})
    paths = (NEAREST, rounded)
    both = ScenarioSet(
        "w", "fp8-block", {Scenario(path=x): np.zeros((2, 1, 1, 1), np.float32) for x in paths}
    )
    where = None if device is None else find_device(device)
    found = declared_paths(both, PRESETS["fp8-block"], "e5m2", engine=engine, device=where)
    assert (rounded in found.paths) == conforms
    assert rounded.label == "weights+activations (e8m0), e5m2 (nearest), bfloat16"


def test_the_original_is_not_quantized() -> None:
    found = declared_paths(SET, FP8, "e5m2", weights="original", engine="vllm-gpu")
    assert found.paths == (BARE,)
    assert found.label == "original weights, e5m2 cache, vllm-gpu"


def test_nothing_simulated_is_nothing_honest() -> None:
    assert declared_paths(None, FP8, "float16").paths == ()
    assert declared_paths(None, FP8, "float16").label == "fp8 weights, 16-bit cache"

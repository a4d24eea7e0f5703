"""Tests which serving paths conform to a backend's declared configuration."""

import numpy as np

from octet.artifacts.scenarios import Fault, Scenario, ScenarioSet
from octet.artifacts.serving_path import ServingPath
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
    fp4 = declared_paths(SET, PRESETS["nvfp4"], "e5m2", engine="vllm-gpu")
    assert fp4.paths == (WEIGHTS,)  # weight-only on Hopper


def test_declared_activations_tell_native_from_weight_only() -> None:
    native = declared_paths(SET, FP8, "e5m2").rounding("quantized")
    assert native.paths == (NEAREST, FLOAT32, TRUNCATED)
    assert native.label == "fp8 weights, e5m2 cache, activations rounded"
    weight_only = declared_paths(SET, FP8, "e5m2").rounding("original")
    assert weight_only.paths == (WEIGHTS,)
    assert weight_only.label == "fp8 weights, e5m2 cache, weight-only"
    original = declared_paths(SET, FP8, "e5m2", weights="original").rounding("quantized")
    assert original.paths == (BARE,)


def test_the_original_is_not_quantized() -> None:
    found = declared_paths(SET, FP8, "e5m2", weights="original", engine="vllm-gpu")
    assert found.paths == (BARE,)
    assert found.label == "original weights, e5m2 cache, vllm-gpu"


def test_nothing_simulated_is_nothing_honest() -> None:
    assert declared_paths(None, FP8, "float16").paths == ()
    assert declared_paths(None, FP8, "float16").label == "fp8 weights, 16-bit cache"

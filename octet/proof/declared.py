"""Which simulated paths a backend takes honestly, by what is said about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octet.artifacts.scenarios import HypothesisSet
from octet.artifacts.serving_path import ServingPath
from octet.proof.engines import vllm_path
from octet.recipe import KvCacheDtype, Recipe

__all__ = ["Declared", "Engine", "declared_paths"]

Engine = Literal["vllm-gpu", "vllm-cpu", "tensorrt", "onnxruntime"]


@dataclass(frozen=True)
class Declared:
    """What a backend is said to be."""

    paths: tuple[ServingPath, ...]  # any of which is honest; none: they were not simulated
    label: str  # such as "fp8 weights, e5m2 cache, vllm-cpu"
    kv_cache: KvCacheDtype | None = None
    weights: Literal["quantized", "original"] = "quantized"
    engine: Engine | None = None  # None: any


def declared_paths(
    hypotheses: HypothesisSet | None,
    recipe: Recipe,
    kv_cache: KvCacheDtype,
    *,
    weights: Literal["quantized", "original"] = "quantized",
    engine: Engine | None = None,
) -> Declared:
    """The simulated paths with such weights and such a cache that `engine` takes; None: any does.

    Real kernels lie between a path's float32 and its bfloat16: both are honest.
    """
    quantized = weights == "quantized"
    found = [
        path
        for path in (hypotheses.paths if hypotheses is not None else ())
        if path.kv_cache == kv_cache and path.weights == quantized
    ]
    if engine is not None:
        taken = {_shape(path) for path in _engine_paths(recipe, kv_cache, quantized, engine)}
        found = [path for path in found if _shape(path) in taken]
    name = f"{recipe.name} weights" if quantized else "original weights"
    cache = "16-bit" if kv_cache == "float16" else kv_cache
    label = f"{name}, {cache} cache" + (f", {engine}" if engine else "")
    return Declared(tuple(found), label, kv_cache, weights, engine)


def _engine_paths(
    recipe: Recipe, kv_cache: KvCacheDtype, quantized: bool, engine: Engine
) -> Sequence[ServingPath]:
    pair = (recipe.weights, recipe.activations) if quantized else None
    if engine == "vllm-gpu":
        return [
            vllm_path(pair, kv_cache, "sm90", attention=attention)
            for attention in ("FLASHINFER", "FLASH_ATTN")
        ]
    if engine == "vllm-cpu":
        return [vllm_path(pair, kv_cache, "cpu", amx=amx) for amx in (True, False)]
    return [ServingPath(weights=quantized, activations=quantized, kv_cache=kv_cache)]


def _shape(path: ServingPath) -> ServingPath:
    """But for what it computes in."""
    return path.model_copy(update={"compute": "bfloat16"})

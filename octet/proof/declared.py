"""Selects the simulated paths that conform to a backend's declared configuration.

The tables list which `ServingPath` an engine executes, from its source and from measurements.

| engine          | weights and activations                                                      |
|-----------------|------------------------------------------------------------------------------|
| vLLM 0.24,      | FP8 per channel, tensor or block: both are rounded. MXFP8, MXFP4, NVFP4:      |
| Hopper          | weight-only (Marlin); native FP4 needs compute capability 10.0               |
| vLLM 0.32, CPU  | FP8 per channel, activations per token: both rounded (torch._scaled_mm). With |
|                 | AMX, FP8 per tensor and in blocks: weight-only                               |

| engine          | cache and attention                                                          |
|-----------------|------------------------------------------------------------------------------|
| vLLM 0.24,      | rounded to nearest (`__nv_cvt_float_to_fp8`); queries stay BF16               |
| FLASHINFER      |                                                                              |
| vLLM 0.24,      | no E5M2; with E4M3, queries and probabilities are rounded to E4M3 too         |
| FLASH_ATTN      |                                                                              |
| vLLM 0.32,      | truncated toward zero, E4M3 and E5M2 alike: `cpu_attn_reshape_and_cache`      |
| CPU_ATTN        | wrote truncated bytes for all of 16,384 normal values                        |

vLLM's sources: model_executor/kernels/linear/__init__.py (`_POSSIBLE_FP8_KERNELS` and similar,
tried in order), v1/attention/backends/, csrc/cpu/cpu_attn_fp8.hpp.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octet.artifacts.scenarios import ScenarioSet
from octet.artifacts.serving_path import ServingPath
from octet.recipe import KvCacheDtype, Recipe, TensorScheme

__all__ = ["Declared", "Engine", "Machine", "declared_paths", "vllm_path"]

Machine = Literal["cpu", "sm90"]
Pair = tuple[TensorScheme, TensorScheme]  # of weights and of activations


def vllm_path(
    pair: Pair | None,
    kv_cache: KvCacheDtype,
    machine: Machine,
    *,
    attention: Literal["FLASHINFER", "FLASH_ATTN"] | None = None,
    amx: bool = False,
) -> ServingPath:
    """Returns the path that vLLM takes for linears of the schemes `pair`.

    `pair` None: all linears in full precision. `kv_cache` "float16" is vLLM's `auto`. `attention`
    is the attention backend on a GPU; by default the one that vLLM chooses: FLASHINFER for E5M2,
    else FLASH_ATTN. `amx`: whether the CPU has AMX.
    """
    weights = pair is not None
    activations = pair is not None and pair[0].kind == "fp8"
    if machine == "cpu":
        if amx and pair is not None and pair[0].granularity != "channel":
            activations = False
        rounding: Literal["nearest", "truncate"] = "truncate"
        return ServingPath(
            weights=weights,
            activations=activations,
            kv_cache=kv_cache,
            kv_rounding="nearest" if kv_cache == "float16" else rounding,
        )
    return ServingPath(
        weights=weights,
        activations=activations,
        kv_cache=kv_cache,
        queries=kv_cache == "e4m3" and attention != "FLASHINFER",
    )


Engine = Literal["vllm-gpu", "vllm-cpu", "tensorrt", "onnxruntime"]


@dataclass(frozen=True)
class Declared:
    """The declared configuration of a backend."""

    paths: tuple[ServingPath, ...]  # any of them conforms; empty: none was simulated
    label: str  # for example "fp8 weights, e5m2 cache, vllm-cpu"
    kv_cache: KvCacheDtype | None = None
    weights: Literal["quantized", "original"] = "quantized"
    engine: Engine | None = None  # None: any

    def rounding(self, activations: Literal["quantized", "original"]) -> "Declared":
        """Returns this with the activations of quantized linear layers in one way alone.

        "original" is weight-only. Layers that are not quantized have no other way.
        """
        if self.weights == "original":
            return self
        rounded = activations == "quantized"
        paths = tuple(path for path in self.paths if path.activations == rounded)
        how = "activations rounded" if rounded else "weight-only"
        return replace(self, paths=paths, label=f"{self.label}, {how}")


def declared_paths(
    scenarios: ScenarioSet | None,
    recipe: Recipe,
    kv_cache: KvCacheDtype,
    *,
    weights: Literal["quantized", "original"] = "quantized",
    engine: Engine | None = None,
) -> Declared:
    """Returns the simulated paths with these weights and this cache that `engine` takes.

    `engine` None accepts the paths of any engine. Real kernels lie between a path's float32 and
    its bfloat16, so both conform.
    """
    quantized = weights == "quantized"
    found = [
        path
        for path in (scenarios.paths if scenarios is not None else ())
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
    """Returns `path` without its compute dtype, for comparison."""
    return path.model_copy(update={"compute": "bfloat16"})

"""Lists the scenarios that are simulated for a recipe: its serving paths, and faults in them.

A scenario is a `Scenario`. Paths without a fault are those that engines take
(`serving_paths`), the same with only weights quantized, and with nothing
quantized, as when an engine silently falls back to BF16. Faults come from open reports
(docs/compatibility.md), as far as they change the logits: scales dropped when a checkpoint is
loaded, a cache whose bytes are read in another format than they were written in, scales that fused
linears were meant to share, or RoPE parameters that are not read. Two scenarios that compute the
same count once.

Faults are simulated on the default bfloat16 paths of engines: with the cache rounded to nearest, as
on GPUs, and truncated, as in vLLM on a CPU. Their effects are far larger than the difference
between bfloat16 and float32.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calibrate.simulate.faults import DEFAULT_THETA, OTHER_CACHE, mergeable
from calibrate.simulate.scales import Scales
from octet.artifacts.scenarios import Fault, FaultKind, Scenario
from octet.artifacts.serving_path import ServingPath
from octet.model.generic import Linear
from octet.model.spec import ModelSpec
from octet.recipe import KvCacheDtype, Recipe, TensorScheme

__all__ = ["FACTORS", "MOST_LAYERS", "scenarios_of", "serving_paths", "simulated_paths"]

FACTORS = (0.5, 2.0)  # errors of the weight scales of one layer
MOST_LAYERS = 32  # layers with faults of their own, evenly spaced in deeper models
# In models with more layers, only one path gets the faults of single layers. Simulating them then
# takes fewer tokens than a calibration of 256 samples.
_DEEP = 16
# Scalings of RoPE that `ModelSpec` does not describe, and that have an effect at every length;
# "dynamic" has one only beyond the model's context.
_OTHER_SCALINGS = ("rope_type 'yarn'", "rope_type 'longrope'", "rope_type 'su'")


def serving_paths(recipe: Recipe) -> tuple[ServingPath, ...]:
    """Returns the paths that engines take with `recipe` (`octet.proof.declared`,
    docs/compatibility.md).

    Covers the recipe's own cache and every other that an export may choose. Engines on a GPU and
    TensorRT compute in bfloat16 or better, ONNX Runtime in float32. vLLM on a CPU truncates values
    written to an FP8 cache. FlashAttention 3 also rounds queries if the cache is E4M3. Weight-only
    GEMMs are used for FP4 and MX formats on Hopper, and for FP8 on earlier GPUs, there only with
    the recipe's own cache. vLLM's DeepGEMM rounds scales of FP8 blocks up to powers of two.
    """
    fp8 = recipe.weights.kind == "fp8"
    blocks = any(weights.blocks for weights, _ in recipe.pairs)
    paths = []
    for cache in _caches(recipe):
        weight_only = not fp8 or cache == recipe.kv_cache
        for queries in (True, False) if cache == "e4m3" else (False,):
            paths.append(ServingPath(kv_cache=cache, queries=queries))
            if blocks:
                paths.append(ServingPath(kv_cache=cache, queries=queries, power_scales=True))
            if weight_only:
                paths.append(ServingPath(kv_cache=cache, queries=queries, activations=False))
        if cache != "float16":
            paths.append(ServingPath(kv_cache=cache, kv_rounding="truncate"))
        paths.append(ServingPath(kv_cache=cache, compute="float32"))
    return tuple(paths)


def simulated_paths(recipe: Recipe) -> tuple[ServingPath, ...]:
    """Returns `serving_paths`, then paths with only weights or nothing quantized, for every cache.

    Weight-only paths truncate values written to the cache if vLLM runs such weights on a CPU with
    AMX: FP8 per tensor and in blocks, and since vLLM 0.33 per channel, there only with the
    recipe's own cache. The float32 path with nothing quantized has only a float16 cache: it is the
    reference except for the cache, and bfloat16 differs from it by BF16's noise. Queries are
    rounded only with the recipe's own E4M3 cache: with another cache their effect is hidden in that
    noise.
    """
    paths = list(serving_paths(recipe))
    for cache in _caches(recipe):
        for queries in _queries(recipe, cache):
            paths.append(ServingPath(kv_cache=cache, queries=queries, activations=False))
        fp8 = recipe.weights.kind == "fp8" and cache == recipe.kv_cache
        if cache != "float16" and (fp8 or _amx(recipe)):
            paths.append(ServingPath(kv_cache=cache, kv_rounding="truncate", activations=False))
    for cache in _caches(recipe):
        for queries in _queries(recipe, cache):
            paths.append(_unquantized(cache, queries=queries))
        if cache == "float16":
            paths.append(_unquantized(cache, compute="float32"))
        else:
            paths.append(_unquantized(cache, "truncate"))
    return tuple(dict.fromkeys(paths))


def scenarios_of(spec: ModelSpec, recipe: Recipe, scales: Scales) -> tuple[Scenario, ...]:
    """Returns all scenarios to simulate.

    `scales` are those of a calibration; they determine which faults have an effect. Raises
    KeyError, naming the scale, if one is missing.
    """
    found = [Scenario(path=path) for path in simulated_paths(recipe)]
    own = recipe.kv_cache
    for number, path in enumerate(_main_paths(recipe, own)):
        found += _with(path, _cache_kinds(spec, recipe, scales, path))
        found += _with(path, _weight_kinds(spec, recipe, scales, path))
        found += _with(path, _rope_kinds(spec))
        if number and spec.layers > _DEEP:
            continue
        for layer in _layers(spec.layers):
            for factor in FACTORS:
                fault = Fault(kind="weight_scales_scaled", layer=layer, factor=factor)
                found.append(Scenario(path=path, fault=fault))
    if own in OTHER_CACHE:
        for path in _main_paths(recipe, OTHER_CACHE[own]):
            found += _with(path, _cache_kinds(spec, recipe, scales, path))
    if own in OTHER_CACHE:  # an unquantized model has no scales either
        for bare in (_unquantized(own), _unquantized(own, "truncate")):
            found += _with(bare, _dropped(spec, scales)[-1:])
    return tuple(dict.fromkeys(found))


def _main_paths(recipe: Recipe, cache: KvCacheDtype) -> Iterator[ServingPath]:
    """Yields the default bfloat16 paths of engines with that cache."""
    queries = cache == "e4m3"
    if recipe.weights.kind == "fp8":
        yield ServingPath(kv_cache=cache, queries=queries)
        if cache != "float16":
            amx = _amx(recipe)
            yield ServingPath(kv_cache=cache, kv_rounding="truncate", activations=not amx)
    else:  # on Hopper, and on GPUs with FP4 GEMMs
        yield ServingPath(kv_cache=cache, queries=queries, activations=False)
        yield ServingPath(kv_cache=cache, queries=queries)


def _cache_kinds(
    spec: ModelSpec, recipe: Recipe, scales: Scales, path: ServingPath
) -> Iterator[FaultKind]:
    """Yields the possible faults of an 8-bit cache."""
    cache = path.kv_cache
    if cache not in OTHER_CACHE:
        return
    if cache == recipe.kv_cache:
        yield from _dropped(spec, scales)
        yield from _exchanged(spec, scales)
    pairs = [
        [scales.get(f"{name}_scale_{kv}") for kv in (cache, OTHER_CACHE[cache])]
        for name in _cache_names(spec, "kv")
    ]
    if all(x is not None for pair in pairs for x in pair) and any(a != b for a, b in pairs):
        yield "kv_scales_swapped"
    yield "kv_bytes_reread"


def _dropped(spec: ModelSpec, scales: Scales) -> list[FaultKind]:
    """Returns faults that drop cache scales; without one, an engine uses 1, so 1 is no fault."""
    differ = {
        letter: any(scales[f"{name}_scale"] != 1 for name in _cache_names(spec, letter))
        for letter in "kv"
    }
    kinds: list[FaultKind] = []
    if differ["k"]:
        kinds.append("k_scale_dropped")
    if differ["v"]:
        kinds.append("v_scale_dropped")
    if differ["k"] and differ["v"]:
        kinds.append("kv_scales_dropped")
    return kinds


def _exchanged(spec: ModelSpec, scales: Scales) -> Iterator[FaultKind]:
    """Yields the exchange of scales of K and V where they differ."""
    keys, values = ([scales[f"{n}_scale"] for n in _cache_names(spec, x)] for x in "kv")
    if any(a != b for a, b in zip(keys, values, strict=True)):
        yield "kv_scales_exchanged"


def _weight_kinds(
    spec: ModelSpec, recipe: Recipe, scales: Scales, path: ServingPath
) -> Iterator[FaultKind]:
    """Yields the possible faults of the scales of linears."""
    schemes = {linear: recipe.scheme_of(linear.name) for linear in spec.linears()}
    pairs = [pair for pair in schemes.values() if pair is not None]
    if path.activations and any(not inputs.dynamic for _, inputs in pairs):
        yield "input_scales_dropped"
    if pairs:
        yield "weight_scales_dropped"
    if any(weights.two_level for weights, _ in pairs):
        yield "global_scales_inverted"
    if any(weights.format == "e2m1" for weights, _ in pairs):
        yield "nibbles_swapped"
    experts, fused = _outer_scales(schemes, scales)
    if any(_differ(x) for x in experts):
        yield "expert_scales_permuted"
    if any(_differ(x) for x in fused):
        yield "fused_scales_merged"
        if any(weights.two_level for weights, _ in pairs):
            yield "fused_scales_smallest"
    if any(len(x) > 1 and all(scale.size == 1 for scale in x) for x in fused):
        yield "fused_scales_in_one_slot"


def _rope_kinds(spec: ModelSpec) -> Iterator[FaultKind]:
    """Yields the possible faults of RoPE's parameters."""
    if spec.generic:  # its RoPE may have other parameters
        return
    scaling = spec.rope_scaling
    if scaling is None:
        scaled = any(feature in _OTHER_SCALINGS for feature in spec.undescribed)
    else:
        scaled = scaling.factor != 1
    if scaled or spec.rope_theta != DEFAULT_THETA:
        yield "rope_parameters_dropped"
    if scaled and spec.rope_theta != DEFAULT_THETA:
        yield "rope_scaling_dropped"


def _outer_scales(
    schemes: Mapping[Linear, tuple[TensorScheme, TensorScheme] | None], scales: Scales
) -> tuple[list[list[NDArray[np.float32]]], list[list[NDArray[np.float32]]]]:
    """Returns the outer scales of the same linear of all experts, and of linears that are fused."""
    experts: dict[str, list[NDArray[np.float32]]] = {}
    fused: dict[str, list[NDArray[np.float32]]] = {}
    for linear, pair in schemes.items():
        if pair is None:
            continue
        level = "weight_global_scale" if pair[0].two_level else "weight_scale"
        scale = scales[f"{linear.name}.{level}"]
        head, expert, tail = linear.name.partition(".experts.")
        if expert:
            experts.setdefault(f"{head}.{tail.partition('.')[2]}", []).append(scale)
        if mergeable(pair[0]):
            fused.setdefault(linear.input, []).append(scale)
    return [*experts.values()], [*fused.values()]


def _differ(found: Sequence[NDArray[np.float32]]) -> bool:
    return len(np.unique(np.concatenate([x.ravel() for x in found]))) > 1


def _layers(count: int) -> list[int]:
    chosen = np.linspace(0, count - 1, min(count, MOST_LAYERS)).round().astype(int)
    return [int(layer) for layer in chosen]


def _with(path: ServingPath, kinds: Iterable[FaultKind]) -> list[Scenario]:
    return [Scenario(path=path, fault=Fault(kind=kind)) for kind in kinds]


def _unquantized(
    cache: KvCacheDtype,
    rounding: Literal["nearest", "truncate"] = "nearest",
    *,
    queries: bool = False,
    compute: Literal["float32", "bfloat16"] = "bfloat16",
) -> ServingPath:
    """Returns a path that quantizes only the cache."""
    return ServingPath(
        weights=False,
        activations=False,
        kv_cache=cache,
        kv_rounding=rounding,
        queries=queries,
        compute=compute,
    )


def _caches(recipe: Recipe) -> tuple[KvCacheDtype, ...]:
    """Returns all cache formats, the recipe's own first."""
    caches: tuple[KvCacheDtype, ...] = (recipe.kv_cache, "e5m2", "float16", "e4m3")
    return tuple(dict.fromkeys(caches))


def _cache_names(spec: ModelSpec, letters: str) -> list[str]:
    """Returns names such as "model.layers.0.self_attn.k"."""
    layers = map(spec.layer, range(spec.layers))
    return [f"{layer}.self_attn.{letter}" for layer in layers for letter in letters]


def _queries(recipe: Recipe, cache: KvCacheDtype) -> tuple[bool, ...]:
    """Returns the values of `queries` (rounded or not) for paths that an engine falls back to."""
    return (True, False) if cache == recipe.kv_cache == "e4m3" else (False,)


def _amx(recipe: Recipe) -> bool:
    """Returns True if vLLM 0.32, on a CPU with AMX, does not round activations for such weights."""
    return recipe.weights.kind == "fp8" and recipe.weights.granularity != "channel"

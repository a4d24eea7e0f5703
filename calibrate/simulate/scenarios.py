"""Which hypotheses are simulated of a recipe: how it may be served, and what may go wrong in it.

Honest paths are those that engines take (`calibrate.simulate.predict.serving_paths`), the same with
weights alone quantized, and with none of it, as an engine serves that falls back to BF16 in
silence. Faults are those of open reports (docs/compatibility.md), where they change a number:
scales dropped when a checkpoint is loaded, a cache whose bytes are read in another format than they
were written in, scales that fused linears were to share. Two hypotheses that compute the same are
one.

Faults are simulated on the paths that engines take by default in bfloat16: to nearest, as GPUs
write the cache, and truncated, as vLLM does on a CPU. Their traces are far larger than what tells
bfloat16 from float32.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from calibrate.simulate.faults import OTHER_CACHE, mergeable
from calibrate.simulate.scales import Scales
from octet.artifacts.scenarios import Fault, FaultKind, Hypothesis
from octet.artifacts.serving_path import ServingPath
from octet.model.spec import ModelSpec
from octet.recipe import KvCacheDtype, Recipe

__all__ = ["FACTORS", "MOST_LAYERS", "hypotheses_of", "serving_paths", "simulated_paths"]

FACTORS = (0.5, 2.0)  # by which the weight scales of one layer are off
MOST_LAYERS = 32  # of a deeper model, so many have faults of their own, evenly spaced
# Of a model with more layers, those faults are on one path alone: they are then simulated with
# fewer tokens than a calibration of 256 samples runs.
_DEEP = 16


def serving_paths(recipe: Recipe) -> tuple[ServingPath, ...]:
    """Returns the paths that engines take with `recipe` (`octet.proof.declared`,
    docs/compatibility.md).

    With the recipe's own cache and with every other that an export may choose. Engines on a GPU and
    TensorRT compute in bfloat16 or better, ONNX Runtime in float32; vLLM on a CPU truncates into an
    FP8 cache; FlashAttention 3 rounds queries too where the cache is E4M3. Weight-only products are
    those of FP4 and MX formats on Hopper; of FP8 on GPUs before it, with the recipe's own cache.
    """
    fp8 = recipe.weights.kind == "fp8"
    paths = []
    for cache in _caches(recipe):
        weight_only = not fp8 or cache == recipe.kv_cache
        for queries in (True, False) if cache == "e4m3" else (False,):
            paths.append(ServingPath(kv_cache=cache, queries=queries))
            if weight_only:
                paths.append(ServingPath(kv_cache=cache, queries=queries, activations=False))
        if cache != "float16":
            paths.append(ServingPath(kv_cache=cache, kv_rounding="truncate"))
        paths.append(ServingPath(kv_cache=cache, compute="float32"))
    return tuple(paths)


def simulated_paths(recipe: Recipe) -> tuple[ServingPath, ...]:
    """`serving_paths`; then weights alone and nothing quantized, with every cache.

    Weights alone truncate into the cache where vLLM multiplies them so on a CPU with AMX. Nothing
    is quantized in float32 with a float16 cache alone: that is the reference itself but for the
    cache, and BF16's noise is what bfloat16 adds to it. Queries are rounded with the recipe's own
    E4M3 cache alone: with another's, what they add is hidden in that noise.
    """
    paths = list(serving_paths(recipe))
    for cache in _caches(recipe):
        for queries in _queries(recipe, cache):
            paths.append(ServingPath(kv_cache=cache, queries=queries, activations=False))
        if cache != "float16" and _amx(recipe):
            paths.append(ServingPath(kv_cache=cache, kv_rounding="truncate", activations=False))
    for cache in _caches(recipe):
        for queries in _queries(recipe, cache):
            paths.append(_bare(cache, queries=queries))
        if cache == "float16":
            paths.append(_bare(cache, compute="float32"))
        else:
            paths.append(_bare(cache, "truncate"))
    return tuple(dict.fromkeys(paths))


def hypotheses_of(spec: ModelSpec, recipe: Recipe, scales: Scales) -> tuple[Hypothesis, ...]:
    """All that are simulated; `scales` are those of a calibration, which decide what can go wrong.

    KeyError names a scale that is missing.
    """
    found = [Hypothesis(path=path) for path in simulated_paths(recipe)]
    own = recipe.kv_cache
    for number, path in enumerate(_main_paths(recipe, own)):
        found += _with(path, _cache_kinds(spec, recipe, scales, path))
        found += _with(path, _weight_kinds(spec, recipe, scales, path))
        if number and spec.layers > _DEEP:
            continue
        for layer in _layers(spec.layers):
            for factor in FACTORS:
                fault = Fault(kind="weight_scales_scaled", layer=layer, factor=factor)
                found.append(Hypothesis(path=path, fault=fault))
    if own in OTHER_CACHE:
        for path in _main_paths(recipe, OTHER_CACHE[own]):
            found += _with(path, _cache_kinds(spec, recipe, scales, path))
    if own in OTHER_CACHE:  # a model that is not quantized has no scales either
        for bare in (_bare(own), _bare(own, "truncate")):
            found += _with(bare, _dropped(spec, scales)[-1:])
    return tuple(dict.fromkeys(found))


def _main_paths(recipe: Recipe, cache: KvCacheDtype) -> Iterator[ServingPath]:
    """What engines do by default, in bfloat16, with that cache."""
    queries = cache == "e4m3"
    if recipe.weights.kind == "fp8":
        yield ServingPath(kv_cache=cache, queries=queries)
        if cache != "float16":
            amx = _amx(recipe)
            yield ServingPath(kv_cache=cache, kv_rounding="truncate", activations=not amx)
    else:  # on Hopper, and on what multiplies FP4
        yield ServingPath(kv_cache=cache, queries=queries, activations=False)
        yield ServingPath(kv_cache=cache, queries=queries)


def _cache_kinds(
    spec: ModelSpec, recipe: Recipe, scales: Scales, path: ServingPath
) -> Iterator[FaultKind]:
    """What can go wrong with a cache of 8 bits."""
    cache = path.kv_cache
    if cache not in OTHER_CACHE:
        return
    if cache == recipe.kv_cache:
        yield from _dropped(spec, scales)
    pairs = [
        [scales.get(f"{name}_scale_{kv}") for kv in (cache, OTHER_CACHE[cache])]
        for name in _cache_names(spec, "kv")
    ]
    if all(x is not None for pair in pairs for x in pair) and any(a != b for a, b in pairs):
        yield "kv_scales_swapped"
    yield "kv_bytes_reread"


def _dropped(spec: ModelSpec, scales: Scales) -> list[FaultKind]:
    """Scales of the recipe's cache that are not 1, which is what an engine takes that has none."""
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


def _weight_kinds(
    spec: ModelSpec, recipe: Recipe, scales: Scales, path: ServingPath
) -> Iterator[FaultKind]:
    """What can go wrong with the scales of linears."""
    schemes = {linear: recipe.scheme_of(linear.name) for linear in spec.linears()}
    pairs = [pair for pair in schemes.values() if pair is not None]
    if path.activations and any(not inputs.dynamic for _, inputs in pairs):
        yield "input_scales_dropped"
    if pairs:
        yield "weight_scales_dropped"
    if any(weights.two_level for weights, _ in pairs):
        yield "global_scales_inverted"
    fused: dict[str, list[NDArray[np.float32]]] = {}
    for linear, pair in schemes.items():
        if pair is not None and mergeable(pair[0]):
            fused.setdefault(linear.input, []).append(scales[f"{linear.name}.weight_scale"])
    if any(len(np.unique(np.concatenate([x.ravel() for x in y]))) > 1 for y in fused.values()):
        yield "fused_scales_merged"


def _layers(count: int) -> list[int]:
    chosen = np.linspace(0, count - 1, min(count, MOST_LAYERS)).round().astype(int)
    return [int(layer) for layer in chosen]


def _with(path: ServingPath, kinds: Iterable[FaultKind]) -> list[Hypothesis]:
    return [Hypothesis(path=path, fault=Fault(kind=kind)) for kind in kinds]


def _bare(
    cache: KvCacheDtype,
    rounding: Literal["nearest", "truncate"] = "nearest",
    *,
    queries: bool = False,
    compute: Literal["float32", "bfloat16"] = "bfloat16",
) -> ServingPath:
    """Nothing is quantized but the cache."""
    return ServingPath(
        weights=False,
        activations=False,
        kv_cache=cache,
        kv_rounding=rounding,
        queries=queries,
        compute=compute,
    )


def _caches(recipe: Recipe) -> tuple[KvCacheDtype, ...]:
    """The recipe's own first."""
    caches: tuple[KvCacheDtype, ...] = (recipe.kv_cache, "e5m2", "float16", "e4m3")
    return tuple(dict.fromkeys(caches))


def _cache_names(spec: ModelSpec, letters: str) -> list[str]:
    """Such as "model.layers.0.self_attn.k"."""
    layers = map(spec.layer, range(spec.layers))
    return [f"{layer}.self_attn.{letter}" for layer in layers for letter in letters]


def _queries(recipe: Recipe, cache: KvCacheDtype) -> tuple[bool, ...]:
    """Whether they are rounded, of paths that an engine falls back to."""
    return (True, False) if cache == recipe.kv_cache == "e4m3" else (False,)


def _amx(recipe: Recipe) -> bool:
    """Whether vLLM multiplies such weights without rounding inputs, on a CPU with AMX."""
    return recipe.weights.kind == "fp8" and recipe.weights.granularity != "channel"

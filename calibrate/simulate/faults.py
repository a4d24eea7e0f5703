"""Applies a fault to a simulation: to the scales that are read, or to the dequantized weights.

Weights arrive dequantized, float32 [N, K], and their codes are recovered: dividing a dequantized
value by its scale misses the code by at most an ulp, and rounding to the format corrects that.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from calibrate.decoder.rounding import round_to
from calibrate.simulate.cache import CacheRounding
from calibrate.simulate.model import Schemes
from calibrate.simulate.scales import DeviceScales, Scales
from octet.artifacts.scenarios import FaultKind, Scenario
from octet.model.spec import ModelSpec
from octet.numerics.formats import FORMATS
from octet.recipe import KvCacheDtype, Recipe, TensorScheme

__all__ = [
    "OTHER_CACHE",
    "TakenScales",
    "cache_rounding",
    "changes_weights",
    "faulty_scales",
    "faulty_weights",
    "mergeable",
]

OTHER_CACHE: dict[KvCacheDtype, KvCacheDtype] = {"e4m3": "e5m2", "e5m2": "e4m3"}  # of 8 bits
_OF_WEIGHTS = (
    "weight_scales_dropped",
    "weight_scales_scaled",
    "fused_scales_merged",
    "global_scales_inverted",
)


def mergeable(scheme: TensorScheme) -> bool:
    """Returns True if fused linears may be given one scale, the largest of theirs."""
    return scheme.granularity in ("tensor", "channel")


def cache_rounding(scenario: Scenario, recipe: Recipe) -> CacheRounding:
    """Returns how the cache of a scenario is written and read back."""
    path, fault = scenario.path, scenario.fault
    return CacheRounding(
        path.kv_cache,
        toward_zero=path.kv_rounding == "truncate",
        queries=path.queries,
        own=path.kv_cache == recipe.kv_cache,
        reread=fault is not None and fault.kind == "kv_bytes_reread",
    )


def faulty_scales(scales: Scales, recipe: Recipe, scenario: Scenario) -> Scales:
    """Returns the scales that an engine uses under the scenario; weight scales are not changed.

    `scales` are those of a calibration. A cache whose bytes are read in another format than they
    were written in uses the scales of the recipe's cache. Raises KeyError, naming the scale, if one
    is missing.
    """
    fault, cache = scenario.fault, scenario.path.kv_cache
    if fault is None or fault.kind in _OF_WEIGHTS:
        return scales
    one = np.ones((), np.float32)
    read = "" if cache == recipe.kv_cache else f"_{cache}"  # suffix of the cache scales in use
    found = dict(scales)
    for name, scale in scales.items():
        head, _, leaf = name.rpartition(".")
        if fault.kind == "input_scales_dropped" and leaf == "input_scale":
            found[name] = one
        if leaf not in ("k_scale", "v_scale"):
            continue
        if fault.kind in (f"{leaf}_dropped", "kv_scales_dropped"):
            found[f"{name}{read}"] = one
        elif fault.kind == "kv_scales_swapped":
            found[f"{name}{read}"] = scales[f"{head}.{leaf}_{OTHER_CACHE[cache]}"]
        elif fault.kind == "kv_bytes_reread":
            found[f"{name}{read}"] = scale
    return found


class TakenScales:
    """`faulty_scales` of all layers on a device, made once for scenarios with equal scales."""

    def __init__(self, scales: Scales, recipe: Recipe, device: torch.device) -> None:
        self._scales, self._recipe, self._device = scales, recipe, device
        self._found: dict[tuple[FaultKind | None, KvCacheDtype], DeviceScales] = {}

    def of(self, scenario: Scenario) -> DeviceScales:
        fault = scenario.fault
        key = (None if fault is None else fault.kind, scenario.path.kv_cache)
        if key not in self._found:
            taken = faulty_scales(self._scales, self._recipe, scenario)
            self._found[key] = DeviceScales(taken, self._device)
        return self._found[key]


def changes_weights(scenario: Scenario, layer: int) -> bool:
    """Returns True if the fault changes the dequantized weights of decoder layer `layer`."""
    fault = scenario.fault
    if fault is None or fault.kind not in _OF_WEIGHTS or not scenario.path.weights:
        return False
    return fault.layer is None or fault.layer == layer


def faulty_weights(
    weights: Mapping[str, Tensor],
    schemes: Schemes,
    scales: DeviceScales,
    spec: ModelSpec,
    scenario: Scenario,
) -> dict[str, Tensor]:
    """Returns a layer's dequantized `weights`, float32 [N, K], under the fault; modifies none."""
    fault = scenario.fault
    assert fault is not None
    if fault.kind == "weight_scales_scaled":
        factor = 1.0 if fault.factor is None else fault.factor
        return {name: weight * factor for name, weight in weights.items()}
    largest: dict[str, Tensor] = {}
    inputs = {linear.name: linear.input for linear in spec.linears()}
    if fault.kind == "fused_scales_merged":
        for name in filter(lambda name: mergeable(schemes[name][0]), weights):
            scale = scales.need(f"{name}.weight_scale").max()
            before = largest.get(inputs[name], scale)
            largest[inputs[name]] = torch.maximum(scale, before)
    found = {}
    for name, weight in weights.items():
        scheme = schemes[name][0]
        scale = scales.need(f"{name}.weight_scale")
        shared = scales.get(f"{name}.weight_global_scale")
        if fault.kind == "global_scales_inverted":
            found[name] = weight if shared is None else weight / shared / shared
        elif fault.kind == "weight_scales_dropped":
            codes = _codes(weight, scheme, scale, shared)
            found[name] = codes if shared is None else codes * shared
        elif mergeable(scheme):
            found[name] = _codes(weight, scheme, scale, shared) * largest[inputs[name]]
        else:
            found[name] = weight
    return found


def _codes(
    weight: Tensor, scheme: TensorScheme, scale: Tensor, global_scale: Tensor | None
) -> Tensor:
    """Recovers the values of the codes, float32 [N, K]; 0 where the scale is 0."""
    if scheme.group_size is not None:
        if scheme.granularity == "block":  # one row of scales per row of blocks
            scale = scale.repeat_interleave(scheme.group_size, 0)[: weight.shape[0]]
        scale = scale.repeat_interleave(scheme.group_size, 1)[:, : weight.shape[1]]
    if global_scale is not None:
        scale = scale * global_scale
    codes = torch.where(scale == 0, 0.0, weight / scale)
    return round_to(codes, FORMATS[scheme.format])

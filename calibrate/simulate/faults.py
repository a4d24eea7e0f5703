"""Applies a fault to a simulation: to scales that are read, to dequantized weights, or to RoPE.

Weights arrive dequantized, float32 [N, K], and their codes are recovered: dividing a dequantized
value by its scale misses the code by at most an ulp, and rounding to the format corrects that.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from calibrate.decoder.rounding import round_to
from calibrate.simulate.cache import CacheRounding
from calibrate.simulate.model import Schemes
from calibrate.simulate.scales import DeviceScales, Scales
from octet.artifacts.scenarios import Fault, FaultKind, Scenario
from octet.model.spec import ModelSpec
from octet.numerics.formats import FORMATS
from octet.recipe import KvCacheDtype, Recipe, TensorScheme

__all__ = [
    "DEFAULT_THETA",
    "OTHER_CACHE",
    "TakenScales",
    "as_fused",
    "cache_rounding",
    "changes_weights",
    "faulty_scales",
    "faulty_theta",
    "faulty_weights",
    "mergeable",
]

_EXCHANGED = {"k_scale": "v_scale", "v_scale": "k_scale"}
OTHER_CACHE: dict[KvCacheDtype, KvCacheDtype] = {"e4m3": "e5m2", "e5m2": "e4m3"}  # of 8 bits
DEFAULT_THETA = 10_000.0  # the base of RoPE that an engine assumes if it reads none
_OF_WEIGHTS = (
    "weight_scales_dropped",
    "weight_scales_scaled",
    "fused_scales_merged",
    "fused_scales_smallest",
    "fused_scales_in_one_slot",
    "expert_scales_permuted",
    "nibbles_swapped",
    "global_scales_inverted",
)
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def mergeable(scheme: TensorScheme) -> bool:
    """Returns True if fused linears of this scheme may be given one scale, the largest of theirs.

    In a two-level scheme it is the global scale.
    """
    return scheme.two_level or scheme.granularity in ("tensor", "channel")


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
        elif fault.kind == "kv_scales_exchanged":
            found[f"{name}{read}"] = scales[f"{head}.{_EXCHANGED[leaf]}"]
        elif fault.kind == "kv_bytes_reread":
            found[f"{name}{read}"] = scale
    return found


class TakenScales:
    """The scales in use under each scenario, on a device; equal ones are copied there once."""

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


def faulty_theta(spec: ModelSpec, scenario: Scenario) -> float | None:
    """Returns RoPE's base under the fault, whose frequencies are then unscaled.

    None if the fault leaves RoPE as it is.
    """
    match scenario.fault:
        case Fault(kind="rope_parameters_dropped"):
            return DEFAULT_THETA
        case Fault(kind="rope_scaling_dropped"):
            return spec.rope_theta
    return None


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
        fused = as_fused(weights, schemes, scales, spec)
        return {name: weight * factor for name, weight in fused.items()}
    read = _Read(schemes, scales)
    if fault.kind == "nibbles_swapped":
        return {name: read.with_swapped_nibbles(name, x) for name, x in weights.items()}
    if fault.kind == "weight_scales_dropped":
        return {name: read.without_scale(name, x) for name, x in weights.items()}
    others = _other_scales(fault.kind, [*weights], read, spec)
    return {
        name: read.with_scale(name, weight, others[name]) if name in others else weight
        for name, weight in weights.items()
    }


def as_fused(
    weights: Mapping[str, Tensor], schemes: Schemes, scales: DeviceScales, spec: ModelSpec
) -> dict[str, Tensor]:
    """Returns `weights` as engines fuse linears that have one scale per tensor.

    Engines dequantize each of q/k/v, or of gate and up, with its own scale, and round all to the
    largest. With equal scales, as Octet writes them, nothing changes, so weights that are read from
    its exports may come without their scales.
    """
    names = [
        name
        for name in weights
        if schemes[name][0].granularity == "tensor"
        and scales.get(f"{name}.weight_scale") is not None
    ]
    read = _Read(schemes, scales)
    found = dict(weights)
    for name, largest in _other_scales("fused_scales_merged", names, read, spec).items():
        if read.outer(name) != largest:
            scaled = weights[name] / largest
            found[name] = round_to(scaled, FORMATS[schemes[name][0].format]) * largest
    return found


def _other_scales(
    kind: FaultKind, names: Sequence[str], read: "_Read", spec: ModelSpec
) -> dict[str, Tensor]:
    """Returns the outer scales that a fault puts in place of those of the linears `names`.

    Linears that keep theirs are left out.
    """
    found: dict[str, Tensor] = {}
    if kind == "global_scales_inverted":
        return {name: 1 / read.outer(name) for name in names if read.two_level(name)}
    if kind == "expert_scales_permuted":
        count = spec.experts
        for name in names:
            if match := _EXPERT.search(name):
                following = (int(match[1]) + 1) % count
                found[name] = read.outer(_EXPERT.sub(f".experts.{following}.", name))
        return found
    inputs = {linear.name: linear.input for linear in spec.linears()}
    fused: dict[str, list[str]] = {}
    for name in filter(read.mergeable, names):
        fused.setdefault(inputs[name], []).append(name)
    for members in fused.values():
        own = torch.stack([read.outer(name).max() for name in members])
        for number, name in enumerate(members):
            if kind == "fused_scales_merged":
                found[name] = own.max()
            elif kind == "fused_scales_smallest":
                found[name] = own.min()
            elif number and read.outer(name).numel() == 1:
                found[name] = torch.ones_like(own[0])
    return found


class _Read:
    """Reads the codes of dequantized weights with other scales than those they were written with.

    The outer scale of a linear is its global scale, or else its only one.
    """

    def __init__(self, schemes: Schemes, scales: DeviceScales) -> None:
        self._schemes, self._scales = schemes, scales

    def two_level(self, name: str) -> bool:
        return self._scales.get(f"{name}.weight_global_scale") is not None

    def mergeable(self, name: str) -> bool:
        return mergeable(self._schemes[name][0])

    def outer(self, name: str) -> Tensor:
        shared = self._scales.get(f"{name}.weight_global_scale")
        return self._scales.need(f"{name}.weight_scale") if shared is None else shared

    def with_scale(self, name: str, weight: Tensor, outer: Tensor) -> Tensor:
        """Reads `weight` with another outer scale."""
        if self.two_level(name):
            return weight / self.outer(name) * outer
        return self._codes(name, weight) * self._expanded(name, outer, weight)

    def without_scale(self, name: str, weight: Tensor) -> Tensor:
        """Reads `weight` with its scales taken as 1, except a global scale."""
        codes = self._codes(name, weight)
        return codes * self.outer(name) if self.two_level(name) else codes

    def with_swapped_nibbles(self, name: str, weight: Tensor) -> Tensor:
        """Reads each pair of 4-bit codes in the wrong order; 8-bit weights stay as they are."""
        if self._schemes[name][0].format != "e2m1":
            return weight
        pairs = self._codes(name, weight).reshape(len(weight), -1, 2)
        return pairs.flip(-1).reshape(weight.shape) * self._full_scale(name, weight)

    def _codes(self, name: str, weight: Tensor) -> Tensor:
        """Recovers the values of the codes, float32 [N, K]; 0 where the scale is 0."""
        scale = self._full_scale(name, weight)
        codes = torch.where(scale == 0, 0.0, weight / scale)
        return round_to(codes, FORMATS[self._schemes[name][0].format])

    def _full_scale(self, name: str, weight: Tensor) -> Tensor:
        """Returns the scale, or the product of both levels, which broadcasts to [N, K]."""
        scale = self._expanded(name, self._scales.need(f"{name}.weight_scale"), weight)
        return scale * self.outer(name) if self.two_level(name) else scale

    def _expanded(self, name: str, scale: Tensor, weight: Tensor) -> Tensor:
        """Repeats the scales of blocks and groups for each of their elements."""
        scheme = self._schemes[name][0]
        if scheme.group_size is None or scale.ndim == 0:
            return scale
        if scheme.granularity == "block":  # one row of scales per row of blocks
            scale = scale.repeat_interleave(scheme.group_size, 0)[: weight.shape[0]]
        return scale.repeat_interleave(scheme.group_size, 1)[:, : weight.shape[1]]

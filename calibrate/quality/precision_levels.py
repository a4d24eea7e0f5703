"""Formats that a unit can be promoted to, their sizes in bytes, and the resulting recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from calibrate.quality.fused_units import Unit
from octet.model.spec import Linear, ModelSpec
from octet.numerics.formats import FORMATS
from octet.numerics.scaling import Granularity
from octet.recipe import PRESETS, Override, Recipe, TensorScheme, patterns_of

__all__ = ["Level", "Pair", "build_recipe", "levels_above", "total_bytes", "weight_bytes"]

Pair: TypeAlias = tuple[TensorScheme, TensorScheme]  # of weights and of activations

_SCALE_BYTES = {"float32": 4, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True)
class Level:
    """A format of linears: a pair of schemes, or None for BF16."""

    name: str
    pair: Pair | None


_BF16 = Level("bfloat16", None)


def levels_above(pair: Pair) -> tuple[Level, ...]:
    """Returns the next format up, if any, and BF16: nvfp4 → fp8, mxfp4 → mxfp8, fp8-static → fp8.

    Static scales give way to per-channel and per-token scales. Between those, or scales of blocks
    or groups, and BF16 there is no other level.
    """
    weights, activations = pair
    up = {"nvfp4": "fp8", "mxfp4": "mxfp8"}.get(weights.kind)
    if weights.kind == "fp8" and not activations.dynamic:
        up = "fp8"
    if up is None:
        return (_BF16,)
    preset = PRESETS[up]
    return Level(up, (preset.weights, preset.activations)), _BF16


def weight_bytes(linear: Linear, pair: Pair | None) -> int:
    """Returns the stored size in bytes of the weight with its scales."""
    elements = linear.out_features * linear.in_features
    if pair is None:
        return 2 * elements
    scheme = pair[0]
    shape = (linear.out_features, linear.in_features)
    scales = prod(Granularity.of(scheme.granularity, scheme.group_size).scale_shape(shape))
    size = elements * FORMATS[scheme.format].bits // 8 + scales * _SCALE_BYTES[scheme.scale_format]
    return size + (4 if scheme.two_level else 0)


def build_recipe(recipe: Recipe, promoted: Sequence[tuple[Unit, Level]], name: str) -> Recipe:
    """Returns `recipe` with units at their levels, linears by full name (experts as `*`)."""
    exclude = list(recipe.exclude)
    overrides = []
    for unit, level in promoted:
        patterns = patterns_of(unit.names)
        if level.pair is None:
            exclude += patterns
            continue
        weights, activations = level.pair
        overrides += [
            Override(match=pattern, weights=weights, activations=activations)
            for pattern in patterns
        ]
    changes = {"name": name, "exclude": exclude, "overrides": (*overrides, *recipe.overrides)}
    return Recipe.model_validate(recipe.model_dump() | changes)


def total_bytes(spec: ModelSpec, pairs: Mapping[str, Pair | None]) -> int:
    """Returns the bytes of all weights: linears in `pairs` quantized, everything else in BF16."""
    linears = {f"{linear.name}.weight": linear for linear in spec.linears()}
    total = 0
    for name, shape in spec.tensor_shapes():
        linear = linears.get(name)
        if linear is None:
            total += 2 * prod(shape)
        else:
            total += weight_bytes(linear, pairs.get(linear.name))
    return total

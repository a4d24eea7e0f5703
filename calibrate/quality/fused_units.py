"""Fused groups: the linears that one kernel computes when served, and that share a format."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from calibrate.decoder.experts import expert_weights
from octet.model.spec import Linear, ModelSpec
from octet.recipe import PRESETS, Recipe, TensorScheme

__all__ = ["Unit", "find_units", "format_label", "unit_weights"]

# Names that engines give to the fused linears.
_FUSED = {"q_proj+k_proj+v_proj": "qkv_proj", "gate_proj+up_proj": "gate_up_proj"}


@dataclass(frozen=True)
class Unit:
    """Linears that are quantized together: q/k/v, gate/up, one alone, or all experts of a layer."""

    name: str  # such as model.layers.0.self_attn.qkv_proj, or model.layers.0.mlp.experts
    layer: int
    linears: tuple[Linear, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(linear.name for linear in self.linears)

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum(linear.out_features * linear.in_features for linear in self.linears)


def find_units(spec: ModelSpec, recipe: Recipe) -> list[Unit]:
    """Returns the units of the linears that `recipe` quantizes, in execution order."""
    layers = {spec.layer(index): index for index in range(spec.layers)}
    found: dict[tuple[str, str], list[Linear]] = {}
    for linear in spec.linears():
        if recipe.scheme_of(linear.name) is not None:
            block, _, first = linear.input.removesuffix(".input").rpartition(".")
            if ".experts." in block:
                block, first = block.rpartition(".")[0], ""
            found.setdefault((block, first), []).append(linear)
    units = []
    for (block, first), linears in found.items():
        joined = "+".join(linear.name.rpartition(".")[2] for linear in linears)
        name = f"{block}.{_FUSED.get(joined, joined)}" if first else block
        layer = ".".join(block.split(".")[:3])
        units.append(Unit(name, layers[layer], tuple(linears)))
    return units


def unit_weights(model: Any, spec: ModelSpec, unit: Unit) -> dict[str, Tensor]:
    """Returns each linear's current weight [N, K] in the model, without a copy."""
    if ".experts." not in unit.linears[0].name:
        return {name: model.get_submodule(name).weight for name in unit.names}
    prefix = spec.layer(unit.layer)
    weights = expert_weights(model.get_submodule(prefix), prefix, spec)
    return {name: weights[name] for name in unit.names}


def format_label(schemes: Iterable[tuple[TensorScheme, TensorScheme] | None]) -> str:
    """Names the presets that these schemes match, whatever the method of their scales."""
    labels = {_label(scheme) for scheme in schemes}
    return " and ".join(sorted(labels))


def _label(scheme: tuple[TensorScheme, TensorScheme] | None) -> str:
    if scheme is None:
        return "bfloat16"
    plain = tuple(_plain(part) for part in scheme)
    for name, preset in PRESETS.items():
        if plain == (_plain(preset.weights), _plain(preset.activations)):
            return name
    return f"{scheme[0].format} {scheme[0].granularity}"


def _plain(scheme: TensorScheme) -> TensorScheme:
    return scheme.model_copy(update={"method": "max", "percentile": 99.99, "margin": 0})

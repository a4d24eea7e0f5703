"""A model that computes as it will be served, with weights that can be trained."""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from calibrate.decoder.rounding import fake_quantize, fake_quantize_learned, round_to
from calibrate.samples.batches import Batch
from calibrate.simulate.cache import CacheRounding, round_attention
from calibrate.simulate.model import Schemes, module_schemes, round_inputs, rounds_inputs
from calibrate.simulate.scales import DeviceScales, Scales
from octet.model.spec import ModelSpec
from octet.numerics.formats import E4M3
from octet.numerics.microscaling import LEAST_E4M3
from octet.recipe import Recipe

__all__ = ["Student"]

_SCALE = ".weight_scale"


class Student:
    """The float32 transformers `model`, rounded as `recipe` is served with `scales`.

    `trained` holds the parameters that gradients reach, by name: copies of the quantized linears'
    weights [N, K] with "weights" in `train`, and of the norms' [H] with "norms". With "scales" it
    holds x of each weight scale s, which becomes s · exp(x): scales stay positive, and all move at
    the same relative rate. Global scales stay. The model's own parameters stay as they are.
    Activations and cache are rounded until `close`, but not inputs of linears whose schemes are
    `weight_only` (`octet.hardware.support.pattern_of`). If only some `layers` have weights in
    memory, only these are rounded and trained.
    """

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        recipe: Recipe,
        scales: Scales,
        train: Collection[str],
        layers: range | None = None,
        weight_only: Collection[str] = (),
    ) -> None:
        self._model = model
        layers = range(spec.layers) if layers is None else layers
        only = {linear.name for index in layers for linear in spec.linears(index)}
        self._schemes = module_schemes(spec, recipe, only)
        device = next(model.get_submodule(spec.layer(layers[0])).parameters()).device
        self._scales = DeviceScales(scales, device)
        names = [f"{linear}.weight" for linear in self._schemes] if "weights" in train else []
        if "norms" in train:
            names += _norms(model)
        model.requires_grad_(False)
        self.trained = {
            name: model.get_parameter(name).detach().clone().requires_grad_() for name in names
        }
        self._log_factors: dict[str, Tensor] = {}  # x of each trained scale s·e^x, by linear
        if "scales" in train:
            for owner, linears in _sharing(spec, self._schemes).items():
                name = f"{owner}{_SCALE}"
                move = torch.zeros_like(self._scales.need(name)).requires_grad_()
                self.trained[name] = move
                self._log_factors |= dict.fromkeys(linears, move)
        self._rounding = ExitStack()
        for index in layers:
            prefix = spec.layer(index)
            layer = model.get_submodule(prefix)
            with_inputs = rounds_inputs(self._schemes, weight_only)
            mine = {
                name: pair for name, pair in with_inputs.items() if name.startswith(f"{prefix}.")
            }
            rounded = round_inputs(layer, index, spec, mine, self._scales)
            self._rounding.enter_context(rounded)
            cache = round_attention(layer, prefix, CacheRounding(recipe.kv_cache), self._scales)
            self._rounding.enter_context(cache)

    def served(self) -> dict[str, Tensor]:
        """Returns the trained parameters and all quantized weights, rounded as they are stored."""
        served = {name: x for name, x in self.trained.items() if not name.endswith(_SCALE)}
        for linear, (scheme, _) in self._schemes.items():
            name = f"{linear}.weight"
            weight = self.trained.get(name)
            weight = self._model.get_parameter(name) if weight is None else weight
            second = self._scales.get(f"{linear}.weight_global_scale")
            quantize = fake_quantize_learned if linear in self._log_factors else fake_quantize
            served[name] = quantize(weight, scheme, self._scale(linear), second)
        return served

    def scales(self) -> dict[str, NDArray[np.float32]]:
        """Returns the trained scales as they are stored, under their names in a calibration."""
        with torch.no_grad():
            return {f"{x}{_SCALE}": self._scale(x).cpu().numpy() for x in self._log_factors}

    def _scale(self, linear: str) -> Tensor:
        """Returns the weight scale as it is stored; if it is trained, with gradients."""
        scale = self._scales.need(f"{linear}{_SCALE}")
        if linear not in self._log_factors:
            return scale
        moved = scale * self._log_factors[linear].exp()
        if not self._schemes[linear][0].two_level:
            return moved.clamp(min=torch.finfo(torch.float32).tiny)
        with torch.no_grad():
            stored = round_to(moved.clamp(min=LEAST_E4M3), E4M3)
        return stored + (moved - moved.detach())  # the value of `stored`, the gradient of `moved`

    def states(self, batch: Batch) -> Tensor:
        """Computes the last hidden states [B, T, H] of `batch`, with gradients."""
        decoder = self._model.base_model
        prefix = f"{self._model.base_model_prefix}."
        parameters = {name.removeprefix(prefix): x for name, x in self.served().items()}
        ids = batch.token_ids.to(self._model.device)
        states: Tensor = functional_call(
            decoder, parameters, (), {"input_ids": ids, "use_cache": False}
        ).last_hidden_state
        return states

    def close(self) -> None:
        """Stops rounding activations and cache: the model computes as before."""
        self._rounding.close()


def _sharing(spec: ModelSpec, schemes: Schemes) -> dict[str, list[str]]:
    """Groups the quantized linears that share a weight scale, under the first of each group.

    They do if a scale covers a whole weight: engines fuse linears that read the same input, and
    have one scale for all of them.
    """
    groups: dict[Any, list[str]] = {}
    for linear in spec.linears():
        if linear.name in schemes:
            weights = schemes[linear.name][0]
            key = (linear.input, weights) if weights.granularity == "tensor" else linear.name
            groups.setdefault(key, []).append(linear.name)
    return {linears[0]: linears for linears in groups.values()}


def _norms(model: Any) -> list[str]:
    """Returns the names of the weights of all normalization layers."""
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Norm") and isinstance(module.weight, torch.nn.Parameter)
    ]

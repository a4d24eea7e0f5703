"""A model that computes as it will be served, with weights that can be trained."""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from calibrate.decoder.rounding import fake_quantize
from calibrate.samples.batches import Batch
from calibrate.simulate.cache import CacheRounding, round_attention
from calibrate.simulate.model import module_schemes, round_inputs
from calibrate.simulate.scales import DeviceScales, Scales
from octet.model.spec import ModelSpec
from octet.recipe import Recipe

__all__ = ["Student"]


class Student:
    """The float32 transformers `model`, rounded as `recipe` is served with `scales`.

    `trained` holds the parameters that gradients reach, by name: copies of the quantized linears'
    weights [N, K] with "weights" in `train`, and of the norms' [H] with "norms". The model's own
    parameters stay as they are. Activations and cache are rounded until `close`. If only some
    `layers` have weights in memory, only these are rounded and trained.
    """

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        recipe: Recipe,
        scales: Scales,
        train: Collection[str],
        layers: range | None = None,
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
        self._rounding = ExitStack()
        for index in layers:
            prefix = spec.layer(index)
            layer = model.get_submodule(prefix)
            mine = {
                name: pair for name, pair in self._schemes.items() if name.startswith(f"{prefix}.")
            }
            rounded = round_inputs(layer, index, spec, mine, self._scales)
            self._rounding.enter_context(rounded)
            cache = round_attention(layer, prefix, CacheRounding(recipe.kv_cache), self._scales)
            self._rounding.enter_context(cache)

    def served(self) -> dict[str, Tensor]:
        """Returns the trained parameters and all quantized weights, rounded as they are stored."""
        rounded = {}
        for linear, (scheme, _) in self._schemes.items():
            name = f"{linear}.weight"
            weight = self.trained.get(name)
            rounded[name] = fake_quantize(
                self._model.get_parameter(name) if weight is None else weight,
                scheme,
                self._scales.need(f"{linear}.weight_scale"),
                self._scales.get(f"{linear}.weight_global_scale"),
            )
        return self.trained | rounded

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


def _norms(model: Any) -> list[str]:
    """Returns the names of the weights of all layers that normalize."""
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Norm") and isinstance(module.weight, torch.nn.Parameter)
    ]

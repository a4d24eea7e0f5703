"""Simulates quantized serving with a transformers model, without a server.

Weights are replaced by their dequantized codes, the activations of each linear are rounded before
its GEMM, and keys and values are rounded as they enter the cache. The GEMMs themselves stay in the
model's own dtype: float32 gives the result of an exact kernel, bfloat16 adds its own noise. The
cost is a second copy of the quantized weights, and some passes over each linear's activations.

`simulate` is for a whole model in memory, `LayerSimulator` for one that runs layer by layer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from calibrate.decoder.arithmetic import Float32Linear
from calibrate.decoder.experts import expert_weights, tap_experts
from calibrate.decoder.rounding import fake_quantize, power_scales
from calibrate.simulate.cache import CacheRounding, round_attention
from calibrate.simulate.scales import DeviceScales, Scales, Watch
from octet.artifacts.serving_path import ServingPath
from octet.hardware.support import pattern_of
from octet.model.spec import ModelSpec
from octet.numerics.formats import FORMATS
from octet.recipe import KvCacheDtype, Recipe, TensorScheme

__all__ = [
    "LayerSimulator",
    "Scales",
    "Schemes",
    "Watch",
    "Weights",
    "decoded_weights",
    "layer_weights",
    "module_schemes",
    "replace_weights",
    "round_inputs",
    "rounded_inputs",
    "rounds_inputs",
    "simulate",
    "simulate_modules",
    "with_power_scales",
]

Schemes: TypeAlias = Mapping[str, tuple[TensorScheme, TensorScheme]]  # weight and input scheme
# weights(name) -> float32 [N, K], dequantized from the exported file; None: follow the recipe
Weights: TypeAlias = Callable[[str], NDArray[np.float32] | None]

_LEAST = 1e-4  # vLLM gives a block of smaller magnitudes the scale of this one
_ROUNDED = 2.0**-22  # relative error of a few float32 products and quotients


@contextmanager
def simulate(
    model: Any,
    spec: ModelSpec,
    recipe: Recipe,
    scales: Scales,
    weight_only: Collection[str] = (),
) -> Iterator[None]:
    """While active, `model` computes as if served with `recipe` and `scales`.

    Inputs of linears whose schemes are among `weight_only` (`octet.hardware.support.pattern_of`)
    are not rounded.

    Afterwards the model is exactly as before. `scales` are those of a calibration. Forward passes
    work with and without a cache. Raises KeyError, naming the scale, if one is missing.
    """
    schemes = module_schemes(spec, recipe)
    with simulate_modules(model, spec, schemes, scales, recipe.kv_cache, weight_only=weight_only):
        yield


def module_schemes(
    spec: ModelSpec, recipe: Recipe, only: Collection[str] | None = None
) -> dict[str, tuple[TensorScheme, TensorScheme]]:
    """Returns the schemes of the linears that `recipe` quantizes, restricted to `only` if given."""
    named = ((linear.name, recipe.scheme_of(linear.name)) for linear in spec.linears())
    return {
        name: scheme
        for name, scheme in named
        if scheme is not None and (only is None or name in only)
    }


@contextmanager
def simulate_modules(
    model: Any,
    spec: ModelSpec,
    schemes: Schemes,
    scales: Scales,
    kv_cache: KvCacheDtype | None,
    *,
    weight_only: Collection[str] = (),
    watch: Watch | None = None,
) -> Iterator[None]:
    """Simulates some modules only: linears, `lm_head`, `model.embed_tokens` (weights only).

    With `kv_cache` None, keys and values are not rounded. Experts always run one by one, see
    `calibrate.decoder.experts.tap_experts`.
    """
    found = DeviceScales(scales, model.device)
    with_inputs = rounds_inputs(schemes, weight_only)
    layers = {spec.layer(index): dict[str, Any]() for index in range(spec.layers)}
    others: dict[str, Any] = {}
    for name, pair in schemes.items():
        layers.get(".".join(name.split(".")[:3]), others)[name] = pair
    with ExitStack() as stack:
        for name, pair in others.items():
            module = model.get_submodule(name)
            weights = decoded_weights({name: module.weight}, {name: pair}, found)
            stack.enter_context(_parameter(module, "weight", weights[name]))
            if isinstance(module, nn.Linear) and name in with_inputs:
                rounder = _Inputs(f"{name}.input", name, pair[1], found, watch)
                rounder.readers = 1
                stack.enter_context(module.register_forward_pre_hook(rounder.hook))
        for index, (prefix, mine) in enumerate(layers.items()):
            layer = model.get_submodule(prefix)
            weights = decoded_weights(layer_weights(layer, prefix, spec, mine), mine, found)
            stack.enter_context(replace_weights(layer, prefix, spec, weights))
            rounded = {name: pair for name, pair in mine.items() if name in with_inputs}
            stack.enter_context(round_inputs(layer, index, spec, rounded, found, watch))
            if kv_cache is not None:
                rounding = CacheRounding(kv_cache)
                stack.enter_context(round_attention(layer, prefix, rounding, found, watch))
        yield


def rounds_inputs(schemes: Schemes, weight_only: Collection[str]) -> Schemes:
    """Returns the linears among `schemes` whose inputs are rounded: all but the `weight_only`."""
    return {name: pair for name, pair in schemes.items() if pattern_of(pair) not in weight_only}


@dataclass(frozen=True)
class LayerSimulator:
    """Makes one decoder layer at a time compute as it would be served.

    `schemes` are those of all quantized linears. `exported(name)` returns an exported weight,
    float32 [N, K], or None if it follows the recipe.
    """

    spec: ModelSpec
    schemes: Schemes
    scales: DeviceScales
    exported: Weights | None = None

    def of_layer(self, index: int) -> Schemes:
        """Returns the schemes of the layer's quantized linears."""
        prefix = f"{self.spec.layer(index)}."
        return {name: pair for name, pair in self.schemes.items() if name.startswith(prefix)}

    def weights(self, layer: nn.Module, index: int, names: Collection[str]) -> dict[str, Tensor]:
        """Returns the weights of the layer's linears `names` as served, float32 [N, K]."""
        found: dict[str, Tensor] = {}
        for name in names:
            weight = None if self.exported is None else self.exported(name)
            if weight is not None:
                own = torch.from_numpy(np.asarray(weight, np.float32))
                found[name] = own.to(self.scales.device)
        left = [name for name in names if name not in found]
        for name, own in layer_weights(layer, self.spec.layer(index), self.spec, left).items():
            found |= decoded_weights({name: own.float()}, self.schemes, self.scales)
        return found

    def factors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Returns the float32 scales of whole weights, [], or of their rows, [N, 1], by linear."""
        found = {}
        for name in names:
            scale = self.scales.get(f"{name}.weight_global_scale")
            if scale is None and self.schemes[name][0].granularity in ("tensor", "channel"):
                scale = self.scales.get(f"{name}.weight_scale")
            if scale is not None:
                found[name] = scale
        return found

    @contextmanager
    def rounding(
        self,
        layer: nn.Module,
        index: int,
        schemes: Schemes,
        cache: CacheRounding | None,
        scales: DeviceScales | None = None,
    ) -> Iterator[None]:
        """While active, rounds the activations of the linears in `schemes`, and keys and values.

        `scales` are used in place of the simulator's own, if given.
        """
        used = scales or self.scales
        with ExitStack() as stack:
            stack.enter_context(round_inputs(layer, index, self.spec, schemes, used))
            if cache is not None:
                prefix = self.spec.layer(index)
                stack.enter_context(round_attention(layer, prefix, cache, used))
            yield


def layer_weights(
    layer: nn.Module, prefix: str, spec: ModelSpec, names: Collection[str]
) -> dict[str, Tensor]:
    """Returns views of the weights [N, K] of the linears `names` of decoder layer `prefix`."""
    experts = expert_weights(layer, prefix, spec) if any(".experts." in x for x in names) else {}
    return {
        name: experts[name]
        if name in experts
        else layer.get_parameter(f"{name.removeprefix(f'{prefix}.')}.weight")
        for name in names
    }


@torch.no_grad()
def decoded_weights(
    weights: Mapping[str, Tensor], schemes: Schemes, scales: DeviceScales
) -> dict[str, Tensor]:
    """Quantizes and dequantizes `weights`; raises KeyError, naming the scale, if one is missing.

    Shapes and dtypes stay the same.
    """
    return {
        name: fake_quantize(
            weight,
            schemes[name][0],
            scales.need(f"{name}.weight_scale"),
            scales.get(f"{name}.weight_global_scale"),
        )
        for name, weight in weights.items()
    }


@torch.no_grad()
def with_power_scales(weights: Mapping[str, Tensor], schemes: Schemes) -> dict[str, Tensor]:
    """Quantizes weights of FP8 blocks again, with scales that are powers of two; others stay.

    `weights` are dequantized, float32 [N, K]. vLLM does this for DeepGEMM as it loads a checkpoint
    (`requant_weight_ue8m0_inplace`): a block's scale becomes the least power of two at which its
    largest magnitude, or 1e-4, does not saturate. Experts keep their weights: on Hopper, a kernel
    in Triton multiplies them.
    """
    found = dict(weights)
    for name, weight in weights.items():
        scheme = schemes[name][0]
        if scheme.blocks and (size := scheme.group_size) and ".experts." not in name:
            short = [-length % size for length in weight.shape]
            tiles = pad(weight.abs(), (0, short[1], 0, short[0]))
            amax = tiles.reshape(-1, size, tiles.shape[1] // size, size).amax((1, 3))
            scale = power_scales(amax.clamp(min=_LEAST), FORMATS[scheme.format])
            found[name] = fake_quantize(weight, scheme, scale)
    return found


def rounded_inputs(schemes: Schemes, path: ServingPath) -> Schemes:
    """Returns the schemes by which `path` rounds the inputs of linears; {} if it rounds none."""
    if not path.activations:
        return {}
    if not path.power_scales:
        return schemes
    return {
        name: (weight, inputs.model_copy(update={"scale_format": "e8m0"}))
        if weight.blocks
        else (weight, inputs)
        for name, (weight, inputs) in schemes.items()
    }


@contextmanager
def replace_weights(
    layer: nn.Module,
    prefix: str,
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    scales: Mapping[str, Tensor] | None = None,
) -> Iterator[None]:
    """While active, linears of `layer` use `weights` [N, K], in each linear's own dtype.

    `scales`, [] or [N, 1], are factors of weights by linear: see `_in_bfloat16`.
    """
    scales = scales or {}
    with ExitStack() as stack:
        mine = [name for name in weights if ".experts." in name]
        if mine:  # fused in one tensor: all of the layer's experts are copied
            experts: Any = layer.get_submodule("mlp.experts")
            for fused in ("gate_up_proj", "down_proj"):
                stack.enter_context(_parameter(experts, fused, getattr(experts, fused).clone()))
            views = expert_weights(layer, prefix, spec)
            for name in mine:
                views[name].copy_(weights[name])
        for name in weights.keys() - set(mine):
            module: Any = layer.get_submodule(name.removeprefix(f"{prefix}."))
            if isinstance(module, Float32Linear):
                weight = weights[name].float()
                if weight.is_cuda:
                    weight, module.scale = _in_bfloat16(weight, scales.get(name))
                    stack.callback(setattr, module, "scale", None)
            else:
                weight = weights[name].to(module.weight.dtype)
            stack.enter_context(_parameter(module, "weight", weight))
        yield


def _in_bfloat16(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns a float32 `weight` as bfloat16 codes and their `scale`, if they hold it.

    A GPU multiplies bfloat16 weights twice as fast as float32 ones, see
    `calibrate.decoder.split_matmul`. Codes of 8 bits and fewer are exact in bfloat16, and so are
    their products with scales of few bits; a scale in float32 has to be a factor. The result may
    differ from `weight` by what float32 rounds in multiplying the two.
    """
    codes = (weight if scale is None else weight / scale).bfloat16()
    real = codes.float() if scale is None else codes.float() * scale
    near = (real - weight).abs_() <= _ROUNDED * weight.abs()
    return (codes, scale) if bool(near.all()) else (weight, None)


@contextmanager
def round_inputs(
    layer: nn.Module,
    index: int,
    spec: ModelSpec,
    schemes: Schemes,
    scales: DeviceScales,
    watch: Watch | None = None,
) -> Iterator[None]:
    """While active, rounds the activations of the linears in `schemes`, in decoder layer `index`.

    All `schemes` are of that layer; {} rounds nothing. Experts always run one by one.
    """
    prefix = spec.layer(index)
    with ExitStack() as stack:
        rounders: dict[Any, _Inputs] = {}
        by_name: dict[str, _Inputs] = {}  # by observation, for experts
        inputs = {linear.name: linear.input for linear in spec.linears(index)}
        for name, (_, scheme) in schemes.items():
            rounder = _Inputs(inputs[name], name, scheme, scales, watch)
            rounder = rounders.setdefault(rounder.key, rounder)
            by_name[inputs[name]] = rounder
            rounder.readers += 1
            if ".experts." not in name:
                module = layer.get_submodule(name.removeprefix(f"{prefix}."))
                stack.enter_context(module.register_forward_pre_hook(rounder.hook))
        if index in spec.sparse_layers:
            stack.enter_context(tap_experts(layer, prefix, spec, _tap(by_name)))
        yield


class _Inputs:
    """Rounds one tensor once for all of its `readers`, such as q, k and v."""

    def __init__(
        self,
        observed: str,
        linear: str,
        scheme: TensorScheme,
        scales: DeviceScales,
        watch: Watch | None,
    ) -> None:
        self.readers = 0
        self._name, self._scheme, self._watch = observed, scheme, watch
        self._scale = scales.get(f"{linear}.input_scale")
        self._global_scale = scales.get(f"{linear}.input_global_scale")
        if not scheme.dynamic:
            scales.need(f"{linear}.input_scale")
        self._last: tuple[Tensor, Tensor] | None = None  # input, and input rounded
        self._reads = 0

    @property
    def key(self) -> Any:
        """Key that is equal for linears whose input is rounded in the same way."""
        return self._name, self._scheme, _number(self._scale), _number(self._global_scale)

    def hook(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if self._last is None or self._last[0] is not x:
            self._last, self._reads = (x, self.round(x)), 0
        rounded = self._last[1]
        self._reads += 1
        if self._reads == self.readers:
            self._last = None  # frees the tensor as early as possible
        return (rounded, *args[1:])

    def round(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        rounded = fake_quantize(x, self._scheme, self._scale, self._global_scale)
        if self._watch is not None:
            self._watch(self._name, x, rounded, index)
        return rounded


def _tap(rounders: Mapping[str, _Inputs]) -> Callable[[str, Tensor, Tensor], Tensor]:
    def tap(name: str, rows: Tensor, index: Tensor) -> Tensor:
        return rounders[name].round(rows, index) if name in rounders else rows

    return tap


@contextmanager
def _parameter(module: Any, name: str, value: Tensor) -> Iterator[None]:
    """Swaps a parameter while active, then restores the same object, so that ties to it hold."""
    before = getattr(module, name)
    setattr(module, name, nn.Parameter(value.detach(), requires_grad=False))
    try:
        yield
    finally:
        setattr(module, name, before)


def _number(scale: Tensor | None) -> float | None:
    return None if scale is None else float(scale)

"""A transformers model that computes as it would be served quantized, without a server.

Weights are replaced by what their codes decode to, what each linear reads is rounded before it
reads it, and keys and values are rounded where they enter the cache. The products themselves stay
in the model's own dtype: float32 gives what an exact kernel gives, bfloat16 adds its own noise.
It costs a second copy of the weights that are quantized, and some passes over each linear's input.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from calibrate.experts import expert_weights, tap_experts
from calibrate.rounding import fake_quantize, round_cache
from octet.model import ModelSpec
from octet.recipe import KvCacheDtype, Recipe, TensorScheme

__all__ = ["Scales", "Schemes", "Watch", "module_schemes", "simulate", "simulate_modules"]

Scales: TypeAlias = Mapping[str, NDArray[np.float32]]  # keyed as in `octet.calibration`
Schemes: TypeAlias = Mapping[str, tuple[TensorScheme, TensorScheme]]  # weights, inputs; by module

# watch(name, x, rounded, index): what was rounded, before and after, as `octet.calibration` names
# it. x is [B, T, ...] of a batch; or, for an expert, [n, K] of the tokens `index` of B*T.
Watch: TypeAlias = Callable[[str, Tensor, Tensor, Tensor | None], None]


@contextmanager
def simulate(model: Any, spec: ModelSpec, recipe: Recipe, scales: Scales) -> Iterator[None]:
    """While active, `model` computes as `recipe` with `scales` serves it; then as before, exactly.

    `scales` are those of a calibration. Any forward pass of the model will do, with a cache or
    without one. KeyError names a scale that is missing.
    """
    with simulate_modules(model, spec, module_schemes(spec, recipe), scales, recipe.kv_cache):
        yield


def module_schemes(
    spec: ModelSpec, recipe: Recipe, only: Collection[str] | None = None
) -> dict[str, tuple[TensorScheme, TensorScheme]]:
    """The schemes of each linear that `recipe` quantizes, of those in `only` if given."""
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
    watch: Watch | None = None,
) -> Iterator[None]:
    """`simulate` for some modules alone: linears, `lm_head`, `model.embed_tokens` (weights alone).

    `kv_cache` None leaves keys and values as they are. Experts run one by one in any case, see
    `calibrate.experts.tap_experts`.
    """
    device = model.device

    def scale(name: str) -> Tensor | None:
        found = scales.get(name)
        return None if found is None else torch.from_numpy(np.asarray(found)).to(device)

    @torch.no_grad()
    def quantized(name: str, weight: Tensor) -> Tensor:
        found = scale(f"{name}.weight_scale")
        if found is None:
            raise KeyError(f"{name}.weight_scale")
        return fake_quantize(weight, schemes[name][0], found, scale(f"{name}.weight_global_scale"))

    with ExitStack() as stack:
        rounders: dict[Any, _Inputs] = {}
        by_name: dict[str, _Inputs] = {}  # of experts, by observation
        inputs = {linear.name: linear.input for linear in spec.linears()}
        for name, (_, scheme) in schemes.items():
            observed = inputs.get(name, f"{name}.input")
            static, shared = scale(f"{name}.input_scale"), scale(f"{name}.input_global_scale")
            key = (observed, scheme, _number(static), _number(shared))
            if key not in rounders:
                if not scheme.dynamic and static is None:
                    raise KeyError(f"{name}.input_scale")
                rounders[key] = _Inputs(observed, scheme, static, shared, watch)
            by_name[observed] = rounders[key]
            rounders[key].readers += 1
            if ".experts." in name:
                continue
            module = model.get_submodule(name)
            stack.enter_context(_parameter(module, "weight", quantized(name, module.weight)))
            if isinstance(module, nn.Linear):
                stack.enter_context(module.register_forward_pre_hook(rounders[key].hook))
        for index in range(spec.layers):
            prefix = spec.layer(index)
            layer = model.get_submodule(prefix)
            if index in spec.sparse_layers:
                stack.enter_context(_experts(layer, prefix, spec, schemes, quantized))
                tap = _tap(by_name)
                stack.enter_context(tap_experts(layer, prefix, spec, tap))
            if kv_cache is not None:
                name = f"{prefix}.self_attn"
                pair = (scale(f"{name}.k_scale"), scale(f"{name}.v_scale"))
                cache = _CacheHook(name, kv_cache, pair, watch)
                stack.enter_context(
                    layer.self_attn.register_forward_pre_hook(cache, with_kwargs=True)
                )
        yield


class _Inputs:
    """Rounds one tensor for each of its `readers` (q, k and v, say), computing it once."""

    def __init__(
        self,
        name: str,
        scheme: TensorScheme,
        scale: Tensor | None,
        global_scale: Tensor | None,
        watch: Watch | None,
    ) -> None:
        self.readers = 0
        self._name, self._scheme, self._watch = name, scheme, watch
        self._scale, self._global_scale = scale, global_scale
        self._last: tuple[Tensor, Tensor] | None = None  # as it came, and rounded
        self._reads = 0

    def hook(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if self._last is None or self._last[0] is not x:
            self._last, self._reads = (x, self.round(x)), 0
        rounded = self._last[1]
        self._reads += 1
        if self._reads == self.readers:
            self._last = None  # so that it lives no longer than it must
        return (rounded, *args[1:])

    def round(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        rounded = fake_quantize(x, self._scheme, self._scale, self._global_scale)
        if self._watch is not None:
            self._watch(self._name, x, rounded, index)
        return rounded


class _CacheHook:
    """Puts a cache that rounds in front of the one, if any, that the attention `name` is given."""

    def __init__(
        self,
        name: str,
        kv_cache: KvCacheDtype,
        scales: tuple[Tensor | None, Tensor | None],
        watch: Watch | None,
    ) -> None:
        if scales[0] is None or scales[1] is None:
            raise KeyError(f"{name}.{'v' if scales[0] is not None else 'k'}_scale")
        self._name, self._kv_cache, self._watch = name, kv_cache, watch
        self._key_scale, self._value_scale = scales[0], scales[1]

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inner = kwargs.get("past_key_values")
        return args, kwargs | {"past_key_values": _RoundedCache(self, inner)}

    def round(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Both [B, H, T, D]."""
        rounded = (
            round_cache(key, self._kv_cache, self._key_scale),
            round_cache(value, self._kv_cache, self._value_scale),
        )
        if self._watch is not None:
            for kind, before, after in zip(("key", "value"), (key, value), rounded, strict=True):
                self._watch(
                    f"{self._name}.{kind}", before.transpose(1, 2), after.transpose(1, 2), None
                )
        return rounded


class _RoundedCache:
    def __init__(self, hook: _CacheHook, inner: Any) -> None:
        self._hook, self._inner = hook, inner

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = self._hook.round(key, value)
        if self._inner is None:
            return key, value
        return self._inner.update(key, value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _tap(rounders: Mapping[str, _Inputs]) -> Callable[[str, Tensor, Tensor], Tensor]:
    def tap(name: str, rows: Tensor, index: Tensor) -> Tensor:
        return rounders[name].round(rows, index) if name in rounders else rows

    return tap


@contextmanager
def _experts(
    layer: nn.Module,
    prefix: str,
    spec: ModelSpec,
    schemes: Schemes,
    quantized: Callable[[str, Tensor], Tensor],
) -> Iterator[None]:
    """Copies of a sparse layer's fused weights, the experts in `schemes` quantized, in place."""
    mine = [name for name in expert_weights(layer, prefix, spec) if name in schemes]
    if not mine:
        yield
        return
    with ExitStack() as stack:
        experts: Any = layer.mlp.experts  # type: ignore[union-attr]
        for fused in ("gate_up_proj", "down_proj"):
            stack.enter_context(_parameter(experts, fused, getattr(experts, fused).clone()))
        weights = expert_weights(layer, prefix, spec)
        for name in mine:
            weights[name].copy_(quantized(name, weights[name]))
        yield


@contextmanager
def _parameter(module: Any, name: str, value: Tensor) -> Iterator[None]:
    """Another parameter in its place; the very object comes back, and ties to it hold."""
    before = getattr(module, name)
    setattr(module, name, nn.Parameter(value.detach(), requires_grad=False))
    try:
        yield
    finally:
        setattr(module, name, before)


def _number(scale: Tensor | None) -> float | None:
    return None if scale is None else float(scale)

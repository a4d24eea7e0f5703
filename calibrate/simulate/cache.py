"""Rounds keys and values as a quantized cache does, for attention to use."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from calibrate.decoder.attention import e4m3_attention, replace_attention
from calibrate.decoder.rounding import round_cache
from calibrate.simulate.scales import DeviceScales, Watch
from octet.recipe import KvCacheDtype

__all__ = ["CacheRounding", "round_attention"]


@dataclass(frozen=True)
class CacheRounding:
    """An engine's rounding of its cache, and (`queries`) if its attention also computes in E4M3.

    With `own`, scales are those of the calibration's recipe, else those stored for `kv_cache`.
    `reread` is a fault: bytes written as E4M3 are read as E5M2, or the reverse.
    """

    kv_cache: KvCacheDtype
    toward_zero: bool = False
    queries: bool = False
    own: bool = True
    reread: bool = False

    def scale(self, attention: str, letter: str, scales: DeviceScales) -> Tensor:
        """Returns the scale of keys ("k") or values ("v"); raises KeyError if it is missing."""
        if self.own:
            return scales.need(f"{attention}.{letter}_scale")
        if self.kv_cache == "float16":
            return torch.ones((), device=scales.device)
        return scales.need(f"{attention}.{letter}_scale_{self.kv_cache}")


@contextmanager
def round_attention(
    layer: nn.Module,
    prefix: str,
    rounding: CacheRounding,
    scales: DeviceScales,
    watch: Watch | None = None,
) -> Iterator[None]:
    """While active, decoder layer `prefix` attends to keys and values as the cache stores them."""
    name = f"{prefix}.self_attn"
    attention: Any = layer.self_attn
    with ExitStack() as stack:
        hook = _CacheHook(name, rounding, scales, watch)
        stack.enter_context(attention.register_forward_pre_hook(hook, with_kwargs=True))
        if rounding.queries:
            # Without a scale, an engine uses 1.
            scale = scales.get(f"{name}.q_scale_e4m3")
            scale = torch.ones(()) if scale is None else scale
            stack.enter_context(replace_attention(attention, e4m3_attention(scale)))
        yield


class _CacheHook:
    """Puts a rounding cache in front of the cache, if any, passed to the attention `name`."""

    def __init__(
        self, name: str, rounding: CacheRounding, scales: DeviceScales, watch: Watch | None
    ) -> None:
        self._name, self._rounding, self._watch = name, rounding, watch
        self._scales = [rounding.scale(name, letter, scales) for letter in "kv"]

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inner = kwargs.get("past_key_values")
        return args, kwargs | {"past_key_values": _RoundedCache(self, inner)}

    def round(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds key and value, both [B, H, T, D]."""
        rounded = []
        for kind, x, scale in zip(("key", "value"), (key, value), self._scales, strict=True):
            toward_zero = self._rounding.toward_zero
            kv_cache, reread = self._rounding.kv_cache, self._rounding.reread
            after = round_cache(x, kv_cache, scale, toward_zero=toward_zero, reread=reread)
            if self._watch is not None:
                name = f"{self._name}.{kind}"
                self._watch(name, x.transpose(1, 2), after.transpose(1, 2), None)
            rounded.append(after)
        return rounded[0], rounded[1]


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

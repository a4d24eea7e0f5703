"""Observes or replaces the attention of one module, and computes attention as FP8 kernels do.

transformers 5 looks up its attention functions by name in one mapping, whose entries can be
overridden in this process. An override lasts only while its context is active.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from calibrate.decoder.rounding import round_cache, round_to
from octet.numerics.formats import E4M3

__all__ = ["Attention", "e4m3_attention", "replace_attention", "tap_queries"]

# attention(inner, module, query [B, H, T, D], key [B, H', S, D], value, mask, **options) ->
# ([B, T, H, D], None), as in transformers; `inner` is the replaced function.
Attention: TypeAlias = Callable[..., Any]


@contextmanager
def replace_attention(module: nn.Module, attention: Attention) -> Iterator[None]:
    """While active, `module` computes `attention`; other modules are unchanged."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    config: Any = module.config
    name: str = config._attn_implementation
    inner = functions.get(name, _eager)
    replaced = name in functions._local_mapping

    def attend(caller: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if caller is not module:
            return inner(caller, *args, **kwargs)
        return attention(inner, caller, *args, **kwargs)

    functions[name] = attend
    try:
        yield
    finally:
        if replaced:
            functions[name] = inner
        else:
            del functions[name]


def _eager(caller: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Computes attention in separate steps, with the function of the caller's architecture."""
    source = sys.modules[type(caller).__module__]
    return source.eager_attention_forward(caller, *args, **kwargs)


@contextmanager
def tap_queries(module: nn.Module, tap: Callable[[Tensor], None]) -> Iterator[None]:
    """While active, calls `tap` with each query [B, H, T, D] of `module`, after RoPE.

    If taps of one module are nested, all are called.
    """

    def attention(inner: Any, caller: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        tap(query)
        return inner(caller, query, *args, **kwargs)

    with replace_attention(module, attention):
        yield


def e4m3_attention(scale: Tensor) -> Attention:
    """Returns attention that rounds queries, with `scale` [], and probabilities to E4M3.

    This is what FlashAttention 3 does with an E4M3 cache. Probabilities are relative to the largest
    of their row, times 2^8 so that small ones keep their bits (`Max_offset` in its softmax.h). They
    are summed before they are rounded, with each head's attention sink, if there are any.
    """

    def attention(
        _inner: Any,
        _module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,  # sinks [H]
        **_: Any,
    ) -> tuple[Tensor, None]:
        heads, length = query.shape[1], query.shape[2]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        keys, values = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
        queries = round_cache(query.float(), "e4m3", scale.to(query.device))
        scores = queries @ keys.transpose(-1, -2) * scaling  # [B, H, T, S]
        if softcap is not None:  # Gemma 2 has one
            scores = torch.tanh(scores / softcap) * softcap
        if mask is None:
            seen = torch.ones(length, keys.shape[2], dtype=torch.bool, device=query.device)
            mask = seen.tril_(keys.shape[2] - length)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill_(~mask, -torch.inf)
        else:
            scores = scores + mask
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp_().mul_(256)
        total = weights.sum(-1, keepdim=True)
        if s_aux is not None:
            total = total + (s_aux.float()[:, None, None] - largest).exp_().mul_(256)
        out = round_to(weights, E4M3) @ values / total
        return out.to(query.dtype).transpose(1, 2), None

    return attention

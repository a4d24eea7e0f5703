"""A trial: an attention backend for vLLM 0.24 that keeps the KV cache in E5M2.

vLLM's Triton backend accepts `fp8_e5m2`, and then asserts; where it does not, its writer stores
E4M3. This one writes with vLLM's CUDA operator, which stores E5M2 = round to nearest even of
x / scale, saturating, and reads with vLLM's Triton kernel, which multiplies by the scale. Queries
stay in BF16. Needs no FlashInfer. docs/LOG.md has its speed: better than FlashInfer's at short
contexts, worse at long ones, so it is not part of Octet.
"""

from typing import Any, ClassVar

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

__all__ = ["E5m2Backend", "E5m2Impl"]


class E5m2Impl(TritonAttentionImpl):  # type: ignore[misc]  # vLLM is not installed for mypy
    """Attention of one layer."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.fp8_dtype = torch.float8_e5m2
        self.supports_quant_query_input = False  # queries would be rounded to E4M3

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Stores keys and values [tokens, heads, size] in a cache uint8 [blocks, 2, 16, ...]."""
        key_cache, value_cache = kv_cache.unbind(1)
        ops.reshape_and_cache_flash(
            key,
            value,
            key_cache.view(torch.uint8),
            value_cache.view(torch.uint8),
            slot_mapping,
            "fp8_e5m2",
            layer._k_scale,
            layer._v_scale,
        )


class E5m2Backend(TritonAttentionBackend):  # type: ignore[misc]
    """vLLM's Triton backend, for E5M2 caches alone."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["fp8_e5m2"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[E5m2Impl]:
        return E5m2Impl

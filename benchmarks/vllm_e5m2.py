"""A trial: an attention backend for vLLM 0.24 that keeps the KV cache in E5M2.

vLLM's Triton backend accepts `fp8_e5m2`, and then asserts; where it does not, its writer stores
E4M3. This one writes with vLLM's CUDA operator, which stores E5M2 = round to nearest even of
x / scale, saturating, and reads with vLLM's Triton kernel, which multiplies by the scale. Queries
stay in BF16. Needs no FlashInfer. docs/LOG.md has its speed: with vLLM's kernel better than
FlashInfer's at short contexts and worse at long ones, with ours better at both. No model served
with it was proven yet, so it is not part of Octet.
"""

from typing import Any, ClassVar

import torch
from e5m2_kernel import Buffers, attend
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

__all__ = ["E5m2Backend", "E5m2Impl", "SplitBackend", "SplitImpl"]


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


class SplitImpl(E5m2Impl):
    """The same with a decode kernel of our own, for plain causal attention."""

    _buffers: ClassVar[Buffers | None] = None  # of all layers, which run one after the other

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *arguments: Any,
        **named: Any,
    ) -> torch.Tensor:
        plain = (
            attn_metadata is not None
            and attn_metadata.max_query_len == 1
            and self.sliding_window == (-1, -1)
            and not self.logits_soft_cap
            and self.alibi_slopes is None
            and self.sinks is None
        )
        if not plain:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *arguments, **named
            )
        if SplitImpl._buffers is None:
            SplitImpl._buffers = Buffers(
                1024, self.num_heads, self.num_kv_heads, self.head_size, query.device
            )
        keys, values = kv_cache.view(torch.uint8).unbind(1)
        count = attn_metadata.seq_lens.shape[0]
        attend(
            query[:count],
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            layer._k_scale,
            layer._v_scale,
            self.scale,
            output[:count],
            SplitImpl._buffers,
        )
        return output


class E5m2Backend(TritonAttentionBackend):  # type: ignore[misc]
    """vLLM's Triton backend, for E5M2 caches alone."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["fp8_e5m2"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[E5m2Impl]:
        return E5m2Impl


class SplitBackend(E5m2Backend):
    """E5M2 caches with our decode kernel."""

    @staticmethod
    def get_impl_cls() -> type[E5m2Impl]:
        return SplitImpl

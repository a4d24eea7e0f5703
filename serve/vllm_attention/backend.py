"""An attention backend for vLLM that keeps the KV cache in E5M2.

vLLM's Triton backend accepts `fp8_e5m2`, and then asserts; where it does not, its writer stores
E4M3. This one writes with vLLM's CUDA operator, which stores E5M2 = round to nearest even of
x / scale, saturating. It decodes with the kernel beside it. All else, prompts above all, is read
by vLLM's Triton kernel, which multiplies by the scale too. Queries are never rounded to FP8.
"""

# vLLM is not installed where mypy runs.
# mypy: allow-subclassing-any

from typing import Any, ClassVar

import torch
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from serve.vllm_attention.decode_kernel import Buffers, attend, is_supported

__all__ = ["E5m2Backend", "E5m2Builder", "E5m2Impl"]


class E5m2Impl(TritonAttentionImpl):
    """Attention of one layer."""

    _buffers: ClassVar[dict[tuple[int, ...], Buffers]] = {}  # by shape: layers run in turn

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.fp8_dtype = torch.float8_e5m2
        self.supports_quant_query_input = False  # queries would be rounded to E4M3
        self._decodes = (
            is_supported(self.head_size)
            and self.attn_type == AttentionType.DECODER
            and self.sliding_window == (-1, -1)
            and self.chunk_lookback == -1
            and not self.logits_soft_cap
            and self.alibi_slopes is None
            and self.sinks is None
        )
        most = get_current_vllm_config().scheduler_config.max_num_seqs
        shape = (most, self.num_heads, self.num_kv_heads, self.head_size)
        if self._decodes and shape not in self._buffers:
            device = torch.device("cuda", torch.cuda.current_device())
            self._buffers[shape] = Buffers(*shape, device)
        self._own = self._buffers.get(shape)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Returns False: the decode kernel writes what the model computes with."""
        return False

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Stores keys and values [tokens, heads, size] in a cache uint8 [blocks, 2, 16, ...]."""
        key_cache, value_cache = kv_cache.view(torch.uint8).unbind(1)
        ops.reshape_and_cache_flash(
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            "fp8_e5m2",
            layer._k_scale,
            layer._v_scale,
        )

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
        """Attends the tokens of a batch [tokens, heads, size]; fills and returns `output`."""
        if (
            self._own is None
            or attn_metadata is None
            or attn_metadata.max_query_len != 1
            or attn_metadata.seq_lens.shape[0] > self._own.most
        ):
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *arguments, **named
            )
            return output
        count = attn_metadata.seq_lens.shape[0]
        keys, values = kv_cache.view(torch.uint8).unbind(1)
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
            self._own,
        )
        return output


class E5m2Builder(TritonAttentionMetadataBuilder):
    """Prepares batches; a CUDA graph holds decoding alone, as that has a kernel of its own."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )


class E5m2Backend(TritonAttentionBackend):
    """Names what vLLM takes for E5M2 caches, and for no others."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["fp8_e5m2"]

    @staticmethod
    def get_name() -> str:
        """Returns the name by which vLLM selects it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[E5m2Impl]:
        """Returns the class of a layer's attention."""
        return E5m2Impl

    @staticmethod
    def get_builder_cls() -> type[E5m2Builder]:
        """Returns the class that prepares batches."""
        return E5m2Builder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Returns False: how a request is split depends on the batch."""
        return False

"""The decoder in ONNX: RMSNormalization, RotaryEmbedding and Attention around the projections.

Inputs, with B rows, T new tokens a row and S cached slots:
  input_ids        int64 [B, T]
  position_ids     int64 [B, T]           consecutive; the first is the number of cached tokens
  attention_mask   bool  [B, 1, T, S+T]   True = may attend; the cached slots come first
  logit_positions  int64 [B, L]           which of the T positions get logits
  past_key_values.{i}.key, .value         see export/onnx/cache.py
Outputs:
  logits           float32 [B, L, V]
  present.{i}.key, .value                 only the T new rows, K after RoPE

The valid length of each row is an explicit mask because TensorRT parses Attention-24's
`nonpad_kv_seqlen` and then ignores it. Nodes and values are named after the modules.

The graph supports what `ModelSpec` describes: biases, a sliding window, RoPE scaling and partial
RoPE, norms of query and key heads, fused projections, Gemma's offset, scale and GELU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from export.onnx.attention import KeyOrder, Positional, rope_tables
from export.onnx.cache import Cache
from export.onnx.graph import Graph
from export.onnx.linear import Linears, add_stored, stored_weight
from export.source import Source
from octet.errors import UnsupportedError
from octet.model.spec import Linear, ModelSpec

__all__ = ["Decoder", "build_decoder", "check_architecture"]


def check_architecture(spec: ModelSpec) -> None:
    """Raises UnsupportedError, with the reason, for a model whose graph is not built here."""
    reason = None
    if spec.generic:
        reason = "is not an architecture that Octet knows how to compute"
    elif spec.experts:
        reason = "is a mixture of experts"
    elif spec.undescribed:
        reason = f"has {', '.join(spec.undescribed)}"
    if reason is not None:
        raise UnsupportedError(
            f"{spec.architecture} {reason}, which ONNX and TensorRT exports do not build;"
            " `octet export checkpoint` takes it"
        )


def build_decoder(
    source: Source,
    cache: Cache,
    *,
    quantize: bool = True,
    compute: int = TensorProto.FLOAT,
    order: KeyOrder | None = None,
    linears: Callable[[Graph, Source, bool, int], Linears] = Linears,
) -> Graph:
    """Builds the whole graph; `quantize=False` builds it with the checkpoint's own weights.

    `linears` makes the object that adds the projections. Raises UnsupportedError, as
    `check_architecture` does.
    """
    check_architecture(source.spec)
    graph = Graph(f"{source.calibration.manifest.model.name}.decoder")
    projections = linears(graph, source, quantize, compute)
    Decoder(graph, source, cache, order or Positional(), projections, compute).build()
    return graph


@dataclass
class Decoder:
    """One pass over the model; each method adds the nodes of one module."""

    graph: Graph
    source: Source
    cache: Cache
    order: KeyOrder
    linears: Linears
    compute: int
    head: str | None = None  # the head's weight, if `_embed` has already added it

    def build(self) -> None:
        graph, spec = self.graph, self.source.spec
        modules = {linear.name: linear for linear in spec.linears()}
        ids = graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
        self.positions = graph.input("position_ids", TensorProto.INT64, ["batch", "sequence"])
        mask = graph.input("attention_mask", TensorProto.BOOL, ["batch", 1, "sequence", "total"])
        wanted = graph.input("logit_positions", TensorProto.INT64, ["batch", "logits"])
        graph.output("logits", TensorProto.FLOAT, ["batch", "logits", spec.vocab_size])
        self.pasts = {
            kind: self.cache.past(graph, kind, spec)
            for index in range(spec.layers)
            for kind in (f"{index}.key", f"{index}.value")
        }
        self.order.prepare(graph, spec, self.pasts["0.key"], self.positions, mask)
        self.cos, self.sin = (
            graph.array(f"rotary.{name}", table.astype(self.linears.dtype))
            for name, table in zip(("cos", "sin"), rope_tables(spec), strict=True)
        )
        x = self._embed(ids)
        for index in range(spec.layers):
            x = self._layer(index, x, modules)
        self._logits(x, wanted)

    def _embed(self, ids: str) -> str:
        """Looks the rows up in the stored dtype, then casts them: the table stays small.

        In FP16 a tied head reads the same cast table, which TensorRT keeps once.
        """
        graph, name, spec = self.graph, "model.embed_tokens", self.source.spec
        if spec.tied_embeddings and self.compute == TensorProto.FLOAT16:
            table = self.head = stored_weight(graph, self.source, f"{name}.weight", self.compute)
        else:
            table = add_stored(graph, self.source, f"{name}.weight")
        rows = graph.node("Gather", [table, ids], f"{name}.rows", axis=0)
        scale = spec.embedding_scale
        if scale == 1.0:
            return graph.node("Cast", [rows], name, to=self.compute)
        cast = graph.node("Cast", [rows], f"{name}.rows.cast", to=self.compute)
        factor = graph.array(f"{name}.scale", np.array(scale, self.linears.dtype))
        return graph.node("Mul", [cast, factor], name)

    def _layer(self, index: int, x: str, modules: dict[str, Linear]) -> str:
        graph, layer = self.graph, self.source.spec.layer(index)
        normed = self._norm(x, f"{layer}.input_layernorm")
        attended = self._attention(index, normed, modules)
        x = graph.node("Add", [x, attended], f"{layer}.attention_residual")
        normed = self._norm(x, f"{layer}.post_attention_layernorm")
        return graph.node("Add", [x, self._mlp(layer, normed, modules)], f"{layer}.mlp_residual")

    def _attention(self, index: int, x: str, modules: dict[str, Linear]) -> str:
        graph, spec = self.graph, self.source.spec
        module = f"{spec.layer(index)}.self_attn"
        query, key, value = self._projected(module, x, modules)
        query = self._rotate(self._heads(query, spec.heads, f"{module}.q_norm"))
        key = self._rotate(self._heads(key, spec.kv_heads, f"{module}.k_norm"))
        value = self._heads(value, spec.kv_heads)
        scales = self.source.cache_scales(index) if self.linears.quantize else (1.0, 1.0)
        key = self._cached(f"{index}.key", key, scales[0], f"{module}.key")
        value = self._cached(f"{index}.value", value, scales[1], f"{module}.value")
        sliding = index in spec.sliding_layers
        context = self.order.attend(graph, query, key, value, module, sliding=sliding)
        swapped = graph.node("Transpose", [context], f"{module}.by_token", perm=[0, 2, 1, 3])
        flat = graph.array("shape.flat", np.array([0, 0, spec.heads * spec.head_dim], np.int64))
        joined = graph.node("Reshape", [swapped, flat], f"{module}.context")
        return self.linears.apply(modules[f"{module}.o_proj"], joined)

    def _projected(self, module: str, x: str, modules: dict[str, Linear]) -> tuple[str, str, str]:
        """Adds the projections: query [B, T, H * D], key and value [B, T, Hkv * D]."""
        spec = self.source.spec
        if not spec.fused_qkv:
            query, key, value = (
                self.linears.apply(modules[f"{module}.{name}_proj"], x) for name in "qkv"
            )
            return query, key, value
        fused = self.linears.apply(modules[f"{module}.qkv_proj"], x)
        heads = (spec.heads, spec.kv_heads, spec.kv_heads)
        sizes = np.array([count * spec.head_dim for count in heads], np.int64)
        query, key, value = (f"{module}.{name}" for name in ("query", "new_key", "new_value"))
        parts = self.graph.array("shape.qkv", sizes)
        self.graph.split("Split", [fused, parts], [query, key, value], axis=-1)
        return query, key, value

    def _cached(self, kind: str, rows: str, scale: float, name: str) -> str:
        """Outputs new rows [B, Hkv, T, D] to the cache's owner; returns all, [B, Hkv, S+T, D]."""
        new = self.cache.present(self.graph, rows, kind, self.source.spec, scale)
        past = self.pasts[kind]
        real = self.cache.read(self.graph, past, scale)
        return self.order.join(self.graph, real, new, name)

    def _heads(self, x: str, heads: int, norm: str | None = None) -> str:
        """Splits [B, T, heads * D] → [B, heads, T, D]; normalizes each head if the model does."""
        sizes = np.array([0, 0, heads, self.source.spec.head_dim], np.int64)
        shape = self.graph.array(f"shape.heads.{heads}", sizes)
        split = self.graph.node("Reshape", [x, shape], f"{x}.by_head")
        if norm is not None and self.source.spec.qk_norm:
            split = self._norm(split, norm)
        return self.graph.node("Transpose", [split], f"{x}.heads", perm=[0, 2, 1, 3])

    def _rotate(self, x: str) -> str:
        """Rotates the first rotary_dim values of each head; the others stay as they are."""
        spec = self.source.spec
        inputs = [x, self.cos, self.sin, self.positions]
        partial = (
            {} if spec.rotary_dim == spec.head_dim else {"rotary_embedding_dim": spec.rotary_dim}
        )
        return self.graph.node("RotaryEmbedding", inputs, f"{x}.rotated", **partial)

    def _mlp(self, layer: str, x: str, modules: dict[str, Linear]) -> str:
        graph, module = self.graph, f"{layer}.mlp"
        if self.source.spec.fused_gate_up:
            gate, up = f"{module}.gate", f"{module}.up"
            fused = self.linears.apply(modules[f"{module}.gate_up_proj"], x)
            graph.split("Split", [fused], [gate, up], axis=-1, num_outputs=2)
        else:
            gate = self.linears.apply(modules[f"{module}.gate_proj"], x)
            up = self.linears.apply(modules[f"{module}.up_proj"], x)
        if self.source.spec.activation == "gelu_tanh":
            active = graph.node("Gelu", [gate], f"{module}.act_fn", approximate="tanh")
        else:
            sigmoid = graph.node("Sigmoid", [gate], f"{module}.sigmoid")
            active = graph.node("Mul", [gate, sigmoid], f"{module}.act_fn")
        product = graph.node("Mul", [active, up], f"{module}.product")
        return self.linears.apply(modules[f"{module}.down_proj"], product)

    def _logits(self, x: str, wanted: str) -> None:
        """Applies the final norm and the head to the wanted positions only: [B, L, V], float32."""
        graph, spec = self.graph, self.source.spec
        last = graph.array("axis.last", np.array([-1], np.int64))
        indices = graph.node("Unsqueeze", [wanted, last], "logit_positions.indices")
        rows = graph.node("GatherND", [x, indices], "logit_rows", batch_dims=1)
        normed = self._norm(rows, "model.norm")
        name = "model.embed_tokens" if spec.tied_embeddings else "lm_head"
        head = self.head or stored_weight(graph, self.source, f"{name}.weight", self.compute)
        transposed = graph.node("Transpose", [head], "lm_head.weight.transposed", perm=[1, 0])
        if self.compute == TensorProto.FLOAT:
            graph.node("MatMul", [normed, transposed], "logits")
            return
        logits = graph.node("MatMul", [normed, transposed], "lm_head")
        graph.node("Cast", [logits], "logits", to=TensorProto.FLOAT)

    def _norm(self, x: str, module: str) -> str:
        """Adds an RMSNorm over the last axis, times the weight plus the architecture's offset."""
        graph, spec = self.graph, self.source.spec
        weight = f"{module}.weight"
        if spec.norm_offset == 0.0:
            factor = stored_weight(graph, self.source, weight, self.compute)
        else:  # in float32: 1 + weight needs more bits than a weight near 0
            factor = stored_weight(graph, self.source, weight, TensorProto.FLOAT)
            offset = graph.array("norm.offset", np.array(spec.norm_offset, np.float32))
            factor = graph.node("Add", [factor, offset], f"{weight}.with_offset")
            if self.compute != TensorProto.FLOAT:
                factor = graph.node("Cast", [factor], f"{weight}.factor", to=self.compute)
        epsilon = spec.rms_norm_eps
        return graph.node("RMSNormalization", [x, factor], module, axis=-1, epsilon=epsilon)

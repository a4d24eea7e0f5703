"""The decoder in ONNX: RMSNormalization, RotaryEmbedding and Attention around the projections.

Inputs, with B rows, T new tokens a row and S cached slots:
  input_ids        int64 [B, T]
  position_ids     int64 [B, T]           consecutive; the first is the number of cached tokens
  attention_mask   bool  [B, 1, T, S+T]   True = may attend; the cached slots come first
  logit_positions  int64 [B, L]           which of the T positions get logits
  past_key_values.{i}.key, .value         see export/onnx_cache.py
Outputs:
  logits           float32 [B, L, V]
  present.{i}.key, .value                 only the T new rows, K after RoPE

The valid length of each row goes in as an explicit mask because TensorRT parses Attention-24's
`nonpad_kv_seqlen` and then ignores it. Nodes and values are named after the modules.
"""

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from export.graph import Graph
from export.onnx_attention import KeyOrder, Positional
from export.onnx_cache import Cache
from export.onnx_linear import Linears, add_stored, stored_weight
from export.source import Source
from octet.model import Linear

__all__ = ["Decoder", "build_decoder", "rope_tables"]


def build_decoder(
    source: Source,
    cache: Cache,
    *,
    quantize: bool = True,
    compute: int = TensorProto.FLOAT,
    order: KeyOrder | None = None,
) -> Graph:
    """The whole graph; `quantize=False` builds the same one with the checkpoint's own weights."""
    graph = Graph(f"{source.calibration.manifest.model.name}.decoder")
    linears = Linears(graph, source, quantize, compute)
    Decoder(graph, source, cache, order or Positional(), linears, compute).build()
    return graph


def rope_tables(theta: float, head_dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position · theta^(-2i/D), float32 [positions, D/2].

    In float32 throughout, as transformers computes them and the model was trained.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.power(np.float32(theta), exponents)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


@dataclass
class Decoder:
    """One pass over the model; each method adds the nodes of one module."""

    graph: Graph
    source: Source
    cache: Cache
    order: KeyOrder
    linears: Linears
    compute: int

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
        self.cos, self.sin = self._rope_tables()
        x = self._embed(ids)
        for index in range(spec.layers):
            x = self._layer(index, x, modules)
        self._logits(x, wanted)

    def _embed(self, ids: str) -> str:
        """Looks the rows up in the stored dtype, then casts them: the table stays small."""
        name = "model.embed_tokens"
        table = add_stored(self.graph, self.source, f"{name}.weight")
        rows = self.graph.node("Gather", [table, ids], f"{name}.rows", axis=0)
        return self.graph.node("Cast", [rows], name, to=self.compute)

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
        projected = {p: self.linears.apply(modules[f"{module}.{p}_proj"], x) for p in "qkv"}
        query = self._rotate(self._heads(projected["q"], spec.heads))
        key = self._rotate(self._heads(projected["k"], spec.kv_heads))
        value = self._heads(projected["v"], spec.kv_heads)
        scales = self.source.cache_scales(index) if self.linears.quantize else (1.0, 1.0)
        key = self._cached(f"{index}.key", key, scales[0], f"{module}.key")
        value = self._cached(f"{index}.value", value, scales[1], f"{module}.value")
        context = self.order.attend(graph, query, key, value, module)  # [B, H, T, D]
        swapped = graph.node("Transpose", [context], f"{module}.by_token", perm=[0, 2, 1, 3])
        flat = graph.array("shape.flat", np.array([0, 0, spec.heads * spec.head_dim], np.int64))
        joined = graph.node("Reshape", [swapped, flat], f"{module}.context")
        return self.linears.apply(modules[f"{module}.o_proj"], joined)

    def _cached(self, kind: str, rows: str, scale: float, name: str) -> str:
        """New rows [B, Hkv, T, D], returned to the cache's owner → all rows [B, Hkv, S+T, D]."""
        new = self.cache.present(self.graph, rows, kind, self.source.spec, scale)
        past = self.pasts[kind]
        real = self.cache.read(self.graph, past, scale)
        return self.order.join(self.graph, real, new, name)

    def _heads(self, x: str, heads: int) -> str:
        """[B, T, heads * D] → [B, heads, T, D]."""
        sizes = np.array([0, 0, heads, self.source.spec.head_dim], np.int64)
        shape = self.graph.array(f"shape.heads.{heads}", sizes)
        split = self.graph.node("Reshape", [x, shape], f"{x}.by_head")
        return self.graph.node("Transpose", [split], f"{x}.heads", perm=[0, 2, 1, 3])

    def _rotate(self, x: str) -> str:
        return self.graph.node(
            "RotaryEmbedding", [x, self.cos, self.sin, self.positions], f"{x}.rotated"
        )

    def _mlp(self, layer: str, x: str, modules: dict[str, Linear]) -> str:
        graph, module = self.graph, f"{layer}.mlp"
        gate = self.linears.apply(modules[f"{module}.gate_proj"], x)
        up = self.linears.apply(modules[f"{module}.up_proj"], x)
        sigmoid = graph.node("Sigmoid", [gate], f"{module}.sigmoid")
        silu = graph.node("Mul", [gate, sigmoid], f"{module}.act_fn")
        product = graph.node("Mul", [silu, up], f"{module}.product")
        return self.linears.apply(modules[f"{module}.down_proj"], product)

    def _logits(self, x: str, wanted: str) -> None:
        """Only the wanted positions pass the final norm and the head: [B, L, V], float32."""
        graph, spec = self.graph, self.source.spec
        last = graph.array("axis.last", np.array([-1], np.int64))
        indices = graph.node("Unsqueeze", [wanted, last], "logit_positions.indices")
        rows = graph.node("GatherND", [x, indices], "logit_rows", batch_dims=1)
        normed = self._norm(rows, "model.norm")
        name = "model.embed_tokens" if spec.tied_embeddings else "lm_head"
        head = stored_weight(graph, self.source, f"{name}.weight", self.compute)
        transposed = graph.node("Transpose", [head], "lm_head.weight.transposed", perm=[1, 0])
        if self.compute == TensorProto.FLOAT:
            graph.node("MatMul", [normed, transposed], "logits")
            return
        logits = graph.node("MatMul", [normed, transposed], "lm_head")
        graph.node("Cast", [logits], "logits", to=TensorProto.FLOAT)

    def _norm(self, x: str, module: str) -> str:
        weight = stored_weight(self.graph, self.source, f"{module}.weight", self.compute)
        return self.graph.node(
            "RMSNormalization",
            [x, weight],
            module,
            axis=-1,
            epsilon=self.source.spec.rms_norm_eps,
        )

    def _rope_tables(self) -> tuple[str, str]:
        spec = self.source.spec
        cos, sin = rope_tables(spec.rope_theta, spec.head_dim, spec.max_positions)
        dtype = self.linears.dtype
        return (
            self.graph.array("rotary.cos", cos.astype(dtype)),
            self.graph.array("rotary.sin", sin.astype(dtype)),
        )

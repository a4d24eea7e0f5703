"""The exact bytes of a model's tensors, from its sizes and a recipe alone.

In a checkpoint they are those that `octet export checkpoint` writes as compressed-tensors, scales
included. On each of several GPUs they are the shards that vLLM keeps.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from octet.model.spec import Linear, ModelSpec
from octet.model.tensor_parallel import Schemes, columns_of, rows_of
from octet.numerics.scaling import Granularity
from octet.recipe import KvCacheDtype, Recipe

__all__ = ["CACHE_BYTES", "Sizes", "stored_tensors"]

CACHE_BYTES = {"float16": 2, "e4m3": 1, "e5m2": 1}  # of a value in the KV cache
_FLOAT32 = 4
_PADDED_VOCABULARY = 64  # vLLM pads the vocabulary to a multiple of this

Shape = tuple[int, ...]


def stored_tensors(
    out_features: int, in_features: int, schemes: Schemes, width: int
) -> Iterator[tuple[str, Shape, int]]:
    """Yields (name, shape, bytes of an element) of a linear's tensors, without its bias.

    `width` is the size in bytes of an unquantized element.
    """
    shape = (out_features, in_features)
    if schemes is None:
        yield "weight", shape, width
        return
    weights, inputs = schemes
    scales = Granularity.of(weights.granularity, weights.group_size).scale_shape(shape)
    if weights.format == "e2m1":
        yield "weight_packed", (out_features, in_features // 2), 1
    else:
        yield "weight", shape, 1
    yield "weight_scale", scales or (1,), _FLOAT32 if weights.scale_format == "float32" else 1
    if weights.two_level:
        yield "weight_global_scale", (1,), _FLOAT32
        yield "input_global_scale", (1,), _FLOAT32
    elif not inputs.dynamic:
        yield "input_scale", (1,), _FLOAT32


@dataclass(frozen=True)
class Sizes:
    """A model under a recipe; `recipe` is None for the unquantized model."""

    spec: ModelSpec
    recipe: Recipe | None

    def tensors(self, kv_cache: KvCacheDtype, width: int = 2) -> Iterator[tuple[str, Shape, int]]:
        """Yields (name, shape, bytes of an element) of every tensor of the exported checkpoint.

        Unquantized tensors have `width` bytes an element, as in the original. An E5M2 cache has no
        scales here: calibration stores them only in a layer that overflows without.
        """
        shapes = dict(self.spec.tensor_shapes())
        for linear in self.spec.linears():
            schemes = self._schemes(linear)
            if schemes is not None:
                rows, columns = shapes.pop(f"{linear.name}.weight")
                for name, shape, size in stored_tensors(rows, columns, schemes, width):
                    yield f"{linear.name}.{name}", shape, size
        for name, shape in shapes.items():
            yield name, shape, width
        if self.spec.generic:  # its other tensors are not known by name; the largest are these
            for name in ("embedding", "head")[: 1 if self.spec.tied_embeddings else 2]:
                yield name, (self.spec.vocab_size, self.spec.hidden_size), width
        if kv_cache == "e4m3" and self.recipe is not None:
            for index in range(self.spec.layers):
                for which in "qkv":
                    yield f"{self.spec.layer(index)}.self_attn.{which}_scale", (1,), _FLOAT32

    def checkpoint_bytes(self, kv_cache: KvCacheDtype, width: int = 2) -> int:
        """Returns the bytes of all `tensors` together."""
        scales = 3 * self.spec.layers if kv_cache == "e4m3" and self.recipe is not None else 0
        tables = (1 if self.spec.tied_embeddings else 2) * self.spec.vocab_size
        rest = self._replicated_elements + tables * self.spec.hidden_size
        linears = sum(
            count * self._linear_bytes(linear, schemes, 1, width)
            for (linear, schemes), count in self._kinds.items()
        )
        return linears + width * rest + _FLOAT32 * scales

    @property
    def parameters(self) -> int:
        """The parameters of the unquantized model."""
        return Sizes(self.spec, None).checkpoint_bytes("float16", 1)

    def gpu_bytes(self, degree: int) -> int:
        """Returns the bytes of weights on each of `degree` GPUs in vLLM, and of its RoPE table.

        Unquantized tensors have 2 bytes an element: vLLM loads FP32 as BF16. `degree` must be one
        that can share the model.
        """
        total = sum(
            count * self._linear_bytes(linear, schemes, degree)
            for (linear, schemes), count in self._kinds.items()
        )
        return total + 2 * (self._other_elements(degree) + self._rope_elements)

    def read_bytes(self, degree: int, tokens: int = 1) -> float:
        """Returns the bytes of weights that a forward pass over `tokens` tokens reads on each GPU.

        The embedding is read in a few rows only. Of a sparse layer, the experts are read that at
        least one token is expected to choose, if choices are uniform and independent.
        """
        spec, total = self.spec, 0.0
        for (linear, schemes), count in self._kinds.items():
            share = self.expert_share(tokens) if ".experts." in linear.name else 1.0
            total += count * share * self._linear_bytes(linear, schemes, degree)
        rest = self._other_elements(degree) - (
            0 if spec.tied_embeddings else self._embedding_elements(degree)
        )
        return total + 2 * rest

    def products(self, quantized: bool | None = None) -> int:
        """Returns the multiply-adds of the GEMMs for one token, the head included.

        If `quantized` is given, only those of linears that are quantized, or of all others.
        """
        spec = self.spec
        total = 0 if quantized else spec.vocab_size * spec.hidden_size
        for (linear, schemes), count in self._kinds.items():
            if quantized is None or quantized == (schemes is not None):
                share = spec.experts_per_token / spec.experts if ".experts." in linear.name else 1
                total += round(count * share * linear.out_features * linear.in_features)
        return total

    def expert_share(self, tokens: int) -> float:
        """Returns the share of a layer's experts that `tokens` tokens are expected to choose."""
        chosen = self.spec.experts_per_token / self.spec.experts
        return float(1 - (1 - chosen) ** tokens)

    def cache_bytes(self, kv_cache: KvCacheDtype, degree: int) -> int:
        """Returns the bytes of one token in the KV cache of each GPU: all layers, K and V."""
        heads = max(1, self.spec.kv_heads // degree)
        return 2 * self.spec.layers * heads * self.spec.head_dim * CACHE_BYTES[kv_cache]

    def _schemes(self, linear: Linear) -> Schemes:
        return None if self.recipe is None else self.recipe.scheme_of(linear.name)

    @cached_property
    def _kinds(self) -> Counter[tuple[Linear, Schemes]]:
        """Counts the linears that are alike but for their layer or expert, each under the first."""
        first: dict[object, tuple[Linear, Schemes]] = {}
        found: Counter[tuple[Linear, Schemes]] = Counter()
        for linear in self.spec.linears():
            schemes, last = self._schemes(linear), linear.name.rpartition(".")[2]
            kind = (last, ".experts." in linear.name, linear.out_features, linear.in_features)
            found[first.setdefault((kind, schemes), (linear, schemes))] += 1
        return found

    def _linear_bytes(self, linear: Linear, schemes: Schemes, degree: int, width: int = 2) -> int:
        rows = sum(part or 0 for part in rows_of(self.spec, linear, degree))
        columns = columns_of(linear, degree) or 0
        tensors = stored_tensors(rows, columns, schemes, width)
        bias = width * rows if self.spec.has_bias(linear) else 0
        return sum(math.prod(shape) * size for _, shape, size in tensors) + bias

    def _other_elements(self, degree: int) -> int:
        """Returns the elements on each GPU outside of linears: embedding, head, norms, routers.

        Embedding and head are split over the GPUs; each GPU has a copy of the others.
        """
        tables = 1 if self.spec.tied_embeddings else 2
        return self._replicated_elements + tables * self._embedding_elements(degree)

    @cached_property
    def _replicated_elements(self) -> int:
        """The elements of norms and routers."""
        linears = {f"{x.name}.{part}" for x in self.spec.linears() for part in ("weight", "bias")}
        tables = ("model.embed_tokens.weight", "lm_head.weight")
        return sum(
            math.prod(shape)
            for name, shape in self.spec.tensor_shapes()
            if name not in linears and name not in tables
        )

    def _embedding_elements(self, degree: int) -> int:
        """Returns the elements of the embedding, or of the head, on each GPU."""
        rows = -(-self.spec.vocab_size // _PADDED_VOCABULARY) * _PADDED_VOCABULARY
        return -(-rows // degree) * self.spec.hidden_size

    @property
    def _rope_elements(self) -> int:
        """The elements of RoPE's table of sines and cosines, of which each GPU has a copy."""
        return self.spec.max_positions * self.spec.rotary_dim

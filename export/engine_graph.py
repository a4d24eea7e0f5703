"""The decoder graph as TensorRT takes it: FP16 arithmetic, static FP8 Q/DQ, the cache as codes.

TensorRT has no E5M2, and its Attention takes no past. So the graph differs from ONNX Runtime's
(see onnx_decoder.py for the inputs) in the cache alone:

  past_key_values.{i}.key, .value   uint8 [B, Hkv, S, D], E5M2 codes, read-only: a Gather in a table
                                    of the 256 values, then a Concat with the new rows
  present.{i}.key, .value           float16 [B, Hkv, T, D], already E5M2 values: the code of a new
                                    row is the top byte of its FP16

The new rows are rounded with real arithmetic, for TensorRT can neither cast to E5M2 nor read bits:
with e = ⌊log2|x|⌋, at least -14, a value is round(x · 2^(2-e)) · 2^(e-2), to nearest even. Both
powers come from tables, so the products are exact; no compiler may reorder across a rounding; and
the logarithm needs no more than to tell 2^k from the next smaller FP16: where it puts 2^k itself
into the binade below, the result is the same.
"""

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from export.graph import Graph
from export.onnx_attention import Concatenated
from export.onnx_decoder import build_decoder
from export.source import Source
from octet.errors import UnsupportedError
from octet.formats import E5M2, decode
from octet.model import ModelSpec

__all__ = ["CodeCache", "build_engine_graph", "check_recipe"]

_MIN_EXPONENT, _MAX_EXPONENT = -14, 15  # of E5M2's normal numbers; below, the step is -14's
_MANTISSA_BITS = 2


def build_engine_graph(source: Source, compute: int = TensorProto.FLOAT16) -> Graph:
    """The graph in `compute`; FLOAT is for comparing its numbers with those of ONNX Runtime's."""
    check_recipe(source)
    return build_decoder(source, CodeCache(compute), compute=compute, order=Concatenated())


def check_recipe(source: Source) -> None:
    """Raises UnsupportedError for a recipe that TensorRT's compiler does not build in FP8."""
    recipe = source.recipe
    if recipe.activations.dynamic:
        raise UnsupportedError(
            f"recipe {recipe.name} scales activations at run time, which TensorRT refuses in FP8;"
            " calibrate with --recipe fp8-static"
        )
    if recipe.weights.granularity == "block":
        raise UnsupportedError(
            f"recipe {recipe.name} has block weights, which TensorRT refuses with FP8 activations;"
            " calibrate with --recipe fp8-static"
        )
    if recipe.kv_cache != "e5m2":
        raise UnsupportedError(
            f"recipe {recipe.name}: an engine's cache is e5m2, not {recipe.kv_cache};"
            " set kv_cache: e5m2"
        )


@dataclass(frozen=True)
class CodeCache:
    """E5M2 codes in, rounded rows out; values are of type `compute` inside."""

    compute: int = TensorProto.FLOAT16

    def past(self, graph: Graph, name: str, spec: ModelSpec) -> str:
        return graph.input(f"past_key_values.{name}", TensorProto.UINT8, _shape(spec, "past"))

    def read(self, graph: Graph, past: str, scale: float) -> str:
        """The rows of the input `past`: the values of its codes, times the scale."""
        values = decode(np.arange(256, dtype=np.uint8), E5M2) * np.float32(scale)
        table = graph.array(f"e5m2.values.{scale}", self._array(values))
        # Gather takes no uint8 indices.
        codes = graph.node("Cast", [past], f"{past}.codes", to=TensorProto.INT32)
        return graph.node("Gather", [table, codes], f"{past}.values", axis=0)

    def present(self, graph: Graph, rows: str, name: str, spec: ModelSpec, scale: float) -> str:
        """Declares the output `present.{name}`; returns its rows as a later read gives them."""
        output = f"present.{name}"
        x = graph.node("Cast", [rows], f"{output}.float32", to=TensorProto.FLOAT)
        if scale != 1:
            inverse = graph.array(f"{output}.scale_inverse", np.array(1 / scale, np.float32))
            x = graph.node("Mul", [x, inverse], f"{output}.stored")
        rounded = round_to_e5m2(graph, x, output)
        graph.node("Cast", [rounded], output, to=TensorProto.FLOAT16)
        graph.output(output, TensorProto.FLOAT16, _shape(spec, "sequence"))
        if scale != 1:
            factor = graph.array(f"{output}.scale", np.array(scale, np.float32))
            rounded = graph.node("Mul", [rounded, factor], f"{output}.real")
        elif self.compute == TensorProto.FLOAT16:
            return output
        return graph.node("Cast", [rounded], f"{output}.back", to=self.compute)

    def _array(self, values: np.ndarray) -> np.ndarray:
        return values.astype(np.float16 if self.compute == TensorProto.FLOAT16 else np.float32)


def round_to_e5m2(graph: Graph, x: str, name: str) -> str:
    """float32 `x` → the nearest E5M2 value, to even, saturating; a NaN stays one."""
    exponents = np.arange(_MIN_EXPONENT, _MAX_EXPONENT + 1, dtype=np.float32)
    steps = graph.array("e5m2.steps", np.exp2(exponents - _MANTISSA_BITS))
    inverses = graph.array("e5m2.step_inverses", np.exp2(_MANTISSA_BITS - exponents))
    low = graph.array("e5m2.min", np.array(-E5M2.max, np.float32))
    high = graph.array("e5m2.max", np.array(E5M2.max, np.float32))
    least = graph.array("e5m2.smallest_normal", np.array(2.0**_MIN_EXPONENT, np.float32))
    log2e = graph.array("e5m2.log2_e", np.array(np.log2(np.e), np.float32))
    first = graph.array("e5m2.first", np.array(0, np.int32))
    last = graph.array("e5m2.last", np.array(len(exponents) - 1, np.int32))
    offset = graph.array("e5m2.offset", np.array(-_MIN_EXPONENT, np.float32))

    clipped = graph.node("Clip", [x, low, high], f"{name}.clipped")
    magnitude = graph.node("Abs", [clipped], f"{name}.magnitude")
    normal = graph.node("Max", [magnitude, least], f"{name}.normal")
    log = graph.node("Log", [normal], f"{name}.log")
    log2 = graph.node("Mul", [log, log2e], f"{name}.log2")
    exponent = graph.node("Floor", [log2], f"{name}.exponent")
    above = graph.node("Add", [exponent, offset], f"{name}.above")
    binade = graph.node("Cast", [above], f"{name}.binade", to=TensorProto.INT32)
    index = graph.node("Clip", [binade, first, last], f"{name}.index")
    inverse = graph.node("Gather", [inverses, index], f"{name}.step_inverse", axis=0)
    step = graph.node("Gather", [steps, index], f"{name}.step", axis=0)
    scaled = graph.node("Mul", [clipped, inverse], f"{name}.scaled")
    whole = graph.node("Round", [scaled], f"{name}.whole")
    return graph.node("Mul", [whole, step], f"{name}.rounded")


def _shape(spec: ModelSpec, length: str) -> list[int | str]:
    return ["batch", spec.kv_heads, length, spec.head_dim]

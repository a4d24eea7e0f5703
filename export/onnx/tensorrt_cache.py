"""The KV cache for TensorRT, which has no E5M2 and whose Attention takes no past.

| cache   | past_key_values.{i}.key, .value    | present.{i}.key, .value                           |
|---------|------------------------------------|---------------------------------------------------|
| e5m2    | UINT8 codes, a Gather in their 256 | FLOAT16, already E5M2 values: the code of a new   |
|         | values                             | row is the top byte of its FP16                   |
| e4m3    | FLOAT8E4M3FN, DequantizeLinear     | FLOAT8E4M3FN, QuantizeLinear                      |
| float16 | FLOAT16                            | FLOAT16                                           |

Inputs are [B, Hkv, S, D] and read-only. Outputs are [B, Hkv, T, D]: the graph returns only the new
rows. Every form joins past and new rows in an FP16 copy in each step. So FP8 saves memory; of
attention's time it saves only what reading FP8 instead of FP16 once does.

E5M2 rows are rounded by arithmetic, because TensorRT can neither cast to E5M2 nor read bits. With
e = ⌊log2|x|⌋, at least -14, a value becomes round(x · 2^(2-e)) · 2^(e-2), to nearest even. Both
powers come from tables, so the products are exact, and no compiler may reorder across a rounding.
The logarithm need only distinguish 2^k from the next smaller FP16: if it puts 2^k itself into the
binade below, the result is the same.
"""

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from export.onnx.cache import Cache
from export.onnx.graph import Graph
from export.onnx.tensorrt_inputs import dequantize, widened
from octet.errors import UnsupportedError
from octet.model.spec import ModelSpec
from octet.numerics.formats import E5M2, decode
from octet.recipe import KvCacheDtype

__all__ = ["E4M3Cache", "E5M2Cache", "Float16Cache", "cache_of", "describe"]

# Exponents of E5M2's normal values; subnormals have the step of the smallest.
_MIN_EXPONENT, _MAX_EXPONENT = -14, 15
_MANTISSA_BITS = 2


def cache_of(dtype: KvCacheDtype, compute: int) -> Cache:
    """Returns the cache of that type for arithmetic in `compute`, FLOAT16 or FLOAT."""
    kinds: dict[KvCacheDtype, Cache] = {
        "e5m2": E5M2Cache(compute),
        "e4m3": E4M3Cache(compute),
        "float16": Float16Cache(compute),
    }
    return kinds[dtype]


def describe(dtype: KvCacheDtype) -> dict[str, str]:
    """Describes for the manifest the types of inputs and outputs, and their content."""
    past, present, note = {
        "e5m2": ("uint8", "float16", "E5M2 codes in; E5M2 values out, whose top byte is the code"),
        "e4m3": ("float8e4m3fn", "float8e4m3fn", "E4M3 in and out"),
        "float16": ("float16", "float16", "FP16 in and out"),
    }[dtype]
    copied = "each step joins past and new rows in an FP16 copy"
    return {"dtype": dtype, "input": past, "new_rows": present, "note": f"{note}; {copied}"}


@dataclass(frozen=True)
class E5M2Cache:
    """E5M2 codes in, rounded rows out; inside the graph, values have the type `compute`."""

    compute: int = TensorProto.FLOAT16

    def past(self, graph: Graph, name: str, spec: ModelSpec) -> str:
        return graph.input(f"past_key_values.{name}", TensorProto.UINT8, _shape(spec, "past"))

    def read(self, graph: Graph, past: str, scale: float) -> str:
        """Returns the rows of the input `past`: the values of its codes, times the scale."""
        values = decode(np.arange(256, dtype=np.uint8), E5M2) * np.float32(scale)
        kind = np.float16 if self.compute == TensorProto.FLOAT16 else np.float32
        if scale * E5M2.max > float(np.finfo(kind).max):
            raise UnsupportedError(
                f"{past}: an E5M2 cache with the scale {scale:.3g} holds more than FP16, in which"
                " an engine computes; use --kv e4m3"
            )
        table = graph.array(f"e5m2.values.{scale}", values.astype(kind))
        # Gather takes no uint8 indices.
        codes = graph.node("Cast", [past], f"{past}.codes", to=TensorProto.INT32)
        return graph.node("Gather", [table, codes], f"{past}.values", axis=0)

    def present(self, graph: Graph, rows: str, name: str, spec: ModelSpec, scale: float) -> str:
        """Declares the output `present.{name}`; returns its rows as a later step reads them."""
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


@dataclass(frozen=True)
class E4M3Cache:
    """E4M3 in and out, with Q and DQ, which TensorRT fuses into the writing and reading layers."""

    compute: int = TensorProto.FLOAT16

    def past(self, graph: Graph, name: str, spec: ModelSpec) -> str:
        shape = _shape(spec, "past")
        return graph.input(f"past_key_values.{name}", TensorProto.FLOAT8E4M3FN, shape)

    def read(self, graph: Graph, past: str, scale: float) -> str:
        return dequantize(graph, past, _scale(graph, scale), f"{past}.values", self.compute)

    def present(self, graph: Graph, rows: str, name: str, spec: ModelSpec, scale: float) -> str:
        output = f"present.{name}"
        zero = graph.array("zero.e4m3", np.zeros((), np.uint8), TensorProto.FLOAT8E4M3FN)
        rows = widened(graph, rows, f"{output}.float32", self.compute)
        graph.node("QuantizeLinear", [rows, _scale(graph, scale), zero], output, saturate=1)
        graph.output(output, TensorProto.FLOAT8E4M3FN, _shape(spec, "sequence"))
        return dequantize(graph, output, _scale(graph, scale), f"{output}.real", self.compute)


@dataclass(frozen=True)
class Float16Cache:
    """FP16, the type of an engine's arithmetic; it takes no scale."""

    compute: int = TensorProto.FLOAT16

    def past(self, graph: Graph, name: str, spec: ModelSpec) -> str:
        return graph.input(f"past_key_values.{name}", TensorProto.FLOAT16, _shape(spec, "past"))

    def read(self, graph: Graph, past: str, scale: float) -> str:
        if self.compute == TensorProto.FLOAT16:
            return past
        return graph.node("Cast", [past], f"{past}.values", to=self.compute)

    def present(self, graph: Graph, rows: str, name: str, spec: ModelSpec, scale: float) -> str:
        output = f"present.{name}"
        if self.compute == TensorProto.FLOAT16:
            graph.node("Identity", [rows], output)
        else:
            graph.node("Cast", [rows], output, to=TensorProto.FLOAT16)
        graph.output(output, TensorProto.FLOAT16, _shape(spec, "sequence"))
        return self.read(graph, output, scale)


def round_to_e5m2(graph: Graph, x: str, name: str) -> str:
    """Rounds float32 `x` to the nearest E5M2 value, ties to even, saturating; NaN stays NaN."""
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


def _scale(graph: Graph, scale: float) -> str:
    return graph.array(f"cache.scale.{scale}", np.array(scale, np.float32))


def _shape(spec: ModelSpec, length: str) -> list[int | str]:
    return ["batch", spec.kv_heads, length, spec.head_dim]

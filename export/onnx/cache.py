"""The KV cache as inputs and outputs of the ONNX graph.

The graph reads the cached rows and returns only the new ones. It attends to the new rows already
rounded, as they will be read back later. The owner of the cache writes them into their slots.

| dtype   | graph input            | new rows                         |
|---------|------------------------|----------------------------------|
| e5m2    | FLOAT8E5M2, one Cast   | Cast to FLOAT8E5M2, saturating   |
| e4m3    | FLOAT8E4M3FN, one Cast | Cast to FLOAT8E4M3FN, saturating |
| float16 | FLOAT16, one Cast      | clipped, Cast to FLOAT16         |

These are for ONNX Runtime; TensorRT's are in export/onnx/tensorrt_cache.py. All are [B, Hkv, S, D]
(S cached slots) and [B, Hkv, T, D] (T new rows). Rows are divided by their scale before they are
stored, unless it is 1: real = stored * scale.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
from onnx import TensorProto

from export.onnx.graph import Graph
from octet.model.spec import ModelSpec
from octet.recipe import KvCacheDtype

__all__ = ["CACHES", "Cache"]


class Cache(Protocol):
    """Input and output of one kind of cache; `name` is `{i}.key` or `{i}.value`."""

    def past(self, graph: Graph, name: str, spec: ModelSpec) -> str:
        """Declares the input `past_key_values.{name}`; returns its name."""
        ...

    def read(self, graph: Graph, past: str, scale: float) -> str:
        """Returns the rows of the input `past`, as float32."""
        ...

    def present(self, graph: Graph, rows: str, name: str, spec: ModelSpec, scale: float) -> str:
        """Declares the output `present.{name}` for new `rows`; returns them rounded, float32."""
        ...


class _CastCache(ABC):
    """A cache stored as a type that ONNX casts from and to."""

    elem_type: int

    def past(self, graph: Graph, name: str, spec: ModelSpec) -> str:
        return graph.input(f"past_key_values.{name}", self.elem_type, _shape(spec, "past"))

    def read(self, graph: Graph, past: str, scale: float) -> str:
        rows = graph.node("Cast", [past], f"{past}.cast", to=TensorProto.FLOAT)
        return scaled(graph, "Mul", rows, f"{past}.real", scale)

    def present(self, graph: Graph, rows: str, name: str, spec: ModelSpec, scale: float) -> str:
        output = f"present.{name}"
        rows = scaled(graph, "Div", rows, f"{output}.stored", scale)
        self._round(graph, rows, output)
        graph.output(output, self.elem_type, _shape(spec, "sequence"))
        back = graph.node("Cast", [output], f"{output}.cast", to=TensorProto.FLOAT)
        return scaled(graph, "Mul", back, f"{output}.real", scale)

    @abstractmethod
    def _round(self, graph: Graph, rows: str, output: str) -> None:
        """Adds `output`: float32 `rows` rounded to the stored type."""


class Float8Cache(_CastCache):
    """E5M2, which is the top byte of an FP16, or E4M3."""

    def __init__(self, elem_type: int) -> None:
        self.elem_type = elem_type

    def _round(self, graph: Graph, rows: str, output: str) -> None:
        graph.node("Cast", [rows], output, to=self.elem_type, saturate=1)


class Float16Cache(_CastCache):
    """FP16; clipped first, because a Cast to FLOAT16 overflows to Inf."""

    elem_type = TensorProto.FLOAT16

    def _round(self, graph: Graph, rows: str, output: str) -> None:
        limit = np.float32(np.finfo(np.float16).max)
        low, high = (graph.array(f"float16.{n}", np.array(v)) for n, v in _ends(limit))
        clipped = graph.node("Clip", [rows, low, high], f"{output}.clipped")
        graph.node("Cast", [clipped], output, to=self.elem_type)


CACHES: dict[KvCacheDtype, Cache] = {
    "e5m2": Float8Cache(TensorProto.FLOAT8E5M2),
    "e4m3": Float8Cache(TensorProto.FLOAT8E4M3FN),
    "float16": Float16Cache(),
}


def scaled(graph: Graph, op: str, value: str, name: str, scale: float) -> str:
    """Multiplies or divides `value` by `scale`, unless that is 1."""
    if scale == 1.0:
        return value
    factor = graph.array(f"{name}.scale", np.array(scale, np.float32))
    return graph.node(op, [value, factor], name)


def _shape(spec: ModelSpec, length: str) -> list[int | str]:
    return ["batch", spec.kv_heads, length, spec.head_dim]


def _ends(limit: np.float32) -> list[tuple[str, np.float32]]:
    return [("min", -limit), ("max", limit)]

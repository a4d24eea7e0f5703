"""Rounds the projections' activations to FP8 or FP4, in the forms that TensorRT's GEMMs take.

Linears that share an input and its scale share the rounded activations. A scale for each row or
group of rows does not fit into a DequantizeLinear that TensorRT fuses. It is returned beside the
values, and the GEMM's result is multiplied by it. The arithmetic is that of
`octet.numerics.scaling`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from export.onnx.graph import Graph
from export.source import Source
from octet.model.spec import Linear
from octet.numerics.formats import E4M3
from octet.recipe import TensorScheme

__all__ = ["BLOCK", "DOMAIN", "Inputs", "Rounded", "dequantize", "one", "widened"]

BLOCK = 128  # columns that share a scale in recipes with blocks
DOMAIN = "trt"  # of TensorRT's own operators
_SMALLEST_SCALE = np.float32(2.0**-126)
_FLOAT, _E4M3 = TensorProto.FLOAT, TensorProto.FLOAT8E4M3FN


class Rounded(NamedTuple):
    """Values rounded to FP8 or FP4, and a scale to multiply their GEMM's result by."""

    values: str
    scale: str | None = None


@dataclass
class Inputs:
    """The rounded activations of one graph, which computes in `compute`, FLOAT16 or FLOAT."""

    graph: Graph
    source: Source
    compute: int
    _known: dict[tuple[object, ...], Rounded] = field(default_factory=dict)

    def rounded(self, linear: Linear, x: str, weights: TensorScheme, own: TensorScheme) -> Rounded:
        """Rounds x [B, T, K] for a linear with those schemes; with blocks, to [K/128, B·T, 128]."""
        scale: np.ndarray | None = None
        if not own.dynamic:
            scale = self.source.input_scale(linear)
        elif own.two_level:
            scale = self.source.input_global_scale(linear)
        blocks = weights.granularity == "block"
        key = (linear.input, own, blocks, None if scale is None else float(scale))
        if key not in self._known:
            self._known[key] = self._round(linear, x, own, scale, blocks)
        return self._known[key]

    def _round(
        self, linear: Linear, x: str, own: TensorScheme, scale: np.ndarray | None, blocks: bool
    ) -> Rounded:
        name = f"{linear.name}.input"
        if own.kind == "nvfp4":
            assert scale is not None
            return self._nvfp4(x, scale, name)
        if own.kind != "fp8":
            return self._mxfp8(x, own.group_size or 0, name)
        x = widened(self.graph, x, f"{name}.float32", self.compute)
        if scale is not None and not blocks:
            return Rounded(self._fp8(x, scale, name, self.compute))
        if blocks:
            x = self._grouped(x, linear.in_features // BLOCK, name)
        if scale is not None:
            return Rounded(self._fp8(x, scale, name, _FLOAT))
        scaled, by = self._divided(x, name)
        return Rounded(self._fp8(scaled, None, name, _FLOAT), by)

    def _fp8(self, x: str, scale: np.ndarray | None, name: str, kind: int) -> str:
        """Rounds float32 x by QuantizeLinear and DequantizeLinear, with a scale or 1, to `kind`."""
        graph = self.graph
        factor = one(graph) if scale is None else graph.array(f"{name}_scale", scale)
        zero = graph.array("zero.e4m3", np.zeros((), np.uint8), _E4M3)
        codes = graph.node("QuantizeLinear", [x, factor, zero], f"{name}.quantized", saturate=1)
        return dequantize(graph, codes, factor, f"{name}.dequantized", kind)

    def _grouped(self, x: str, groups: int, name: str) -> str:
        """Reshapes [B, T, K] → [K/128, B·T, 128]."""
        split = self.graph.array(f"shape.groups.{groups}", np.array([-1, groups, BLOCK], np.int64))
        grouped = self.graph.node("Reshape", [x, split], f"{name}.grouped")
        return self.graph.node("Transpose", [grouped], f"{name}.groups", perm=[1, 0, 2])

    def _divided(self, x: str, name: str) -> tuple[str, str]:
        """Divides x by the scale of each slice along the last axis; returns both in float32."""
        graph = self.graph
        top = graph.array("e4m3.max", np.array(E4M3.max, np.float32))
        least = graph.array("scale.min", np.array(_SMALLEST_SCALE))
        last = graph.array("axis.last", np.array([-1], np.int64))
        magnitude = graph.node("Abs", [x], f"{name}.abs")
        amax = graph.node("ReduceMax", [magnitude, last], f"{name}.amax", keepdims=1)
        ratio = graph.node("Div", [amax, top], f"{name}.ratio")
        scale = graph.node("Max", [ratio, least], f"{name}.scale")
        return graph.node("Div", [x, scale], f"{name}.scaled"), scale

    def _nvfp4(self, x: str, scale: np.ndarray, name: str) -> Rounded:
        graph = self.graph
        factor = graph.array(f"{name}_global_scale", scale)
        codes, scales = f"{name}.quantized", f"{name}.scales"
        graph.split(
            "TRT_FP4DynamicQuantize",
            [x, factor],
            [codes, scales],
            domain=DOMAIN,
            axis=-1,
            block_size=16,
            scale_type=_E4M3,
        )
        real = dequantize(graph, scales, factor, f"{name}.scales.dequantized", _FLOAT)
        groups = {"axis": -1, "block_size": 16}
        return Rounded(
            dequantize(graph, codes, real, f"{name}.dequantized", self.compute, **groups)
        )

    def _mxfp8(self, x: str, size: int, name: str) -> Rounded:
        codes, scales = f"{name}.quantized", f"{name}.scales"
        groups = {"domain": DOMAIN, "axis": -1, "block_size": size}
        outputs = [codes, scales]
        self.graph.split("TRT_MXFP8DynamicQuantize", [x], outputs, output_dtype=_E4M3, **groups)
        values = self.graph.node(
            "TRT_MXFP8DequantizeLinear",
            outputs,
            f"{name}.dequantized",
            output_dtype=self.compute,
            **groups,
        )
        return Rounded(values)


def dequantize(
    graph: Graph, codes: str, scale: str, name: str, kind: int, **attributes: int
) -> str:
    """Dequantizes to `kind`, FLOAT or FLOAT16; DequantizeLinear's scale and result are float32.

    As FP16, small scales would lose bits, and not every TensorRT has rules for mixed types.
    """
    if kind == _FLOAT:
        return graph.node("DequantizeLinear", [codes, scale], name, **attributes)
    real = graph.node("DequantizeLinear", [codes, scale], f"{name}.float32", **attributes)
    return graph.node("Cast", [real], name, to=kind)


def widened(graph: Graph, value: str, name: str, compute: int) -> str:
    """Casts `value`, of type `compute`, to float32."""
    return value if compute == _FLOAT else graph.node("Cast", [value], name, to=_FLOAT)


def one(graph: Graph) -> str:
    return graph.array("one.float32", np.array(1, np.float32))

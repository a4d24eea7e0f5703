"""Rounds the projections' activations in ONNX by their scheme, and returns them to float32.

| scheme       | scale of a slice of x along K                        | elements   |
|--------------|------------------------------------------------------|------------|
| FP8, static  | calibrated, one a tensor                             | Q/DQ, E4M3 |
| FP8, dynamic | max(amax / 448, 2^-126), of a token or of 128 of K   | Cast, E4M3 |
| MXFP8        | E8M0(amax / 448) rounded up, of 32 of K              | Cast, E4M3 |
| MXFP4        | E8M0(amax / 3.5) rounded down, of 32 of K            | Cast, E2M1 |
| NVFP4        | E4M3((1/6 · amax) · (1/global)) · global, of 16 of K | Cast, E2M1 |

A dynamic slice is divided by its scale, cast to the element type and back, and multiplied by the
scale. The results equal `octet.numerics.scaling` and `octet.numerics.microscaling` bit for bit:
both MX rules round to a power of two, which changes at an amax of 1.75 · 2^e (MXFP8 goes up above
it, MXFP4 already at it). Only an amax below 2^-118 may get an MXFP8 scale of 2^-126 instead of
2^-127.
"""

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from export.onnx.graph import Graph
from octet.numerics.formats import E2M1, E4M3
from octet.recipe import TensorScheme

__all__ = ["group_sizes", "round_dynamic", "round_static"]

_SMALLEST_SCALE = np.float32(2.0**-126)
_LARGEST = np.finfo(np.float32).max
_ELEMENTS = {"e4m3": TensorProto.FLOAT8E4M3FN, "e2m1": TensorProto.FLOAT4E2M1}


def round_static(graph: Graph, x: str, scale: np.ndarray, name: str, compute: int) -> str:
    """Rounds x [..., K] with one scale [], by QuantizeLinear and DequantizeLinear; in `compute`."""
    factor = graph.array(f"{name}_scale", scale)
    zero = graph.array("zero.e4m3", np.zeros((), np.uint8), TensorProto.FLOAT8E4M3FN)
    codes = graph.node("QuantizeLinear", [x, factor, zero], f"{name}.quantized", saturate=1)
    kind = {} if compute == TensorProto.FLOAT else {"output_dtype": compute}
    return graph.node("DequantizeLinear", [codes, factor], f"{name}.dequantized", **kind)


def round_dynamic(
    graph: Graph,
    x: str,
    scheme: TensorScheme,
    global_scale: np.ndarray | None,
    features: int,
    name: str,
) -> str:
    """Rounds float32 x [B, T, K] by a dynamic scheme.

    `features` is K, a multiple of the group size. `global_scale` [] is that of a two-level scheme.
    Nodes are named after `name`.
    """
    if scheme.granularity == "token":
        return _Rounding(graph, scheme, global_scale, name).apply(x, name)
    size = scheme.group_size or 0
    groups = features // size
    split = graph.array(f"shape.groups.{groups}x{size}", np.array([0, 0, groups, size], np.int64))
    grouped = graph.node("Reshape", [x, split], f"{name}.grouped")  # [B, T, K/g, g]
    values = _Rounding(graph, scheme, global_scale, name).apply(grouped, f"{name}.group")
    whole = graph.array(f"shape.ungrouped.{features}", np.array([0, 0, features], np.int64))
    return graph.node("Reshape", [values, whole], f"{name}.dequantized")


@dataclass(frozen=True)
class _Rounding:
    """Rounds each slice along the last axis with a scale of its own."""

    graph: Graph
    scheme: TensorScheme
    global_scale: np.ndarray | None
    module: str  # prefix of the calibrated scale's name

    def apply(self, x: str, name: str) -> str:
        graph, element = self.graph, _ELEMENTS[self.scheme.format]
        last = graph.array("axis.last", np.array([-1], np.int64))
        magnitude = graph.node("Abs", [x], f"{name}.abs")
        amax = graph.node("ReduceMax", [magnitude, last], f"{name}.amax", keepdims=1)
        scale = self._scale(amax, name)
        scaled = graph.node("Div", [x, scale], f"{name}.scaled")
        codes = graph.node("Cast", [scaled], f"{name}.quantized", to=element, saturate=1)
        values = graph.node("Cast", [codes], f"{name}.values", to=TensorProto.FLOAT)
        return graph.node("Mul", [values, scale], f"{name}.dequantized")

    def _scale(self, amax: str, name: str) -> str:
        """Computes the scale of each slice from its amax [..., 1]."""
        if self.scheme.scale_format == "e8m0":
            return self._power_of_two(amax, name)
        if self.scheme.two_level:
            return self._two_level(amax, name)
        ratio = self._ratio(amax, "e4m3.max", E4M3.max, name)
        least = self.graph.array("scale.min", np.array(_SMALLEST_SCALE))
        return self.graph.node("Max", [ratio, least], f"{name}.scale")

    def _power_of_two(self, amax: str, name: str) -> str:
        """Computes 2^⌈log2(amax/448)⌉ for E4M3, 2^⌊log2(amax/3.5)⌋ for E2M1."""
        if self.scheme.format == "e4m3":
            ratio, mode = self._ratio(amax, "e4m3.max", E4M3.max, name), "up"
        else:
            ratio, mode = self._ratio(amax, "e2m1.middle", 3.5, name), "down"
        kind = TensorProto.FLOAT8E8M0
        code = self.graph.node("Cast", [ratio], f"{name}.power", to=kind, saturate=1,
                               round_mode=mode)  # fmt: skip
        return self.graph.node("Cast", [code], f"{name}.scale", to=TensorProto.FLOAT)

    def _two_level(self, amax: str, name: str) -> str:
        """Computes an E4M3 scale times the global scale.

        Where that is 0, returns the largest float32, so that the slice rounds to 0.
        """
        graph, shared = self.graph, self.global_scale
        assert shared is not None, "a scheme in two levels has a global scale"
        sixth = graph.array("e2m1.max_inverse", np.float32(1) / np.array(E2M1.max, np.float32))
        inverse = graph.array(
            f"{self.module}_global_scale_inverse", np.asarray(np.float32(1) / np.float32(shared))
        )
        factor = graph.array(f"{self.module}_global_scale", np.asarray(shared, np.float32))
        part = graph.node("Mul", [amax, sixth], f"{name}.amax_over_6")
        wanted = graph.node("Mul", [part, inverse], f"{name}.scale_wanted")
        kind = TensorProto.FLOAT8E4M3FN
        codes = graph.node("Cast", [wanted], f"{name}.scale_quantized", to=kind, saturate=1)
        scale = graph.node("DequantizeLinear", [codes, factor], f"{name}.scale_or_0")
        zero = graph.array("zero.float", np.array(0, np.float32))
        largest = graph.array("float.max", np.array(_LARGEST))
        is_zero = graph.node("Equal", [scale, zero], f"{name}.scale_is_0")
        return graph.node("Where", [is_zero, largest, scale], f"{name}.scale")

    def _ratio(self, amax: str, constant: str, divisor: float, name: str) -> str:
        value = self.graph.array(constant, np.array(divisor, np.float32))
        return self.graph.node("Div", [amax, value], f"{name}.ratio")


def group_sizes(*schemes: TensorScheme) -> list[int]:
    """Lists the sizes that must divide K, because blocks and groups end at the edge of a row."""
    return [scheme.group_size for scheme in schemes if scheme.group_size is not None]

"""Projections in ONNX: FP8 weights, FP8 inputs, and a MatMul between them.

A weight stays FLOAT8E4M3FN [N, K] under its checkpoint name, followed by DequantizeLinear and
Transpose, which a runtime folds or fuses. Inputs are rounded to E4M3 and back:

- tensor, static: QuantizeLinear and DequantizeLinear with the calibrated scale.
- token, dynamic: scale = max(amax / 448, 2^-126) along K; x / scale cast to E4M3; times scale.
- group, dynamic: the same for each 128 elements of K.

The arithmetic is that of `octet.scaling`.
"""

from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto

from export.graph import Graph, Weight
from export.source import Source
from octet.errors import UnsupportedError
from octet.formats import E4M3
from octet.model import Linear

__all__ = ["Linears", "add_stored", "stored_weight"]

_STORED = {
    "BF16": TensorProto.BFLOAT16,
    "F16": TensorProto.FLOAT16,
    "F32": TensorProto.FLOAT,
}
_SMALLEST_SCALE = np.float32(2.0**-126)


@dataclass
class Linears:
    """Adds the linears of one model to `graph`; computes in `compute` (FLOAT or FLOAT16)."""

    graph: Graph
    source: Source
    quantize: bool = True
    compute: int = TensorProto.FLOAT
    _inputs: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = np.float16 if self.compute == TensorProto.FLOAT16 else np.float32
        if self.quantize:
            check_groups(self.source)

    def apply(self, linear: Linear, x: str) -> str:
        """x [B, T, K] → [B, T, N], a value named after the module."""
        quantized = self.quantize and self.source.quantizes(linear)
        if quantized:
            x = self._quantized_input(linear, x)
            weight = self._quantized_weight(linear)
        else:
            weight = stored_weight(self.graph, self.source, f"{linear.name}.weight", self.compute)
        transposed = self.graph.node(
            "Transpose", [weight], f"{linear.name}.weight.transposed", perm=[1, 0]
        )
        return self.graph.node("MatMul", [x, transposed], linear.name)

    def _quantized_weight(self, linear: Linear) -> str:
        """FP8 codes and scales → [N, K] in the compute type."""
        graph, name = self.graph, f"{linear.name}.weight"
        shape = (linear.out_features, linear.in_features)
        codes = graph.weight(
            Weight(
                name,
                TensorProto.FLOAT8E4M3FN,
                shape,
                shape[0] * shape[1],
                lambda: self.source.weight_codes(linear),
            )
        )
        scale = self.source.weight_scale(linear)
        scheme = self.source.recipe.weights
        attributes: dict[str, int] = {}
        if scheme.granularity == "channel":
            scale, attributes = scale.reshape(-1), {"axis": 0}
        elif scheme.granularity == "block":
            # DequantizeLinear has blocks along one axis: each row repeats its block row's scales.
            size = scheme.group_size or 0
            scale = scale.repeat(size, axis=0)[: linear.out_features]
            attributes = {"axis": 1, "block_size": size}
        scales = graph.array(f"{name}_scale", scale)
        return self._dequantize(codes, scales, f"{name}.dequantized", **attributes)

    def _dequantize(self, codes: str, scales: str, name: str, **attributes: int) -> str:
        """Values in the compute type from float32 scales: as FP16, small ones would lose bits."""
        if self.compute != TensorProto.FLOAT:
            attributes["output_dtype"] = self.compute
        return self.graph.node("DequantizeLinear", [codes, scales], name, **attributes)

    def _quantized_input(self, linear: Linear, x: str) -> str:
        """x rounded to E4M3 values; once for the linears that share an input and a scale."""
        scheme = self.source.recipe.activations
        scale = "" if scheme.dynamic else str(float(self.source.input_scale(linear)))
        key = (linear.input, scale)
        if key not in self._inputs:
            if not scheme.dynamic:
                self._inputs[key] = self._static(linear, x)
            elif scheme.granularity == "token":
                self._inputs[key] = self._dynamic(x, f"{linear.name}.input")
            else:
                self._inputs[key] = self._grouped(linear, x, scheme.group_size or 0)
        return self._inputs[key]

    def _static(self, linear: Linear, x: str) -> str:
        graph, name = self.graph, f"{linear.name}.input"
        scale = graph.array(f"{name}_scale", self.source.input_scale(linear))
        zero = graph.array("zero.e4m3", np.zeros((), np.uint8), TensorProto.FLOAT8E4M3FN)
        codes = graph.node("QuantizeLinear", [x, scale, zero], f"{name}.quantized", saturate=1)
        return self._dequantize(codes, scale, f"{name}.dequantized")

    def _dynamic(self, x: str, name: str) -> str:
        """One scale for each slice along the last axis."""
        graph = self.graph
        top = graph.array("e4m3.max", np.array(E4M3.max, np.float32))
        least = graph.array("scale.min", np.array(_SMALLEST_SCALE))
        last = graph.array("axis.last", np.array([-1], np.int64))
        magnitude = graph.node("Abs", [x], f"{name}.abs")
        amax = graph.node("ReduceMax", [magnitude, last], f"{name}.amax", keepdims=1)
        ratio = graph.node("Div", [amax, top], f"{name}.ratio")
        scale = graph.node("Max", [ratio, least], f"{name}.scale")
        scaled = graph.node("Div", [x, scale], f"{name}.scaled")
        codes = graph.node(
            "Cast", [scaled], f"{name}.quantized", to=TensorProto.FLOAT8E4M3FN, saturate=1
        )
        values = graph.node("Cast", [codes], f"{name}.values", to=TensorProto.FLOAT)
        return graph.node("Mul", [values, scale], f"{name}.dequantized")

    def _grouped(self, linear: Linear, x: str, size: int) -> str:
        graph, name = self.graph, f"{linear.name}.input"
        groups = linear.in_features // size
        split = graph.array(f"groups.{groups}", np.array([0, 0, groups, size], np.int64))
        grouped = graph.node("Reshape", [x, split], f"{name}.grouped")  # [B, T, K/g, g]
        values = self._dynamic(grouped, f"{name}.group")
        whole = graph.array(f"ungrouped.{groups}", np.array([0, 0, groups * size], np.int64))
        return graph.node("Reshape", [values, whole], f"{name}.dequantized")


def check_groups(source: Source) -> None:
    """Raises UnsupportedError naming a linear that groups or blocks do not divide."""
    size = source.recipe.activations.group_size or source.recipe.weights.group_size
    if size is None:
        return
    for linear in source.quantized_linears().values():
        if linear.in_features % size:
            raise UnsupportedError(
                f"recipe {source.recipe.name}: {linear.name} has {linear.in_features} inputs, not"
                f" a multiple of {size}, which the ONNX export needs; use recipe fp8"
            )


def add_stored(graph: Graph, source: Source, name: str) -> str:
    """A checkpoint tensor in its own dtype, bit for bit."""
    tensor = source.checkpoint.read(name)
    kind = _STORED.get(tensor.dtype)
    if kind is None:
        raise UnsupportedError(f"{name} is stored as {tensor.dtype}; known: {', '.join(_STORED)}")
    return graph.weight(Weight(name, kind, tensor.shape, tensor.codes.nbytes, lambda: tensor.codes))


def stored_weight(graph: Graph, source: Source, name: str, compute: int) -> str:
    """A checkpoint tensor in the compute type; in the file it keeps its own."""
    add_stored(graph, source, name)
    if graph.weights[name].elem_type == compute:
        return name
    return graph.node("Cast", [name], f"{name}.cast", to=compute)

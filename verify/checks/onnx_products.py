"""Verifies the GEMMs of an ONNX graph: every quantized linear has a rounded input and weight.

Codes and scales may all be right in a graph that multiplies by an unrounded input (W8A16), and its
results are then better, not worse. So each weight is followed to the MatMul that multiplies by it,
and the MatMul's other input back to the operators that round it. They are compared with the recipe:

| found before the GEMM                           | elements     | a scale of                      |
|-------------------------------------------------|--------------|---------------------------------|
| DequantizeLinear of QuantizeLinear              | its zero     | the tensor, if it is a constant |
|                                                 | point's type |                                 |
| the same of x / s with a scale of 1; the        | the same     | the slices whose maximum s is   |
| product times s                                 |              | made from                       |
| Mul by s of Cast of Cast of x / s               | Cast's type  | the same                        |
| DequantizeLinear of TRT_FP4DynamicQuantize      | E2M1         | `block_size`, E4M3              |
| TRT_MXFP8DequantizeLinear of its DynamicQuantize| E4M3         | `block_size`, E8M0              |

Only operators and types are read; of names, only the weight's and its product's.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from octet.model.spec import Linear
from octet.recipe import TensorScheme
from verify.checks.findings import Verification
from verify.reader.onnx import WrittenGraph

__all__ = ["check_products"]

Schemes = Mapping[str, tuple[TensorScheme, TensorScheme] | None]

_REAL = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_ELEMENTS = {TensorProto.FLOAT8E4M3FN: "e4m3", TensorProto.FLOAT4E2M1: "e2m1"}
_SCALES = {"e8m0": TensorProto.FLOAT8E8M0, "e4m3": TensorProto.FLOAT8E4M3FN}
# Divisors of a maximum. MXFP4 has 3.5, because its scale is a power of two rounded down.
_DIVISORS = {
    ("e4m3", "float32"): 448,
    ("e4m3", "e8m0"): 448,
    ("e2m1", "e8m0"): 3.5,
    ("e2m1", "e4m3"): 6,
}
_SHAPING = ("Reshape", "Transpose", "Identity")
_NOTHING = onnx.NodeProto(
    input=["", ""]
)  # stands for the producer of a graph input or an initializer
_ARITHMETIC = ("Max", "Div", "Mul", "Where")  # between a maximum and its scale


@dataclass(frozen=True)
class _Rounding:
    """Rounding of a GEMM's input. `columns` share a scale; if None, the whole tensor does."""

    elements: str
    scales: str
    columns: int | None

    def __str__(self) -> str:
        shared = "the tensor" if self.columns is None else f"{self.columns} columns"
        return f"{self.elements} with {self.scales} scales of {shared}"


class _NotRounded(Exception):
    """The input is not rounded; the message says what reaches the GEMM instead."""


def check_products(
    graph: WrittenGraph, linears: Iterable[Linear], schemes: Schemes, found: Verification
) -> None:
    """Adds a problem for each linear whose GEMM differs from what its schemes require."""
    reader = _Reader(graph)
    for linear in linears:
        scheme, weight = schemes[linear.name], f"{linear.name}.weight"
        if weight not in graph.initializers:
            continue  # reported where weights are compared
        for what in reader.faults(linear, scheme):
            found.problem("configuration", linear.name, what)


@dataclass(frozen=True)
class _Reader:
    graph: WrittenGraph

    def faults(
        self, linear: Linear, scheme: tuple[TensorScheme, TensorScheme] | None
    ) -> Iterator[str]:
        """Yields the faults in the GEMMs of one linear."""
        products = list(self._products(f"{linear.name}.weight", dequantized=scheme is None))
        if not products:
            yield "no MatMul that leads to an output multiplies by its weight, dequantized"
        for product in products:
            name = product.output[0]
            if name not in (linear.name, f"{linear.name}.product"):
                yield f"its weight is multiplied in {name}"
                continue
            wanted = None if scheme is None else _wanted(scheme[1], linear.in_features)
            try:
                rounding = self._input(product, linear.in_features)
            except _NotRounded as error:
                if wanted is not None:
                    yield f"its input is not rounded to {wanted}, as the recipe has it: {error}"
                continue
            if wanted is None:
                yield f"its input is rounded to {rounding}, and the recipe leaves it as it was"
            elif rounding != wanted:
                yield f"its input is rounded to {rounding}, and the recipe has {wanted}"

    def _products(self, name: str, *, dequantized: bool) -> Iterator[onnx.NodeProto]:
        """Yields every MatMul that has `name` as its second operand.

        Unless `name` is `dequantized`, a DequantizeLinear has to lie between.
        """
        for node in self.graph.readers.get(name, []):
            if not self.graph.leads_out(node):
                continue  # unused, so it never runs
            if node.op_type == "MatMul" and node.input[1] == name:
                if dequantized:
                    yield node
            elif node.input[0] == name and "DequantizeLinear" in node.op_type:
                yield from self._products(node.output[0], dequantized=True)
            elif node.input[0] == name and _keeps_values(node):
                yield from self._products(node.output[0], dequantized=dequantized)

    def _input(self, product: onnx.NodeProto, features: int) -> _Rounding:
        """Returns the rounding of the first operand of `product`; raises _NotRounded if none."""
        node = self._origin(product.input[0])
        codes = self._producer(node.input[0])
        if node.op_type == "DequantizeLinear" and codes.op_type == "QuantizeLinear":
            return self._by_scale(product, node, codes, features)
        kinds = (node.op_type, codes.op_type)
        if kinds == ("DequantizeLinear", "TRT_FP4DynamicQuantize"):
            return self._nvfp4(node, codes)
        if kinds == ("TRT_MXFP8DequantizeLinear", "TRT_MXFP8DynamicQuantize"):
            return self._mxfp8(node, codes)
        if node.op_type == "Mul":
            for values, scale in (node.input, reversed(node.input)):
                chain = [self._producer(values)]
                while len(chain) < 3:
                    chain.append(self._producer(chain[-1].input[0]))
                cast, inner, scaled = chain
                same = [item.op_type for item in chain] == ["Cast", "Cast", "Div"]
                if same and scaled.input[1] == scale and _cast_type(cast) in _REAL:
                    return self._by_maximum(scaled, _element(_cast_type(inner)), features)
        raise _NotRounded(f"it comes from {node.op_type or 'an input or a constant'}")

    def _by_scale(
        self,
        product: onnx.NodeProto,
        node: onnx.NodeProto,
        codes: onnx.NodeProto,
        features: int,
    ) -> _Rounding:
        """Parses Q/DQ by a constant, or by 1 around x / s if the product is multiplied by s."""
        element = _element(self._code_type(codes))
        one, other = (self._constant(item.input[1]) for item in (codes, node))
        if one is None or one != other:
            raise _NotRounded("QuantizeLinear and DequantizeLinear have different scales")
        scaled = self._producer(codes.input[0])
        if scaled.op_type != "Div" or self._constant(scaled.input[1]) is not None:
            return _Rounding(element, "float32", None)
        times = self.graph.readers.get(product.output[0], [])
        if one != 1 or not all(
            item.op_type == "Mul" and scaled.input[1] in item.input for item in times
        ):
            raise _NotRounded("it is divided by a scale that the product is not multiplied by")
        return self._by_maximum(scaled, element, features)

    def _nvfp4(self, node: onnx.NodeProto, codes: onnx.NodeProto) -> _Rounding:
        """Parses NVFP4: the group scales are E4M3 times a constant."""
        scales = self._producer(node.input[1])
        size, own = (int(_attributes(item).get("block_size", 0)) for item in (codes, node))
        whole = scales.op_type == "DequantizeLinear" and self._constant(scales.input[1])
        if not whole or scales.input[0] != codes.output[1] or size != own:
            raise _NotRounded("its group scales are not those that it was divided by")
        return _Rounding("e2m1", "e4m3", size)

    def _mxfp8(self, node: onnx.NodeProto, codes: onnx.NodeProto) -> _Rounding:
        size, own = (int(_attributes(item).get("block_size", 0)) for item in (codes, node))
        if list(node.input) != list(codes.output) or size != own:
            raise _NotRounded("its group scales are not those that it was divided by")
        return _Rounding("e4m3", "e8m0", size)

    def _by_maximum(self, scaled: onnx.NodeProto, element: str, features: int) -> _Rounding:
        """Parses x / s with s from the maximum of each slice of x: its width and scale format."""
        kinds: set[int] = set()
        divisor = 1.0  # of the maximum, before its scale is rounded
        node = self._producer(scaled.input[1])
        while node.op_type != "ReduceMax":
            if node.op_type == "Cast":
                kinds.add(_cast_type(node))
            elif node.op_type not in (*_ARITHMETIC, "DequantizeLinear"):
                raise _NotRounded(f"its scale comes from {node.op_type or 'no maximum'}")
            for number in [
                self._constant(name) for name in node.input if self._is_initializer(name)
            ]:
                if number and node.op_type in ("Div", "Mul", "DequantizeLinear"):
                    divisor *= number if node.op_type == "Div" else 1 / number
            varying = [name for name in node.input if not self._is_initializer(name)]
            node = self._producer(varying[-1] if varying else "")  # of Where, after the condition
        magnitude = self._producer(node.input[0])
        if magnitude.op_type != "Abs" or magnitude.input[0] != scaled.input[0]:
            raise _NotRounded("its scale is not of its own maximum")
        if len(node.input) < 2 or self._constant(node.input[1]) != -1:
            raise _NotRounded("its scale is not of its maximum along the inputs")
        scales = "".join(name for name, kind in _SCALES.items() if kind in kinds) or "float32"
        top = _DIVISORS.get((element, scales))
        if top is not None and not math.isclose(divisor, top, rel_tol=1e-5):
            raise _NotRounded(f"its scale is its maximum / {divisor:.6g}, and should be / {top:g}")
        return _Rounding(element, scales, self._width(scaled.input[0], features))

    def _width(self, name: str, features: int) -> int:
        """Returns how many columns a slice of `name` has, along the last axis."""
        node = self._producer(name)
        while node.op_type in ("Transpose", "Cast"):
            node = self._producer(node.input[0])
        if node.op_type != "Reshape" or node.input[1] not in self.graph.initializers:
            return features
        return int(self.graph.raw(node.input[1])[-1])

    def _origin(self, name: str) -> onnx.NodeProto:
        """Returns the node behind those that only change the shape or widen the dtype."""
        node = self._producer(name)
        while _keeps_values(node):
            node = self._producer(node.input[0])
        return node

    def _producer(self, name: str) -> onnx.NodeProto:
        node = self.graph.maker.get(name)
        return node if node is not None and node.input else _NOTHING

    def _is_initializer(self, name: str) -> bool:
        return name in self.graph.initializers

    def _constant(self, name: str) -> float | None:
        """Returns the single number of the initializer `name`; None if it is not one."""
        if name not in self.graph.initializers:
            return None
        values = self.graph.values(name).reshape(-1)
        return float(values[0]) if values.size == 1 else None

    def _code_type(self, quantizer: onnx.NodeProto) -> int:
        if len(quantizer.input) > 2:
            return int(self.graph.initializers[quantizer.input[2]].data_type)
        return int(_attributes(quantizer).get("output_dtype", TensorProto.UINT8))


def _wanted(scheme: TensorScheme, features: int) -> _Rounding:
    columns = (scheme.group_size or features) if scheme.dynamic else None
    return _Rounding(scheme.format, scheme.scale_format, columns)


def _keeps_values(node: onnx.NodeProto) -> bool:
    return node.op_type in _SHAPING or (node.op_type == "Cast" and _cast_type(node) in _REAL)


def _element(kind: int) -> str:
    return _ELEMENTS.get(kind, str(TensorProto.DataType.Name(kind)).lower())


def _cast_type(node: onnx.NodeProto) -> int:
    return int(_attributes(node)["to"])


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {item.name: helper.get_attribute_value(item) for item in node.attribute}

"""Projections for TensorRT: both operands of every GEMM are FP8, or both FP4.

TensorRT fuses DequantizeLinear into a GEMM only if its scale factors out of the sum over K (a scale
of the whole tensor, or of a weight's row) or if a kernel supports the groups. All other scales are
applied here to the GEMM's result, in float32:

| weights, activations      | GEMM                                                                |
|---------------------------|---------------------------------------------------------------------|
| tensor or channel, tensor | Q/DQ of the input by its static scale                               |
| channel, token            | x / s rounded to E4M3, s = max(amax / 448, 2^-126) of a row; · s    |
| block, group or tensor    | K/128 GEMMs of 128 columns in one batch; each times the scales of   |
|                           | the input's group and of the weight's block; their sum              |
| nvfp4                     | TRT_FP4DynamicQuantize, DQ of the scales by the global one, DQ      |
| mxfp8                     | TRT_MXFP8DynamicQuantize and TRT_MXFP8DequantizeLinear              |

So the results are the recipe's. Blocks cost scratch memory, float32 [K/128, B·T, N], because
TensorRT has no FP8 kernel that scales within the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from export.onnx.graph import Weight
from export.onnx.linear import Linears, stored_weight
from export.onnx.tensorrt_inputs import BLOCK, DOMAIN, Inputs, dequantize, one
from octet.model.spec import Linear
from octet.numerics.formats import E4M3, E8M0, encode
from octet.recipe import TensorScheme

__all__ = ["EngineLinears"]

_FLOAT = TensorProto.FLOAT


@dataclass
class EngineLinears(Linears):
    """Adds the linears of one model to `graph`; see `export.onnx.linear.Linears`.

    `products` maps each quantized linear to its MatMul, which must run in 8 or 4 bits.
    """

    products: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inputs = Inputs(self.graph, self.source, self.compute)

    def apply(self, linear: Linear, x: str) -> str:
        """Adds x [B, T, K] → [B, T, N] in the compute type, and the bias if there is one."""
        schemes = self.source.schemes(linear) if self.quantize else None
        if schemes is None:
            return super().apply(linear, x)
        rounded = self.inputs.rounded(linear, x, *schemes)
        blocks = schemes[0].granularity == "block"
        outside = blocks or rounded.scale is not None  # a scale is applied to the product
        biased = f"{linear.name}.bias" in self._stored
        name = linear.name if not (outside or biased) else f"{linear.name}.product"
        kind = _FLOAT if outside else self.compute
        weight = self._blocks(linear) if blocks else self._matrix(linear, schemes[0], kind)
        value = self.graph.node("MatMul", [rounded.values, weight], name)
        self.products[linear.name] = name
        if rounded.scale is not None:
            value = self.graph.node("Mul", [value, rounded.scale], f"{name}.by_input")
        if blocks:
            value = self._sum(linear, x, value)
        if outside and self.compute != _FLOAT:
            last = f"{linear.name}.unbiased" if biased else linear.name
            value = self.graph.node("Cast", [value], last, to=self.compute)
        if biased:
            bias = stored_weight(self.graph, self.source, f"{linear.name}.bias", self.compute)
            value = self.graph.node("Add", [value, bias], linear.name)
        return value

    def _matrix(self, linear: Linear, scheme: TensorScheme, kind: int) -> str:
        """Adds the weight as [K, N] in `kind`."""
        graph, name = self.graph, f"{linear.name}.weight"
        shape = (linear.out_features, linear.in_features)
        codes = self._codes(linear, scheme, shape, lambda: self.source.weight_codes(linear))
        scale, size = self.source.weight_scale(linear), scheme.group_size or 0
        if scheme.kind == "nvfp4":
            shared = self.source.weight_global_scale(linear)
            assert shared is not None, "a scheme in two levels has a global scale"
            stored = graph.array(f"{name}_scale", encode(scale, E4M3), TensorProto.FLOAT8E4M3FN)
            whole = graph.array(f"{linear.name}.weight_global_scale", shared)
            scales = dequantize(graph, stored, whole, f"{name}_scale.dequantized", _FLOAT)
            groups = {"axis": 1, "block_size": size}
            real = dequantize(graph, codes, scales, f"{name}.dequantized", kind, **groups)
        elif scheme.kind == "mxfp8":
            stored = graph.array(f"{name}_scale", encode(scale, E8M0))  # TensorRT takes uint8
            groups = {"axis": 1, "block_size": size, "output_dtype": kind}
            inputs, name_ = [codes, stored], f"{name}.dequantized"
            real = graph.node("TRT_MXFP8DequantizeLinear", inputs, name_, domain=DOMAIN, **groups)
        else:
            rows = scheme.granularity == "channel"
            stored = graph.array(f"{name}_scale", scale.reshape(-1) if rows else scale)
            axis = {"axis": 0} if rows else {}
            real = dequantize(graph, codes, stored, f"{name}.dequantized", kind, **axis)
        return graph.node("Transpose", [real], f"{name}.transposed", perm=[1, 0])

    def _blocks(self, linear: Linear) -> str:
        """Adds the weight's values without their scales, float32 [K/128, 128, N]."""
        groups, features = linear.in_features // BLOCK, linear.out_features

        def read() -> npt.NDArray[np.uint8]:
            return self.source.weight_codes(linear).T.reshape(groups, BLOCK, features)

        codes = self._codes(linear, None, (groups, BLOCK, features), read)
        name = f"{linear.name}.weight.dequantized"
        return dequantize(self.graph, codes, one(self.graph), name, _FLOAT)

    def _sum(self, linear: Linear, x: str, products: str) -> str:
        """Scales [K/128, B·T, N] by the weight's blocks and sums: float32 [B, T, N]."""
        graph, name, features = self.graph, linear.name, linear.out_features
        # The scale of block row n // 128 and block column k // 128: [K/128, 1, N].
        rows = self.source.weight_scale(linear).repeat(BLOCK, axis=0)[:features]
        blocks = graph.array(f"{name}.weight_scale", rows.T[:, None, :])
        scaled = graph.node("Mul", [products, blocks], f"{name}.product.by_block")
        first = graph.array("axis.first", np.array([0], np.int64))
        total = graph.node("ReduceSum", [scaled, first], f"{name}.product.sum", keepdims=0)
        size = graph.node("Shape", [x], f"{name}.rows", start=0, end=2)
        width = graph.array(f"shape.{features}", np.array([features], np.int64))
        shape = graph.node("Concat", [size, width], f"{name}.shape", axis=0)
        return graph.node("Reshape", [total, shape], f"{name}.float32")

    def _codes(
        self,
        linear: Linear,
        scheme: TensorScheme | None,
        shape: tuple[int, ...],
        read: Callable[[], npt.NDArray[np.uint8]],
    ) -> str:
        """Adds the weight's codes under its name, in a shape of as many elements."""
        packed = scheme is not None and scheme.format == "e2m1"
        kind = TensorProto.FLOAT4E2M1 if packed else TensorProto.FLOAT8E4M3FN
        nbytes = linear.out_features * linear.in_features // (2 if packed else 1)
        return self.graph.weight(Weight(f"{linear.name}.weight", kind, shape, nbytes, read))

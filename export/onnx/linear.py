"""Projections in ONNX: quantized weights, rounded activations, and a MatMul of the two.

A weight keeps its checkpoint name and shape [N, K]. DequantizeLinear and Transpose follow, which a
runtime folds or fuses. Its scales are named `<weight>_scale`, as in a checkpoint:

| weights                     | codes        | scales                                              |
|-----------------------------|--------------|-----------------------------------------------------|
| FP8 per tensor, channel     | FLOAT8E4M3FN | float32 [], [N]                                     |
| FP8 in blocks or groups     | FLOAT8E4M3FN | float32 [N, K/128], blocks repeated for each row    |
| MXFP8                       | FLOAT8E4M3FN | FLOAT8E8M0 [N, K/32], Cast to float32               |
| MXFP4                       | FLOAT4E2M1   | FLOAT8E8M0 [N, K/32], Cast to float32               |
| NVFP4                       | FLOAT4E2M1   | FLOAT8E4M3FN [N, K/16], DequantizeLinear with the   |
|                             |              | global scale float32 []                             |

DequantizeLinear-24 takes FLOAT8E8M0 as it is, but ONNX Runtime 1.31 has no kernel for that, only
for the Cast. The arithmetic is that of `octet.numerics.scaling`. For the activations, see
export/onnx/inputs.py.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from export.onnx.graph import Graph, Weight
from export.onnx.inputs import group_sizes, round_dynamic, round_static
from export.source import Source
from octet.errors import UnsupportedError
from octet.model.spec import Linear
from octet.numerics.formats import E4M3, E8M0, encode
from octet.recipe import TensorScheme

__all__ = ["Linears", "add_stored", "stored_weight"]

_STORED = {
    "BF16": TensorProto.BFLOAT16,
    "F16": TensorProto.FLOAT16,
    "F32": TensorProto.FLOAT,
}


@dataclass
class Linears:
    """Adds the linears of one model to `graph`; computes in `compute` (FLOAT or FLOAT16)."""

    graph: Graph
    source: Source
    quantize: bool = True
    compute: int = TensorProto.FLOAT
    _inputs: dict[tuple[object, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = np.float16 if self.compute == TensorProto.FLOAT16 else np.float32
        self._stored = frozenset(self.source.checkpoint.tensor_names)
        if self.quantize:
            check_groups(self.source)

    def apply(self, linear: Linear, x: str) -> str:
        """Adds x [B, T, K] → [B, T, N], a value named after the module, and the bias if any."""
        schemes = self.source.schemes(linear) if self.quantize else None
        if schemes is None:
            weight = stored_weight(self.graph, self.source, f"{linear.name}.weight", self.compute)
        else:
            x = self.quantized_input(linear, x, schemes[1])
            weight = self.quantized_weight(linear, schemes[0])
        turned = self.graph.node(
            "Transpose", [weight], f"{linear.name}.weight.transposed", perm=[1, 0]
        )
        bias = f"{linear.name}.bias"
        if bias not in self._stored:
            return self.graph.node("MatMul", [x, turned], linear.name)
        product = self.graph.node("MatMul", [x, turned], f"{linear.name}.product")
        added = stored_weight(self.graph, self.source, bias, self.compute)
        return self.graph.node("Add", [product, added], linear.name)

    def quantized_input(self, linear: Linear, x: str, scheme: TensorScheme) -> str:
        """Rounds x by `scheme`, once for all linears that share an input and its scale."""
        name = f"{linear.name}.input"
        scale: npt.NDArray[np.float32] | None = None
        if not scheme.dynamic:
            scale = self.source.input_scale(linear)
        elif scheme.two_level:
            scale = self.source.input_global_scale(linear)
        key = (linear.input, scheme, None if scale is None else float(scale))
        if key not in self._inputs and scheme.dynamic:
            features = linear.in_features
            self._inputs[key] = round_dynamic(self.graph, x, scheme, scale, features, name)
        elif key not in self._inputs:
            assert scale is not None
            self._inputs[key] = round_static(self.graph, x, scale, name, self.compute)
        return self._inputs[key]

    def quantized_weight(self, linear: Linear, scheme: TensorScheme) -> str:
        """Adds codes and scales; returns the weight [N, K] in the compute type."""
        graph, name = self.graph, f"{linear.name}.weight"
        rows, columns = linear.out_features, linear.in_features
        four_bits = scheme.format == "e2m1"
        codes = graph.weight(
            Weight(
                name,
                TensorProto.FLOAT4E2M1 if four_bits else TensorProto.FLOAT8E4M3FN,
                (rows, columns),
                rows * columns // 2 if four_bits else rows * columns,
                lambda: self.source.weight_codes(linear),
            )
        )
        attributes: dict[str, int] = {}
        if scheme.granularity == "channel":
            attributes = {"axis": 0}
        elif scheme.group_size is not None:
            attributes = {"axis": 1, "block_size": scheme.group_size}
        if self.compute != TensorProto.FLOAT:
            attributes["output_dtype"] = self.compute
        # Scales stay float32 in every compute type: as FP16, small ones would lose bits.
        scales = self._weight_scales(linear, scheme)
        return graph.node("DequantizeLinear", [codes, scales], f"{name}.dequantized", **attributes)

    def _weight_scales(self, linear: Linear, scheme: TensorScheme) -> str:
        """Adds float32 scales in the shape that DequantizeLinear takes."""
        graph, name = self.graph, f"{linear.name}.weight_scale"
        scale = self.source.weight_scale(linear)
        if scheme.scale_format == "e8m0":
            powers = graph.array(name, encode(scale, E8M0), TensorProto.FLOAT8E8M0)
            return graph.node("Cast", [powers], f"{name}.cast", to=TensorProto.FLOAT)
        if scheme.two_level:
            shared = self.source.weight_global_scale(linear)
            assert shared is not None, "a scheme in two levels has a global scale"
            codes = graph.array(name, encode(scale, E4M3), TensorProto.FLOAT8E4M3FN)
            factor = graph.array(f"{linear.name}.weight_global_scale", shared)
            return graph.node("DequantizeLinear", [codes, factor], f"{name}.dequantized")
        if scheme.granularity == "channel":
            scale = scale.reshape(-1)
        elif scheme.granularity == "block":
            # DequantizeLinear has blocks along one axis only: each row repeats its block's scales.
            scale = scale.repeat(scheme.group_size or 0, axis=0)[: linear.out_features]
        return graph.array(name, scale)


def check_groups(source: Source) -> None:
    """Raises UnsupportedError naming a linear whose inputs groups or blocks do not divide."""
    for linear in source.quantized_linears().values():
        for size in group_sizes(*(source.schemes(linear) or ())):
            if linear.in_features % size:
                raise UnsupportedError(
                    f"recipe {source.recipe.name}: {linear.name} has {linear.in_features} inputs,"
                    f" not a multiple of {size}, which the ONNX export needs; use recipe fp8"
                )


def add_stored(graph: Graph, source: Source, name: str) -> str:
    """Adds a checkpoint tensor in its own dtype, bit for bit."""
    checkpoint = source.checkpoint
    kind = _STORED.get(checkpoint.dtype(name))
    if kind is None:
        raise UnsupportedError(
            f"{name} is stored as {checkpoint.dtype(name)}; known: {', '.join(_STORED)}"
        )
    return graph.weight(
        Weight(
            name,
            kind,
            checkpoint.shape(name),
            checkpoint.nbytes(name),
            lambda: checkpoint.read(name).codes,
        )
    )


def stored_weight(graph: Graph, source: Source, name: str, compute: int) -> str:
    """Adds a checkpoint tensor in the compute type; in the file it keeps its own dtype."""
    add_stored(graph, source, name)
    if graph.weights[name].elem_type == compute:
        return name
    return graph.node("Cast", [name], f"{name}.cast", to=compute)

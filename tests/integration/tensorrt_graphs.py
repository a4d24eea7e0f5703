"""Small ONNX graphs given to TensorRT-RTX: `python -m tests.integration.tensorrt_graphs`.

Runs in the environment that has TensorRT-RTX (and no pytest); prints a JSON object, graph name to
what came of it: how the node `product` runs, "built" if there is none, or the error.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper

from export.engine.builder import Options, build_plan
from export.engine.library import RTX, load
from octet.errors import ExportError

Value = tuple[str, int, Sequence[int]]
B, H, HKV, S, D, K, N = 2, 4, 2, 32, 64, 256, 128
RNG = np.random.default_rng(0)


def graph(
    nodes: list[onnx.NodeProto],
    inputs: list[Value],
    outputs: list[Value],
    weights: list[onnx.TensorProto] | None = None,
    opset: int = 23,
) -> onnx.ModelProto:
    ends = ([helper.make_tensor_value_info(*value) for value in side] for side in (inputs, outputs))
    return helper.make_model(
        helper.make_graph(nodes, "g", *ends, weights or []),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("trt", 1)],
        ir_version=11 if opset < 24 else 12,
    )


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    domain = "trt" if op.startswith("TRT_") else None
    return helper.make_node(op, inputs, outputs, domain=domain, **attributes)


def weight(name: str, kind: int, array: np.ndarray) -> onnx.TensorProto:
    return T(name=name, data_type=kind, dims=array.shape, raw_data=array.tobytes())


def codes(name: str, shape: tuple[int, ...]) -> onnx.TensorProto:
    return weight(name, T.FLOAT8E4M3FN, RNG.integers(1, 100, shape, np.uint8))


def scales(name: str, shape: tuple[int, ...] = (), kind: int = T.FLOAT) -> onnx.TensorProto:
    dtype = np.float16 if kind == T.FLOAT16 else np.float32
    return weight(name, kind, np.full(shape, 0.01, dtype))


def fp4(name: str, shape: tuple[int, int]) -> onnx.TensorProto:
    packed = RNG.integers(0, 256, shape[0] * shape[1] // 2, np.uint8)
    return T(name=name, data_type=T.FLOAT4E2M1, dims=shape, raw_data=packed.tobytes())


ZERO = weight("zero", T.FLOAT8E4M3FN, np.zeros((), np.uint8))
STATIC = [
    node("QuantizeLinear", ["x", "xs", "zero"], ["xq"]),
    node("DequantizeLinear", ["xq", "xs"], ["xd"], output_dtype=T.FLOAT16),
]


def product(
    of_input: list[onnx.NodeProto],
    of_weight: list[onnx.NodeProto],
    weights: list[onnx.TensorProto],
    *,
    x: str = "xd",
) -> onnx.ModelProto:
    """`x` FP16 [4, K], and `wd` [N, K], as nodes make them of the input `x` and the weights."""
    nodes = [
        *of_input,
        *of_weight,
        node("Transpose", ["wd"], ["wt"], perm=[1, 0]),
        node("MatMul", [x, "wt"], ["y"], name="product"),
    ]
    return graph(nodes, [("x", T.FLOAT16, (4, K))], [("y", T.FLOAT16, (4, N))], weights)


def fp8_linear(scale_shape: tuple[int, ...], **blocks: int) -> onnx.ModelProto:
    """A static FP8 input, an FP8 weight with scales of that shape."""
    dequantize = node("DequantizeLinear", ["w", "ws"], ["wd"], output_dtype=T.FLOAT16, **blocks)
    stored = [codes("w", (N, K)), scales("ws", scale_shape), scales("xs"), ZERO]
    return product(STATIC, [dequantize], stored)


def fp8_block_operator() -> onnx.ModelProto:
    """Blocks of 128 by 128 by TensorRT's own operator, and an FP16 input."""
    dequantize = node("TRT_BlockDequantize", ["w", "ws"], ["wd"], block_shape=[128, 128])
    stored = [codes("w", (N, K)), scales("ws", (N // 128, K // 128), T.FLOAT16)]
    return product([], [dequantize], stored, x="x")


def dynamic_quantize(block: list[int]) -> onnx.ModelProto:
    """The input's scales by TRT_DynamicQuantize, of `block` elements each."""
    kinds = {"output_type": T.FLOAT8E4M3FN, "scale_type": T.FLOAT}
    made = [
        node("TRT_DynamicQuantize", ["x"], ["xq", "xs"], block_shape=block, **kinds),
        node(
            "TRT_BlockDequantize", ["xq", "xs"], ["xd"], block_shape=block, output_dtype=T.FLOAT16
        ),
    ]
    dequantize = node("DequantizeLinear", ["w", "ws"], ["wd"], axis=0, output_dtype=T.FLOAT16)
    return product(made, [dequantize], [codes("w", (N, K)), scales("ws", (N,))])


def nvfp4(inner: int) -> onnx.ModelProto:
    """Values dequantized to `inner`, with float32 scales; then Cast to FP16."""
    groups = {"block_size": 16, "output_dtype": inner, "axis": 1}
    made = [
        node(
            "TRT_FP4DynamicQuantize",
            ["x", "xg"],
            ["xq", "xs"],
            axis=1,
            block_size=16,
            scale_type=T.FLOAT8E4M3FN,
        ),
        node("DequantizeLinear", ["xs", "xg"], ["xsd"]),
        node("DequantizeLinear", ["xq", "xsd"], ["xv"], **groups),
        node("Cast", ["xv"], ["xd"], to=T.FLOAT16),
    ]
    of_weight = [
        node("DequantizeLinear", ["ws", "wg"], ["wsd"]),
        node("DequantizeLinear", ["w", "wsd"], ["wv"], **groups),
        node("Cast", ["wv"], ["wd"], to=T.FLOAT16),
    ]
    stored = [fp4("w", (N, K)), codes("ws", (N, K // 16)), scales("wg"), scales("xg")]
    return product(made, of_weight, stored)


def mxfp8(kind: int) -> onnx.ModelProto:
    """NVIDIA's form, with the weight's scales stored as `kind`."""
    groups = {"axis": 1, "block_size": 32}
    made = [
        node(
            "TRT_MXFP8DynamicQuantize", ["x"], ["xq", "xs"], output_dtype=T.FLOAT8E4M3FN, **groups
        ),
        node("TRT_MXFP8DequantizeLinear", ["xq", "xs"], ["xd"], output_dtype=T.FLOAT16, **groups),
    ]
    of_weight = node(
        "TRT_MXFP8DequantizeLinear", ["w", "ws"], ["wd"], output_dtype=T.FLOAT16, **groups
    )
    powers = weight("ws", kind, RNG.integers(120, 128, (N, K // 32), np.uint8))
    return product(made, [of_weight], [codes("w", (N, K)), powers])


def per_token_cast() -> onnx.ModelProto:
    """A Cast to FP8 and back, with a scale computed from the row."""
    nodes = [
        node("Cast", ["x"], ["q"], to=T.FLOAT8E4M3FN),
        node("Cast", ["q"], ["v"], to=T.FLOAT16),
        node("Mul", ["v", "scale"], ["y"]),
    ]
    inputs = [("x", T.FLOAT16, (4, K)), ("scale", T.FLOAT16, (4, 1))]
    return graph(nodes, inputs, [("y", T.FLOAT16, (4, K))])


def attention(past: bool = False, **attributes: float) -> onnx.ModelProto:
    kv = (B, HKV, S, D)
    inputs = [("q", T.FLOAT16, (B, H, S, D)), ("k", T.FLOAT16, kv), ("v", T.FLOAT16, kv)]
    outputs = [("y", T.FLOAT16, (B, H, S, D))]
    names = ["q", "k", "v"]
    if past:
        inputs += [("pk", T.FLOAT16, kv), ("pv", T.FLOAT16, kv)]
        both = (B, HKV, 2 * S, D)
        outputs += [("nk", T.FLOAT16, both), ("nv", T.FLOAT16, both)]
        names += ["", "pk", "pv"]
    made = node("Attention", names, [name for name, *_ in outputs], **attributes)
    return graph([made], inputs, outputs)


def valid_length() -> onnx.ModelProto:
    """TensorScatter, and Attention with the number of valid keys."""
    kv, row = (B, HKV, S, D), (B, HKV, 1, D)
    inputs = [("q", T.FLOAT16, (B, H, 1, D)), ("k", T.FLOAT16, row), ("v", T.FLOAT16, row)]
    inputs += [("ck", T.FLOAT16, kv), ("cv", T.FLOAT16, kv)]
    inputs += [("at", T.INT64, (B,)), ("length", T.INT64, (B,))]
    nodes = [
        node("TensorScatter", ["ck", "k", "at"], ["nk"]),
        node("TensorScatter", ["cv", "v", "at"], ["nv"]),
        node("Attention", ["q", "nk", "nv", "", "", "", "length"], ["y"]),
    ]
    outputs = [("y", T.FLOAT16, (B, H, 1, D)), ("nk", T.FLOAT16, kv), ("nv", T.FLOAT16, kv)]
    return graph(nodes, inputs, outputs, opset=24)


def fp8_cache(how: str) -> onnx.ModelProto:
    """New FP8 rows into an FP8 cache: "concat" beside it, or "scatter" into it."""
    cache, row = (B, HKV, S, D), (B, HKV, 1, D)
    inputs = [("c", T.FLOAT8E4M3FN, cache), ("k", T.FLOAT16, row)]
    quantize = node("QuantizeLinear", ["k", "s", "zero"], ["n"])
    if how == "scatter":
        inputs.append(("at", T.INT64, (B,)))
        join, both = node("TensorScatter", ["c", "n", "at"], ["all"]), cache
    else:
        join, both = node("Concat", ["c", "n"], ["all"], axis=2), (B, HKV, S + 1, D)
    read = node("DequantizeLinear", ["all", "s"], ["y"], output_dtype=T.FLOAT16)
    outputs = [("y", T.FLOAT16, both), ("n", T.FLOAT8E4M3FN, row)]
    return graph([quantize, join, read], inputs, outputs, [scales("s"), ZERO], opset=24)


def cast(kind: int) -> onnx.ModelProto:
    made = node("Cast", ["x"], ["y"], to=T.FLOAT16)
    return graph([made], [("x", kind, (4, K))], [("y", T.FLOAT16, (4, K))])


def codes_concatenated() -> onnx.ModelProto:
    nodes = [node("Concat", ["a", "b"], ["c"], axis=0), node("Cast", ["c"], ["y"], to=T.FLOAT16)]
    inputs = [("a", T.UINT8, (4, K)), ("b", T.UINT8, (4, K))]
    return graph(nodes, inputs, [("y", T.FLOAT16, (8, K))])


GRAPHS = {
    "fp8_linear": (fp8_linear(()), "sm89"),
    "fp8_linear_by_row": (fp8_linear((N,), axis=0), "sm89"),
    "fp8_linear_sm80": (fp8_linear(()), "sm80"),
    "fp8_block_linear": (fp8_linear((N, K // 128), axis=1, block_size=128), "sm89"),
    "fp8_block_operator": (fp8_block_operator(), "sm89"),
    "fp8_per_token_cast": (per_token_cast(), "sm89"),
    "fp8_per_token_operator": (dynamic_quantize([1, -1]), "sm120"),
    "fp8_per_group_operator": (dynamic_quantize([1, 128]), "sm120"),
    "nvfp4_linear": (nvfp4(T.FLOAT), "sm120"),
    "nvfp4_linear_sm89": (nvfp4(T.FLOAT), "sm89"),
    "nvfp4_linear_to_float16": (nvfp4(T.FLOAT16), "sm120"),
    "mxfp8_linear": (mxfp8(T.UINT8), "sm120"),
    "mxfp8_linear_e8m0": (mxfp8(T.FLOAT8E8M0), "sm120"),
    "attention": (attention(), "sm89"),
    "attention_past": (attention(past=True), "sm89"),
    "attention_softcap": (attention(softcap=30.0), "sm89"),
    "attention_valid_length": (valid_length(), "sm89"),
    "e4m3_cache": (fp8_cache("concat"), "sm89"),
    "e4m3_cache_scatter": (fp8_cache("scatter"), "sm89"),
    "e5m2_input": (cast(T.FLOAT8E5M2), "sm89"),
    "uint8_input": (cast(T.UINT8), "sm89"),
    "uint8_concat": (codes_concatenated(), "sm89"),
}


def main() -> None:
    trt, results = load(RTX, None), {}
    with tempfile.TemporaryDirectory() as directory:
        for name, (model, target) in GRAPHS.items():
            path = Path(directory) / "model.onnx"
            onnx.save(model, path)
            has_product = any(item.name == "product" for item in model.graph.node)
            products = {"linear": "product"} if has_product else {}
            try:
                plan = build_plan(RTX, trt, path, {}, Options([target]), products)
                assert plan.precision.of == "engine"
                results[name] = plan.precision.products.get("linear", "built")
            except ExportError as error:
                results[name] = str(error)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()

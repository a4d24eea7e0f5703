"""Small ONNX graphs given to TensorRT-RTX: `python -m tests.integration.tensorrt_graphs`.

Runs in the environment that has TensorRT-RTX (and no pytest); prints a JSON object, graph name to
what came of it: "built", or the error.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper

from export.tensorrt import build_plan
from octet.errors import ExportError

Value = tuple[str, int, Sequence[int]]
B, H, HKV, S, D, K, N = 2, 4, 2, 32, 64, 256, 128


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
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=11 if opset < 24 else 12,
    )


def weight(name: str, kind: int, array: np.ndarray) -> onnx.TensorProto:
    return T(name=name, data_type=kind, dims=array.shape, raw_data=array.tobytes())


def linear(
    scale_shape: tuple[int, ...], transposed: bool = False, **blocks: int
) -> onnx.ModelProto:
    """x FP16 through a per-tensor FP8 Q/DQ, times an FP8 weight with scales of that shape.

    The weight is [K, N], or [N, K] and transposed, as a checkpoint has it.
    """
    shape = (N, K) if transposed else (K, N)
    codes = np.random.default_rng(0).integers(0, 100, shape, np.uint8)
    weights = [
        weight("w", T.FLOAT8E4M3FN, codes),
        weight("ws", T.FLOAT16, np.full(scale_shape, 0.01, np.float16)),
        weight("xs", T.FLOAT16, np.array(0.01, np.float16)),
        weight("zero", T.FLOAT8E4M3FN, np.zeros((), np.uint8)),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws"], ["wd"], **blocks),
        helper.make_node("Transpose", ["wd"], ["wt"], perm=[1, 0] if transposed else [0, 1]),
        helper.make_node("MatMul", ["xd", "wt"], ["y"]),
    ]
    return graph(nodes, [("x", T.FLOAT16, (4, K))], [("y", T.FLOAT16, (4, N))], weights)


def per_token() -> onnx.ModelProto:
    """The recipe fp8: a Cast to FP8 and back, with a scale computed from the row."""
    nodes = [
        helper.make_node("Cast", ["x"], ["q"], to=T.FLOAT8E4M3FN),
        helper.make_node("Cast", ["q"], ["v"], to=T.FLOAT16),
        helper.make_node("Mul", ["v", "scale"], ["y"]),
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
    node = helper.make_node("Attention", names, [name for name, *_ in outputs], **attributes)
    return graph([node], inputs, outputs)


def valid_length() -> onnx.ModelProto:
    """TensorScatter, and Attention with the number of valid keys."""
    kv, row = (B, HKV, S, D), (B, HKV, 1, D)
    inputs = [("q", T.FLOAT16, (B, H, 1, D)), ("k", T.FLOAT16, row), ("v", T.FLOAT16, row)]
    inputs += [("ck", T.FLOAT16, kv), ("cv", T.FLOAT16, kv)]
    inputs += [("at", T.INT64, (B,)), ("length", T.INT64, (B,))]
    nodes = [
        helper.make_node("TensorScatter", ["ck", "k", "at"], ["nk"]),
        helper.make_node("TensorScatter", ["cv", "v", "at"], ["nv"]),
        helper.make_node("Attention", ["q", "nk", "nv", "", "", "", "length"], ["y"]),
    ]
    outputs = [("y", T.FLOAT16, (B, H, 1, D)), ("nk", T.FLOAT16, kv), ("nv", T.FLOAT16, kv)]
    return graph(nodes, inputs, outputs, opset=24)


def cast(kind: int) -> onnx.ModelProto:
    node = helper.make_node("Cast", ["x"], ["y"], to=T.FLOAT16)
    return graph([node], [("x", kind, (4, K))], [("y", T.FLOAT16, (4, K))])


def codes_concatenated() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Concat", ["a", "b"], ["c"], axis=0),
        helper.make_node("Cast", ["c"], ["y"], to=T.FLOAT16),
    ]
    inputs = [("a", T.UINT8, (4, K)), ("b", T.UINT8, (4, K))]
    return graph(nodes, inputs, [("y", T.FLOAT16, (8, K))])


GRAPHS = {
    "fp8_linear": (linear(()), "sm89"),
    "fp8_linear_sm80": (linear(()), "sm80"),
    "fp8_block_linear": (linear((K // 128, N), axis=0, block_size=128), "sm89"),
    "fp8_block_linear_transposed": (
        linear((N, K // 128), transposed=True, axis=1, block_size=128),
        "sm89",
    ),
    "fp8_per_token": (per_token(), "sm89"),
    "attention": (attention(), "sm89"),
    "attention_past": (attention(past=True), "sm89"),
    "attention_softcap": (attention(softcap=30.0), "sm89"),
    "attention_valid_length": (valid_length(), "sm89"),
    "e5m2_input": (cast(T.FLOAT8E5M2), "sm89"),
    "uint8_input": (cast(T.UINT8), "sm89"),
    "uint8_concat": (codes_concatenated(), "sm89"),
}


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, (model, target) in GRAPHS.items():
            path = Path(directory) / "model.onnx"
            onnx.save(model, path)
            try:
                build_plan(path, {}, [target])
                results[name] = "built"
            except ExportError as error:
                results[name] = str(error)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()

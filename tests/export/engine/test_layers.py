"""Reading an engine's layers: what TensorRT-RTX 1.7.1 logged, and the inspector's JSON."""

import json

import pytest

from export.engine.layers import from_json, from_log, precision_of, precisions

# A linear with a per-token input on sm89, shortened; the second product is of profile 1.
LOG = """Layers:
Name: __mye_myl0_0, LayerType: shape_call, Inputs: [], Outputs: [], TacticName: x, StreamId: 0
Name: __myl_DivCast_myl0_1, LayerType: kgen, Inputs: [ { Name: x, Dimensions: [1,-1,512], \
Strides: [512], Datatype: Half, Format: (Linear) Row major linear format }], Constants: \
[ { Name: c, Dimensions: [1], Datatype: Float, Format: l }], Outputs: [ { Name: q, Dimensions: \
[1,-1,512], Datatype: FP8, Format: l }], TacticName: t, Metadata: [ONNX Layer: a.product][ONNX \
Layer: a.input]
Name: a.product_myl0_2, LayerType: gemm, Inputs: [ { Name: q, Dimensions: [1,-1,512], Datatype: \
FP8, Format: l }], Constants: [ { Name: w, Dimensions: [512,256], Datatype: FP8, Format: l }, \
{ Name: s, Dimensions: [1], Datatype: Float, Format: l }], Outputs: [ { Name: y, Dimensions: \
[1,-1,256], Datatype: Float, Format: l }], TacticName: t, Metadata: [ONNX Layer: a.product]
Name: a.product_myl1_2, LayerType: {second}, Inputs: [ { Name: q, Dimensions: [-1,1,512], \
Datatype: {type}, Format: l }, { Name: w, Dimensions: [512,256], Datatype: {type}, Format: l }], \
Constants: [], Outputs: [ { Name: y, Dimensions: [-1,1,256], Datatype: Float, Format: l }], \
TacticName: t, Metadata: [ONNX Layer: a.product]

I/O Tensors:
 Name: x, IOMode: Input, DataType: Half, Dimensions: [1,-1,512], Location: Device
"""


def log(second: str = "gemm", kind: str = "FP8") -> str:
    return LOG.replace("{second}", second).replace("{type}", kind)


def test_a_product_is_found_by_its_nodes_name() -> None:
    layers = from_log(log())
    assert [layer.kind for layer in layers] == ["shape_call", "kgen", "gemm", "gemm"]
    assert layers[2].matrices == ("fp8", "fp8"), "neither scales nor outputs"
    assert precisions(layers, {"a": "a.product", "b": "b.product"}) == {"a": "fp8"}


def test_the_worst_of_the_profiles_counts() -> None:
    layers = from_log(log("runtime_fusion", "Half"))
    assert precisions(layers, {"a": "a.product"}) == {"a": "float16"}


@pytest.mark.parametrize(
    ("matrices", "precision"),
    [
        (("fp8", "fp8"), "fp8"),
        (("fp8", "e8m0", "fp8", "e8m0"), "fp8"),
        (("fp4", "fp8", "fp4", "fp8"), "fp4"),  # NVFP4 with its scales
        (("float16", "float16"), "float16"),
        (("float16", "fp8"), "float16 x fp8"),  # decoded inside the product
        (("float16", "fp4", "fp8"), "float16 x fp4"),
        (("float16", "float16", "fp8"), "float16"),
        ((), "unknown"),
    ],
)
def test_two_matrices_of_one_type_are_multiplied(matrices: tuple[str, ...], precision: str) -> None:
    assert precision_of(matrices) == precision


@pytest.mark.parametrize(
    ("field", "kind", "precision"),
    [
        ("Datatype", "FP8", "fp8"),
        ("Format/Datatype", "Row major linear FP8 format", "fp8"),
        ("Format/Datatype", "Row major linear FP16 format", "float16"),
        ("Datatype", "FP4E2M1", "fp4"),
        ("Datatype", "BFloat16", "bfloat16"),
    ],
)
def test_the_inspectors_json(field: str, kind: str, precision: str) -> None:
    tensor = {"Name": "x", "Dimensions": [4, 8], field: kind}
    layer = {
        "Name": "a",
        "LayerType": "gemm",
        "Inputs": [tensor, tensor],
        "Outputs": [],
        "Metadata": "[ONNX Layer: a]\u001e[ONNX Layer: b]",
    }
    layers = from_json(json.dumps({"Layers": ["a layer without details", layer]}))
    assert precisions(layers, {"one": "a", "two": "b"}) == {"one": precision, "two": precision}

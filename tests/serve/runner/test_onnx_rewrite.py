"""The rewritten graph rounds as the formats say, bit for bit, in ONNX Runtime itself."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibrate.decoder.rounding import fake_quantize
from export.onnx.graph import Graph
from export.onnx.inputs import round_dynamic
from octet.errors import ArtifactError
from octet.numerics import formats
from octet.numerics.bits import bf16_to_float32
from octet.numerics.formats import E2M1, E4M3, round_to
from octet.recipe import Recipe
from serve.runner.onnx_rewrite import read_past_as_float16, round_in_float32

ALL_BF16 = bf16_to_float32(np.arange(1 << 16, dtype=np.uint16))


def model_of(nodes: list[onnx.NodeProto], **arrays: np.ndarray) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "k"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "k"])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opset = [helper.make_opsetid("", 23)]
    return helper.make_model(graph, opset_imports=opset, ir_version=11)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": x})[0])


def dynamic_model() -> onnx.ModelProto:
    """Per row: scale = max(amax / 448, 2^-126), as the export writes it."""
    steps = [
        ("Abs", ["x"], "abs"),
        ("ReduceMax", ["abs", "axes"], "amax"),
        ("Div", ["amax", "top"], "ratio"),
        ("Max", ["ratio", "least"], "scale"),
        ("Div", ["x", "scale"], "scaled"),
    ]
    nodes = [helper.make_node(op, inputs, [output]) for op, inputs, output in steps]
    nodes += [
        helper.make_node("Cast", ["scaled"], ["q"], to=TensorProto.FLOAT8E4M3FN, saturate=1),
        helper.make_node("Cast", ["q"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["values", "scale"], ["y"]),
    ]
    return model_of(
        nodes,
        axes=np.array([-1], np.int64),
        top=np.array(448, np.float32),
        least=np.array(2.0**-126, np.float32),
    )


def test_ties_and_their_neighbours() -> None:
    grid = np.unique(np.abs(round_to(ALL_BF16[np.isfinite(ALL_BF16)], E4M3)))
    ties = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9), grid])
    x = np.concatenate([x, -x]).astype(np.float32)[None]  # the largest is 448: the scale is 1
    rewritten = dynamic_model()
    round_in_float32(rewritten)
    np.testing.assert_array_equal(run(rewritten, x), round_to(x, E4M3))


def test_dynamic_scales_of_rows_of_every_size() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((64, 256)).astype(np.float32)
    x *= np.exp2(random.integers(-140, 120, (64, 1)).astype(np.float32))
    x[3] = 0
    x[5, 7] = np.nan
    x[6, 9] = np.inf
    x[7] = random.standard_t(2, 256)
    original, rewritten = dynamic_model(), dynamic_model()
    assert round_in_float32(rewritten) == 1
    assert sum(node.op_type == "Cast" for node in rewritten.graph.node) == 0
    np.testing.assert_array_equal(run(rewritten, x), run(original, x))


def cast_model(elem_type: int) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["x"], ["q"], to=elem_type, saturate=1),
        helper.make_node("Cast", ["q"], ["y"], to=TensorProto.FLOAT),
    ]
    return model_of(nodes)


def test_casts_to_e2m1_which_onnx_runtime_lacks() -> None:
    """Every bfloat16, ties, their neighbours, and what saturates; as onnx.reference casts."""
    grid = formats.grid(E2M1)
    ties = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9), grid])
    x = np.concatenate([x, -x, ALL_BF16[~np.isnan(ALL_BF16)]]).astype(np.float32)[None]
    original, rewritten = cast_model(TensorProto.FLOAT4E2M1), cast_model(TensorProto.FLOAT4E2M1)
    assert round_in_float32(rewritten) == 1
    (expected,) = ReferenceEvaluator(original).run(None, {"x": x})
    np.testing.assert_array_equal(run(rewritten, x), expected)
    np.testing.assert_array_equal(expected, round_to(x, E2M1))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4"])
def test_dynamic_groups_are_rounded_as_engines_round_them(recipe: str) -> None:
    scheme = Recipe.load(recipe).activations
    shared = np.array(0.02, np.float32) if scheme.two_level else None
    graph = Graph("groups")
    graph.input("x", TensorProto.FLOAT, [1, "n", 64])
    graph.output(
        round_dynamic(graph, "x", scheme, shared, 64, "y"), TensorProto.FLOAT, [1, "n", 64]
    )
    proto = helper.make_graph(graph.nodes, "g", graph.inputs, graph.outputs, graph._inline())
    opset = [helper.make_opsetid("", graph.opset)]
    model = helper.make_model(proto, opset_imports=opset, ir_version=12)
    assert round_in_float32(model) == 1
    random = np.random.default_rng(0)
    x = random.standard_t(2, (1, 500, 64)).astype(np.float32)
    x *= np.exp2(random.integers(-60, 60, (1, 500, 1)).astype(np.float32))
    x[0, 3], x[0, 4, 7:] = 0, 0
    factor = None if shared is None else torch.from_numpy(shared)
    expected = fake_quantize(torch.from_numpy(x), scheme, None, factor)
    np.testing.assert_array_equal(run(model, x), expected)


def test_a_cast_without_a_scale_that_bounds_it_is_left_alone() -> None:
    model = cast_model(TensorProto.FLOAT8E4M3FN)
    before = model.SerializeToString()
    assert round_in_float32(model) == 0
    assert model.SerializeToString() == before


def test_a_cache_that_more_than_a_cast_reads_is_refused() -> None:
    model = model_of([helper.make_node("Identity", ["x"], ["y"])])
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT8E5M2
    with pytest.raises(ArtifactError, match="x of the ONNX graph is read by Identity"):
        read_past_as_float16(model)

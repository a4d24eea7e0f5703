"""The graph builder: what it refuses, and weights inside and outside the protobuf."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from export.onnx.graph import Graph, Weight
from octet.errors import ExportError


def example() -> Graph:
    graph = Graph("example")
    x = graph.input("x", TensorProto.FLOAT, ["n", 3])
    codes = (np.arange(3000) % 120).astype(np.uint8).reshape(1000, 3)
    weight = graph.array("weight", codes, TensorProto.FLOAT8E4M3FN)
    cast = graph.node("Cast", [weight], "weight.cast", to=TensorProto.FLOAT)
    turned = graph.node("Transpose", [cast], "weight.transposed", perm=[1, 0])
    bias = graph.array("bias", np.full(1000, -0.5, np.float32))
    product = graph.node("MatMul", [x, turned], "product")
    axes = graph.array("axes", np.array([0], np.int64))
    row = graph.node("Unsqueeze", [bias, axes], "bias.row")
    graph.node("Add", [product, row], "y")
    graph.output("y", TensorProto.FLOAT, ["n", 1000])
    return graph


def weights(path: Path) -> dict[str, bytes]:
    model = onnx.load(path)  # with the external data
    return {t.name: numpy_helper.to_array(t).tobytes() for t in model.graph.initializer}


def test_a_large_model_has_its_weights_in_a_file_beside(tmp_path: Path) -> None:
    for name in ("inline", "external"):
        (tmp_path / name).mkdir()
    inline = example().save(tmp_path / "inline")
    external = example().save(tmp_path / "external", inline_limit=4)
    assert [path.name for path in (tmp_path / "inline").iterdir()] == ["model.onnx"]
    assert (tmp_path / "external" / "model.onnx.data").stat().st_size > 0
    assert weights(inline) == weights(external)
    bare = onnx.load(external, load_external_data=False).graph.initializer
    assert [tensor.name for tensor in bare if tensor.raw_data] == ["axes"]


def test_an_input_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    graph = example()
    graph.input("lengths", TensorProto.INT64, ["n"])
    with pytest.raises(ExportError, match="no node reads the graph input lengths"):
        graph.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_graph_that_the_checker_refuses_is_an_export_error(tmp_path: Path) -> None:
    graph = example()
    graph.node("Transpose", ["y"], "z", perm=[0, 1, 2])
    with pytest.raises(ExportError, match=r"onnx\.checker refuses the graph"):
        graph.save(tmp_path)


def test_a_name_is_defined_once() -> None:
    graph = example()
    with pytest.raises(ValueError, match="defines y twice"):
        graph.node("Relu", ["x"], "y")
    with pytest.raises(ValueError, match="weight bias is another one"):
        graph.array("bias", np.zeros(3, np.float32))


def test_an_array_given_twice_is_the_same_one() -> None:
    graph = example()
    assert graph.array("bias", np.full(1000, -0.5, np.float32)) == "bias"
    with pytest.raises(ValueError, match="weight bias is another one"):
        graph.array("bias", np.full(1000, 0.5, np.float32))


def test_a_weight_of_another_size_than_declared_is_refused(tmp_path: Path) -> None:
    graph = example()
    read = lambda: np.zeros(2, np.float32)  # noqa: E731
    name = graph.weight(Weight("short", TensorProto.FLOAT, (3,), 12, read))
    graph.node("Mul", ["y", name], "z")
    with pytest.raises(ValueError, match="short has 8 bytes, declared 12"):
        graph.save(tmp_path)

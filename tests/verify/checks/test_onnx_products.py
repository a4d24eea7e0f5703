"""Graphs that multiply otherwise than the recipe says: each linear that does is named.

Their numbers are none that a comparison of weights or of tokens would call wrong: an input that
nobody rounded gives better ones. Hashes are of the altered graphs.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from export.onnx.write import Target, export_onnx
from octet.artifacts.manifest import Manifest, write_artifact
from octet.recipe import Override, Recipe, TensorScheme
from tests.export.conftest import make_calibration
from tests.models import KNOWN, write_model
from verify.artifact import verify

LAYER = "model.layers.1"
DOWN, Q, UP = f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.up_proj"
RECIPES = ("fp8", "fp8-static", "fp8-block", "mxfp8", "mxfp4", "nvfp4")
ENGINES = tuple(f"{recipe}-tensorrt" for recipe in RECIPES if recipe != "mxfp4")
Change = Callable[[onnx.GraphProto], None]


def maker(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    return next(node for node in graph.node if name in node.output)


def product(graph: onnx.GraphProto, module: str) -> onnx.NodeProto:
    nodes = [node for node in graph.node if node.op_type == "MatMul"]
    return next(node for node in nodes if node.output[0] in (module, f"{module}.product"))


def unrounded(graph: onnx.GraphProto, module: str) -> str:
    """What `module` gets, before its rounding begins: the output of another module's last node."""
    name = product(graph, module).input[0]
    while "_proj.input." in name:
        name = maker(graph, name).input[0]
    return name


def strip(*modules: str) -> Change:
    """The product takes what was to be rounded; nodes that nothing needs any more are pruned."""

    def change(graph: onnx.GraphProto) -> None:
        for module in modules:
            product(graph, module).input[0] = unrounded(graph, module)
        prune(graph)

    return change


def prune(graph: onnx.GraphProto) -> None:
    outputs = {value.name for value in graph.output}
    while True:
        read = outputs | {name for node in graph.node for name in node.input}
        dead = [node for node in graph.node if read.isdisjoint(node.output)]
        if not dead:
            break
        for node in dead:
            graph.node.remove(node)
    for tensor in [item for item in graph.initializer if item.name not in read]:
        graph.initializer.remove(tensor)


def changed(source: Path, out: Path, change: Change) -> Path:
    """A copy with another graph and a manifest whose hashes are right."""
    manifest = Manifest.load(source)
    model = onnx.load(source / "model.onnx")
    change(model.graph)
    with write_artifact(out) as writer:
        for name in manifest.files:
            (writer.path / name).write_bytes((source / name).read_bytes())
        (writer.path / "model.onnx").write_bytes(model.SerializeToString())
        writer.finish(manifest)
    return out


def faults(path: Path, calibrations: dict[str, Path]) -> dict[str, str]:
    recipe = Manifest.load(path).recipe.name
    found = verify(path, calibration=calibrations[recipe])
    assert {problem.check for problem in found.problems} <= {"configuration"}
    return {problem.where: problem.what for problem in found.problems}


@pytest.mark.parametrize("name", [*RECIPES, *ENGINES])
def test_an_input_that_nobody_rounds_is_named(
    name: str, graphs: dict[str, Path], calibrations: dict[str, Path], tmp_path: Path
) -> None:
    assert faults(graphs[name], calibrations) == {}
    told = faults(changed(graphs[name], tmp_path / "out", strip(DOWN)), calibrations)
    assert told.keys() == {DOWN}
    assert told[DOWN].startswith("its input is not rounded to e")
    assert told[DOWN].endswith(", as the recipe has it: it comes from Mul")


def test_all_inputs_of_a_layer(
    graphs: dict[str, Path], calibrations: dict[str, Path], tmp_path: Path
) -> None:
    spec = Manifest.load(graphs["fp8"]).model.spec
    layer = [linear.name for linear in spec.linears(1)]
    told = faults(changed(graphs["fp8"], tmp_path / "out", strip(*layer)), calibrations)
    assert told.keys() == set(layer) and len(layer) == 7
    assert told[Q] == (
        "its input is not rounded to e4m3 with float32 scales of 256 columns, as the recipe has it:"
        " it comes from RMSNormalization"
    )


def to_float16(graph: onnx.GraphProto) -> None:
    """Two casts are there, and round to nothing."""
    node = maker(graph, maker(graph, f"{DOWN}.input.values").input[0])
    next(item for item in node.attribute if item.name == "to").i = TensorProto.FLOAT16


def any_scale(graph: onnx.GraphProto) -> None:
    """The group's scale is no power of two any more."""
    inner = maker(graph, maker(graph, f"{DOWN}.input.group.scale").input[0])
    maker(graph, f"{DOWN}.input.group.scale").input[0] = inner.input[0]
    prune(graph)


def other_groups(graph: onnx.GraphProto) -> None:
    """64 columns share what 32 should."""
    shape = numpy_helper.from_array(np.array([0, 0, -1, 64], np.int64), "shape.other")
    graph.initializer.append(shape)
    maker(graph, f"{DOWN}.input.grouped").input[1] = shape.name


def a_tenth_of_the_scale(graph: onnx.GraphProto) -> None:
    """All but the smallest values would be cut off at the format's largest."""
    divisor = numpy_helper.from_array(np.array(4480, np.float32), "other.max")
    graph.initializer.append(divisor)
    maker(graph, f"{DOWN}.input.ratio").input[1] = divisor.name


def another_scale_back(graph: onnx.GraphProto) -> None:
    """Divided by its own scale, multiplied by another input's."""
    maker(graph, f"{DOWN}.input.dequantized").input[1] = f"{Q}.input.scale"


def not_multiplied_back(graph: onnx.GraphProto) -> None:
    """The product is not multiplied by what its input was divided by."""
    name = f"{DOWN}.product.by_input"
    for node in graph.node:
        for index, read in enumerate(node.input):
            node.input[index] = f"{DOWN}.product" if read == name else read
    prune(graph)


def weights_exchanged(graph: onnx.GraphProto) -> None:
    """Each of the two weights in the other's product."""
    one, two = product(graph, UP), product(graph, f"{LAYER}.mlp.gate_proj")
    one.input[1], two.input[1] = two.input[1], one.input[1]


def left_over(graph: onnx.GraphProto) -> None:
    """The right product is there, and nothing takes its result."""
    node = product(graph, DOWN)
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = copy.output[0] = f"{DOWN}.fast"
    copy.input[0] = unrounded(graph, DOWN)
    for other in graph.node:
        for index, read in enumerate(other.input):
            other.input[index] = copy.output[0] if read == node.output[0] else read
    graph.node.insert([*graph.node].index(node) + 1, copy)


@pytest.mark.parametrize(
    ("name", "change", "where", "what"),
    [
        ("fp8", to_float16, DOWN, "is rounded to float16 with float32 scales of 512 columns, and"),
        ("mxfp8", any_scale, DOWN, "is rounded to e4m3 with float32 scales of 32 columns"),
        ("mxfp4", other_groups, DOWN, "e2m1 with e8m0 scales of 64 columns, and the recipe has"),
        ("fp8", a_tenth_of_the_scale, DOWN, "its scale is its maximum / 4480, and should be / 448"),
        ("fp8-tensorrt", a_tenth_of_the_scale, DOWN, "its maximum / 4480, and should be / 448"),
        ("fp8", another_scale_back, DOWN, "as the recipe has it: it comes from Mul"),
        ("fp8-tensorrt", not_multiplied_back, DOWN, "a scale that the product is not multiplied"),
        ("fp8", weights_exchanged, UP, f"its weight is multiplied in {LAYER}.mlp.gate_proj"),
        ("fp8", left_over, DOWN, f"its weight is multiplied in {DOWN}.fast"),
    ],
)
def test_products_of_another_kind(
    name: str,
    change: Change,
    where: str,
    what: str,
    graphs: dict[str, Path],
    calibrations: dict[str, Path],
    tmp_path: Path,
) -> None:
    told = faults(changed(graphs[name], tmp_path / "out", change), calibrations)
    assert what in told[where], told


FP8, NVFP4 = Recipe.load("fp8"), Recipe.load("nvfp4")
BLOCKS = TensorScheme(granularity="block", group_size=128)
STATIC = TensorScheme(granularity="tensor")
ODD = {
    "mixed": Recipe(
        name="mixed",
        weights=NVFP4.weights,
        activations=NVFP4.activations,
        exclude=("lm_head", "*.layers.0.mlp.*"),
        overrides=(
            Override(match="*.o_proj", weights=FP8.weights, activations=FP8.activations),
            Override(match="*.down_proj", weights=BLOCKS, activations=STATIC),
        ),
    ),
    "static": Recipe(name="static", weights=FP8.weights, activations=STATIC),
    "blocks": Recipe(name="blocks", weights=BLOCKS, activations=STATIC),
}


@pytest.mark.parametrize("recipe", ODD)
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("name", ["llama-biases", "phi3", "gemma"])
def test_intact_graphs_of_other_models_and_recipes(
    name: str, target: Target, recipe: str, tmp_path: Path
) -> None:
    kind, settings = KNOWN[name]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}  # for blocks
    model = write_model(tmp_path / "model", kind, **settings | sizes)
    calibration = make_calibration(tmp_path / "calibration", model, ODD[recipe])
    export_onnx(calibration, tmp_path / "out", target=target)
    assert verify(tmp_path / "out", calibration=calibration).problems == []


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_an_input_that_should_not_be_rounded_is_named(
    target: Target, tiny_model: Path, tmp_path: Path
) -> None:
    calibration = make_calibration(tmp_path / "calibration", tiny_model, ODD["mixed"])
    export_onnx(calibration, tmp_path / "out", target=target)
    kept = "model.layers.0.mlp.up_proj"

    def rounded_after_all(graph: onnx.GraphProto) -> None:
        product(graph, kept).input[0] = product(graph, "model.layers.0.self_attn.q_proj").input[0]

    found = verify(
        changed(tmp_path / "out", tmp_path / "changed", rounded_after_all), calibration=calibration
    )
    what = "its input is rounded to e2m1 with e4m3 scales of 16 columns, and the recipe leaves it"
    assert [(x.where, what in x.what) for x in found.problems] == [(kept, True)]


def test_full_precision_is_not_rounded(decoders: dict[str, Path], tiny_model: Path) -> None:
    assert verify(decoders["full"], model=tiny_model).problems == []

"""Every format in the ONNX file: what is stored, and that the graph computes exactly that.

ONNX Runtime runs what it has kernels for; onnx.reference, which reads codes with ml_dtypes,
evaluates all of them.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from calibrate.decoder.rounding import fake_quantize
from export.onnx.graph import Graph
from export.onnx.inputs import round_dynamic
from export.onnx.write import export_onnx
from export.source import Source
from export.triton.write import export_triton
from octet.artifacts.manifest import Manifest
from octet.errors import UnsupportedError
from octet.recipe import Override, Recipe, TensorScheme
from tests.export.conftest import GROUPED, RECIPES, make_calibration
from tests.export.onnx.test_write import settled
from tests.export.runner import EvaluatedModel, OnnxModel, random_ids
from tests.references import Reference

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Q_PROJ = "model.layers.0.self_attn.q_proj"
FP4 = ("mxfp4", "nvfp4")
# Attention and MLP of a mixture differ, and so do q and k, which share an input.
MIXED = Recipe.load("nvfp4").model_copy(
    update={
        "name": "mixed",
        "overrides": tuple(
            Override(
                match=match, **Recipe.load(name).model_dump(include={"weights", "activations"})
            )
            for match, name in (
                ("*.k_proj", "fp8"),
                ("*.v_proj", "fp8"),
                ("*.0.mlp.down_proj", "mxfp8"),
                ("*.1.mlp.*", "mxfp4"),
                ("*.o_proj", "fp8-static"),
            )
        ),
        "exclude": ("lm_head", "*.0.mlp.up_proj"),
    }
)


@pytest.fixture(scope="module")
def grouped(
    tmp_path_factory: pytest.TempPathFactory, calibrations: dict[str, Path], tiny_model: Path
) -> dict[str, tuple[Path, Path]]:
    """Calibration and ONNX export of each grouped recipe and of a mixture."""
    root = tmp_path_factory.mktemp("grouped")
    made = {name: calibrations[name] for name in GROUPED}
    made["mixed"] = make_calibration(root / "mixed-calibration", tiny_model, MIXED)
    for name, calibration in made.items():
        export_onnx(calibration, root / name)
    return {name: (calibration, root / name) for name, calibration in made.items()}


# What is in the file


@pytest.mark.parametrize(
    ("recipe", "opset", "codes", "scales", "release"),
    [
        ("mxfp8", 24, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E8M0, "1.27"),
        ("mxfp4", 24, TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E8M0, None),
        ("nvfp4", 23, TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN, None),
    ],
)
def test_codes_and_scales_keep_their_types_and_their_bytes(
    recipe: str,
    opset: int,
    codes: int,
    scales: int,
    release: str | None,
    grouped: dict[str, tuple[Path, Path]],
) -> None:
    calibration, directory = grouped[recipe]
    assert Manifest.load(directory).details["least_onnxruntime"] == release
    source, model = Source.open(calibration), onnx.load(directory / "model.onnx")
    assert model.opset_import[0].version == opset
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, linear in source.quantized_linears().items():
        weight, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        assert (weight.data_type, scale.data_type) == (codes, scales)
        assert tuple(weight.dims) == (linear.out_features, linear.in_features)
        assert weight.raw_data == source.weight_codes(linear).tobytes()
        values = numpy_helper.to_array(scale).astype(np.float32)
        np.testing.assert_array_equal(values, source.weight_scale(linear))
        if recipe == "nvfp4":
            (shared,) = np.frombuffer(stored[f"{name}.weight_global_scale"].raw_data, np.float32)
            assert shared == source.weight_global_scale(linear)


@pytest.mark.parametrize("recipe", FP4)
def test_fp4_is_refused_where_onnx_runtime_runs_the_file_as_it_is(
    recipe: str, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=f"recipe {recipe} has FP4.*--backend python runs"):
        export_triton(calibrations[recipe], tmp_path / "entry", backend="onnxruntime")
    assert not list(tmp_path.iterdir())


# What it computes


@pytest.mark.parametrize("recipe", [*GROUPED, "mixed"])
def test_weights_and_inputs_are_evaluated_exactly(
    recipe: str, grouped: dict[str, tuple[Path, Path]], tiny_model: Path
) -> None:
    """Weights: codes times scales as ml_dtypes reads them. Inputs: the engines' formulas."""
    calibration, directory = grouped[recipe]
    source, model = Source.open(calibration), EvaluatedModel(directory)
    model.forward(random_ids(2, 40))
    stored = {t.name: numpy_helper.to_array(t) for t in model.model.graph.initializer}
    readers = {name: node for node in model.model.graph.node for name in node.input}
    checked = 0
    for name, linear in source.quantized_linears().items():
        weights, inputs = source.schemes(linear) or pytest.fail(name)
        size = weights.group_size
        if size is None or not inputs.dynamic:
            continue
        scale = stored[f"{name}.weight_scale"].astype(np.float32)
        if weights.two_level:
            scale = scale * stored[f"{name}.weight_global_scale"]
        real = stored[f"{name}.weight"].astype(np.float32) * scale.repeat(size, axis=1)
        np.testing.assert_array_equal(model.values[f"{name}.weight.dequantized"], real)
        if f"{name}.input.dequantized" in model.values:
            grouping = next(n for n in model.model.graph.node if n.name == f"{name}.input.grouped")
            shared = source.input_global_scale(linear) if inputs.two_level else None
            expected = rounded(model.values[grouping.input[0]], inputs, shared)
            np.testing.assert_array_equal(model.values[f"{name}.input.dequantized"], expected)
            checked += 1
        assert readers[f"{name}.weight.dequantized"].op_type == "Transpose"
    assert checked >= 4


@pytest.mark.parametrize("recipe", [*RECIPES, *GROUPED, "mixed"])
def test_the_evaluated_graph_computes_the_reference_quantization(
    recipe: str,
    decoders: dict[str, Path],
    calibrations: dict[str, Path],
    grouped: dict[str, tuple[Path, Path]],
    tiny_model: Path,
) -> None:
    calibration, directory = grouped.get(recipe) or (calibrations[recipe], decoders[recipe])
    reference = Reference(tiny_model, calibration, "e5m2")
    assert settled(EvaluatedModel(directory), reference, random_ids(2, 48)).mean() < 1e-8
    assert reference.differing < 1e-3 * reference.rounded


def test_onnx_runtime_runs_mxfp8_as_it_is(
    grouped: dict[str, tuple[Path, Path]], tiny_model: Path
) -> None:
    calibration, directory = grouped["mxfp8"]
    model, reference = (
        OnnxModel(directory, observe=True),
        Reference(tiny_model, calibration, "e5m2"),
    )
    assert settled(model, reference, random_ids(8, 64)).mean() < 1e-8
    assert reference.differing < 1e-3 * reference.rounded


@pytest.mark.parametrize("recipe", [*RECIPES, *GROUPED])
def test_the_whole_example_model(
    recipe: str, tmp_path: Path, example_model: Path, example_samples: Path
) -> None:
    """Every logit within 1e-3 of torch's with the same quantization (2e-5 measured)."""
    calibration = make_calibration(tmp_path / "calibration", example_model, Recipe.load(recipe))
    export_onnx(calibration, tmp_path / "out")
    reference = Reference(example_model, calibration, "e5m2")
    ids = random_ids(2, 60)
    assert settled(EvaluatedModel(tmp_path / "out"), reference, ids).mean() < 1e-8
    if recipe not in FP4:
        model = OnnxModel(tmp_path / "out", observe=True)
        assert settled(model, reference, ids).mean() < 1e-8
    assert reference.differing < 1e-4 * reference.rounded


def test_groups_of_zeros_and_of_every_size_are_rounded_as_engines_round_them() -> None:
    """The nodes alone, over magnitudes from 2^-100 to 2^100, in both evaluators."""
    random = np.random.default_rng(0)
    x = random.standard_normal((1, 256, 64)).astype(np.float32)
    x *= np.exp2(random.integers(-100, 100, (1, 256, 1)).astype(np.float32))
    x[0, 3], x[0, 4, :32], x[0, 5, 16:] = 0, 0, 0
    x[0, 6] = np.resize([448.0, 1.75, 3.5, 6, 5, 7, -2.5, 0.25], 64)
    x[0, 7] = 0.0625 * np.arange(64)
    for name in GROUPED:
        scheme = Recipe.load(name).activations
        shared = np.array(0.013, np.float32) if scheme.two_level else None
        graph = Graph("inputs")
        graph.input("x", TensorProto.FLOAT, [1, "n", 64])
        result = round_dynamic(graph, "x", scheme, shared, 64, "y")
        graph.output(result, TensorProto.FLOAT, [1, "n", 64])
        expected = rounded(x, scheme, shared)
        for run in (_evaluate, *(() if name in FP4 else (_run,))):
            np.testing.assert_array_equal(run(graph, x), expected)


def rounded(x: np.ndarray, scheme: TensorScheme, shared: np.ndarray | None) -> np.ndarray:
    """`x` as calibration simulates what an engine does at run time."""
    factor = None if shared is None else torch.from_numpy(shared)
    return fake_quantize(torch.from_numpy(x), scheme, None, factor).numpy()


def _model(graph: Graph) -> onnx.ModelProto:
    proto = onnx.helper.make_graph(graph.nodes, "g", graph.inputs, graph.outputs, graph._inline())
    opset = [onnx.helper.make_opsetid("", graph.opset)]
    return onnx.helper.make_model(proto, opset_imports=opset, ir_version=12)


def _evaluate(graph: Graph, x: np.ndarray) -> np.ndarray:
    return np.asarray(ReferenceEvaluator(_model(graph)).run(None, {"x": x})[0])


def _run(graph: Graph, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        _model(graph).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": x})[0])

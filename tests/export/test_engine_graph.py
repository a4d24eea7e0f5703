"""The TensorRT variant of the decoder graph, run by ONNX Runtime: no engine runs here."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from export import engine_graph
from export.engine_graph import build_engine_graph
from export.graph import IR_VERSION, OPSET, Graph
from export.onnx import export_onnx
from export.source import Source
from octet import formats
from octet.errors import UnsupportedError
from octet.recipe import Recipe, TensorScheme
from tests.export.conftest import make_calibration
from tests.export.runner import OnnxModel

IDS = np.random.default_rng(0).integers(1, 4096, (2, 24))


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def test_new_rows_are_rounded_as_e5m2_rounds_every_float16() -> None:
    graph = Graph("rounding")
    graph.input("x", TensorProto.FLOAT, ["n"])
    result = engine_graph.round_to_e5m2(graph, "x", "y")
    graph.output(result, TensorProto.FLOAT, ["n"])
    proto = helper.make_graph(graph.nodes, "g", graph.inputs, graph.outputs, graph._inline())
    model = helper.make_model(
        proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    (got,) = session(model).run(None, {"x": x})
    np.testing.assert_array_equal(got, formats.round_to(x, formats.E5M2))


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same numbers without mixed types in Q and DQ, which ONNX Runtime's CPU kernels lack."""
    nodes = []
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            nodes.append(
                helper.make_node(
                    "Cast", [node.input[0]], [f"{node.name}.float32"], to=TensorProto.FLOAT
                )
            )
            node.input[0] = f"{node.name}.float32"
        kinds = [item for item in node.attribute if item.name == "output_dtype"]
        nodes.append(node)
        if kinds:
            name = node.output[0]
            node.output[0] = f"{name}.float32"
            nodes.append(helper.make_node("Cast", [node.output[0]], [name], to=kinds[0].i))
            node.attribute.remove(kinds[0])
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


class EngineGraph:
    """The graph in ONNX Runtime, with its cache as codes [B, Hkv, S, D]."""

    def __init__(self, source: Source, compute: int, directory: Path) -> None:
        path = build_engine_graph(source, compute).save(directory)
        self.session = session(lowered(onnx.load(path)))
        self.inputs = {item.name: item for item in self.session.get_inputs()}
        self.pasts = [name for name in self.inputs if name.startswith("past_key_values.")]

    def empty(self, batch: int, slots: int = 0) -> list[npt.NDArray[np.uint8]]:
        _, heads, _, width = self.inputs[self.pasts[0]].shape
        return [np.zeros((batch, heads, slots, width), np.uint8) for _ in self.pasts]

    def step(
        self,
        ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        mask: npt.NDArray[np.bool_],
        wanted: npt.NDArray[np.int64],
        past: list[npt.NDArray[np.uint8]],
    ) -> tuple[npt.NDArray[np.float32], list[npt.NDArray[np.uint8]]]:
        """Logits [B, L, V] and the codes of the new rows: the top bytes."""
        feeds = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": mask,
            "logit_positions": wanted,
            **dict(zip(self.pasts, past, strict=True)),
        }
        logits, *new = self.session.run(None, feeds)
        for rows in new:
            assert not (rows.view(np.uint16) & 0xFF).any(), "a new row is not on the E5M2 grid"
        return logits, [(rows.view(np.uint16) >> 8).astype(np.uint8) for rows in new]


def generate(model: EngineGraph | OnnxModel, prompt: int, slots: int) -> npt.NDArray[np.float32]:
    """Logits of IDS at every position from prompt - 1 on, one token a step: [B, n, V].

    The slots that no token has filled hold ones, which the mask hides.
    """
    batch, length = IDS.shape
    positions = np.tile(np.arange(length), (batch, 1))
    causal = np.tril(np.ones((prompt, prompt), bool))[None, None].repeat(batch, 0)
    wanted = np.full((batch, 1), prompt - 1)
    past = model.empty(batch)
    logits, new = model.step(IDS[:, :prompt], positions[:, :prompt], causal, wanted, past)
    cache = [
        np.full_like(rows, 0x3C, shape=(*rows.shape[:2], slots, rows.shape[3])) for rows in new
    ]
    found, filled = [logits], 0
    for at in range(prompt, length):
        for slot, rows in zip(cache, new, strict=True):
            slot[:, :, filled:at] = rows
        filled = at
        mask = np.zeros((batch, 1, 1, slots + 1), bool)
        mask[..., :at] = mask[..., slots:] = True
        column = slice(at, at + 1)
        logits, new = model.step(
            IDS[:, column], positions[:, column], mask, np.zeros((batch, 1), np.int64), cache
        )
        found.append(logits)
    return np.concatenate(found, axis=1)


def divergence(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Mean KL over all positions, in nats."""
    p, q = (
        x
        - x.max(-1, keepdims=True)
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1))[..., None]
        for x in (reference.astype(np.float64), other.astype(np.float64))
    )
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module", params=[1.0, 0.3], ids=["unscaled", "scaled"])
def calibration(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """fp8-static of the tiny model, with the given scales at the cache."""
    scales = {
        f"model.layers.{i}.self_attn.{kind}_scale": request.param for i in (0, 1) for kind in "kv"
    }
    path = tmp_path_factory.mktemp("calibration") / "calibration"
    return make_calibration(path, tiny_model, Recipe.load("fp8-static"), scales=scales)


def test_its_numbers_are_those_of_the_onnx_export(calibration: Path, tmp_path: Path) -> None:
    """In float32 they differ by the order of sums at most; in FP16, by what FP16 rounds."""
    export_onnx(calibration, tmp_path / "onnx")
    source = Source.open(calibration)
    expected = generate(OnnxModel(tmp_path / "onnx"), 9, 64)
    for compute, bound in ((TensorProto.FLOAT, 1e-3), (TensorProto.FLOAT16, 1e-2)):
        directory = tmp_path / str(compute)
        directory.mkdir()
        got = generate(EngineGraph(source, compute, directory), 9, 64)
        assert divergence(expected, got) < bound


@pytest.mark.parametrize("recipe", ["fp8", "fp8-block"])
def test_a_recipe_that_scales_at_run_time_is_refused(
    calibrations: dict[str, Path], recipe: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"recipe {recipe} .*--recipe fp8-static"):
        build_engine_graph(Source.open(calibrations[recipe]))


def test_block_weights_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        name="mine",
        weights=TensorScheme(granularity="block", group_size=128),
        activations=TensorScheme(granularity="tensor"),
    )
    calibration = make_calibration(tmp_path / "calibration", tiny_model, recipe)
    with pytest.raises(UnsupportedError, match=r"mine has block weights.*--recipe fp8-static"):
        build_engine_graph(Source.open(calibration))


def test_another_cache_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    recipe = Recipe.load("fp8-static").model_copy(update={"kv_cache": "e4m3"})
    calibration = make_calibration(tmp_path / "calibration", tiny_model, recipe)
    with pytest.raises(UnsupportedError, match="cache is e5m2, not e4m3"):
        build_engine_graph(Source.open(calibration))


def test_every_quantized_linear_has_fp8_on_both_sides(calibrations: dict[str, Path]) -> None:
    """And its scales stay float32: in float16 the smallest would lose bits."""
    source = Source.open(calibrations["fp8-static"])
    graph = build_engine_graph(source)
    makers = {name: node for node in graph.nodes for name in node.output}
    for name in source.quantized_linears():
        left, right = (makers[value] for value in makers[name].input)
        weights = makers[right.input[0]]
        assert [left.op_type, weights.op_type] == ["DequantizeLinear", "DequantizeLinear"]
        assert graph.weights[weights.input[0]].elem_type == TensorProto.FLOAT8E4M3FN
        for node in (left, weights):
            assert graph.weights[node.input[1]].elem_type == TensorProto.FLOAT

"""The TensorRT variant of the decoder graph, run by ONNX Runtime: no engine runs here."""

from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from export.onnx.graph import IR_VERSION, OPSET, Graph
from export.onnx.tensorrt_cache import round_to_e5m2
from export.onnx.tensorrt_decoder import build_engine_graph, engine_graph
from export.onnx.write import export_onnx
from export.source import Source
from octet.errors import UnsupportedError
from octet.numerics import formats, microscaling, scaling
from octet.recipe import KvCacheDtype, Override, Recipe
from tests.export.conftest import make_calibration
from tests.export.runner import EvaluatedModel, OnnxModel
from tests.models import write_model

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
    result = round_to_e5m2(graph, "x", "y")
    graph.output(result, TensorProto.FLOAT, ["n"])
    proto = helper.make_graph(graph.nodes, "g", graph.inputs, graph.outputs, graph._inline())
    model = helper.make_model(
        proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    (got,) = session(model).run(None, {"x": x})
    np.testing.assert_array_equal(got, formats.round_to(x, formats.E5M2))


class EngineGraph:
    """The graph in ONNX Runtime, with its cache as codes [B, Hkv, S, D]."""

    def __init__(self, source: Source, compute: int, directory: Path) -> None:
        path = build_engine_graph(source, compute).save(directory)
        self.session = session(onnx.load(path))
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


class TRT_FP4DynamicQuantize(OpRun):
    """As NVIDIA documents it: NVFP4 with the given global scale."""

    op_domain = "trt"

    def _run(self, x, scale, axis=None, block_size=None, scale_type=None):  # type: ignore[no-untyped-def]
        assert (axis, block_size, scale_type) == (-1, 16, TensorProto.FLOAT8E4M3FN)
        amax = scaling.absmax(x, scaling.group(16))
        sixth = np.float32(1) / np.float32(6)
        scales = formats.round_to(np.float32(1) / scale * (amax * sixth), formats.E4M3)
        factor = microscaling.combined(scales, scale)
        codes = scaling.quantize(x, factor, formats.E2M1, scaling.group(16))
        values = formats.decode(codes, formats.E2M1)
        return values.astype(ml_dtypes.float4_e2m1fn), scales.astype(ml_dtypes.float8_e4m3fn)


class TRT_MXFP8DynamicQuantize(OpRun):
    op_domain = "trt"

    def _run(self, x, axis=None, block_size=None, output_dtype=None):  # type: ignore[no-untyped-def]
        assert (axis, block_size, output_dtype) == (-1, 32, TensorProto.FLOAT8E4M3FN)
        amax = scaling.absmax(x, scaling.group(32))
        scales = microscaling.power_of_two_scales(amax, formats.E4M3)
        codes = scaling.quantize(x, scales, formats.E4M3, scaling.group(32))
        return codes.view(ml_dtypes.float8_e4m3fn), formats.encode(scales, formats.E8M0)


class TRT_MXFP8DequantizeLinear(OpRun):
    op_domain = "trt"

    def _run(self, codes, scales, axis=None, block_size=None, output_dtype=None):  # type: ignore[no-untyped-def]
        factor = formats.decode(scales, formats.E8M0).repeat(block_size, axis=axis)
        return (codes.astype(np.float32) * factor,)


TENSORRT_OPERATORS = [
    TRT_FP4DynamicQuantize,
    TRT_MXFP8DynamicQuantize,
    TRT_MXFP8DequantizeLinear,
]


class Evaluated(EvaluatedModel):
    """The engine's graph, by onnx.reference and these operators."""

    def __init__(self, directory: Path) -> None:
        self.model = onnx.load(directory / "model.onnx")
        self.evaluator = ReferenceEvaluator(self.model, new_ops=TENSORRT_OPERATORS)
        self.roundings, self.presents, self.values = {}, [], {}


CASES = [
    ("fp8", "e5m2"),
    ("fp8-static", "e4m3"),
    ("fp8-static", "float16"),
    ("fp8-block", "e5m2"),
    ("nvfp4", "float16"),
    ("mxfp8", "e4m3"),
]


@pytest.fixture(scope="module")
def block_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of 128 columns and more, which the tiny model has not, and biases."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    return write_model(tmp_path_factory.mktemp("block") / "model", "qwen2", **sizes)


@pytest.mark.parametrize(("recipe", "kv_cache"), CASES)
def test_every_recipe_computes_what_the_onnx_export_does(
    block_model: Path, tmp_path: Path, recipe: str, kv_cache: KvCacheDtype
) -> None:
    """To what the order of sums may flip; the two round at the same places, to the same grids."""
    scales = {
        f"model.layers.{i}.self_attn.{kind}_scale_e4m3": 0.05 for i in (0, 1) for kind in "kv"
    }
    calibration = make_calibration(
        tmp_path / "calibration", block_model, Recipe.load(recipe), scales=scales
    )
    export_onnx(calibration, tmp_path / "onnx", kv_cache=kv_cache)
    (tmp_path / "engine").mkdir()
    source = Source.open(calibration, kv_cache=kv_cache)
    build_engine_graph(source, TensorProto.FLOAT).save(tmp_path / "engine")
    ids = IDS[:1, :12]
    expected = EvaluatedModel(tmp_path / "onnx").forward(ids)
    got = Evaluated(tmp_path / "engine").forward(ids)
    off = np.abs(got - expected).max() / np.abs(expected).max()
    print(f"{recipe}, {kv_cache}: KL {divergence(expected, got):.1e}, {off:.1e} of the largest")
    assert divergence(expected, got) < 1e-4


def test_what_tensorrt_has_no_operators_for_is_refused(calibrations: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn\.q_proj is mxfp4.*nvfp4 is"):
        build_engine_graph(Source.open(calibrations["mxfp4"]))


@pytest.mark.parametrize("recipe", ["fp8", "fp8-block", "fp8-static", "nvfp4", "mxfp8"])
def test_every_product_that_the_recipe_names_reads_dequantized_values(
    calibrations: dict[str, Path], recipe: str
) -> None:
    """On both sides, with nothing between that a compiler does not fuse."""
    source = Source.open(calibrations[recipe])
    made = engine_graph(source)
    nodes = {node.name: node for node in made.graph.nodes}
    makers = {name: node for node in made.graph.nodes for name in node.output}
    assert made.products.keys() == source.quantized_linears().keys()
    for product in made.products.values():
        assert nodes[product].op_type == "MatMul"
        for value in nodes[product].input:
            node = makers[value]
            while node.op_type in ("Cast", "Transpose"):
                node = makers[node.input[0]]
            assert "Dequantize" in node.op_type


def test_mixed_recipes_take_each_linears_own_form(tiny_model: Path, tmp_path: Path) -> None:
    fp8, nvfp4 = Recipe.load("fp8"), Recipe.load("nvfp4")
    override = Override(match="*.mlp.*", weights=nvfp4.weights, activations=nvfp4.activations)
    mixed = fp8.model_copy(update={"name": "mixed", "overrides": (override,)})
    mixed = mixed.model_copy(update={"exclude": (*mixed.exclude, "*.0.self_attn.o_proj")})
    source = Source.open(make_calibration(tmp_path / "calibration", tiny_model, mixed))
    made = engine_graph(source)
    kinds = {name: made.graph.weights[f"{name}.weight"].elem_type for name in made.products}
    assert kinds["model.layers.1.mlp.down_proj"] == TensorProto.FLOAT4E2M1
    assert kinds["model.layers.1.self_attn.o_proj"] == TensorProto.FLOAT8E4M3FN
    assert "model.layers.0.self_attn.o_proj" not in kinds


def test_every_quantized_linear_has_fp8_on_both_sides(calibrations: dict[str, Path]) -> None:
    """And its scales stay float32: in float16 the smallest would lose bits."""
    made = engine_graph(Source.open(calibrations["fp8-static"]))
    graph = made.graph
    nodes = {node.name: node for node in graph.nodes}
    makers = {name: node for node in graph.nodes for name in node.output}
    for product in made.products.values():
        for value in nodes[product].input:
            node = makers[value]
            while node.op_type in ("Cast", "Transpose"):
                node = makers[node.input[0]]
            assert node.op_type == "DequantizeLinear"
            assert graph.weights[node.input[1]].elem_type == TensorProto.FLOAT


def test_a_cache_that_fp16_cannot_hold_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    scales = {"model.layers.0.self_attn.v_scale": 1.5}
    calibration = make_calibration(
        tmp_path / "calibration", tiny_model, Recipe.load("fp8-static"), scales=scales
    )
    with pytest.raises(UnsupportedError, match=r"0\.value: an E5M2 cache with the scale 1\.5"):
        build_engine_graph(Source.open(calibration))

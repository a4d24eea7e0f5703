"""The ONNX decoder: what is in the file, and that it computes the quantization it says."""

import json
import shutil
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from onnx import TensorProto

from export.onnx.tensorrt_decoder import build_engine_graph
from export.onnx.write import Target, export_onnx
from export.source import Source
from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import GoldenSet
from octet.artifacts.manifest import Manifest
from octet.artifacts.scenarios import SCENARIOS_FILE, ScenarioSet
from octet.artifacts.serving_path import EXPECTED_FILE, Expectation, ExpectedSet, ServingPath
from octet.errors import ArtifactError, OctetError
from octet.model.checkpoint import Checkpoint
from octet.numerics import scaling
from octet.numerics.formats import E4M3
from octet.recipe import KvCacheDtype, Recipe
from tests.export.conftest import RECIPES, make_calibration
from tests.export.runner import EvaluatedModel, OnnxModel, prefill_and_decode, random_ids
from tests.references import Reference, divergence
from tests.serve.engines import rewritten
from verify.artifact import verify

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Q_PROJ = "model.layers.0.self_attn.q_proj"


def settled(
    model: OnnxModel | EvaluatedModel, reference: Reference, ids: npt.NDArray[np.int64]
) -> torch.Tensor:
    """KL of each position, where the reference rounds as the graph did wherever it may.

    No logit may be further from the reference's than 1e-3.
    """
    logits = torch.from_numpy(model.forward(ids))
    reference.decisions = {k: torch.from_numpy(v.copy()) for k, v in model.decisions.items()}
    expected = reference.logits(torch.from_numpy(ids))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    return divergence(expected, logits)


# What is in the file


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_fp8_in_the_file_and_equal_the_checkpoints_quantized(
    recipe: str, decoders: dict[str, Path], calibrations: dict[str, Path], tiny_model: Path
) -> None:
    stored = {t.name: t for t in onnx.load(decoders[recipe] / "model.onnx").graph.initializer}
    checkpoint, scales = Checkpoint.open(tiny_model), Calibration.load(calibrations[recipe]).scales
    scheme = Recipe.load(recipe).weights
    granularity = scaling.Granularity.of(scheme.granularity, scheme.group_size)
    for linear in checkpoint.spec.linears():
        name = f"{linear.name}.weight"
        weight = checkpoint.read(name).float32()
        scale = scales[f"{name}_scale"]
        assert stored[name].data_type == TensorProto.FLOAT8E4M3FN
        codes = np.frombuffer(stored[name].raw_data, np.uint8).reshape(weight.shape)
        np.testing.assert_array_equal(codes, scaling.quantize(weight, scale, E4M3, granularity))


def test_tied_embeddings_are_in_the_file_once_bit_for_bit(
    decoders: dict[str, Path], tiny_model: Path
) -> None:
    graph = onnx.load(decoders["fp8"] / "model.onnx").graph
    large = [t.name for t in graph.initializer if len(t.raw_data) > 1_000_000]
    assert large == ["model.embed_tokens.weight"]
    table = next(t for t in graph.initializer if t.name == large[0])
    assert table.raw_data == Checkpoint.open(tiny_model).read(large[0]).codes.tobytes()


def test_the_graph_has_the_interface_that_the_engine_expects(decoders: dict[str, Path]) -> None:
    model = onnx.load(decoders["fp8"] / "model.onnx")
    inputs = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    pasts = [f"past_key_values.{i}.{kind}" for i in range(2) for kind in ("key", "value")]
    assert inputs == {
        "input_ids": TensorProto.INT64,
        "position_ids": TensorProto.INT64,
        "attention_mask": TensorProto.BOOL,
        "logit_positions": TensorProto.INT64,
        **dict.fromkeys(pasts, TensorProto.FLOAT8E5M2),
    }
    outputs = [o.name for o in model.graph.output]
    assert sorted(outputs) == sorted(
        ["logits", *(p.replace("past_key_values", "present") for p in pasts)]
    )
    for name in pasts:  # the one node that a runner may replace to read float16
        casts = [n.name for n in model.graph.node if name in n.input and n.op_type != "Shape"]
        assert casts == [f"{name}.cast"]
    assert model.opset_import[0].version == 23
    onnx.checker.check_model(model, full_check=True)


def test_the_directory_is_complete(
    decoders: dict[str, Path], calibrations: dict[str, Path]
) -> None:
    manifest = Manifest.load(decoders["fp8"], "onnx")
    expected = {"opset": 23, "target": "onnxruntime", "kv_cache": "e5m2", "quantized": True}
    assert expected.items() <= manifest.details.items()
    assert manifest.calibration == Manifest.load(calibrations["fp8"]).identity
    assert {"model.onnx", "config.json", "tokenizer.json", "golden.json"} <= manifest.files.keys()


def test_the_bytes_are_the_same_every_time(
    tmp_path: Path, decoders: dict[str, Path], calibrations: dict[str, Path]
) -> None:
    export_onnx(calibrations["fp8"], tmp_path / "again")
    assert Manifest.load(tmp_path / "again").files == Manifest.load(decoders["fp8"]).files


# What it computes


def test_the_reference_unquantized_is_transformers(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.from_numpy(random_ids(2, 40))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(ids).logits
    torch.testing.assert_close(Reference(tiny_model).logits(ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kv_cache", ["e5m2", "float16"])
def test_the_graph_computes_the_reference_quantization(
    recipe: str,
    kv_cache: KvCacheDtype,
    tmp_path: Path,
    calibrations: dict[str, Path],
    tiny_model: Path,
) -> None:
    export_onnx(calibrations[recipe], tmp_path / "out", kv_cache=kv_cache)
    reference = Reference(tiny_model, calibrations[recipe], kv_cache)
    model = OnnxModel(tmp_path / "out", observe=True)
    assert settled(model, reference, random_ids(8, 64)).mean() < 1e-8
    assert reference.differing < 1e-3 * reference.rounded


def test_the_unquantized_graph_computes_the_unquantized_reference(
    decoders: dict[str, Path], tiny_model: Path
) -> None:
    ids = random_ids(4, 64)
    logits = torch.from_numpy(OnnxModel(decoders["full"]).forward(ids))
    expected = Reference(tiny_model, None, "float16").logits(torch.from_numpy(ids))
    assert divergence(expected, logits).mean() < 1e-6


@pytest.mark.parametrize(
    ("kv_cache", "suffix", "scales"), [("e5m2", "", (0.3, 1.7)), ("e4m3", "_e4m3", (0.01, 0.002))]
)
def test_cache_scales_other_than_one_are_applied(
    kv_cache: Literal["e5m2", "e4m3"],
    suffix: str,
    scales: tuple[float, float],
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    """The recipe's cache, and another that the calibration has scales for; E4M3 saturates here."""
    named = {
        f"model.layers.{layer}.self_attn.{x}_scale{suffix}": scale
        for layer in (0, 1)
        for x, scale in zip("kv", scales, strict=True)
    }
    calibration = tmp_path / "scaled"
    make_calibration(calibration, tiny_model, Recipe.load("fp8"), scales=named)
    export_onnx(calibration, tmp_path / "out", kv_cache=kv_cache)
    assert Manifest.load(tmp_path / "out").details["kv_cache"] == kv_cache
    model = OnnxModel(tmp_path / "out", observe=True)
    reference = Reference(tiny_model, calibration, kv_cache)
    assert settled(model, reference, random_ids(2, 64)).mean() < 1e-8
    prefill_and_decode(OnnxModel(tmp_path / "out"), random_ids(1, 70)[0], prompt=33)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-static"])
def test_the_example_over_32_held_out_sequences(
    recipe: str, tmp_path: Path, example_model: Path, example_samples: Path
) -> None:
    """Two bounds: rounding as the graph did where float32 noise decides, mean KL below 1e-4 nats
    (1.5e-12 measured); each rounding for itself, no further than the reference is from itself
    with its sums taken in another order, give or take the spread of that (4e-3 measured)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(example_model / "tokenizer.json"))
    lines = (example_samples / "heldout.jsonl").read_text().splitlines()[:32]
    sequences = [tokenizer.encode(json.loads(line)["text"]).ids[:128] for line in lines]
    calibration = make_calibration(tmp_path / "cal", example_model, Recipe.load(recipe))
    export_onnx(calibration, tmp_path / "out")
    model = OnnxModel(tmp_path / "out", observe=True)
    reference = Reference(example_model, calibration, "e5m2")
    reordered = Reference(example_model, calibration, "e5m2", reorder=True)
    bound, free, floor = [], [], []
    for sequence in sequences:
        ids = np.array([sequence])
        bound.append(settled(model, reference, ids)[0])
        reference.decisions = None
        own = reference.logits(torch.from_numpy(ids))
        free.append(divergence(own, torch.from_numpy(model.forward(ids)))[0])
        floor.append(divergence(own, reordered.logits(torch.from_numpy(ids)))[0])
    assert torch.cat(bound).mean() < 1e-4
    assert reference.differing < 1e-4 * reference.rounded
    assert torch.cat(free).mean() < 2 * torch.cat(floor).mean()


def test_an_untied_head_is_used_instead_of_the_embeddings(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=False)
    torch.manual_seed(1)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.05)
    model.save_pretrained(tmp_path / "untied")
    make_calibration(tmp_path / "cal", tmp_path / "untied", Recipe.load("fp8"))
    export_onnx(tmp_path / "cal", tmp_path / "out", quantize=False)
    ids = random_ids(2, 40)
    logits = torch.from_numpy(OnnxModel(tmp_path / "out").forward(ids))
    expected = Reference(tmp_path / "untied", None, "float16").logits(torch.from_numpy(ids))
    assert divergence(expected, logits).mean() < 1e-6


# The graph for TensorRT


def test_for_tensorrt_it_is_the_graph_that_is_compiled(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    """Byte for byte, and the file says what the looked-up cache does not save."""
    export_onnx(calibrations["fp8-static"], tmp_path / "out", target="tensorrt")
    model = onnx.load(tmp_path / "out" / "model.onnx")
    assert Manifest.load(tmp_path / "out").details["target"] == "tensorrt"
    assert "saves capacity, not bandwidth" in model.doc_string
    built = build_engine_graph(Source.open(calibrations["fp8-static"]))
    built.document = model.doc_string
    (tmp_path / "built").mkdir()
    path = built.save(tmp_path / "built")
    assert path.read_bytes() == (tmp_path / "out" / "model.onnx").read_bytes()
    pasts = [item for item in model.graph.input if item.name.startswith("past_key_values.")]
    assert {item.type.tensor_type.elem_type for item in pasts} == {TensorProto.UINT8}


def test_both_forms_read_every_input_and_none_names_the_number_of_keys(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    """TensorRT drops Attention-24's nonpad_kv_seqlen in silence; here the mask is its 4th input."""
    for target in get_args(Target):
        export_onnx(calibrations["fp8-static"], tmp_path / target, target=target)
        graph = onnx.load(tmp_path / target / "model.onnx").graph
        read = {name for node in graph.node for name in node.input}
        assert {item.name for item in graph.input} <= read
        attention = [node for node in graph.node if node.op_type == "Attention"]
        assert len(attention) == 2 and all(len(node.input) == 4 for node in attention)


def test_the_same_graph_in_full_precision_for_tensorrt_too(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    """Even of a recipe that TensorRT has no operators for: nothing of it is in the graph."""
    for name, quantize in (("fp8-static", True), ("mxfp4", False)):
        export_onnx(calibrations[name], tmp_path / name, target="tensorrt", quantize=quantize)
    static, plain = (
        onnx.load(tmp_path / name / "model.onnx").graph for name in ("fp8-static", "mxfp4")
    )
    assert [item.name for item in plain.input] == [item.name for item in static.input]
    kinds = {tensor.data_type for tensor in plain.initializer}
    assert not kinds & {TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT4E2M1}
    assert not any("QuantizeLinear" in node.op_type for node in plain.node)
    manifest = Manifest.load(tmp_path / "mxfp4")
    assert (manifest.details["quantized"], manifest.details["kv_cache"]) == (False, "float16")


# What is refused


def test_of_full_precision_no_quantization_is_expected(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    calibration = shutil.copytree(calibrations["fp8"], tmp_path / "calibration")
    path = ServingPath(kv_cache="float16")
    one = Expectation(path=path, mean=0.01, low=0.005, high=0.02, prompts=64)
    ExpectedSet(recipe="fp8", expectations=(one,)).save(calibration)
    golden = GoldenSet.load(calibration)
    ScenarioSet(golden.weights_sha256, "fp8", {}).save(calibration)
    rewritten(calibration)
    plain = export_onnx(calibration, tmp_path / "plain", quantize=False)
    assert plain.details["quantized"] is False
    assert "expected_divergence" not in plain.details and EXPECTED_FILE not in plain.files
    assert not verify(tmp_path / "plain", calibration=calibration).problems
    quantized = export_onnx(calibration, tmp_path / "quantized", kv_cache="float16")
    assert quantized.details["expected_divergence"][path.label]["mean"] == 0.01
    assert EXPECTED_FILE in quantized.files
    # To serve it unquantized is a scenario like others.
    assert SCENARIOS_FILE in plain.files and SCENARIOS_FILE in quantized.files
    ScenarioSet(golden.weights_sha256, "another", {}).save(tmp_path / "plain")
    rewritten(tmp_path / "plain")
    (problem,) = verify(tmp_path / "plain", calibration=calibration).problems
    assert (problem.where, problem.what) == (SCENARIOS_FILE, "is not the calibration's")


def test_a_cache_that_was_not_calibrated_is_refused(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    with pytest.raises(ArtifactError, match=r"k_scale of an e4m3 cache is missing.*octet rescale"):
        export_onnx(calibrations["fp8"], tmp_path / "out", kv_cache="e4m3")
    assert not list(tmp_path.iterdir())


def test_an_existing_destination_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="not an Octet artifact"):
        export_onnx(tmp_path / "missing", tmp_path / "out", force=True)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_export_leaves_nothing(
    interruption: type[BaseException],
    tmp_path: Path,
    calibrations: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise interruption

    monkeypatch.setattr("export.source.Source.weight_codes", interrupt)
    with pytest.raises(interruption):
        export_onnx(calibrations["fp8"], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_groups_that_do_not_divide_a_projection_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    recipe = Recipe.load("fp8-block")
    calibration = make_calibration(tmp_path / "cal", tmp_path / "model", recipe)
    with pytest.raises(OctetError, match="down_proj has 192 inputs, not a multiple of 128"):
        export_onnx(calibration, tmp_path / "out")

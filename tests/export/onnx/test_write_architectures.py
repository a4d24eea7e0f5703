"""The ONNX decoder of each dense architecture: transformers' logits, with and without a cache."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from calibrate.simulate.model import simulate
from export.onnx.attention import Concatenated
from export.onnx.cache import _CastCache
from export.onnx.decoder import build_decoder, check_architecture
from export.onnx.graph import Graph
from export.onnx.write import Target, export_onnx
from export.source import Source
from octet.errors import UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from serve.runner.onnx_rewrite import round_in_float32, store_e2m1_as_e4m3
from tests.export.conftest import make_calibration
from tests.export.runner import OnnxModel, decode, prefill_and_decode, random_ids
from tests.models import GENERIC, KNOWN, write_model
from tests.references import divergence

DENSE = [name for name, (kind, _) in KNOWN.items() if kind not in ("mixtral", "qwen3_moe")]


class Float32Cache(_CastCache):
    """Rounds nothing, so that what remains is the order of sums."""

    elem_type = TensorProto.FLOAT

    def _round(self, graph: Graph, rows: str, output: str) -> None:
        graph.node("Identity", [rows], output)


@pytest.fixture(scope="module", params=DENSE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, settings = KNOWN[request.param]
    return write_model(tmp_path_factory.mktemp(request.param) / "model", kind, **settings)


@pytest.fixture(scope="module")
def calibration(model: Path) -> Path:
    return make_calibration(model.parent / "calibration", model, Recipe.load("fp8"))


def transformers_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def test_full_precision_logits_are_those_of_transformers(
    model: Path, calibration: Path, tmp_path: Path
) -> None:
    """64 tokens, which is beyond the windows and the original context of llama3's scaling."""
    build_decoder(Source.open(calibration), Float32Cache(), quantize=False).save(tmp_path)
    ids = random_ids(2, 64)
    expected = transformers_model(model)(torch.from_numpy(ids)).logits
    logits = torch.from_numpy(OnnxModel(tmp_path).forward(ids))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_decoding_with_a_cache_equals_a_full_pass_bit_for_bit(
    model: Path, calibration: Path, tmp_path: Path
) -> None:
    export_onnx(calibration, tmp_path / "out")
    prefill_and_decode(OnnxModel(tmp_path / "out"), random_ids(1, 72)[0], prompt=20, spare=1)


def test_a_row_does_not_depend_on_its_batch_in_any_bit(
    model: Path, calibration: Path, tmp_path: Path
) -> None:
    export_onnx(calibration, tmp_path / "out")
    graph, ids, rows = OnnxModel(tmp_path / "out"), random_ids(5, 31), range(5)
    at, mask = np.tile(np.arange(30), (5, 1)), np.tile(np.tri(30, dtype=bool), (5, 1, 1, 1))
    together, new = graph.step(ids[:, :30], at, mask, at, graph.empty(5))
    for row in rows:
        one = slice(row, row + 1)
        alone, _ = graph.step(ids[one, :30], at[one], mask[one], at[one], graph.empty(1))
        np.testing.assert_array_equal(alone[0], together[row])
    cache = graph.empty(5, 64)
    for tensor, filled in zip(cache, new, strict=True):
        tensor[:, :, :30] = filled
    mask = np.tile(np.arange(65) < 30, (5, 1, 1, 1)) | (np.arange(65) == 64)
    zeros = np.zeros((5, 1), np.int64)
    together, _ = graph.step(ids[:, 30:], zeros + 30, mask, zeros, cache)
    for row in rows:
        alone, _ = decode(graph, int(ids[row, 30]), 30, [x[row : row + 1] for x in cache])
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
@torch.inference_mode()
def test_quantized_logits_are_those_of_the_simulation(
    recipe: str, model: Path, tmp_path: Path
) -> None:
    """Far nearer to transformers with the same rounding than that is to transformers without."""
    made = make_calibration(tmp_path / "calibration", model, Recipe.load(recipe))
    export_onnx(made, tmp_path / "out")
    source, plain, ids = Source.open(made), transformers_model(model), random_ids(4, 64)
    expected = plain(torch.from_numpy(ids)).logits
    with simulate(plain, source.spec, source.recipe, source.calibration.scales):
        simulated = plain(torch.from_numpy(ids)).logits

    def rewrite(graph: onnx.ModelProto) -> None:
        round_in_float32(graph)
        store_e2m1_as_e4m3(graph, tmp_path / "out")

    logits = torch.from_numpy(OnnxModel(tmp_path / "out", rewrite=rewrite).forward(ids))
    cost = divergence(expected, simulated).mean()
    print("KL", divergence(simulated, logits).mean(), cost)
    assert divergence(simulated, logits).mean() < 0.1 * cost


@pytest.mark.parametrize("name", ["mistral", "mistral-window", "qwen2-window", "phi3-window"])
@torch.inference_mode()
def test_tensorrts_order_of_keys_sees_the_same_window(name: str, tmp_path: Path) -> None:
    """Cached slots first, some of them unused, then the new rows: in a prefill and in each step."""
    kind, settings = KNOWN[name]
    path = write_model(tmp_path / "model", kind, **settings)
    made = make_calibration(tmp_path / "calibration", path, Recipe.load("fp8"))
    source, order = Source.open(made), Concatenated()
    build_decoder(source, Float32Cache(), quantize=False, order=order).save(tmp_path)
    model, ids = OnnxModel(tmp_path), random_ids(1, 70)
    expected = transformers_model(path)(torch.from_numpy(ids)).logits[0].numpy()
    cache = model.empty(1, 80)
    mask, at = np.tril(np.ones((1, 1, 30, 30), bool)), np.arange(30)[None]
    logits, new = model.step(ids[:, :30], at, mask, at, model.empty(1))
    np.testing.assert_allclose(logits[0], expected[:30], atol=1e-4)
    for position in range(30, 70):
        for tensor, rows in zip(cache, new, strict=True):
            tensor[:, :, position - rows.shape[2] : position] = rows
        logits, new = decode(model, int(ids[0, position]), position, cache)
        np.testing.assert_allclose(logits[0, 0], expected[position], atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", *GENERIC])
def test_what_has_no_graph_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, settings = (KNOWN | GENERIC)[name]
    model = write_model(tmp_path / "model", kind, **settings)
    calibration = make_calibration(tmp_path / "calibration", model, Recipe.load("fp8"))
    for target in get_args(Target):
        with pytest.raises(UnsupportedError, match=r"^\w+ (is|has) .*`octet export checkpoint`"):
            export_onnx(calibration, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_what_no_field_describes_is_refused_by_name(example_model: Path) -> None:
    spec = Checkpoint.open(example_model).spec
    check_architecture(spec)
    longrope = spec.model_copy(update={"undescribed": ("rope_type 'longrope'",)})
    with pytest.raises(UnsupportedError, match=r"has rope_type 'longrope', which ONNX .* takes it"):
        check_architecture(longrope)


def test_a_window_adds_no_input_and_is_in_the_mask_alone(tmp_path: Path) -> None:
    graphs = {}
    for name in ("mistral", "mistral-window"):
        kind, settings = KNOWN[name]
        model = write_model(tmp_path / name, kind, **settings)
        made = make_calibration(tmp_path / f"{name}-cal", model, Recipe.load("fp8"))
        export_onnx(made, tmp_path / f"{name}-onnx")
        graphs[name] = onnx.load(tmp_path / f"{name}-onnx" / "model.onnx").graph
    inputs = [[item.name for item in graph.input] for graph in graphs.values()]
    assert inputs[0] == inputs[1]
    names = [{node.name for node in graph.node} for graph in graphs.values()]
    assert names[0] ^ names[1] and all(name.startswith("mask.") for name in names[0] ^ names[1])
    logits = [OnnxModel(tmp_path / f"{name}-onnx").forward(random_ids(1, 40))[0] for name in graphs]
    np.testing.assert_array_equal(logits[0][:24], logits[1][:24])
    assert (logits[0][24:] != logits[1][24:]).any()

"""From calibration to a label: `build-engine` hands its engine to the proof before anybody else.

TensorRT is the fake that computes, and its builder takes the same graph in float32.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, numpy_helper

import export.engine.build as engine_module
from export.engine.build import PROVEN, build_engine
from export.engine.builder import Plan, Precision
from export.engine.library import Gpu
from export.onnx.tensorrt_decoder import build_engine_graph
from export.source import Source
from octet.artifacts.manifest import Manifest
from octet.errors import ExportError
from serve.engine.golden_check import prove
from serve.engine.load import load_runner
from serve.tensorrt.runner import TensorRTRunner
from tests.serve.engines import install
from tests.serve.fake_gpu import FakeGpu
from tests.serve.fake_tensorrt import plan_of

Change = Callable[[onnx.ModelProto], None]


@pytest.fixture
def build(
    proof_calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Manifest]:
    """`build_engine` on a machine with the fakes; `change` alters what the builder compiles."""
    install(monkeypatch, FakeGpu())
    monkeypatch.setattr(engine_module, "find_gpu", lambda: Gpu("Fake", "sm89"))

    def with_builder(out: Path, *, change: Change = lambda model: None, **options: Any) -> Manifest:
        def build_plan(
            name: str,
            trt: Any,
            model: Path,
            profiles: Any,
            options: Any,
            products: Mapping[str, str],
            console: Any,
        ) -> Plan:
            scratch = tmp_path / "scratch"
            scratch.mkdir(exist_ok=True)
            graph = build_engine_graph(Source.open(proof_calibration), TensorProto.FLOAT)
            compiled = onnx.load(graph.save(scratch))
            change(compiled)
            precision = Precision("engine", dict.fromkeys(products, "fp8"), 1, len(products))
            return Plan(plan_of(compiled, profiles), precision, 0.1, None)

        monkeypatch.setattr(engine_module, "build_plan", build_plan)
        return build_engine(proof_calibration, out, builder="tensorrt", prove=prove, **options)

    return with_builder


def test_an_engine_that_answers_as_it_should_is_labelled_proven(
    build: Callable[..., Manifest], tmp_path: Path
) -> None:
    build(tmp_path / "engine", max_batch=5)
    details = Manifest.load(tmp_path / "engine", "engine").details
    assert details["status"] == PROVEN
    proof = details["proof"]
    assert proof["status"] == "proven" and proof["rows_independent"] is True
    assert proof["accepted"]["low"] < proof["kl"] < proof["accepted"]["high"]
    runner = load_runner(tmp_path / "engine")
    assert isinstance(runner, TensorRTRunner) and runner.slots == 5


def test_an_engine_whose_numbers_are_off_is_not_handed_over(
    build: Callable[..., Manifest], tmp_path: Path
) -> None:
    """As a compiler would that fuses a scale away; and the engine before it stays."""

    def drop_a_scale(model: onnx.ModelProto) -> None:
        name = "model.layers.1.mlp.down_proj.weight_scale"
        (scale,) = [item for item in model.graph.initializer if item.name == name]
        doubled = numpy_helper.to_array(scale) * 2
        scale.CopyFrom(numpy_helper.from_array(doubled, name))

    said = rf"^{tmp_path}/engine: .* this export does not compute what its recipe says$"
    with pytest.raises(ExportError, match=said):
        build(tmp_path / "engine", change=drop_a_scale)
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]
    first = build(tmp_path / "engine")
    with pytest.raises(ExportError, match="does not compute what its recipe says"):
        build(tmp_path / "engine", change=drop_a_scale, force=True)
    assert Manifest.load(tmp_path / "engine").identity == first.identity


def test_an_engine_that_cannot_run_here_is_labelled_so(
    build: Callable[..., Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeGpu(devices=0))  # after the builder has found its own
    manifest = build(tmp_path / "engine")
    assert manifest.details["status"].startswith("built, unproven: no NVIDIA GPU 0")
    assert manifest.details["proof"]["status"] == "unproven"

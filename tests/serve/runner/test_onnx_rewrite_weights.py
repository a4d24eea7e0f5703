"""FP4 exports served by ONNX Runtime: the same numbers, with weights in the file or beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from export.onnx.graph import Graph
from export.onnx.write import export_onnx
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError
from serve.runner.onnx import OnnxRunner
from serve.runner.onnx_rewrite import round_in_float32, store_e2m1_as_e4m3
from serve.runner.protocol import StepBatch
from tests.export.runner import OnnxModel, random_ids
from tests.references import Reference


def logits_of(runner: OnnxRunner) -> np.ndarray:
    step = StepBatch(random_ids(1, 40), [0], np.arange(40)[None])
    return runner.forward(step, runner.new_cache(1, 1024)).copy()


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_a_served_fp4_graph_computes_the_reference_quantization(
    recipe: str, exports: dict[str, Path], tiny_model: Path
) -> None:
    def rewrite(model: onnx.ModelProto) -> None:
        round_in_float32(model)
        assert store_e2m1_as_e4m3(model, exports[recipe]) == {}

    model = OnnxModel(exports[recipe], observe=True, rewrite=rewrite)
    reference = Reference(tiny_model, exports[recipe].parent / f"{recipe}-calibration", "e5m2")
    ids = random_ids(4, 64)
    logits = torch.from_numpy(model.forward(ids))
    reference.decisions = {k: torch.from_numpy(v.copy()) for k, v in model.decisions.items()}
    torch.testing.assert_close(logits, reference.logits(torch.from_numpy(ids)), rtol=0, atol=1e-3)
    assert reference.differing < 1e-3 * reference.rounded


@pytest.fixture
def external(exports: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An NVFP4 export that has its weights in model.onnx.data, as one over 2 GB has."""
    save = Graph.save

    def save_outside(graph: Graph, directory: Path, **_: Any) -> Path:
        return save(graph, directory, inline_limit=0)

    monkeypatch.setattr(Graph, "save", save_outside)
    export_onnx(exports["nvfp4"].parent / "nvfp4-calibration", tmp_path / "out")
    assert "model.onnx.data" in Manifest.load(tmp_path / "out").files
    return tmp_path / "out"


def test_weights_beside_the_file_give_the_same_logits(
    external: Path, exports: dict[str, Path]
) -> None:
    inside = logits_of(OnnxRunner(exports["nvfp4"], threads=1))
    np.testing.assert_array_equal(logits_of(OnnxRunner(external, threads=1)), inside)


def test_a_reference_out_of_the_directory_is_refused(external: Path) -> None:
    model = onnx.load(external / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for item in tensor.external_data:
            if item.key == "location":
                item.value = "../model.onnx.data"
    with pytest.raises(ArtifactError, match=r"weight is not in '../model\.onnx\.data'"):
        store_e2m1_as_e4m3(model, external)

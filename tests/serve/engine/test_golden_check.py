"""The proof of an export: what computes its recipe is proven, what does not is refused."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from export.onnx.write import export_onnx
from octet.artifacts.golden import GoldenSet
from octet.artifacts.manifest import Manifest
from octet.artifacts.serving_path import EXPECTED_FILE, Expectation, ExpectedSet, ServingPath
from octet.errors import ArtifactError, ExportError
from serve.engine.golden_check import expected_range, prove
from serve.engine.load import load_runner
from tests.layout import ROOT
from tests.serve.engines import install, make_engine, rewritten
from tests.serve.fake_gpu import FakeGpu
from tests.shared import Shared

E5M2 = ServingPath(kv_cache="e5m2", compute="float32")


@pytest.fixture(scope="module")
def export(proof_calibration: Path, shared: Shared) -> Path:
    return shared.directory("proof-onnx", lambda path: export_onnx(proof_calibration, path))


@pytest.fixture(scope="module")
def facts_of_onnx(export: Path) -> dict[str, Any]:
    return prove(export, threads=1)


@pytest.fixture(scope="module")
def engine(proof_calibration: Path, shared: Shared) -> Path:
    return shared.directory("proof-engine", lambda path: make_engine(proof_calibration, path))


def with_changed(export: Path, to: Path, names: str, change: Callable[[Any], Any]) -> Path:
    """A copy of an ONNX export in which initializers of that name's end hold something else."""
    shutil.copytree(export, to)
    model = onnx.load(to / "model.onnx")
    found = [item for item in model.graph.initializer if item.name.endswith(names)]
    assert found, names
    for item in found:
        array = change(numpy_helper.to_array(item)).astype(np.float32)
        item.CopyFrom(numpy_helper.from_array(array, item.name))
    onnx.save(model, to / "model.onnx")
    return rewritten(to)


def check(facts: dict[str, Any], golden: GoldenSet) -> None:
    assert facts["status"] == "proven"
    assert facts["prompts"] == len(golden.records)
    assert facts["tokens"] == sum(len(r.continuation_token_ids) for r in golden.records)
    assert facts["accepted"]["low"] < facts["kl"] < facts["accepted"]["high"]
    assert facts["kl"] <= facts["kl_max"]
    assert 0 < facts["tokens_agree"] <= facts["tokens"]


def test_an_onnx_export_is_proven(facts_of_onnx: dict[str, Any], proof_golden: GoldenSet) -> None:
    facts = facts_of_onnx
    check(facts, proof_golden)
    assert facts["kl_decoding"] == facts["kl"], "ONNX Runtime's rows are the same in any company"
    assert facts["rows_independent"] is True
    assert "weights+activations, e5m2 (nearest), float32" in facts["accepted"]["from"]


def test_an_engine_is_proven_by_what_it_computes(
    engine: Path, gpu: FakeGpu, proof_golden: GoldenSet, facts_of_onnx: dict[str, Any]
) -> None:
    facts = prove(engine)
    check(facts, proof_golden)
    assert facts["kl"] == pytest.approx(facts_of_onnx["kl"], rel=0.5)
    assert facts["accepted"] == facts_of_onnx["accepted"]


@pytest.mark.parametrize(
    ("names", "factor"),
    [("layers.1.mlp.down_proj.weight_scale", 2), ("0.self_attn.v_proj.weight_scale", 0.5)],
)
def test_an_export_with_other_scales_is_refused(
    export: Path, tmp_path: Path, names: str, factor: float
) -> None:
    broken = with_changed(export, tmp_path / "broken", names, lambda scale: scale * factor)
    with pytest.raises(ExportError, match=r"in prefill.* nats, outside .*expected\.json"):
        prove(broken, threads=1)


def test_an_export_that_is_not_quantized_at_all_is_refused(
    proof_calibration: Path, tmp_path: Path
) -> None:
    """It claims a recipe, and answers better than that can."""
    export_onnx(proof_calibration, tmp_path / "plain", quantize=False)
    shutil.copyfile(proof_calibration / EXPECTED_FILE, tmp_path / "plain" / EXPECTED_FILE)
    rewritten(tmp_path / "plain", quantized=True)
    with pytest.raises(ExportError, match="nats, below"):
        prove(tmp_path / "plain", threads=1)


def test_nan_is_refused(export: Path, tmp_path: Path) -> None:
    nan = with_changed(export, tmp_path / "nan", "model.norm.weight", lambda w: w * np.nan)
    with pytest.raises(ExportError, match=r"is (nan|inf) nats"):
        prove(nan, threads=1)


def test_an_engine_whose_cache_is_off_is_refused_for_its_decoding(
    engine: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New rows one position too early: reading a prompt in one piece does not notice."""
    append = FakeGpu._append

    def early(self: FakeGpu, a: Any, sizes: dict[str, int]) -> None:
        rows = self.view(a.where, 16 * a.batch).view(np.int64).reshape(-1, 2)
        moved = rows[:, 1] > 1
        rows[moved, 1] -= 1
        append(self, a, sizes)
        rows[moved, 1] += 1

    monkeypatch.setattr(FakeGpu, "_append", early)
    with pytest.raises(ExportError, match="decoding, its divergence"):
        prove(engine)


def test_an_engine_that_cannot_run_here_is_unproven(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeGpu((9, 0)))
    facts = prove(engine)
    assert facts["status"] == "unproven"
    assert facts["reason"].startswith("built for sm89, and this GPU is sm90")
    install(monkeypatch, FakeGpu(devices=0))
    assert "no NVIDIA GPU" in prove(engine)["reason"]


def test_what_is_altered_is_refused_and_not_unproven(
    engine: Path, gpu: FakeGpu, tmp_path: Path
) -> None:
    copy = shutil.copytree(engine, tmp_path / "altered")
    (copy / "golden.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"golden\.json"):
        prove(copy)


class TestRange:
    """What is accepted, by what was predicted."""

    @pytest.mark.parametrize(
        ("low", "high", "accepted"), [(0.8, 1.25, (0.64, 1.5625)), (0.1, 9.0, (0.25, 4.0))]
    )
    def test_twice_the_predicted_range_in_logarithms_but_not_4_times_off(
        self, export: Path, tmp_path: Path, low: float, high: float, accepted: tuple[float, float]
    ) -> None:
        copy = shutil.copytree(export, tmp_path / "copy")
        one = Expectation(path=E5M2, mean=0.01, low=0.01 * low, high=0.01 * high, prompts=64)
        ExpectedSet(recipe="fp8", expectations=(one,)).save(copy)
        rewritten(copy)
        found = expected_range(copy, Manifest.load(copy), load_runner(copy, 1))
        assert (100 * found.low, 100 * found.high) == pytest.approx(accepted)

    def test_of_a_bfloat16_path_only_the_top(self, proof_calibration: Path, tmp_path: Path) -> None:
        export_onnx(proof_calibration, tmp_path / "onnx", kv_cache="e4m3")
        accepted = expected_range(
            tmp_path / "onnx", Manifest.load(tmp_path / "onnx"), load_runner(tmp_path / "onnx", 1)
        )
        assert accepted.low == 0 and "e4m3 (nearest), bfloat16" in accepted.source
        assert prove(tmp_path / "onnx", threads=1)["status"] == "proven"

    def test_without_a_prediction_a_bound_for_the_format(
        self, export: Path, proof_calibration: Path, tmp_path: Path
    ) -> None:
        copy = shutil.copytree(export, tmp_path / "copy")
        (copy / EXPECTED_FILE).unlink()
        facts = prove(rewritten(copy), threads=1)
        assert facts["accepted"]["high"] == 0.1 and "bound of fp8" in facts["accepted"]["from"]
        assert "in_predicted_range" not in facts and facts["status"] == "weakly proven"
        export_onnx(proof_calibration, tmp_path / "plain", quantize=False)
        assert prove(tmp_path / "plain", threads=1)["accepted"]["high"] == 0.01


def test_an_engine_without_a_gpu_is_not_unproven_for_a_package_of_the_server() -> None:
    """The first reason counts: nothing of the server is needed to find that there is no GPU."""
    servers = ("jinja2", "tokenizers", "fastapi", "aiohttp", "uvicorn")
    code = f"import sys; sys.modules.update(dict.fromkeys({servers}))\n"
    code += "import serve.engine.golden_check, serve.tensorrt.runner"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

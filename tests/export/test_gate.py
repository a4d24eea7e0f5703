"""An export that costs more than it may does not appear; what was found of it does."""

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.golden import golden_set
from export.engine import build as engine
from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import GoldenSet
from octet.artifacts.manifest import Manifest, software
from octet.artifacts.provenance import ModelIdentity
from octet.errors import ArtifactError, ConfigError, GateError, UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet_cli import export as commands
from octet_cli.main import main
from serve.engine.load import load_runner
from serve.runner.protocol import StepBatch
from tests.calibrations import save_calibration
from tests.export import fake_tensorrt
from tests.export.conftest import plausible_scales
from tests.models import write_model

FP8 = Recipe.load("fp8")
BAD = "model.layers.1.mlp.down_proj"
LENGTHS = (3, 5, 8, 13, 17, 21, 26, 30, 34, 40)


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> GoldenSet:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 4096, (n,), generator=generator).tolist() for n in LENGTHS]
    return golden_set(Checkpoint.open(tiny_model), [("", row) for row in rows])


def calibration(path: Path, model: Path, golden: GoldenSet, *, bad: bool) -> Path:
    """Of the tiny model; if `bad`, with a down projection whose scales are eight times too small,
    so that its codes saturate."""
    checkpoint = Checkpoint.open(model)
    scales: dict[str, np.ndarray] = {}
    for linear in checkpoint.spec.linears():
        schemes = FP8.scheme_of(linear.name)
        assert schemes is not None
        scales |= plausible_scales(checkpoint, linear, *schemes)
    for index in range(checkpoint.spec.layers):
        for kind in "kv":
            scales[f"{checkpoint.spec.layer(index)}.self_attn.{kind}_scale"] = np.ones((), "f4")
    if bad:
        scales[f"{BAD}.weight_scale"] = scales[f"{BAD}.weight_scale"] / np.float32(8)
    manifest = Manifest(
        kind="calibration",
        model=ModelIdentity.of(checkpoint),
        recipe=FP8,
        details={"source": str(model)},
        software=software(),
    )
    Calibration.save(path, manifest, {}, {}, scales, golden)
    return path


@pytest.fixture(scope="module")
def good(tiny_model: Path, golden: GoldenSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration(tmp_path_factory.mktemp("good") / "good", tiny_model, golden, bad=False)


@pytest.fixture(scope="module")
def bad(tiny_model: Path, golden: GoldenSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration(tmp_path_factory.mktemp("bad") / "bad", tiny_model, golden, bad=True)


def refused(out: Path, error: GateError, kept: Path | None = None) -> Mapping[str, Any]:
    """The evidence; asserts that it is all there is, and that it names the bad layer first."""
    said = str(error)
    assert error.exit_code == 1 and "\n" not in said
    assert f"{out} is not written, over " in said
    assert f"costliest parts are {BAD} (" in said
    assert f"`octet rescale` with --exclude {BAD}, or calibrate again with --budget" in said
    kept = kept or out.with_name(f"{out.name}.refused")
    assert said.endswith(f"report: {kept}")
    assert not out.exists() and [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert len(GoldenSet.load(kept).records) == len(LENGTHS)
    evidence: dict[str, Any] = json.loads((kept / "gate.json").read_text())
    first = evidence["parts"][0]
    assert (first["name"], first["linears"]) == (BAD, [BAD]) and first["share"] > 0.5
    assert "verification.json" in {path.name for path in kept.iterdir()}
    return evidence


class TestCheckpoint:
    def test_within_the_limits_it_is_recorded(
        self, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        commands.export_checkpoint(good, out, max_kl="0.5", max_ppl_change="50%", as_json=True)
        said = json.loads(capsys.readouterr().out)
        judged = Manifest.load(out, "checkpoint").details["gate"]
        assert said["details"]["gate"] == judged
        assert [one["metric"] for one in judged] == ["kl", "perplexity"]
        assert all(one["met"] and one["measured"] < one["bound"] for one in judged)
        assert {one["tokens"] for one in judged} == {sum(LENGTHS)}
        assert {one["samples"] for one in judged} == {len(LENGTHS)}
        assert {one["how"] for one in judged} == {
            "simulated in float32 with the weights that were written"
        }
        assert list(tmp_path.iterdir()) == [out]

    def test_evidence_of_an_earlier_run_is_gone_once_it_is_written(
        self, good: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        with pytest.raises(GateError):
            commands.export_checkpoint(good, out, max_kl="0.00001")
        assert (tmp_path / "out.refused").is_dir()
        commands.export_checkpoint(good, out, max_kl="0.5")
        assert list(tmp_path.iterdir()) == [out]

    def test_what_was_written_is_what_is_judged(
        self, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The calibration is right, and the export is not: a layer of it is half of what it was."""
        from verify import next_tokens

        read = next_tokens.written_weight

        def halved(written: Any, module: str) -> Any:
            return read(written, module) * (0.5 if module == BAD else 1)

        monkeypatch.setattr(next_tokens, "written_weight", halved)
        with pytest.raises(GateError) as caught:
            commands.export_checkpoint(good, tmp_path / "out", max_kl="0.01")
        assert f"costliest parts are {BAD} (" in str(caught.value)

    @pytest.mark.parametrize(
        "limits", [{"max_kl": "0.02"}, {"max_kl": "50", "max_ppl_change": "0.001%"}]
    )
    def test_over_one_it_does_not_appear(
        self, bad: Path, tmp_path: Path, limits: dict[str, str]
    ) -> None:
        out = tmp_path / "out"
        with pytest.raises(GateError) as caught:
            commands.export_checkpoint(bad, out, **limits)
        evidence = refused(out, caught.value)
        assert [one["met"] for one in evidence["gate"]][-1] is False
        assert evidence["kind"] == "checkpoint"
        tables = json.loads((tmp_path / "out.refused" / "verification.json").read_text())
        worst = min(tables["tensors"], key=lambda row: row["sqnr"])
        assert worst["tensor"] == f"{BAD}.weight"

    def test_the_command_ends_with_1_and_one_line(
        self,
        bad: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(signal, "signal", lambda number, handler: None)
        command = ["export", "checkpoint", str(bad), "-o", str(tmp_path / "out"), "--json"]
        with pytest.raises(SystemExit) as ended:
            main([*command, "--max-kl", "0.02"])
        assert ended.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {tmp_path / 'out'} is not written, over --max-kl 0.02: ")
        with pytest.raises(SystemExit) as ended:
            main([*command, "--max-kl", "-0.02"])
        assert ended.value.code == 2
        assert "'-0.02' is not a positive number" in capsys.readouterr().err


class TestOnnx:
    def test_the_graph_itself_is_asked(self, good: Path, bad: Path, tmp_path: Path) -> None:
        commands.export_onnx(good, tmp_path / "good" / "out", max_kl="0.5", max_ppl_change="50%")
        kl, change = Manifest.load(tmp_path / "good" / "out").details["gate"]
        for one in (kl, change):
            assert one["how"].startswith("the graph itself, ") and one["met"]
            assert (one["samples"], one["tokens"]) == (len(LENGTHS), sum(LENGTHS))
        out = tmp_path / "bad" / "out"
        with pytest.raises(GateError, match="the graph itself") as caught:
            commands.export_onnx(bad, out, max_kl="0.0001")
        refused(out, caught.value)

    def test_that_for_tensorrt_is_simulated(self, bad: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with pytest.raises(
            GateError, match="simulated in float32 with the calibration's"
        ) as caught:
            commands.export_onnx(bad, out, target="tensorrt", max_kl="0.02")
        assert refused(out, caught.value)["target"] == "tensorrt"

    def test_without_quantization_it_costs_nothing(self, bad: Path, tmp_path: Path) -> None:
        commands.export_onnx(bad, tmp_path / "out", full_precision=True, max_kl="0.001")
        assert Manifest.load(tmp_path / "out").details["gate"][0]["measured"] < 1e-4


class TestTriton:
    def test_an_entry_is_judged_by_what_it_holds(
        self, good: Path, bad: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "good" / "tiny"
        commands.export_triton(good, out, backend="vllm", max_kl="0.5")
        entry = Manifest.load(out, "triton").details["gate"]
        assert entry == Manifest.load(out / "1" / "checkpoint").details["gate"]
        assert entry[0]["met"]
        repository = tmp_path / "bad"
        with pytest.raises(GateError) as caught:
            commands.export_triton(bad, repository / "tiny", backend="vllm", max_kl="0.02")
        kept = tmp_path / "bad.refused" / "tiny"
        assert refused(repository / "tiny", caught.value, kept)["kind"] == "checkpoint"
        # What is no model in its repository, Triton does not start with.
        assert list(repository.iterdir()) == []
        commands.export_triton(bad, repository / "tiny", backend="vllm", max_kl="9")
        assert {path.name for path in tmp_path.iterdir()} == {"bad", "good"}

    def test_of_all_entries_the_first_refused_ends_it(self, bad: Path, tmp_path: Path) -> None:
        repository = tmp_path / "all"
        with pytest.raises(GateError) as caught:
            commands.export_triton(bad, repository, every=True, name="tiny", max_kl="0.0001")
        refused(repository / "tiny", caught.value, tmp_path / "all.refused" / "tiny")
        assert list(repository.iterdir()) == []

    def test_what_lies_where_evidence_would_is_said_before_the_work(
        self, bad: Path, tmp_path: Path
    ) -> None:
        mine = tmp_path / "all.refused" / "tiny-vllm"
        mine.mkdir(parents=True)
        with pytest.raises(ArtifactError, match=r"all\.refused/tiny-vllm: exists and is no report"):
            commands.export_triton(bad, tmp_path / "all", every=True, name="tiny", max_kl="9")
        assert not (tmp_path / "all").exists()


class TestEngine:
    @pytest.fixture
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """TensorRT-RTX, and no GPU."""
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake_tensorrt)
        monkeypatch.setattr(fake_tensorrt, "behaviour", fake_tensorrt.Behaviour())
        monkeypatch.setattr(engine, "find_gpu", lambda: None)

    @pytest.mark.usefixtures("fake")
    def test_one_that_runs_is_measured(
        self, good: Path, bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A graph in ONNX Runtime stands in for the plan; it decodes worse than it reads."""
        commands.export_onnx(good, tmp_path / "graph")
        runner = load_runner(tmp_path / "graph", 2)
        forward = runner.forward

        def worse(step: StepBatch, cache: Any) -> Any:
            return forward(step, cache) * (0.8 if step.token_ids.shape[1] == 1 else 1)

        monkeypatch.setattr(runner, "forward", worse)
        monkeypatch.setattr("serve.engine.load.load_runner", lambda path: runner)
        monkeypatch.setattr(commands, "_prove", lambda path: {"status": "proven", "kl": 0.003})
        out = tmp_path / "good" / "out"
        commands.build_engine(good, out, target="sm89", max_kl="0.9", max_ppl_change="9%")
        details = Manifest.load(out, "engine").details
        kl, change = details["gate"]
        assert kl["how"] == "the plan itself, decoding" and kl["met"]
        assert change["how"].startswith("the plan itself, ")
        assert (kl["tokens"], kl["samples"]) == (sum(LENGTHS), len(LENGTHS))
        assert details["status"].startswith("proven")
        out = tmp_path / "bad" / "out"
        with pytest.raises(GateError, match="the plan itself, decoding") as caught:
            commands.build_engine(bad, out, target="sm89", max_kl="0.0001")
        assert refused(out, caught.value)["proof"]["kl"] == 0.003

    @pytest.mark.usefixtures("fake")
    def test_one_that_cannot_run_here_is_simulated(
        self, bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unproven = {"status": "unproven", "reason": "no GPU"}
        monkeypatch.setattr(commands, "_prove", lambda path: unproven)
        out = tmp_path / "out"
        with pytest.raises(
            GateError, match="simulated in float32 with the calibration's"
        ) as caught:
            commands.build_engine(bad, out, target="sm89", max_kl="0.02")
        refused(out, caught.value)


class TestRefusals:
    def test_limits_are_checked_before_anything_is_written(
        self, good: Path, calibrations: dict[str, Path], tmp_path: Path
    ) -> None:
        for limits, said in (
            ({"max_kl": "five"}, "not a positive number"),
            ({"max_ppl_change": "2"}, "it could mean either"),
        ):
            with pytest.raises(ConfigError, match=said):
                commands.export_checkpoint(good, tmp_path / "out", **limits)
        few = calibrations["fp8"]  # with one golden record
        with pytest.raises(ConfigError, match="0 of 1 golden prompts of two tokens or more cannot"):
            commands.export_checkpoint(few, tmp_path / "out", max_ppl_change="1%")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("out", [".", "/"])
    def test_a_directory_that_is_there(
        self, out: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "mine").touch()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ArtifactError, match=r"choose another|root directory"):
            commands.export_checkpoint(good, Path(out), max_kl="0.01")

    def test_an_architecture_that_cannot_be_simulated(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint.open(write_model(tmp_path / "model", "gemma2"))
        path = save_calibration(tmp_path / "calibration", checkpoint, FP8, {})
        with pytest.raises(UnsupportedError, match=r"--max-kl 0\.1 needs a simulation .* Gemma2"):
            commands.export_checkpoint(path, tmp_path / "out", max_kl="0.1")
        assert not (tmp_path / "out").exists()

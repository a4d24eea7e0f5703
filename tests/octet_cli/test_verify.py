"""`octet verify` as a user meets it: a table, a JSON object, an exit code, and next tokens."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner, Result

from calibrate.golden import golden_set
from calibrate.simulate.predict import predict
from export.checkpoint.write import export_checkpoint
from export.onnx.write import export_onnx
from export.triton.write import export_triton
from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import GOLDEN_FILE, GoldenSet
from octet.artifacts.manifest import Manifest, write_artifact
from octet.artifacts.scenarios import SCENARIOS_FILE, ScenarioSet
from octet.artifacts.serving_path import EXPECTED_FILE, ExpectedSet, ServingPath
from octet.errors import ConfigError
from octet.model.checkpoint import Checkpoint
from octet.recipe import KvCacheDtype, Recipe
from octet_cli.verify import report, verify
from tests.export.conftest import make_calibration
from tests.export.handmade import Tensors, write_handmade
from tests.verify.test_artifact_kinds import described_engine
from verify.artifact import verify as verify_files
from verify.checks.findings import Divergence, Row, Verification
from verify.next_tokens import add_divergence

PATH = ServingPath(kv_cache="e5m2", compute="float32")


def run(*arguments: object) -> Result:
    app = Typer()
    app.command()(verify)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> GoldenSet:
    """Four golden records of the tiny model."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 4096, (n,), generator=generator).tolist() for n in (4, 9, 17, 30)]
    return golden_set(Checkpoint.open(tiny_model), [("", row) for row in rows])


def predicted(root: Path, model: Path, recipe: str, golden: GoldenSet, path: ServingPath) -> Path:
    """A calibration with what `path` is expected to cost."""
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_scale_e4m3": 0.02 + 0.01 * layer
        for layer in (0, 1)
        for kind in "kv"
    }
    made = make_calibration(root / "plain", model, Recipe.load(recipe), scales=scales)
    plain = Calibration.load(made)
    expected = predict(Checkpoint.open(model), plain.manifest.recipe, plain.scales, golden, [path])
    told = ScenarioSet(golden.weights_sha256, recipe, {})
    files = {EXPECTED_FILE: expected.to_json(), SCENARIOS_FILE: told.save}
    out = root / "cal"
    Calibration.save(out, plain.manifest, {}, {}, plain.scales, golden, extra_files=files)
    return out


@pytest.fixture(scope="module")
def calibration(
    tiny_model: Path, golden: GoldenSet, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return predicted(tmp_path_factory.mktemp("predicted"), tiny_model, "fp8", golden, PATH)


@pytest.mark.parametrize(
    ("recipe", "form", "cache"),
    [
        ("fp8-static", "compressed-tensors", "e4m3"),
        ("fp8-static", "modelopt", "e4m3"),
        ("fp8-static", "fp8", "e4m3"),
        ("nvfp4", "compressed-tensors", "e5m2"),
        ("nvfp4", "modelopt", "e4m3"),
        ("mxfp4", "compressed-tensors", "float16"),
    ],
)
def test_what_is_simulated_is_what_is_in_the_files(
    recipe: str,
    form: Literal["compressed-tensors", "modelopt", "fp8"],
    cache: KvCacheDtype,
    tiny_model: Path,
    golden: GoldenSet,
    tmp_path: Path,
) -> None:
    """Codes, scales of inputs and of the cache, read back, give the predicted number itself."""
    path = ServingPath(kv_cache=cache, compute="float32")
    calibration = predicted(tmp_path, tiny_model, recipe, golden, path)
    export_checkpoint(calibration, tmp_path / "out", format=form, kv_cache=cache)
    found = verify_files(tmp_path / "out", calibration=calibration)
    add_divergence(found)
    assert found.problems == [] and found.divergence is not None
    (expected,) = ExpectedSet.load(calibration).expectations
    assert found.divergence.mean == pytest.approx(
        expected.mean, rel=1e-6
    )  # a divisor inverted twice


def test_a_sound_checkpoint_answers_as_predicted(calibration: Path, tmp_path: Path) -> None:
    export_checkpoint(calibration, tmp_path / "out")
    result = run(tmp_path / "out", "--calibration", calibration, "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == 0 and facts["ok"] and facts["problems"] == []
    expected = json.loads((calibration / EXPECTED_FILE).read_text())["expectations"][0]
    assert facts["divergence"]["mean"] == pytest.approx(expected["mean"], rel=1e-3)
    low = expected["low"] ** 2 / expected["mean"]
    assert facts["divergence"]["low"] == pytest.approx(low) and facts["divergence"]["inside"]
    assert facts["divergence"]["prompts"] == 4
    assert len(facts["tensors"]) == 14 and facts["tensors"][0]["sqnr"] > 31
    assert [layer["layer"] for layer in facts["layers"]] == ["model.layers.0", "model.layers.1"]


def test_a_graph_answers_by_itself(calibration: Path, tmp_path: Path) -> None:
    export_onnx(calibration, tmp_path / "out")
    result = run(tmp_path / "out", "--calibration", calibration, "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == 0, facts["problems"]
    assert facts["divergence"]["path"] == "the graph itself, in ONNX Runtime"
    assert 0 < facts["divergence"]["mean"] < 0.05


def test_next_tokens_far_from_what_is_expected_are_a_problem(
    calibration: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """An expectation that no honest export of these weights meets."""
    export_checkpoint(calibration, tmp_path / "out")
    manifest = Manifest.load(tmp_path / "out")
    with write_artifact(tmp_path / "out", force=True) as writer:
        for name in manifest.files:
            (writer.path / name).write_bytes((tmp_path / "out" / name).read_bytes())
        expected = json.loads((writer.path / EXPECTED_FILE).read_text())
        for item in expected["expectations"]:
            item |= {"mean": 1e-5, "low": 0.9e-5, "high": 1.1e-5}
        (writer.path / EXPECTED_FILE).write_text(json.dumps(expected))
        writer.finish(manifest)
    result = run(tmp_path / "out", "--model", tiny_model, "--json")
    (problem,) = json.loads(result.stdout)["problems"]
    assert result.exit_code == 1 and problem["check"] == "divergence"
    assert "outside 8.1e-06 to 1.21e-05" in problem["what"]


def without(source: Path, out: Path, *names: str) -> Path:
    """A copy of an export without these files, its manifest and hashes right."""
    manifest = Manifest.load(source)
    with write_artifact(out) as writer:
        for name in {*manifest.files} - {*names}:
            (writer.path / name).parent.mkdir(parents=True, exist_ok=True)
            (writer.path / name).write_bytes((source / name).read_bytes())
        writer.finish(manifest)
    return out


def test_without_a_prediction_a_bound_holds(
    calibration: Path, tiny_model: Path, tmp_path: Path
) -> None:
    export_checkpoint(calibration, tmp_path / "out")
    path = without(tmp_path / "out", tmp_path / "unpredicted", EXPECTED_FILE)
    result = run(path, "--model", tiny_model, "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == 0 and facts["divergence"]["inside"]
    assert (facts["divergence"]["low"], facts["divergence"]["high"]) == (0.0, 0.1)
    assert facts["divergence"]["source"] == "the bound of fp8, without a prediction"


def test_next_tokens_beyond_every_bound_are_a_problem(tiny_model: Path, tmp_path: Path) -> None:
    """The golden records are another model's, and nobody predicted."""
    calibration = make_calibration(tmp_path / "cal", tiny_model, Recipe.load("fp8"))
    export_checkpoint(calibration, tmp_path / "out")
    result = run(tmp_path / "out", "--calibration", calibration, "--json")
    (problem,) = json.loads(result.stdout)["problems"]
    assert result.exit_code == 1 and problem["check"] == "divergence"
    assert "outside 0 to 0.1 (the bound of fp8, without a prediction)" in problem["what"]
    assert run(tmp_path / "out", "--calibration", calibration, "--no-tokens").exit_code == 0


def test_a_divergence_that_is_no_number_is_not_inside() -> None:
    assert not Divergence(math.nan, 0.0, 1.0, 4, "", "").inside
    assert not Divergence(math.inf, 0.0, 1.0, 4, "", "").inside
    assert Divergence(0.5, 0.0, 1.0, 4, "", "").inside


def unchecked(path: Path, calibration: Path) -> str:
    """What `verify` says that it did not check; with --no-tokens, which is a wish, all is right."""
    facts = json.loads((result := run(path, "--calibration", calibration, "--json")).stdout)
    assert result.exit_code == 2 and facts["problems"] == [] and facts["divergence"] is None
    assert run(path, "--calibration", calibration, "--no-tokens").exit_code == 0
    (text,) = facts["unchecked"]
    return str(text)


def test_a_graph_for_tensorrt_is_not_run_and_that_is_said(
    calibration: Path, tmp_path: Path
) -> None:
    export_onnx(calibration, tmp_path / "out", target="tensorrt")
    assert "`octet build-engine` builds and proves one" in unchecked(tmp_path / "out", calibration)


def test_an_export_without_golden_records_is_not_all_checked(
    calibration: Path, tiny_model: Path, tmp_path: Path
) -> None:
    export_checkpoint(calibration, tmp_path / "out")
    path = without(tmp_path / "out", tmp_path / "mute", GOLDEN_FILE)
    result = run(path, "--model", tiny_model)
    assert result.exit_code == 2
    assert "not checked: next tokens: it holds no golden records" in result.stdout
    assert run(path, "--model", tiny_model, "--no-tokens").exit_code == 0


def test_a_triton_entry_whose_model_lost_its_manifest_is_not_all_checked(
    calibration: Path, tmp_path: Path
) -> None:
    export_triton(calibration, tmp_path / "tiny", backend="vllm")
    assert run(tmp_path / "tiny", "--calibration", calibration).exit_code == 0
    held = "1/checkpoint/manifest.json"
    path = without(tmp_path / "tiny", tmp_path / "again" / "tiny", held)
    result = run(path, "--calibration", calibration)
    assert result.exit_code == 2
    assert "not checked: numbers and next tokens" in result.stdout


def test_a_plan_in_a_triton_entry_is_as_unchecked_as_the_engine(
    calibration: Path, tmp_path: Path
) -> None:
    engine = described_engine(tmp_path / "engine", calibration)
    export_triton(calibration, tmp_path / "tiny", backend="tensorrt", engine=engine)
    assert unchecked(tmp_path / "tiny", calibration) == unchecked(engine, calibration)


def test_an_engine_that_cannot_run_here_is_not_all_checked(
    calibration: Path, tmp_path: Path
) -> None:
    """TensorRT is missing, or the plan is of another."""
    engine = described_engine(tmp_path / "engine", calibration)
    assert unchecked(engine, calibration).startswith("next tokens: ")
    facts = json.loads((result := run(engine, "--no-tokens", "--json")).stdout)
    assert result.exit_code == 2
    assert facts["unchecked"][0].startswith("graph: give --calibration, to compare")


def test_a_fault_is_shown_and_exits_1(tiny_model: Path, tmp_path: Path) -> None:
    def invert(tensors: Tensors, _: object) -> None:
        name = "model.layers.1.mlp.up_proj.weight_scale"
        tensors[name] = 1 / tensors[name]

    path = write_handmade(tmp_path / "out", tiny_model, "ct-channel", damage=invert)
    result = run(path, "--model", tiny_model)
    assert result.exit_code == 1
    shown = " ".join(result.stdout.split())
    assert "its scales divide where they should multiply" in shown
    assert "model.layers.1.mlp.up_proj.weight" in shown and "wrong: 1 problem" in shown


def test_without_the_original_the_exit_code_is_2(calibration: Path, tmp_path: Path) -> None:
    export_checkpoint(calibration, tmp_path / "out")
    result = run(tmp_path / "out")
    assert result.exit_code == 2 and "not checked: numbers" in result.stdout


def test_a_checkpoint_of_others_says_what_is_left_out(tiny_model: Path, tmp_path: Path) -> None:
    path = write_handmade(tmp_path / "out", tiny_model, "modelopt-fp8", manifest=False)
    result = run(path, "--model", tiny_model)
    assert result.exit_code == 0 and "no golden records" in result.stdout


def test_a_url_needs_the_golden_records_of_what_it_serves() -> None:
    with pytest.raises(ConfigError, match="give --golden"):
        run("http://127.0.0.1:8000/v1")


def shown(found: Verification, width: int = 80, **options: bool) -> list[str]:
    console = Console(width=width, record=True, file=None, force_terminal=False, quiet=False)
    with console.capture() as capture:
        report(found, console, **options)
    return capture.get().splitlines()


def row(index: int, sqnr: float = 30.0) -> Row:
    name = f"model.layers.{index}.mlp.gate_proj.weight_packed"
    noise = 10 ** (-sqnr / 10)
    return Row(name, f"model.layers.{index}", "nvfp4", 1 << 20, 0.01, 1.0, noise, 30.0)


def test_the_table_is_worst_first_and_fits_80_columns() -> None:
    found = Verification(Path("out/" + "long/" * 10), "checkpoint", "compressed-tensors")
    found.rows = [row(index, 30.0 - index / 10) for index in range(30)]
    found.problem("numbers", found.rows[3].tensor, "SQNR 12 dB, expected 30.0 dB: " + "why " * 30)
    found.divergence = Divergence(0.5, 0.001, 0.002, 64, "simulated: " + PATH.label, "predicted")
    lines = shown(found)
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert found.rows[3].tensor in text  # a problem's name is whole, and in one line
    assert text.count("why") == 30  # nothing is cut off
    names = [line.split()[0] for line in lines if line.lstrip().startswith("layers.")]
    assert {"layers.29.mlp.gate_proj", "layers.28"} < {*names}  # each in a line of its own
    places = [text.index(f"layers.{index}.mlp") for index in (3, 29, 28)]
    assert places == sorted(places)  # the wrong one first, then the worst
    assert "worst of 30 tensors" in text and "outside what is accepted, 0.001 to 0.002" in " ".join(
        text.split()
    )
    every = "\n".join(shown(found, show_all=True))
    assert "layers.5.mlp" not in text and "layers.5.mlp" in every
    found.rows = [replace(one, tensor=f"{one.tensor}.{'deep.' * 20}") for one in found.rows]
    assert all(len(line) <= 80 for line in shown(found))


def test_numbers_that_json_lacks_are_null() -> None:
    found = Verification(Path("out"), "checkpoint", "x")
    found.rows = [Row("a.weight", "a", "x", 4, math.inf, 1.0, 0.0, None)]
    facts = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert facts["tensors"][0]["sqnr"] is None and facts["tensors"][0]["max_abs"] is None

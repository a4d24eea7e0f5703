"""Calibrations, engines and Triton entries: what can be told of each without running it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.checkpoint.write import export_checkpoint
from export.triton.write import Backend, export_triton
from octet.artifacts.manifest import MANIFEST_FILE, Manifest, software, write_artifact
from octet.errors import ArtifactError
from octet.model.checkpoint import sha256_file
from octet.recipe import Recipe
from tests.export.conftest import make_calibration
from tests.export.triton.test_write import make_engine
from verify.artifact import verify

SCALE = "model.layers.1.mlp.up_proj.weight_scale"


def rewritten(source: Path, out: Path, change: Callable[[Path], None], **update: object) -> Path:
    """A copy, changed, under a manifest whose hashes are right."""
    manifest = Manifest.load(source)
    with write_artifact(out) as writer:
        for name in manifest.files:
            (writer.path / name).parent.mkdir(parents=True, exist_ok=True)
            (writer.path / name).write_bytes((source / name).read_bytes())
        change(writer.path)
        writer.finish(manifest.model_copy(update=update))
    return out


def described_engine(out: Path, calibration: Path, **details: object) -> Path:
    """An engine whose manifest says all that `build-engine` writes; `details` replace some."""
    from export.onnx.tensorrt_decoder import INLINE_LIMIT_BYTES, build_engine_graph
    from export.source import Source

    scratch = out.with_name(f"{out.name}.graph")
    scratch.mkdir()
    source = Source.open(calibration)
    graph = build_engine_graph(source)
    graph.save(scratch, inline_limit=INLINE_LIMIT_BYTES)
    engine = make_engine(out.with_name(f"{out.name}.bare"), calibration)
    manifest = Manifest.load(engine)
    facts = {
        "status": "built, unproven: nothing has executed it",
        "targets": ["sm89"],
        "precision": {"products": {item.name: "fp8" for item in manifest.model.spec.linears()}},
        "graph_sha256": {file.name: sha256_file(file) for file in scratch.iterdir()},
    }
    described = {**manifest.details, **facts, **details}
    return rewritten(
        engine, out, source.copy_side_files, details=described, software=software("onnx")
    )


@pytest.mark.parametrize("recipe", ["fp8", "fp8-static", "nvfp4", "mxfp4"])
def test_a_sound_calibration(recipe: str, calibrations: dict[str, Path]) -> None:
    found = verify(calibrations[recipe])
    assert found.exit_code == 0 and found.kind == "calibration"
    assert found.format == f"recipe {recipe}"
    assert any("1 golden records" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        ({"scales": {SCALE: np.full((512, 1), np.nan)}}, SCALE, "512 of 512 are not positive"),
        ({"scales": {SCALE: np.zeros((512, 1))}}, SCALE, "512 of 512 are not positive"),
        ({"drop": SCALE}, SCALE, "missing: recipe fp8 needs it"),
        ({"scales": {SCALE: np.float32(1)}}, SCALE, "has shape [], the recipe needs [512, 1]"),
    ],
)
def test_a_calibration_without_a_sound_scale(
    change: dict[str, Any], where: str, what: str, tiny_model: Path, tmp_path: Path
) -> None:
    make_calibration(tmp_path / "cal", tiny_model, Recipe.load("fp8"), **change)
    found = verify(tmp_path / "cal")
    assert found.exit_code == 1
    assert [problem.where for problem in found.problems] == [where]
    assert what in found.problems[0].what


def test_an_engine_is_read_as_far_as_it_can_be(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    calibration = calibrations["fp8-static"]
    sound = described_engine(tmp_path / "a", calibration)
    found = verify(sound, calibration=calibration)
    assert found.exit_code == 0 and found.format == "plan by TensorRT 10.16 for sm89"
    assert "status: built, unproven: nothing has executed it" in found.notes

    unlabelled = described_engine(tmp_path / "b", calibration, status=None, graph_sha256=None)
    assert [problem.where for problem in verify(unlabelled).problems] == ["status", "graph_sha256"]

    products = dict(Manifest.load(sound).details["precision"]["products"])
    report = {"products": products | {"model.layers.1.mlp.up_proj": "float16"}}
    slow = described_engine(tmp_path / "c", calibration, precision=report)
    assert [str(problem) for problem in verify(slow).problems] == [
        "model.layers.1.mlp.up_proj: runs in float16, and recipe fp8-static has fp8"
    ]

    def empty(path: Path) -> None:
        (path / "model.plan").write_bytes(b"")

    hollow = rewritten(sound, tmp_path / "d", empty)
    assert "is empty" in [problem.what for problem in verify(hollow).problems]

    def another(path: Path) -> None:
        (path / "tokenizer.json").write_text("{}")
        (path / "golden.json").write_text("{}")

    changed = rewritten(sound, tmp_path / "e", another)
    assert [str(problem) for problem in verify(changed, calibration=calibration).problems] == [
        "tokenizer.json: is not the original's tokenizer",
        "golden.json: is not the calibration's",
    ]


def test_what_of_an_engine_could_not_be_checked_is_said(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    calibration = calibrations["fp8-static"]
    silent = described_engine(tmp_path / "a", calibration, precision=None)
    assert verify(silent, calibration=calibration).unchecked == [
        "precision: the manifest does not list which GEMMs run in 8 or 4 bits"
    ]
    sound = described_engine(tmp_path / "b", calibration)
    assert verify(sound).unchecked == [
        "graph: give --calibration, to compare its graph with the one that was compiled"
    ]
    old = rewritten(sound, tmp_path / "c", lambda path: None, software={"octet": "0", "onnx": "1"})
    found = verify(old, calibration=calibration)
    assert found.exit_code == 2
    assert found.unchecked[0].startswith("graph: it was built with octet 0, onnx 1, and octet ")


def test_the_graph_of_an_engine_is_built_again_and_compared(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    calibration = calibrations["fp8-static"]
    same = described_engine(tmp_path / "a", calibration)
    assert verify(same, calibration=calibration).problems == []
    hashes = Manifest.load(same).details["graph_sha256"] | {"model.onnx": "0" * 64}
    other = described_engine(tmp_path / "b", calibration, graph_sha256=hashes)
    (problem,) = verify(other, calibration=calibration).problems
    assert problem.where == "graph_sha256: model.onnx" and "is not the graph that" in problem.what


@pytest.mark.parametrize(
    ("backend", "held"), [("python", "1/onnx"), ("vllm", "1/checkpoint"), ("onnxruntime", "1")]
)
def test_a_triton_entry_is_as_sound_as_what_it_holds(
    backend: Backend, held: str, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    entry = tmp_path / "models" / "tiny"
    export_triton(calibrations["fp8"], entry, backend=backend)
    found = verify(entry, calibration=calibrations["fp8"])
    assert found.problems == [] and found.exit_code == 0
    assert len(found.rows) == 14 and found.copied == 6
    assert found.format.startswith(f"{backend} backend; {held}: ")
    assert verify(entry).exit_code == 2


def test_an_entry_that_triton_would_not_load(calibrations: dict[str, Path], tmp_path: Path) -> None:
    entry = tmp_path / "models" / "tiny"
    export_triton(calibrations["fp8"], entry, backend="vllm")
    moved = tmp_path / "models" / "renamed"
    entry.rename(moved)
    found = verify(moved, calibration=calibrations["fp8"])
    assert [str(problem) for problem in found.problems] == [
        "config.pbtxt: names the model 'tiny': Triton wants the directory named so"
    ]


def test_a_fault_inside_an_entry_is_named_with_its_place(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    entry = tmp_path / "models" / "tiny"
    export_triton(calibrations["fp8"], entry, backend="vllm")
    config = entry / "1" / "checkpoint" / "config.json"
    content = json.loads(config.read_text())
    content["quantization_config"]["ignore"].append("model.layers.0.mlp.up_proj")
    content["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    config.write_text(json.dumps(content))
    found = {p.where: p.what for p in verify(entry, calibration=calibrations["fp8"]).problems}
    assert "altered since it was written" in found["1/checkpoint/config.json"]
    assert "vLLM refuses the two together" in found["1/model.json"]
    assert "ignore lists it" in found["1/checkpoint: model.layers.0.mlp.up_proj"]


def test_files_that_were_added_are_noted(
    calibrations: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    export_checkpoint(calibrations["fp8"], tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    found = verify(tmp_path / "out", model=tiny_model)
    assert found.exit_code == 0
    assert f"README.md: not listed in {MANIFEST_FILE}, added afterwards" in found.notes


def test_a_tokenizer_or_golden_record_of_another_model(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    export_checkpoint(calibrations["fp8"], tmp_path / "out")

    def change(path: Path) -> None:
        (path / "tokenizer.json").write_text("{}")
        (path / "tokenizer_config.json").unlink()
        (path / "golden.json").write_text((path / "golden.json").read_text() + " ")

    path = rewritten(tmp_path / "out", tmp_path / "changed", change)
    found = verify(path, calibration=calibrations["fp8"])
    assert {problem.where: problem.what for problem in found.problems} == {
        "tokenizer.json": "is not the original's tokenizer",
        "tokenizer_config.json": "missing: the original's tokenizer has it",
        "golden.json": "is not the calibration's",
    }


def sampled_hotter(path: Path) -> None:
    (path / "generation_config.json").write_text('{"temperature": 1.7}')


def without_generation_config(path: Path) -> None:
    (path / "generation_config.json").unlink()


def with_another_template(path: Path) -> None:
    (path / "chat_template.jinja").write_text("Ignore what {{ messages }} say.")


SIDE = {
    sampled_hotter: ("generation_config.json", "is not the original's"),
    without_generation_config: ("generation_config.json", "missing: the original has it"),
    with_another_template: ("chat_template.jinja", "is not the original's"),
}


@pytest.mark.parametrize("change", SIDE)
def test_a_side_file_that_is_not_the_originals(
    change: Callable[[Path], None], calibrations: dict[str, Path], tmp_path: Path
) -> None:
    """Neither is in the tokenizer's files: the tiny model has no template."""
    export_checkpoint(calibrations["fp8"], tmp_path / "out")
    assert verify(tmp_path / "out", calibration=calibrations["fp8"]).exit_code == 0
    path = rewritten(tmp_path / "out", tmp_path / "changed", change)
    found = verify(path, calibration=calibrations["fp8"])
    assert [(problem.where, problem.what) for problem in found.problems] == [SIDE[change]]
    # An artifact of release 0.2 records none of them.
    model = Manifest.load(path).model.model_copy(update={"side": None})
    old = rewritten(path, tmp_path / "old", lambda _: None, model=model)
    assert verify(old, calibration=calibrations["fp8"]).exit_code == 0


@pytest.mark.parametrize("change", [sampled_hotter, with_another_template])
def test_an_original_whose_side_files_have_changed_is_not_exported(
    change: Callable[[Path], None], tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    calibration = make_calibration(tmp_path / "calibration", model, Recipe.load("fp8"))
    export_checkpoint(calibration, tmp_path / "right")
    change(model)
    line = f"{model / SIDE[change][0]} has changed since calibration"
    with pytest.raises(ArtifactError, match=line):
        export_checkpoint(calibration, tmp_path / "out")

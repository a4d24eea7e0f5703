"""Triton entries: the directories, what is in them, and what is not written."""

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest

from export.checkpoint.write import export_checkpoint
from export.onnx.graph import Graph
from export.onnx.write import export_onnx
from export.source import Source
from export.triton.entries import SLOTS, Tuning, python_entry, vllm_engine
from export.triton.step_entries import read_graph
from export.triton.write import export_all, export_triton
from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import ArtifactError, ConfigError, ExportError, UnsupportedError
from octet.model.spec import ModelSpec
from octet.recipe import Recipe
from tests.export.conftest import make_calibration
from tests.export.triton.test_config import config_of, parsed
from tests.export.triton.test_write_engines import make_engine
from tests.models import write_model
from tests.serve.engines import rewritten

COMMITTED = Path(__file__).parents[3] / "triton_models"
Backend = Literal["python", "vllm", "tensorrt", "onnxruntime"]
BACKENDS: tuple[Backend, ...] = ("python", "vllm", "onnxruntime")
CONTENT = {"python": "1/onnx", "vllm": "1/checkpoint", "onnxruntime": "1"}


def test_the_python_entry_declares_the_tensors_of_the_vllm_backend() -> None:
    message = parsed(python_entry("m").config)
    inputs = {tensor.name: tensor for tensor in message.input}
    kinds = type(message).DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_number
    flags = {name for name, t in inputs.items() if kinds[t.data_type].name == "TYPE_BOOL"}
    assert flags == {
        "stream",
        "exclude_input_in_output",
        "return_finish_reason",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
    }
    assert inputs.keys() - flags == {"text_input", "input_ids", "sampling_parameters"}
    assert all(tensor.optional for tensor in message.input)
    assert {(t.name, kinds[t.data_type].name, tuple(t.dims)) for t in message.output} == {
        ("text_output", "TYPE_STRING", (-1,)),
        ("finish_reason", "TYPE_STRING", (-1,)),
        ("stop_reason", "TYPE_STRING", (-1,)),
        ("logprobs", "TYPE_STRING", (-1,)),
        ("num_input_tokens", "TYPE_UINT32", (1,)),
        ("num_output_tokens", "TYPE_UINT32", (-1,)),
    }
    assert message.parameters["slots"].string_value == str(SLOTS)
    assert message.model_transaction_policy.decoupled and not message.HasField("dynamic_batching")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_entry_holds_the_whole_model(
    backend: Backend, tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    out = tmp_path / "models" / "tiny"
    manifest = export_triton(calibrations["fp8"], out, backend=backend)
    assert Manifest.load(out, "triton") == manifest  # every file is listed and unaltered
    content = Manifest.load(out / CONTENT[backend])
    assert content.calibration == manifest.calibration
    assert manifest.details["content"] == CONTENT[backend]
    golden = calibrations["fp8"] / "golden.json"
    assert (out / "golden.json").read_bytes() == golden.read_bytes()
    for sample in config_of(out).model_warmup:  # every file that a warm-up names is there
        for given in sample.inputs.values():
            if given.input_data_file:
                assert (out / "warmup" / given.input_data_file).is_file()
    for script in out.glob("1/*.py"):
        compile(script.read_text(), script.name, "exec")


def test_two_exports_are_the_same_bytes_wherever_they_are(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    """No path of this machine is in any of them."""
    one, other = tmp_path / "one" / "models", tmp_path / "elsewhere"
    for repository in (one, other):
        export_all(calibrations["fp8"], repository, name="tiny")
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(other) for p in other.rglob("*") if p.is_file())
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
        assert str(tmp_path).encode() not in (one / file).read_bytes(), file


def test_vllm_is_told_of_the_checkpoint_beside_its_file(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    out = tmp_path / "tiny"
    export_triton(calibrations["fp8"], out, backend="vllm")
    arguments = json.loads((out / "1" / "model.json").read_text())
    assert (out / "1" / arguments["model"]).samefile(out / "1" / "checkpoint")
    assert arguments["kv_cache_dtype"] == "fp8_e5m2" and arguments["max_model_len"] == 1024


def test_only_an_e5m2_cache_asks_for_an_attention_backend() -> None:
    spec = ModelSpec.model_construct(max_positions=512)
    engines = {cache: vllm_engine("m", spec, cache) for cache in ("e5m2", "e4m3", "float16")}
    types = {cache: engine["kv_cache_dtype"] for cache, engine in engines.items()}
    assert types == {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto"}
    assert [cache for cache, engine in engines.items() if "attention_backend" in engine] == ["e5m2"]


def test_the_onnxruntime_entry_is_the_graph_with_a_batch(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    out = tmp_path / "tiny"
    export_triton(calibrations["fp8"], out, backend="onnxruntime")
    config = config_of(out)
    assert config.max_batch_size == 16 and config.HasField("dynamic_batching")
    inputs, outputs = read_graph(out / "1" / "model.onnx")
    for declared, actual in ((config.input, inputs), (config.output, outputs)):
        assert [tensor.name for tensor in declared] == [tensor.name for tensor in actual]
        for tensor, found in zip(declared, actual, strict=True):
            assert found.shape[0] == "batch"
            assert tuple(tensor.dims) == tuple(
                -1 if isinstance(s, str) else s for s in found.shape[1:]
            )
    assert Manifest.load(out / "1", "onnx").details["kv_cache"] == "float16"


def test_a_graph_with_an_fp8_cache_has_no_entry(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    export_onnx(calibrations["fp8"], tmp_path / "onnx", kv_cache="e5m2")
    with pytest.raises(UnsupportedError, match=r"past_key_values\.0\.key is FLOAT8E5M2, which Tri"):
        read_graph(tmp_path / "onnx" / "model.onnx")


def test_all_writes_what_can_be_written_and_says_why_not(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    repository = tmp_path / "models"
    written = export_all(calibrations["fp8-static"], repository)
    name = Manifest.load(calibrations["fp8-static"]).model.name
    assert written.manifests.keys() == {name, f"{name}-vllm", f"{name}-onnxruntime"}
    assert written.left_out.keys() == {f"{name}-engine", f"{name}-tensorrt"}
    assert all("--engine ENGINE" in reason for reason in written.left_out.values())
    assert {path.name for path in repository.iterdir()} == written.manifests.keys()
    for entry, manifest in written.manifests.items():
        assert Manifest.load(repository / entry, "triton") == manifest
        assert config_of(repository / entry).name == entry

    calibration = calibrations["fp8-static"]
    engine = make_engine(tmp_path / "engine", calibration)
    written = export_all(calibration, tmp_path / "more", engine=engine, name="lm")
    assert written.manifests.keys() == {
        *("lm", "lm-vllm", "lm-onnxruntime", "lm-engine", "lm-tensorrt")
    }
    assert not written.left_out


def test_all_leaves_out_what_a_backend_has_no_kernels_for(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    written = export_all(calibrations["nvfp4"], tmp_path, name="lm")
    assert written.manifests.keys() == {"lm", "lm-vllm"}
    assert "has FP4, for which ONNX Runtime has no kernel" in written.left_out["lm-onnxruntime"]
    assert {path.name for path in tmp_path.iterdir()} == {"lm", "lm-vllm"}


def test_all_writes_nothing_without_space_for_all(
    tmp_path: Path, calibrations: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is enough for each, and for any two."""
    calibration, models = calibrations["fp8"], tmp_path / "models"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("export.source._SPARE_BYTES", 0)
    free = int(2.9 * Source.open(calibration).stored_nbytes())
    monkeypatch.setattr("export.source.shutil.disk_usage", lambda _: usage._replace(free=free))
    export_triton(calibration, tmp_path / "one")
    with pytest.raises(ExportError, match=r"models: the export needs .* are free there"):
        export_all(calibration, models, name="lm")
    assert not models.exists()


def test_an_error_names_the_entry_not_where_it_was_being_written(
    tmp_path: Path, calibrations: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr("export.source.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ExportError, match=rf"^{tmp_path}/one/1/onnx: the export needs"):
        export_triton(calibrations["fp8"], tmp_path / "one")


def test_what_it_would_store_is_what_it_stores(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    for recipe, calibration in calibrations.items():
        export_checkpoint(calibration, tmp_path / recipe)
        written = (tmp_path / recipe / "model.safetensors").stat().st_size
        estimated = Source.open(calibration).stored_nbytes()
        assert 0 <= written - estimated < 20_000, recipe  # the header


def test_fp4_is_refused_before_its_graph_is_written(
    tmp_path: Path, calibrations: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object, **__: object) -> None:
        raise AssertionError("the graph is written")

    monkeypatch.setattr(Graph, "save", save)
    for recipe in ("nvfp4", "mxfp4"):
        with pytest.raises(UnsupportedError, match=f"recipe {recipe} has FP4"):
            export_triton(calibrations[recipe], tmp_path / "a", backend="onnxruntime")
    assert not list(tmp_path.iterdir())


def test_what_is_doubtful_about_a_model_is_in_every_manifest(tmp_path: Path) -> None:
    """Of an architecture that is not known, whose weights an algorithm changed."""
    model = write_model(tmp_path / "model", "gemma2")
    calibration = make_calibration(tmp_path / "calibration", model, Recipe.load("fp8-static"))
    details = Manifest.load(calibration).details | {"algorithm": {"name": "smoothquant"}}
    rewritten(calibration, **details)
    manifest = export_triton(calibration, tmp_path / "entry", backend="vllm")
    assert "is an architecture that Octet does not know" in manifest.details["warnings"][0]
    assert manifest.details["algorithm"] == "smoothquant"
    inside = Manifest.load(tmp_path / "entry" / "1" / "checkpoint")
    assert inside.details["warnings"] == manifest.details["warnings"]


def test_the_committed_entries_are_what_export_writes(tmp_path: Path, example_model: Path) -> None:
    """All but what .gitignore leaves out: manifests, weights and what goes with them."""
    recipe = Recipe.load("fp8-static")
    calibration = make_calibration(tmp_path / "calibration", example_model, recipe)
    engine = make_engine(tmp_path / "engine", calibration, builder="tensorrt-rtx", batch=16)
    export_all(calibration, tmp_path / "models", engine=engine, name="python-lm")
    committed, written = kept(COMMITTED), kept(tmp_path / "models")
    assert committed == written
    for file in committed:
        assert (COMMITTED / file).read_bytes() == (tmp_path / "models" / file).read_bytes(), file


def kept(repository: Path) -> set[Path]:
    """Its configurations, scripts and warm-up inputs."""
    patterns = ("config.pbtxt", "warmup/*", "1/model.py", "1/model.json")
    paths = [path for pattern in patterns for path in repository.glob(f"*/{pattern}")]
    return {path.relative_to(repository) for path in paths}


def test_the_directory_has_the_name_of_the_model(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=r"directory named as its model, 'b'; use --out .*/b$"):
        export_triton(calibrations["fp8"], tmp_path / "a", name="b")
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_an_entry_that_failed(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such directory"):
        export_triton(tmp_path / "missing", tmp_path / "models" / "a")
    with pytest.raises(ArtifactError, match="no such directory"):
        export_all(tmp_path / "missing", tmp_path / "models")
    assert not list(tmp_path.rglob("a"))


def test_an_entry_is_replaced_only_by_force(tmp_path: Path, calibrations: dict[str, Path]) -> None:
    out = tmp_path / "a"
    export_triton(calibrations["fp8"], out)
    with pytest.raises(ArtifactError, match="add --force"):
        export_triton(calibrations["fp8"], out, backend="vllm")
    export_triton(calibrations["fp8"], out, backend="vllm", force=True)
    assert (out / "1" / "model.json").is_file() and not (out / "1" / "onnx").exists()


def test_all_touches_nothing_where_one_entry_is_in_the_way(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    (tmp_path / "tiny-onnxruntime").mkdir()
    (tmp_path / "tiny-onnxruntime" / "mine").write_text("")
    with pytest.raises(ArtifactError, match="tiny-onnxruntime: exists and is not an Octet artifac"):
        export_all(calibrations["fp8"], tmp_path, name="tiny", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-onnxruntime"]
    (tmp_path / "tiny-onnxruntime" / "mine").unlink()
    export_all(calibrations["fp8"], tmp_path, name="tiny")
    export_all(calibrations["fp8"], tmp_path, name="tiny", force=True)
    assert (tmp_path / "tiny" / MANIFEST_FILE).is_file()


def test_an_entry_can_be_tuned(calibrations: dict[str, Path], tmp_path: Path) -> None:
    out, tuning = tmp_path / "lm", Tuning(instances=3, queue_delay_us=500, preferred_batches=(4, 8))
    export_triton(calibrations["fp8"], out, backend="onnxruntime", tuning=tuning)
    config = config_of(out)
    assert config.instance_group[0].count == 3
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 8]
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 1024  # as it was


@pytest.mark.parametrize(
    ("backend", "tuning", "message"),
    [
        ("vllm", Tuning(instances=2), "--instances: vLLM's entry has one"),
        ("python", Tuning(queue_delay_us=1), "only the entry of --backend onnxruntime"),
        ("onnxruntime", Tuning(preferred_batches=(17,)), "--preferred-batch 17: .* takes 16"),
    ],
)
def test_a_tuning_that_an_entry_cannot_have_is_refused(
    backend: Backend,
    tuning: Tuning,
    message: str,
    calibrations: dict[str, Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        export_triton(calibrations["fp8"], tmp_path / "lm", backend=backend, tuning=tuning)
    assert not (tmp_path / "lm").exists()

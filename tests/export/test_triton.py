"""Triton entries: the configuration that Triton reads, and the directory it is in."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from export.triton import SLOTS, export_triton, python_config, vllm_config, vllm_engine
from export.triton_config import InstanceGroup, Kind, ModelConfig, Parameter
from octet.artifact import Manifest
from octet.errors import ArtifactError, ConfigError
from octet.model import ModelSpec
from octet.recipe import Recipe
from tests.export.conftest import make_calibration

COMMITTED = Path(__file__).parents[2] / "triton_models"
Backend = Literal["python", "vllm"]
CONTENT = {"python": "onnx", "vllm": "checkpoint"}


def parsed(config: ModelConfig) -> Any:
    """As Triton reads it: an unknown field or a misplaced value is an error."""
    return text_format.Parse(config.pbtxt(), model_config_pb2.ModelConfig())


@pytest.mark.parametrize("config", [python_config("m"), vllm_config("m")])
def test_models_are_decoupled_and_batch_by_themselves(config: ModelConfig) -> None:
    message = parsed(config)
    assert (message.name, message.backend, message.max_batch_size) == ("m", config.backend, 0)
    assert message.model_transaction_policy.decoupled
    (group,) = message.instance_group
    kind = {"python": "KIND_CPU", "vllm": "KIND_MODEL"}[config.backend]
    assert (group.count, group.kind) == (1, group.Kind.Value(kind))


def test_the_python_entry_declares_the_tensors_of_the_vllm_backend() -> None:
    message = parsed(python_config("m"))
    inputs = {tensor.name: tensor for tensor in message.input}
    flags = {name for name, t in inputs.items() if t.data_type == model_config_pb2.TYPE_BOOL}
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
    assert list(inputs["input_ids"].dims) == [-1]
    assert {(t.name, t.data_type, tuple(t.dims)) for t in message.output} == {
        ("text_output", model_config_pb2.TYPE_STRING, (-1,)),
        ("finish_reason", model_config_pb2.TYPE_STRING, (-1,)),
        ("stop_reason", model_config_pb2.TYPE_STRING, (-1,)),
        ("logprobs", model_config_pb2.TYPE_STRING, (-1,)),
        ("num_input_tokens", model_config_pb2.TYPE_UINT32, (1,)),
        ("num_output_tokens", model_config_pb2.TYPE_UINT32, (-1,)),
    }
    assert message.parameters["slots"].string_value == str(SLOTS)


@pytest.mark.parametrize("text", ['a "quoted" \\ name', "é\n\t\x01", "x" * 200])
def test_any_text_survives(text: str) -> None:
    config = ModelConfig(
        name=text,
        backend="python",
        instance_group=(InstanceGroup(Kind.CPU, 3), InstanceGroup(Kind.MODEL)),
        parameters={text: Parameter(text), "other": Parameter("")},
    )
    message = parsed(config)
    assert message.name == text
    assert {k: v.string_value for k, v in message.parameters.items()} == {text: text, "other": ""}
    assert [group.count for group in message.instance_group] == [3, 1]


@pytest.mark.parametrize("backend", ["python", "vllm"])
def test_an_entry_holds_the_whole_model(
    backend: Backend, tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    out = tmp_path / "models" / "tiny"
    manifest = export_triton(calibrations["fp8"], out, backend=backend)
    assert Manifest.load(out, "triton") == manifest  # every file is listed and unaltered
    content = Manifest.load(out / "1" / CONTENT[backend])
    assert content.kind == CONTENT[backend] and content.calibration == manifest.calibration
    assert manifest.details["content"] == f"1/{CONTENT[backend]}"
    golden = calibrations["fp8"] / "golden.json"
    assert (out / "golden.json").read_bytes() == golden.read_bytes()
    if backend == "python":
        compile((out / "1" / "model.py").read_text(), "model.py", "exec")
        return
    engine = json.loads((out / "1" / "model.json").read_text())
    # From the directory that holds the repository, the path is right.
    assert (tmp_path / engine["model"]).samefile(out / "1" / "checkpoint")
    assert engine["kv_cache_dtype"] == "fp8_e5m2" and engine["max_model_len"] == 1024


def test_only_an_e5m2_cache_asks_for_an_attention_backend() -> None:
    spec = ModelSpec.model_construct(max_positions=512)
    engines = {cache: vllm_engine("m", spec, cache) for cache in ("e5m2", "e4m3", "float16")}
    types = {cache: engine["kv_cache_dtype"] for cache, engine in engines.items()}
    assert types == {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto"}
    assert [cache for cache, engine in engines.items() if "attention_backend" in engine] == ["e5m2"]


@pytest.mark.parametrize("backend", ["python", "vllm"])
def test_the_committed_entries_are_what_export_writes(
    backend: Backend, tmp_path: Path, example_model: Path
) -> None:
    calibration = make_calibration(tmp_path / "calibration", example_model, Recipe.load("fp8"))
    name = {"python": "python-lm", "vllm": "python-lm-vllm"}[backend]
    out = tmp_path / "triton_models" / name
    export_triton(calibration, out, backend=backend)
    files = {"config.pbtxt", "1/model.py" if backend == "python" else "1/model.json"}
    for file in files:
        assert (COMMITTED / name / file).read_text() == (out / file).read_text(), file
    left_out = {"manifest.json", "golden.json", f"1/{CONTENT[backend]}"}
    written = {p.relative_to(out).as_posix() for p in (*out.glob("*.*"), *out.glob("1/*"))}
    assert written == files | left_out


def test_the_directory_has_the_name_of_the_model(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=r"directory named as its model, 'b'; use --out .*/b$"):
        export_triton(calibrations["fp8"], tmp_path / "a", name="b")
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_an_entry_that_failed(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such directory"):
        export_triton(tmp_path / "missing", tmp_path / "models" / "a")
    assert not list((tmp_path / "models").iterdir())


def test_an_entry_is_replaced_only_by_force(tmp_path: Path, calibrations: dict[str, Path]) -> None:
    out = tmp_path / "a"
    export_triton(calibrations["fp8"], out)
    with pytest.raises(ArtifactError, match="add --force"):
        export_triton(calibrations["fp8"], out, backend="vllm")
    export_triton(calibrations["fp8"], out, backend="vllm", force=True)
    assert (out / "1" / "model.json").is_file() and not (out / "1" / "model.py").exists()

"""Triton entries that run an engine, from what `build-engine` leaves to config.pbtxt."""

from pathlib import Path

import numpy as np
import pytest

from export.triton.entries import python_entry
from export.triton.step_entries import plan_tensors, read_graph, tensorrt_entry
from export.triton.write import Backend, export_all, export_triton
from octet.artifacts.manifest import Manifest, software, write_artifact
from octet.errors import ArtifactError, ConfigError, UnsupportedError
from tests.export.triton.test_config import config_of

PLAN = b"not a plan"


def make_engine(
    path: Path, calibration: Path, *, builder: str = "TensorRT", cache: str = "e5m2", batch: int = 8
) -> Path:
    """What `build-engine` leaves, without a plan that could run."""
    origin = Manifest.load(calibration, "calibration")
    inputs, _ = plan_tensors(origin.model.spec, "e5m2")
    sizes = {"batch": batch, "sequence": 1, "logits": 1, "past": 1024, "total": 1025}
    largest = {t.name: [sizes[s] if isinstance(s, str) else s for s in t.shape] for t in inputs}
    profile = {name: [shape, shape, shape] for name, shape in largest.items()}
    details = {
        "builder": {"name": builder, "version": "10.16"},
        "profiles": {"prefill": profile, "decode": profile},
        "kv_cache": {"dtype": cache},
        "max_batch": batch,
        "max_length": 1024,
    }
    with write_artifact(path) as writer:
        (writer.path / "model.plan").write_bytes(PLAN)
        (writer.path / "golden.json").write_bytes((calibration / "golden.json").read_bytes())
        writer.finish(
            origin.model_copy(
                update={
                    "kind": "engine",
                    "calibration": origin.identity,
                    "details": details,
                    "software": software(),
                }
            )
        )
    return path


@pytest.fixture
def engine(tmp_path: Path, calibrations: dict[str, Path]) -> Path:
    return make_engine(tmp_path / "engine", calibrations["fp8-static"])


def test_the_tensorrt_entry_is_the_plan_with_both_profiles(
    tmp_path: Path, calibrations: dict[str, Path], engine: Path
) -> None:
    out = tmp_path / "tiny"
    export_triton(calibrations["fp8-static"], out, backend="tensorrt", engine=engine)
    assert (out / "1" / "model.plan").read_bytes() == PLAN
    assert Manifest.load(out / "1") == Manifest.load(engine)
    config = config_of(out)
    assert config.platform == "tensorrt_plan" and config.max_batch_size == 0
    (group,) = config.instance_group
    assert list(group.profile) == ["0", "1"] and group.kind == 1  # KIND_GPU, each that there is
    spec = Manifest.load(engine).model.spec
    past = next(t for t in config.input if t.name == "past_key_values.0.key")
    assert list(past.dims) == [-1, spec.kv_heads, -1, spec.head_dim]
    types = {t.name: t.data_type for t in (*config.input, *config.output)}
    assert types["past_key_values.0.key"] == 2  # TYPE_UINT8, codes of E5M2
    assert types["present.0.key"] == 10  # TYPE_FP16, whose top byte is the code


def test_the_python_entry_runs_an_engine_where_one_is_given(
    tmp_path: Path, calibrations: dict[str, Path], engine: Path
) -> None:
    out = tmp_path / "tiny"
    manifest = export_triton(calibrations["fp8-static"], out, engine=engine)
    assert manifest.details["content"] == "1/engine" and not (out / "1" / "onnx").exists()
    assert Manifest.load(out / "1" / "engine") == Manifest.load(engine)
    config = config_of(out)
    assert config.parameters["slots"].string_value == "8"  # what its decode profile takes
    assert config.instance_group[0].kind == 1  # KIND_GPU


def test_triton_loads_no_plan_of_tensorrt_rtx(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    calibration = calibrations["fp8-static"]
    engine = make_engine(tmp_path / "engine", calibration, builder="TensorRT-RTX")
    with pytest.raises(UnsupportedError, match=r"loads no plan of TensorRT-RTX; use --backend py"):
        export_triton(calibration, tmp_path / "a", backend="tensorrt", engine=engine)
    written = export_all(calibration, tmp_path / "models", engine=engine, name="tiny")
    assert "tiny-engine" in written.manifests
    assert "loads no plan of TensorRT-RTX" in written.left_out["tiny-tensorrt"]
    assert not (tmp_path / "models" / "tiny-tensorrt").exists()


def test_a_plan_with_an_e4m3_cache_has_no_bare_entry(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    calibration = calibrations["fp8-static"]
    engine = make_engine(tmp_path / "engine", calibration, cache="e4m3")
    with pytest.raises(UnsupportedError, match="a cache of e4m3 has no Triton entry; build it wi"):
        export_triton(calibration, tmp_path / "a", backend="tensorrt", engine=engine)


def test_a_small_plan_is_warmed_up_within_its_profiles(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    spec = Manifest.load(calibrations["fp8-static"]).model.spec
    tensors = plan_tensors(spec, "e5m2")
    prompt, decode = tensorrt_entry("m", *tensors, max_batch=1, max_length=12).config.model_warmup
    assert prompt.inputs["attention_mask"].dims == (1, 1, 12, 24)
    assert decode.inputs["attention_mask"].dims == (1, 1, 1, 13)
    (sample,) = python_entry("m", context=12).config.model_warmup
    assert sample.inputs["input_ids"].dims == (11,)


def test_an_engine_of_another_calibration_is_refused(
    tmp_path: Path, calibrations: dict[str, Path], engine: Path
) -> None:
    on_engines: tuple[Backend, ...] = ("python", "tensorrt")
    for backend in on_engines:
        with pytest.raises(ArtifactError, match=r"was not built from .*fp8-block; build it with"):
            export_triton(
                calibrations["fp8-block"],
                tmp_path / "a",
                backend=backend,
                engine=engine,
            )
    (engine / "model.plan").write_bytes(b"another")
    with pytest.raises(ArtifactError, match=r"model\.plan: altered since it was written"):
        export_triton(calibrations["fp8-static"], tmp_path / "a", engine=engine)
    assert not (tmp_path / "a").exists()


def test_all_refuses_an_engine_of_another_calibration_before_the_first_entry(
    tmp_path: Path, calibrations: dict[str, Path], engine: Path
) -> None:
    with pytest.raises(ArtifactError, match=r"was not built from .*fp8-block; build it with"):
        export_all(calibrations["fp8-block"], tmp_path / "models", engine=engine)
    assert not (tmp_path / "models").exists()


def test_an_engine_is_asked_for_where_it_is_needed_and_only_there(
    tmp_path: Path, calibrations: dict[str, Path], engine: Path
) -> None:
    with pytest.raises(ConfigError, match="no engine was given: --engine ENGINE"):
        export_triton(calibrations["fp8"], tmp_path / "a", backend="tensorrt")
    without: tuple[Backend, ...] = ("vllm", "onnxruntime")
    for backend in without:
        with pytest.raises(ConfigError, match=f"for --backend python or tensorrt, not {backend}"):
            export_triton(
                calibrations["fp8-static"],
                tmp_path / "a",
                backend=backend,
                engine=engine,
            )


def test_the_tensors_of_a_plan_are_those_of_its_graph(
    tmp_path: Path, calibrations: dict[str, Path]
) -> None:
    from export.onnx.tensorrt_decoder import build_engine_graph
    from export.source import Source

    source = Source.open(calibrations["fp8-static"])
    path = build_engine_graph(source).save(tmp_path)
    found = read_graph(path)
    for mine, actual in zip(plan_tensors(source.spec, "e5m2"), found, strict=True):
        assert {t.name: t for t in mine} == {t.name: t for t in actual}
    assert np.prod(found[1][0].shape[2:]) == source.spec.vocab_size

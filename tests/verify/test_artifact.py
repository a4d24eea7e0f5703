"""Every format, written by another hand, is read back exactly and found right."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from export.checkpoint.write import export_checkpoint
from octet.errors import ArtifactError, CheckpointError, ConfigError, UnsupportedError
from octet.recipe import Recipe
from tests.export.conftest import make_calibration
from tests.export.handmade import FORMATS, write_handmade
from verify.artifact import verify
from verify.reader.checkpoint import Written
from verify.reader.codes import ELEMENTS, e8m0, unpack

# Of weights drawn from a normal distribution, in dB: FP8 31.5, MX with powers of two less.
AT_LEAST = {"fp8": 31.0, "fp8-static": 31.0, "fp8-block": 31.0, "mxfp8": 31.0, "mxfp4": 17.0}
AT_LEAST["nvfp4"] = 19.5


def test_codes_mean_what_ml_dtypes_says() -> None:
    codes = np.arange(256, dtype=np.uint8)
    as_e4m3 = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(ELEMENTS["e4m3"].values, as_e4m3, equal_nan=True)
    as_e8m0 = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(e8m0(codes), as_e8m0, equal_nan=True)
    as_e2m1 = codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(ELEMENTS["e2m1"].values, as_e2m1)
    assert unpack(np.array([[0x21, 0x43]], np.uint8)).tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_an_interval_holds_what_rounds_to_its_code(name: str) -> None:
    elements = ELEMENTS[name]
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}[name]
    x = np.random.default_rng(0).normal(0, elements.largest / 4, 100_000).astype(np.float32)
    x = np.clip(x, -elements.largest, elements.largest)
    codes = x.astype(dtype).view(np.uint8)
    assert ((elements.low[codes] <= x) & (x <= elements.high[codes])).all()
    assert np.array_equal(np.abs(elements.nearest(x) - x), np.abs(elements.values[codes] - x))
    other = codes ^ 1  # the neighbour, of a magnitude one step away
    inside = (elements.low[other] <= x) & (x <= elements.high[other])
    assert inside.mean() < 1e-3


@pytest.mark.parametrize("form", FORMATS)
def test_a_sound_checkpoint_is_found_sound(form: str, tiny_model: Path, tmp_path: Path) -> None:
    path = write_handmade(tmp_path / "out", tiny_model, form)
    found = verify(path, model=tiny_model)
    assert found.problems == [] and found.exit_code == 0
    assert (
        len(found.rows) == 14
        and found.copied == len(load_file(tiny_model / "model.safetensors")) - 14
    )
    assert all(row.unrounded == 0 for row in found.rows)
    for row in found.rows:
        assert row.sqnr > AT_LEAST[FORMATS[form].recipe], row
        assert row.expected is not None and abs(row.margin) < 0.5, row
    assert [layer.tensors for layer in found.layers] == [7, 7]


@pytest.mark.parametrize("form", FORMATS)
def test_dequantized_weights_are_those_of_torch(
    form: str, tiny_model: Path, tmp_path: Path
) -> None:
    path = write_handmade(tmp_path / "out", tiny_model, form, manifest=False)
    tensors = load_file(path / "model.safetensors")
    original = load_file(tiny_model / "model.safetensors")
    module = "model.layers.1.mlp.down_proj"
    real = Written.open(path).dequantized(module)
    assert real is not None
    weight = original[f"{module}.weight"].float()
    assert real.shape == tuple(weight.shape)
    codes = tensors.get(f"{module}.weight")
    if codes is not None and codes.dtype == torch.float8_e4m3fn:
        scale = tensors.get(f"{module}.weight_scale", tensors.get(f"{module}.weight_scale_inv"))
        assert scale is not None
        scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale
        scale = scale.reshape(scale.shape[0], -1) if scale.ndim == 4 else scale
        scale = scale.reshape(-1, 1) if scale.ndim == 1 else scale
        rows, columns = weight.shape[0] // scale.shape[0], weight.shape[1] // scale.shape[1]
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        assert np.array_equal(real, (codes.float() * scale).numpy())
    assert np.linalg.norm(real - weight.numpy()) / np.linalg.norm(weight.numpy()) < 0.13


@pytest.mark.parametrize("recipe", ["fp8", "fp8-static", "fp8-block"])
def test_what_octet_exports_is_found_right(
    recipe: str, calibrations: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    export_checkpoint(calibrations[recipe], tmp_path / "out")
    for where in ({"model": tiny_model}, {"calibration": calibrations[recipe]}):
        found = verify(tmp_path / "out", **where)
        assert found.problems == [] and found.unchecked == [] and len(found.rows) == 14


def test_without_the_original_numbers_are_left_out_and_that_is_said(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    export_checkpoint(calibrations["fp8"], tmp_path / "out")
    found = verify(tmp_path / "out")
    assert found.ok and found.rows == [] and found.exit_code == 2
    assert "--model" in found.unchecked[0] and "--calibration" in found.unchecked[0]


def test_a_checkpoint_of_others_needs_the_original_and_has_no_golden_records(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = write_handmade(tmp_path / "out", tiny_model, "modelopt-nvfp4", manifest=False)
    assert verify(path).exit_code == 2
    found = verify(path, model=tiny_model)
    assert found.exit_code == 0 and found.made_by == "others" and len(found.rows) == 14
    assert any("no golden records" in note for note in found.notes)


@pytest.fixture
def pair_of_others(tiny_model: Path, tmp_path: Path) -> tuple[Path, Path]:
    """An original with defaults of its own, and another tool's checkpoint, which has them anew."""
    original = tmp_path / "original"
    shutil.copytree(tiny_model, original)
    defaults = {"temperature": 0.6, "top_p": 1.0, "eos_token_id": [0, 7], "min_p": None}
    (original / "generation_config.json").write_text(json.dumps(defaults))
    (original / "tokenizer_config.json").write_text(json.dumps({"eos_token": "A"}))
    (original / "chat_template.jinja").write_text("{{ messages }}\n")
    theirs = write_handmade(tmp_path / "theirs", original, "ct-channel", manifest=False)
    tokenizer = json.loads((original / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [x if isinstance(x, str) else " ".join(x) for x in merges]
    (theirs / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    config = {"chat_template": "{{ messages }}", "eos_token": {"content": "A"}}
    (theirs / "tokenizer_config.json").write_text(json.dumps(config))
    (theirs / "chat_template.jinja").unlink(missing_ok=True)
    defaults = {"temperature": 0.6, "top_k": -1, "eos_token_id": [7, 0, 7]}
    (theirs / "generation_config.json").write_text(json.dumps(defaults))
    return original, theirs


def test_side_files_of_others_are_compared_by_content(pair_of_others: tuple[Path, Path]) -> None:
    original, theirs = pair_of_others
    assert verify(theirs, model=original).problems == []
    template = "{% generation %}{{ messages }}{% endgeneration %}"  # that Octet does not render
    for directory in pair_of_others:
        (directory / "chat_template.jinja").write_text(template)
    assert verify(theirs, model=original).problems == []


def test_others_may_add_a_template_where_the_original_has_none(
    pair_of_others: tuple[Path, Path],
) -> None:
    original, theirs = pair_of_others
    (original / "chat_template.jinja").unlink()
    assert verify(theirs, model=original).problems == []


def test_weights_of_others_may_come_alone(pair_of_others: tuple[Path, Path]) -> None:
    original, theirs = pair_of_others
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (theirs / name).unlink()
    found = verify(theirs, model=original)
    assert found.problems == [] and any("no tokenizer: " in note for note in found.notes)


def test_an_original_whose_tokenizer_is_in_no_tokenizer_json(
    pair_of_others: tuple[Path, Path],
) -> None:
    original, theirs = pair_of_others
    (original / "tokenizer.json").unlink()
    found = verify(theirs, model=original)
    assert found.problems == [] and any("original has no tokenizer" in x for x in found.notes)


def test_without_the_tokenizers_package_the_rest_is_compared(
    pair_of_others: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, theirs = pair_of_others
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "serve.engine.tokenizer", raising=False)
    found = verify(theirs, model=original)
    assert found.problems == [] and found.exit_code == 2
    (said,) = found.unchecked
    assert said.startswith("tokenizer.json: tokenizers is not installed: pip install")


def rotated(theirs: Path) -> None:
    tokenizer = json.loads((theirs / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (theirs / "tokenizer.json").write_text(json.dumps(tokenizer))


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda theirs: (theirs / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (rotated, "tokenizer.json", "encodes 'A' as token "),
        (written("tokenizer.json", "{}"), "tokenizer.json", "cannot be compared: "),
        (
            written("tokenizer_config.json", '{"eos_token": "A"}'),
            "chat_template.jinja",
            "missing: the original has one",
        ),
        (
            written(
                "tokenizer_config.json", '{"eos_token": "B", "chat_template": "{{ messages }}"}'
            ),
            "tokenizer_config.json",
            "eos_token is 'B', and 'A' in the original",
        ),
        (lambda theirs: (theirs / "tokenizer.json").unlink(), "tokenizer.json", "missing: the"),
        (written("chat_template.jinja", "{{ 1 }}"), "chat_template.jinja", "is not the original's"),
        (
            written("generation_config.json", '{"top_k": 20, "eos_token_id": 0}'),
            "generation_config.json",
            "temperature is 1, and 0.6 in the original; top_k is 20, and 0 in the original;"
            " eos_token_id is [0], and [0, 7] in the original",
        ),
        (written("generation_config.json", "{"), "generation_config.json", "cannot be compared: "),
    ],
)
def test_another_default_of_others_is_named(
    change: Callable[[Path], object], where: str, what: str, pair_of_others: tuple[Path, Path]
) -> None:
    original, theirs = pair_of_others
    change(theirs)
    found = verify(theirs, model=original)
    (problem,) = found.problems
    assert problem.where == where and problem.what.startswith(what) and found.exit_code == 1


ROPE: dict[str, Any] = {"rope_theta": 500_000.0, "rope_type": "linear", "factor": 2.0}
OLD_ROPE = {"rope_theta": 500_000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
LOST = [
    "rope_theta is 10000.0, and 500000.0 in the original",
    "rope_scaling is None, and {'type': 'linear', 'factor': 2.0",
]


@pytest.mark.parametrize(
    ("theirs_has", "lost"), [({"rope_parameters": ROPE}, []), (OLD_ROPE, []), ({}, LOST)]
)
def test_rope_parameters_that_others_lose_are_named(
    theirs_has: dict[str, Any], lost: list[str], pair_of_others: tuple[Path, Path]
) -> None:
    original, theirs = pair_of_others
    for directory, rope in ((original, {"rope_parameters": ROPE}), (theirs, theirs_has)):
        config = json.loads((directory / "config.json").read_text())
        for name in ("rope_theta", "rope_scaling", "rope_parameters"):
            config.pop(name, None)
        (directory / "config.json").write_text(json.dumps(config | rope))
    problems = [problem.what for problem in verify(theirs, model=original).problems]
    assert len(problems) == len(lost)
    assert all(map(str.startswith, problems, lost)), problems


def test_hf_quant_config_stands_in_for_a_missing_quantization_config(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = write_handmade(tmp_path / "out", tiny_model, "modelopt-nvfp4", manifest=False)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": inner})
    )
    assert verify(path, model=tiny_model).exit_code == 0


def test_modules_may_be_stored_in_different_formats(tiny_model: Path, tmp_path: Path) -> None:
    """compressed-tensors' mixed-precision: FP8 attention, NVFP4 elsewhere."""
    eight = write_handmade(tmp_path / "a", tiny_model, "ct-channel", manifest=False)
    donor = load_file(eight / "model.safetensors")
    attention = FORMATS["ct-channel"].config["config_groups"]["group_0"]

    def mix(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".self_attn." in name]:
            del tensors[name]
        tensors |= {name: value for name, value in donor.items() if ".self_attn." in name}
        groups = config["quantization_config"]["config_groups"]
        groups["group_1"] = attention | {"targets": ["re:.*self_attn.*"]}

    path = write_handmade(tmp_path / "b", tiny_model, "ct-nvfp4", manifest=False, damage=mix)
    found = verify(path, model=tiny_model)
    assert found.problems == []
    kinds = {row.tensor.rpartition("_proj.")[2]: row.stored for row in found.rows}
    assert kinds == {
        "weight": "float-quantized channel",
        "weight_packed": "nvfp4-pack-quantized tensor_group",
    }


def test_a_number_that_is_not_quantized_is_the_originals_to_the_bit(
    tiny_model: Path, tmp_path: Path
) -> None:
    def nudge(tensors: dict[str, torch.Tensor], _: dict[str, object]) -> None:
        norm = tensors["model.norm.weight"]
        norm.view(torch.int16)[7] ^= 1

    path = write_handmade(tmp_path / "out", tiny_model, "ct-channel", damage=nudge)
    (problem,) = verify(path, model=tiny_model).problems
    assert problem.where == "model.norm.weight" and "the first at [7]" in problem.what


def test_another_original_is_refused(
    calibrations: dict[str, Path], tiny_model: Path, example_model: Path, tmp_path: Path
) -> None:
    export_checkpoint(calibrations["fp8"], tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"config.json is another file: this was made from"):
        verify(tmp_path / "out", model=example_model)
    with pytest.raises(ArtifactError, match="not the calibration that this was made from"):
        verify(tmp_path / "out", calibration=calibrations["fp8-block"])


def test_what_cannot_be_verified_is_refused_in_a_line(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a server, whose answers"):
        verify("http://127.0.0.1:8000")
    with pytest.raises(ConfigError, match="no such directory"):
        verify(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not a directory; give what an export wrote"):
        verify(tiny_model / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="neither an Octet artifact"):
        verify(tmp_path / "empty")
    write_handmade(tmp_path / "several" / "b", tiny_model, "ct-channel")
    write_handmade(tmp_path / "several" / "a", tiny_model, "ct-channel")
    with pytest.raises(ArtifactError, match="it holds a, b: verify each by itself"):
        verify(tmp_path / "several")

    def unknown(_: object, config: dict[str, dict[str, str]]) -> None:
        config["quantization_config"]["quant_method"] = "gptq"

    path = write_handmade(
        tmp_path / "gptq", tiny_model, "ct-channel", manifest=False, damage=unknown
    )
    with pytest.raises(UnsupportedError, match="quant_method 'gptq'"):
        verify(path, model=tiny_model)


def test_an_altered_file_is_named(
    calibrations: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    export_checkpoint(calibrations["fp8"], tmp_path / "out")
    file = tmp_path / "out" / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    found = verify(tmp_path / "out", model=tiny_model)
    assert found.exit_code == 1
    assert str(found.problems[0]) == (
        "tokenizer.json: altered since it was written (SHA-256 differs)"
    )


def test_a_truncated_shard_is_a_finding(
    calibrations: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    export_checkpoint(calibrations["fp8"], tmp_path / "out")
    shard = tmp_path / "out" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    found = verify(tmp_path / "out", model=tiny_model)
    assert found.exit_code == 1
    assert any("truncated" in problem.what for problem in found.problems)


def test_weights_that_an_algorithm_changed_are_compared_with_the_calibration(
    tiny_model: Path, tmp_path: Path
) -> None:
    from octet.artifacts.calibration import WEIGHTS_FILE, Calibration
    from octet.storage.tensors import Tensor, write_tensors

    base = make_calibration(tmp_path / "base", tiny_model, Recipe.load("fp8"))
    opened = Calibration.load(base)
    original = load_file(tiny_model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    halved = (original[name] / 2).view(torch.int16).numpy().view(np.uint16)
    write_tensors(tmp_path / "changed.safetensors", {name: Tensor("BF16", halved)})
    scales = dict(opened.scales)
    scales[f"{name}_scale"] = scales[f"{name}_scale"] / np.float32(2)
    extra = {WEIGHTS_FILE: tmp_path / "changed.safetensors"}
    for algorithm in (None, "gptq"):
        details = opened.manifest.details | (
            {"algorithm": {"name": algorithm}} if algorithm else {}
        )
        manifest = opened.manifest.model_copy(update={"details": details})
        saved = tmp_path / f"cal-{algorithm}"
        Calibration.save(saved, manifest, {}, {}, scales, opened.golden, extra_files=extra)
        export_checkpoint(saved, tmp_path / f"out-{algorithm}")
        assert verify(tmp_path / f"out-{algorithm}", calibration=saved).problems == []
    found = verify(tmp_path / "out-gptq", model=tiny_model)
    assert found.rows == [] and found.exit_code == 2
    assert "gptq changed the weights" in found.unchecked[0]
    (problem,) = verify(tmp_path / "out-None", model=tiny_model).problems
    assert problem.where == name and "every scale is 0.5 times" in problem.what

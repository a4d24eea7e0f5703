"""Checkpoints in FP8 blocks as sources: what is decoded, and what is refused before it is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octet.errors import CheckpointError, OctetError, UnsupportedError
from octet.model.checkpoint import Checkpoint
from tests.command import octet
from tests.fp8_blocks import FP8, LLM_COMPRESSOR, quantize_in_blocks, write_config
from tests.models import write_model

Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose sizes are not multiples of 128: [128, 160], [200, 160] and so on."""
    path = tmp_path_factory.mktemp("model") / "original"
    return write_model(path, "llama", hidden_size=160, intermediate_size=200)


@pytest.mark.parametrize("layout", [FP8, LLM_COMPRESSOR], ids=["fp8", "compressed-tensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_weight_is_its_codes_times_its_scales_in_bf16(
    layout: dict[str, Any], dtype: torch.dtype, model: Path, tmp_path: Path
) -> None:
    real = quantize_in_blocks(model, tmp_path / "fp8", layout, scales=dtype)
    checkpoint = Checkpoint.open(tmp_path / "fp8")
    assert {*checkpoint.tensor_names} == {*Checkpoint.open(model).tensor_names}
    assert len(real) == 2 * 7
    for name, expected in real.items():
        found = checkpoint.read(name)
        assert (found.dtype, found.shape) == ("BF16", tuple(expected.shape))
        assert (checkpoint.dtype(name), checkpoint.nbytes(name)) == ("BF16", found.codes.nbytes)
        assert torch.equal(torch.from_numpy(found.float32()), expected.bfloat16().float()), name
        buffer = bytearray(found.codes.nbytes)  # pinned memory, where there is a GPU
        checkpoint.read_into(name, memoryview(buffer))
        assert bytes(buffer) == found.codes.tobytes()
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.warnings == ()


def test_a_checkpoint_without_bf16_is_decoded_to_float32(model: Path, tmp_path: Path) -> None:
    real = quantize_in_blocks(model, tmp_path / "fp8", FP8, others=torch.float16)
    checkpoint = Checkpoint.open(tmp_path / "fp8")
    assert torch.equal(torch.from_numpy(checkpoint.read(Q).codes.copy()), real[Q])
    assert (checkpoint.dtype(Q), checkpoint.dtype("model.norm.weight")) == ("F32", "F16")


def test_what_is_listed_as_not_converted_may_be_in_bf16(model: Path, tmp_path: Path) -> None:
    quantize_in_blocks(model, tmp_path / "fp8", FP8, keep=("q_proj", "lm_head"))
    checkpoint = Checkpoint.open(tmp_path / "fp8")
    before = Checkpoint.open(model).read(Q)
    assert np.array_equal(checkpoint.read(Q).codes, before.codes) and not checkpoint.decodes(Q)
    assert checkpoint.decodes(UP)


def test_a_folded_power_of_two_multiplies_the_scales_alone(model: Path, tmp_path: Path) -> None:
    quantize_in_blocks(model, tmp_path / "fp8", FP8)
    checkpoint = Checkpoint.open(tmp_path / "fp8")
    folded = checkpoint.with_folds({"model.layers.0": {"k": 3}})
    for name, factor in ((Q, 1 / 8), (Q.replace("q_proj", "k_proj"), 8)):
        before, after = checkpoint.blocks_of(name), folded.blocks_of(name)
        assert before is not None and after is not None
        assert np.array_equal(before[0].codes, after[0].codes)
        assert np.array_equal(before[1].codes * np.float32(factor), after[1].codes)
        assert np.array_equal(checkpoint.read(name).float32() * factor, folded.read(name).float32())


def test_hashes_are_those_of_the_files(model: Path, tmp_path: Path) -> None:
    quantize_in_blocks(model, tmp_path / "fp8", FP8)
    before = Checkpoint.open(tmp_path / "fp8").weight_hashes
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    tensors[f"{Q}_scale_inv"][0, 0] *= 2
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    after = Checkpoint.open(tmp_path / "fp8").weight_hashes
    assert before["model.safetensors"] != after["model.safetensors"]
    assert before["config.json"] == after["config.json"]


def _without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


def _with(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


def _value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(scale: torch.Tensor) -> torch.Tensor:
        scale[1, 0] = value
        return scale

    return change


SCALE = f"{UP}_scale_inv"
BAD: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no scale": (_without(SCALE), f"{SCALE} is missing, and its weight in FP8 cannot be decoded"),
    "a scale of another shape": (
        _with(SCALE, lambda x: x[:1].clone()),
        f"{SCALE} has shape [1, 2], and a weight [200, 160] in blocks of 128 by 128 has scales [2,",
    ),
    "a NaN scale": (_with(SCALE, _value(float("nan"))), f"{SCALE} is nan at [1, 0]: a scale has"),
    "a negative scale": (_with(SCALE, _value(-1.0)), f"{SCALE} is -1 at [1, 0]"),
    "a scale of zero": (_with(SCALE, _value(0.0)), f"{SCALE} is 0 at [1, 0]"),
    "a scale that overflows": (_with(SCALE, _value(1e37)), f"{SCALE} is 1e+37 at [1, 0]"),
    "a scale in float16": (_with(SCALE, torch.Tensor.half), f"{SCALE} is stored as F16"),
    "a weight that is not FP8": (
        _with(UP, torch.Tensor.bfloat16),
        f"{UP} is stored as BF16, and config.json's quantization_config has it in FP8 blocks",
    ),
    "a head in FP8": (
        lambda x: x | {"lm_head.weight": x["lm_head.weight"].to(torch.float8_e4m3fn)},
        "quantized already, with lm_head.weight stored as F8_E4M3",
    ),
    "a scale of a cache": (
        lambda x: x | {"model.layers.0.self_attn.k_scale": torch.ones(1)},
        "model.layers.0.self_attn.k_scale is a scale of a cache",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_are_named_before_a_weight_is_read(
    case: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, said = BAD[case]
    quantize_in_blocks(model, tmp_path / "fp8", FP8, change=change)
    monkeypatch.setattr("octet.model.fp8_blocks.decode_blocks", lambda *given: pytest.fail("read"))
    with pytest.raises(OctetError) as error:
        Checkpoint.open(tmp_path / "fp8")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_module_listed_as_not_converted_must_not_be_fp8(model: Path, tmp_path: Path) -> None:
    quantize_in_blocks(model, tmp_path / "fp8", FP8)
    write_config(tmp_path / "fp8", FP8 | {"modules_to_not_convert": ["model.layers.1.mlp"]})
    with pytest.raises(CheckpointError, match=r"stored as F8_E4M3, .* leaves it unquantized"):
        Checkpoint.open(tmp_path / "fp8")


OTHERS: dict[str, dict[str, Any]] = {
    "other blocks": FP8 | {"weight_block_size": [64, 64]},
    "no blocks": {"quant_method": "fp8"},
    "E5M2": FP8 | {"fmt": "e5m2"},
    "static": FP8 | {"activation_scheme": "static"},
    "mxfp4": {"quant_method": "mxfp4"},
    "a cache scheme": LLM_COMPRESSOR | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    "a bad pattern": LLM_COMPRESSOR | {"ignore": ["re:*"]},
    "a pattern that takes for ever": LLM_COMPRESSOR | {"ignore": [r"re:([\w.]+)+!"]},
    "a pattern with many wildcards": LLM_COMPRESSOR | {"ignore": ["re:" + ".*" * 5]},
    "a list that is none": FP8 | {"modules_to_not_convert": "lm_head"},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_quantizations_are_refused_as_before(case: str, model: Path, tmp_path: Path) -> None:
    quantize_in_blocks(model, tmp_path / "fp8", FP8)
    write_config(tmp_path / "fp8", OTHERS[case])
    with pytest.raises(UnsupportedError, match=r"quantized already, with"):
        Checkpoint.open(tmp_path / "fp8")


def test_fp8_tensors_that_config_json_does_not_declare_are_refused(
    model: Path, tmp_path: Path
) -> None:
    quantize_in_blocks(model, tmp_path / "fp8", FP8)
    write_config(tmp_path / "fp8", None)
    with pytest.raises(UnsupportedError, match=r"quantized already, with .*q_proj.weight stored"):
        Checkpoint.open(tmp_path / "fp8")


def test_calibrate_says_so_in_one_line(model: Path, tmp_path: Path) -> None:
    quantize_in_blocks(model, tmp_path / "fp8", FP8, change=_without(SCALE))
    (tmp_path / "samples.jsonl").write_text('{"text": "x"}\n')
    result = octet(
        "calibrate",
        tmp_path / "fp8",
        "--samples",
        tmp_path / "samples.jsonl",
        "-o",
        tmp_path / "out",
    )
    assert result.returncode == 2 and f"{SCALE} is missing" in " ".join(result.stderr.split())

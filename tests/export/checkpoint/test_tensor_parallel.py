"""Shapes that cannot be split over GPUs are refused by layer and degree, with those that can."""

import re
from pathlib import Path
from typing import Any

import pytest

from export.checkpoint.fused import check_tensor_parallel
from export.checkpoint.write import export_checkpoint
from export.source import Source
from octet.errors import UnsupportedError
from octet.recipe import Recipe
from tests.export.conftest import make_calibration
from tests.models import write_model

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def source_of(directory: Path, kind: str, recipe: str, **settings: Any) -> Source:
    model = write_model(directory / "model", kind, **(SIZES | settings))
    return Source.open(make_calibration(directory / "cal", model, Recipe.load(recipe)))


@pytest.mark.parametrize(
    ("recipe", "degree", "message"),
    [
        ("fp8", 3, "tensor parallel 3: 8 attention heads do not divide; --tp 1 or 2 or 4 or 8"),
        ("fp8", 0, "tensor parallel 0: is no number of GPUs"),
        (
            "fp8-block",
            2,
            "tensor parallel 2: model.layers.0.mlp.gate_proj has 192 outputs on each GPU, no"
            " multiple of 128, the block of its scales; --tp 1 would do",
        ),
        (
            "mxfp4",
            8,
            "tensor parallel 8: model.layers.0.mlp.down_proj has 48 inputs on each GPU, no multiple"
            " of 32, the group of mxfp4 scales; --tp 1 or 2 or 4 would do",
        ),
    ],
)
def test_a_degree_that_does_not_divide(
    recipe: str, degree: int, message: str, tmp_path: Path
) -> None:
    source = source_of(tmp_path, "llama", recipe)
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        export_checkpoint(source.calibration.path, tmp_path / "out", tensor_parallel=degree)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "degrees"), [("fp8", (1, 2, 4, 8)), ("fp8-block", (1,)), ("nvfp4", (1, 2, 4, 8))]
)
def test_degrees_that_divide(recipe: str, degrees: tuple[int, ...], tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama", recipe)
    for degree in degrees:
        check_tensor_parallel(source, degree)
    manifest = export_checkpoint(
        source.calibration.path, tmp_path / "out", tensor_parallel=degrees[-1]
    )
    assert manifest.details["tensor_parallel"] == degrees[-1]


def test_on_one_gpu_the_last_of_joined_linears_may_end_within_a_block(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama", "fp8-block", num_key_value_heads=3)
    with pytest.raises(UnsupportedError, match="k_proj has 192 outputs, no multiple of 128"):
        check_tensor_parallel(source, 1)


def test_inputs_must_be_whole_groups(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama", "mxfp8", intermediate_size=400)
    match = "recipe mxfp8: model.layers.0.mlp.down_proj has 400 inputs, no multiple of 32"
    with pytest.raises(UnsupportedError, match=match):
        check_tensor_parallel(source, 1)


def test_parts_of_fused_linears_are_split_one_by_one(tmp_path: Path) -> None:
    sizes = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    source = source_of(tmp_path, "phi3", "fp8-block", **sizes)
    check_tensor_parallel(source, 1)
    with pytest.raises(UnsupportedError, match="qkv_proj has 64 outputs on each GPU"):
        check_tensor_parallel(source, 2)


def test_experts_need_whole_blocks_on_one_gpu_too(tmp_path: Path) -> None:
    source = source_of(tmp_path, "qwen3_moe", "fp8-block", moe_intermediate_size=64)
    match = r"experts\.0\.(gate|up|down)_proj has 64 (in|out)puts, no multiple of 128"
    with pytest.raises(UnsupportedError, match=match):
        check_tensor_parallel(source, 1)


def test_of_an_unknown_architecture_both_sides_must_divide(tmp_path: Path) -> None:
    source = source_of(tmp_path, "olmo2", "mxfp8")
    check_tensor_parallel(source, 4)
    with pytest.raises(UnsupportedError, match="down_proj has 48 inputs on each GPU"):
        check_tensor_parallel(source, 8)

"""Tests that vLLM refuses, or loads wrongly, each split over GPUs that Octet refuses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from export.checkpoint.fused import check_tensor_parallel
from export.checkpoint.write import export_checkpoint
from export.source import Source
from octet.errors import UnsupportedError
from octet.recipe import Recipe
from tests.export.conftest import make_calibration
from tests.integration.conftest import require
from tests.integration.servers import layout
from tests.integration.test_loaders import SIZES, answer, job, run
from tests.models import write_model


@dataclass(frozen=True)
class Split:
    """`vllm`: what its loader does with the last GPU's part; "loads", "refuses" or "mangles"."""

    kind: str
    recipe: str
    degree: int
    vllm: str
    settings: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.recipe} over {self.degree} {dict(self.settings) or ''}"


WIDE = (("intermediate_size", 512), ("num_key_value_heads", 4))
SPLITS = [
    Split("llama", "fp8", 2, "loads"),
    Split("llama", "fp8", 3, "refuses"),  # 8 heads
    Split("llama", "fp8", 4, "loads"),  # 2 KV heads, repeated
    Split("llama", "fp8-static", 8, "loads"),
    Split("llama", "nvfp4", 4, "loads"),
    Split("llama", "fp8-block", 2, "loads", WIDE),
    Split("llama", "fp8-block", 2, "refuses"),  # 192 outputs of gate
    Split("llama", "fp8-block", 4, "refuses", WIDE),  # 64 outputs of k
    Split("llama", "mxfp8", 2, "loads"),
    Split("llama", "mxfp4", 8, "mangles"),  # 48 inputs of down: a group and a half
    Split("qwen3_moe", "fp8", 2, "loads"),
    Split("qwen3_moe", "fp8-block", 2, "refuses"),  # 64 outputs of an expert's gate
    Split("qwen3_moe", "mxfp8", 8, "mangles"),  # 16 inputs of an expert's down
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Split, tuple[Path, str | None]]:
    """Each split's calibration, and vLLM's error; by one process."""
    require(layout.VLLM)
    root = tmp_path_factory.mktemp("tensor-parallel")
    jobs, calibrations = [], {}
    for number, split in enumerate(SPLITS):
        settings: dict[str, Any] = SIZES | dict(split.settings)
        if "moe" not in split.kind:
            settings.pop("moe_intermediate_size")
        model = write_model(root / f"model-{number}", split.kind, **settings)
        calibration, out = root / f"calibration-{number}", root / f"checkpoint-{number}"
        calibrations[split] = make_calibration(calibration, model, Recipe.load(split.recipe))
        export_checkpoint(calibration, out)
        part = (split.degree, split.degree - 1)
        jobs.append(job(out, root / f"answer-{number}", "fp8_e5m2", tensor_parallel=part))
    run(jobs, root)
    return {
        split: (calibrations[split], answer(root / f"answer-{number}")[0])
        for number, split in enumerate(SPLITS)
    }


@pytest.mark.vllm
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_octet_accepts_what_vllm_loads_and_nothing_else(
    split: Split, outcomes: dict[Split, tuple[Path, str | None]]
) -> None:
    calibration, error = outcomes[split]
    assert (error is not None) == (split.vllm == "refuses"), error
    source = Source.open(calibration)
    if split.vllm == "loads":
        check_tensor_parallel(source, split.degree)
        return
    with pytest.raises(UnsupportedError, match=rf"tensor parallel {split.degree}: .*"):
        check_tensor_parallel(source, split.degree)

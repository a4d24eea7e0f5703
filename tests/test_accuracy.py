"""What quantization may cost the example, on part of what `benchmarks/accuracy.py` measures."""

from pathlib import Path

import pytest

import calibrate
from calibrate.reference import perplexity as perplexity_of_checkpoint
from export.onnx import export_onnx
from octet.recipe import Recipe
from serve.evaluate import perplexity as perplexity_of_export

COUNT, LENGTH = 48, 256


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "limit"), [("fp8", 0.005), ("fp8-static", 0.01)])
def test_held_out_perplexity_stays_within_its_limits(
    recipe: str, limit: float, example_model: Path, example_samples: Path, tmp_path: Path
) -> None:
    held_out = example_samples / "heldout.jsonl"
    calibrate.run(
        example_model,
        example_samples / "calibration.jsonl",
        tmp_path / "calibration",
        recipe=Recipe.load(recipe),
        held_out=held_out,
        count=128,
        max_length=LENGTH,
    )
    values = {}
    for cache in ("float16", "e5m2"):
        export_onnx(tmp_path / "calibration", tmp_path / cache, kv_cache=cache)
        scored = perplexity_of_export(tmp_path / cache, held_out, count=COUNT, max_length=LENGTH)
        values[cache] = scored.perplexity
    reference = perplexity_of_checkpoint(example_model, held_out, count=COUNT, max_length=LENGTH)
    assert reference.tokens == scored.tokens
    assert 0 < values["float16"] / reference.perplexity - 1 < limit
    assert values["e5m2"] / values["float16"] - 1 < 0.01

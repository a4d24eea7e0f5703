"""Tests what quantization may cost the example, by a part of `benchmarks/accuracy.py`."""

from pathlib import Path

import pytest

from calibrate.rescale import rescale
from export.onnx.write import export_onnx
from octet.recipe import Recipe
from verify.evaluation.comparison import compare
from verify.evaluation.evaluator import evaluate
from verify.evaluation.targets.checkpoint import CheckpointTarget
from verify.evaluation.targets.export import Export

COUNT, LENGTH = 48, 256


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "limit"), [("fp8", 0.005), ("fp8-static", 0.01)])
def test_held_out_perplexity_stays_within_its_limits(
    recipe: str,
    limit: float,
    example_model: Path,
    example_samples: Path,
    example_calibration: Path,
    tmp_path: Path,
) -> None:
    calibration = tmp_path / "calibration"
    rescale(example_calibration, calibration, recipe=Recipe.load(recipe), predict=False)
    caches = ("float16", "e5m2")
    for cache in caches:
        export_onnx(calibration, tmp_path / cache, kv_cache=cache)
    reference = CheckpointTarget(example_model)
    held_out = example_samples / "heldout.jsonl"
    sequences = reference.sequences(held_out, count=COUNT, max_length=LENGTH)
    exports = [Export(tmp_path / cache) for cache in caches]
    float16, e5m2 = compare(evaluate(exports, reference, sequences, k=20)).rows
    assert float16.change is not None and 0 < float16.change.mean < limit
    assert e5m2.change_from_first is not None and e5m2.change_from_first.mean < 0.01

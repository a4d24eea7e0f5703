"""What quantization may cost the example, on part of what `benchmarks/accuracy.py` measures."""

from pathlib import Path

import pytest

import calibrate
from calibrate.reference import CheckpointTarget
from export.onnx import export_onnx
from octet.evaluation.comparison import compare
from octet.evaluation.evaluator import evaluate
from octet.recipe import Recipe
from serve.evaluation.export import Export

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
        predict=False,
    )
    caches = ("float16", "e5m2")
    for cache in caches:
        export_onnx(tmp_path / "calibration", tmp_path / cache, kv_cache=cache)
    reference = CheckpointTarget(example_model)
    sequences = reference.sequences(held_out, count=COUNT, max_length=LENGTH)
    exports = [Export(tmp_path / cache) for cache in caches]
    float16, e5m2 = compare(evaluate(exports, reference, sequences, k=20)).rows
    assert float16.change is not None and 0 < float16.change.mean < limit
    assert e5m2.change_from_first is not None and e5m2.change_from_first.mean < 0.01

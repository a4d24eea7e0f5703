"""Held-out perplexity of the example: BF16, FP8 dynamic, FP8 static, with and without E5M2.

The claims it checks: `fp8` within 0.5 % of BF16, `fp8-static` within 1 %, and the E5M2 cache adding
at most 1 %. BF16 is the checkpoint in transformers; the others are the exported ONNX graphs, run by
ONNX Runtime as the embedded engine runs them. Each sample is scored by itself, every token but the
first, given all before it.

    python benchmarks/accuracy.py [--output FILE]
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from card import conditions, report

from calibrate.options import Options
from calibrate.pipeline import run
from export.onnx.write import export_onnx
from octet.recipe import Recipe
from verify.evaluation.comparison import compare
from verify.evaluation.evaluator import evaluate
from verify.evaluation.targets.checkpoint import CheckpointTarget
from verify.evaluation.targets.export import Export

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"
HELD_OUT = EXAMPLE / "samples" / "heldout.jsonl"
LIMITS = {("fp8", "float16"): 0.005, ("fp8-static", "float16"): 0.01}
CACHE_LIMIT = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    output: Path | None = parser.parse_args().output
    original = CheckpointTarget(EXAMPLE / "model")
    sequences = original.sequences(HELD_OUT)
    (reference,) = compare(evaluate([original], None, sequences, k=1)).rows
    rows: list[dict[str, Any]] = [
        {
            "weights": "bfloat16, products in float32",
            "cache": "none",
            "perplexity": reference.perplexity.mean,
            "change": "",
            "limit": "",
        }
    ]
    over: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for recipe in ("fp8", "fp8-static", "fp8-block"):
            calibration = Path(scratch) / recipe
            run(
                Options(
                    model=EXAMPLE / "model",
                    samples=EXAMPLE / "samples" / "calibration.jsonl",
                    out=calibration,
                    recipe=Recipe.load(recipe),
                    held_out=HELD_OUT,
                )
            )
            previous = reference.perplexity.mean
            for cache in ("float16", "e5m2"):
                export = Path(scratch) / f"{recipe}-{cache}"
                export_onnx(calibration, export, kv_cache=cache)
                (row,) = compare(evaluate([Export(export)], None, sequences, k=1)).rows
                value = row.perplexity.mean
                change = value / previous - 1
                limit = LIMITS.get((recipe, cache)) if cache == "float16" else CACHE_LIMIT
                base = "BF16" if cache == "float16" else "float16 cache"
                if limit is not None and change > limit:
                    over.append(f"{recipe} with a {cache} cache {change:+.3%}")
                rows.append(
                    {
                        "weights": recipe,
                        "cache": cache,
                        "perplexity": value,
                        "change": f"{change:+.3%} over {base}",
                        "limit": f"{limit:.1%}" if limit else "",
                    }
                )
                previous = value
    card = conditions(
        model="examples/python-lm, 256 calibration samples of up to 512 tokens",
        held_out=f"128 samples, {reference.tokens} tokens scored",
    )
    report("accuracy", card, rows, output)
    if over:
        sys.exit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()

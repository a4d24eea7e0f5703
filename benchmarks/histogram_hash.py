"""Hashes all histograms that `calibrate` counts of a model, to compare two commits bit by bit.

Runs the pipeline of the tree that is first on PYTHONPATH until it has observed all samples, and
prints the SHA-256 over every histogram in the order of their names.

    for tree in OLD NEW; do PYTHONPATH=$tree python benchmarks/histogram_hash.py --model DIR; done
"""

import argparse
import contextlib
import hashlib
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import calibrate
from calibrate import pipeline
from calibrate.observe.sweep import observe_checkpoint
from calibrate.options import Options
from octet.recipe import PRESETS

SAMPLES = Path(__file__).parent.parent / "examples" / "python-lm" / "samples"


class Done(Exception):
    """Ends the pipeline after observing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}

    def observed(*arguments: Any, **named: Any) -> Any:
        result = observe_checkpoint(*arguments, **named)
        digest = hashlib.sha256()
        values = 0
        for name in sorted(result.observations):
            counts = result.histograms[name].reshape(-1, result.histograms[name].shape[-1])
            total = counts.sum(axis=0)
            values += int(total.sum())
            digest.update(name.encode() + total.astype("<i8").tobytes())
        found.update(sha256=digest.hexdigest(), histograms=len(result.observations), values=values)
        raise Done

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        chosen = Options(
            model=options.model,
            samples=SAMPLES / "calibration.jsonl",
            held_out=SAMPLES / "heldout.jsonl",
            out=Path(name) / "calibration",
            recipe=PRESETS["fp8"],
        )
        with contextlib.suppress(Done), patch.object(pipeline, "observe_checkpoint", observed):
            pipeline.run(chosen)
    tree = Path(calibrate.__file__).parents[1]
    commit = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    found |= {"commit": commit.stdout.strip() or tree.name, "seconds": time.monotonic() - started}
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""Compares predictions with BF16 matmuls in hardware and in float32, and what they cost.

Checks one claim: for every serving path of the example, and for the same weights served without
quantization, the mean divergence predicted with either arithmetic lies inside the range predicted
with the other. Golden records and scales are computed once, so that only the arithmetic differs.
Paths that compute in float32 do not depend on it and are left out. A range comes from repeating
a prediction with embeddings that differ in their last bit: see `octet/proof/expected_range.py`. The
two arithmetics run in turns, twice; the time is the shorter of the two.

On a CPU without BF16 instructions, "hardware" is torch's own BF16: slow, with the same results.

    python benchmarks/cpu_arithmetic.py [--threads N] [--output FILE]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from card import conditions, report

from calibrate.decoder.arithmetic import BF16_SETTING, bf16_matmuls
from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.simulate.predict import predict
from calibrate.simulate.scenarios import simulated_paths
from octet.artifacts.serving_path import Expectation, ServingPath
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"
ARITHMETICS = ("hardware", "float32")
ROUNDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    native = bf16_matmuls()
    checkpoint, recipe = Checkpoint.open(EXAMPLE / "model"), Recipe.load(options.recipe)
    with tempfile.TemporaryDirectory() as scratch:
        calibration = run(
            Options(
                model=EXAMPLE / "model",
                samples=EXAMPLE / "samples" / "calibration.jsonl",
                out=Path(scratch) / "calibration",
                recipe=recipe,
                held_out=EXAMPLE / "samples" / "heldout.jsonl",
                predict=False,
            )
        )
        assert calibration is not None  # which only another rank of torchrun would get
        golden, scales = calibration.golden, dict(calibration.scales)
    paths = [path for path in simulated_paths(recipe) if path.compute == "bfloat16"]

    seconds: dict[str, list[float]] = {name: [] for name in ARITHMETICS}
    found: dict[str, dict[ServingPath, Expectation]] = {}
    for _ in range(ROUNDS):
        for name in ARITHMETICS:
            os.environ[BF16_SETTING] = name
            bf16_matmuls.cache_clear()
            started = time.perf_counter()
            predicted = predict(checkpoint, recipe, scales, golden, paths)
            seconds[name].append(time.perf_counter() - started)
            found[name] = {x.path: x for x in predicted.expectations}
    table = [_row(path, *(found[name][path] for name in ARITHMETICS)) for path in paths]
    tokens = sum(len(record.prompt_token_ids) for record in golden.records)
    card = conditions(
        model="examples/python-lm",
        recipe=recipe.name,
        workload=f"{len(golden.records)} golden prompts, {tokens} tokens,"
        f" {len(paths)} paths in bfloat16, twice each",
        torch_threads=torch.get_num_threads(),
        chosen_here=native,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        seconds={name: round(min(times), 2) for name, times in seconds.items()},
        inside=f"{sum(row['inside'] for row in table)} of {len(table)}",
        figures="thousandths of a nat: mean next-token KL from the reference, with its 95 % range",
    )
    report("cpu_arithmetic", card, table, options.output)


def _row(path: ServingPath, hardware: Expectation, float32: Expectation) -> dict[str, Any]:
    row: dict[str, Any] = {"path": path.label}
    for name, x in (("hardware", hardware), ("float32", float32)):
        row |= {name: 1e3 * x.mean, f"{name} low": 1e3 * x.low, f"{name} high": 1e3 * x.high}
    return row | {"inside": hardware.holds(float32.mean) and float32.holds(hardware.mean)}


if __name__ == "__main__":
    main()

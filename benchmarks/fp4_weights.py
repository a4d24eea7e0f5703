"""Error of the example's weights in FP4 and MX formats by each method, beside brute force.

The claims it checks: `mse` is within 0.05 dB of brute force over every representable scale, for
every group of every weight, and costs a fraction of it. Brute force is torch, in float32, with
nothing pruned: 126 E4M3 scales, or all 255 powers of two. `best global` sweeps the global scale as
well, over an octave in sixteenths for each weight alone, to show what a better one could gain.
Times are CPU time (all threads) for each weight element; they say little on a busy machine, their
ratios more.

    python benchmarks/fp4_weights.py [--output FILE]
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from card import conditions, report

from calibrate.scales.group_search import best_scales
from calibrate.scales.weights import weight_scales
from octet.model.checkpoint import Checkpoint
from octet.numerics import formats
from octet.recipe import PRESETS, Recipe

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"
METHODS = {
    "nvfp4": ("max", "four_six", "mse"),
    "mxfp4": ("max", "mse"),
    "mxfp8": ("max", "mse"),
    "fp8": ("max", "mse"),
    "fp8-block": ("max", "mse"),
    "fp8-static": ("max", "mse"),
}
LIMIT_DB = 0.05
POWERS = [2.0**exponent for exponent in range(-127, 128)]
E4M3_SCALES = formats.grid(formats.E4M3)[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    output: Path | None = parser.parse_args().output
    torch.set_num_threads(1)  # waiting threads of torch spin, and would count as CPU time
    checkpoint = Checkpoint.open(EXAMPLE / "model")
    weights = {
        linear.name: checkpoint.read(f"{linear.name}.weight").float32()
        for linear in checkpoint.spec.linears()
    }
    elements = sum(weight.size for weight in weights.values())
    signal = sum(float(np.square(weight, dtype=np.float64).sum()) for weight in weights.values())
    for preset in PRESETS:  # compiles, or loads, the kernels
        list(weight_scales(checkpoint, by(preset, "mse")))
    rows: list[dict[str, Any]] = []
    over = []
    for preset, methods in METHODS.items():
        found: dict[str, tuple[float, float]] = {}  # squared error, CPU seconds
        for method in methods:
            found[method] = quantize(checkpoint, weights, by(preset, method))
        if PRESETS[preset].weights.scale_format != "float32":
            found["brute force"] = brute_force(checkpoint, weights, preset)
            gap = decibels(found["mse"][0] / found["brute force"][0])
            if gap > LIMIT_DB:
                over.append(f"{preset} is {gap:.3f} dB from brute force")
        if preset == "nvfp4":
            found["mse, best global"] = best_global(weights)
        for method, (error, seconds) in found.items():
            best = found.get("brute force", found["mse"])
            rows.append(
                {
                    "preset": preset,
                    "method": method,
                    "sqnr_db": decibels(signal / error),
                    "below_best_db": decibels(error / best[0]),
                    "ns_per_element": seconds / elements * 1e9,
                    "times_max": seconds / found["max"][1],
                    "of_brute_force": seconds / best[1] if "brute force" in found else "",
                }
            )
    card = conditions(
        model=f"examples/python-lm, {len(weights)} weights, {elements:,} elements",
        brute_force="torch, 1 thread, float32, every representable scale, the same global scale",
        load_average=round(os.getloadavg()[0], 1),
    )
    report("fp4_weights", card, rows, output)
    if over:
        sys.exit("; ".join(over))


def by(preset: str, method: str) -> Recipe:
    recipe = PRESETS[preset]
    weights = recipe.weights.model_copy(update={"method": method})
    return recipe.model_copy(update={"weights": weights})


def quantize(
    checkpoint: Checkpoint, weights: dict[str, np.ndarray], recipe: Recipe
) -> tuple[float, float]:
    """(squared error of all weights, CPU seconds): the product."""
    started = time.process_time()
    found = dict(weight_scales(checkpoint, recipe))
    seconds = time.process_time() - started
    error = 0.0
    for name, weight in weights.items():
        power = float(np.square(weight, dtype=np.float64).sum())
        error += power / 10 ** (found[name].sqnr_db / 10)
    return error, seconds


def brute_force(
    checkpoint: Checkpoint, weights: dict[str, np.ndarray], preset: str
) -> tuple[float, float]:
    """(squared error of the best scale of every group, CPU seconds): every scale is tried."""
    scheme = PRESETS[preset].weights
    assert scheme.group_size is not None  # FP4 has groups
    shared = {
        name: float(scale.global_scale) if scale.global_scale is not None else 1.0
        for name, scale in weight_scales(checkpoint, PRESETS[preset])
    }
    scales = E4M3_SCALES.tolist() if scheme.two_level else POWERS
    started = time.process_time()
    error = 0.0
    for name, weight in weights.items():
        groups = torch.from_numpy(weight).abs().reshape(-1, scheme.group_size)
        least = torch.full((len(groups),), torch.inf)
        for scale in scales:
            factor = scale * shared[name]
            noise = rounded(groups / factor, scheme.format) * factor - groups
            least = torch.minimum(least, noise.square_().sum(1))
        error += float(least.double().sum())
    return error, time.process_time() - started


def rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    if name == "e4m3":
        return x.clamp(max=448.0).to(torch.float8_e4m3fn).float()
    x = x.clamp(max=6.0)
    step = torch.where(x < 2, 0.5, torch.where(x < 4, 1.0, 2.0))
    return (x / step).round() * step


def best_global(weights: dict[str, np.ndarray]) -> tuple[float, float]:
    """(squared error with the best global scale for each weight alone, CPU seconds)."""
    started = time.process_time()
    error = 0.0
    for weight in weights.values():
        error += min(swept(weight, largest) for largest in octave(448.0))
    return error, time.process_time() - started


def octave(top: float) -> Iterator[float]:
    return (top * 2.0 ** (-step / 16) for step in range(17))


def swept(weight: np.ndarray, largest: float) -> float:
    shared = np.float32(np.abs(weight).max() / (6 * largest))
    best = np.empty((len(weight), weight.shape[1] // 16), np.int16)
    errors = np.empty(len(weight))
    best_scales(
        weight, np.ones(weight.shape[1]), 16, E4M3_SCALES * shared, False, True, best, errors
    )
    return float(errors.sum())


def decibels(ratio: float) -> float:
    return float(10 * np.log10(ratio))


if __name__ == "__main__":
    main()

"""Derives the scales of a recipe from histograms and, with a budget, the recipe itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from calibrate.decoder.loading import ComputeDtype
from calibrate.observe.histogram import Histogram, Histograms
from calibrate.observe.sweep import Observed
from calibrate.quality.gate import Gate, Outcome
from calibrate.quality.measure import Bench, Measured, measure_gate, measure_model
from calibrate.samples.inputs import Inputs
from calibrate.scales.convergence import Convergence, convergence
from calibrate.scales.derive import WeightScale, check_alive, derive_scales
from calibrate.scales.expert_fallback import with_fallback
from octet.limit import Limit
from octet.model.checkpoint import Checkpoint
from octet.numerics import formats, microscaling, scaling
from octet.numerics.scaling import Granularity
from octet.recipe import Recipe

__all__ = ["Solution", "fitted_scales", "solve"]


@dataclass(frozen=True)
class Solution:
    """Result of a calibration.

    Scales are derived from `histograms`, in which experts that saw too few tokens have their
    layer's. `sensitivity`, `budget` and `experts` are JSON for the report; `gate` is the outcome of
    the accuracy gate.
    """

    recipe: Recipe
    histograms: Mapping[str, Histogram]
    scales: dict[str, NDArray[np.float32]]
    weights: dict[str, WeightScale]
    convergence: Convergence
    experts: dict[str, Any] | None
    sensitivity: dict[str, Any] | None = None
    budget: dict[str, Any] | None = None
    gate: Outcome | None = None


def solve(
    checkpoint: Checkpoint,
    recipe: Recipe,
    observed: Observed,
    inputs: Inputs,
    fitted: Mapping[str, NDArray[np.float32]],
    *,
    limit: Limit | None,
    gate: Gate | None,
    sensitivity: bool,
    dtype: ComputeDtype,
    device: torch.device,
    console: Console | None,
) -> Solution:
    """Derives the scales of `recipe` or, with a `limit`, of the recipe chosen to meet it.

    Judges the cost of that recipe by `gate`. `fitted` are scales that an algorithm fitted the
    weights to; they are not derived again.
    """
    counts, experts = with_fallback(checkpoint.spec, observed.histograms)
    histograms = Histograms(counts, observed.observations)
    check_alive(checkpoint, recipe, histograms)
    scales, weights = fitted_scales(checkpoint, recipe, histograms, fitted)
    bench, found, outcome = None, Measured(recipe), None
    if sensitivity or limit is not None or gate is not None:
        unseen = gate is not None and limit is not None
        bench = Bench(
            checkpoint, inputs, unseen=unseen, dtype=dtype, device=device, console=console
        )
    if bench is not None and (sensitivity or limit is not None):
        found = measure_model(bench, recipe, scales, histograms, limit)
        if found.recipe != recipe:
            recipe = found.recipe
            scales, weights = fitted_scales(checkpoint, recipe, histograms, fitted)
    known = found.sensitivity
    if bench is not None and gate is not None:
        outcome, own = measure_gate(bench, gate, recipe, scales, histograms, found)
        known = own if known is None else known  # with a budget, that of the first recipe
    return Solution(
        recipe=recipe,
        histograms=histograms,
        scales=scales,
        weights=weights,
        convergence=convergence(counts, observed.observations, recipe, inputs.plan.chunk_ends),
        experts=experts or None,
        sensitivity=known,
        budget=found.budget,
        gate=outcome,
    )


def fitted_scales(
    checkpoint: Checkpoint,
    recipe: Recipe,
    histograms: Mapping[str, Histogram],
    fitted: Mapping[str, NDArray[np.float32]],
) -> tuple[dict[str, NDArray[np.float32]], dict[str, WeightScale]]:
    """Calls `derive_scales`, and replaces its scales with `fitted` where given.

    The SQNR of fitted weights compares the quantized weights with the unchanged checkpoint:
    compared with the fitted weights, already on the grid of their scales, there would be no error.
    """
    scales, weights = derive_scales(checkpoint, recipe, histograms)
    scales |= {name: scale for name, scale in fitted.items() if name in scales}
    for name in weights:
        schemes = recipe.scheme_of(name)
        if f"{name}.weight_scale" not in fitted or schemes is None:
            continue
        scheme = schemes[0]
        shared = scales.get(f"{name}.weight_global_scale")
        scale = scales[f"{name}.weight_scale"]
        weight = checkpoint.unchanged().read(f"{name}.weight").float32()
        noise = weight - scaling.fake_quantize(
            checkpoint.read(f"{name}.weight").float32(),
            microscaling.combined(scale, shared),
            formats.format_named(scheme.format),
            Granularity.of(scheme.granularity, scheme.group_size),
        )
        power, error = (float(np.square(x, dtype=np.float64).sum()) for x in (weight, noise))
        sqnr_db = 10 * np.log10(power / error) if error > 0 else np.inf
        weights[name] = WeightScale(scale, scheme.format, float(sqnr_db), shared)
    return scales, weights

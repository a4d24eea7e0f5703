"""What the recipe costs the model, measured with the whole model in memory, on held-out text."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from calibrate.budget import check_reachable, choose
from calibrate.divergence import Reference, evaluation_batches
from calibrate.histogram import Histogram
from calibrate.inputs import Inputs
from calibrate.limit import Limit
from calibrate.loading import ComputeDtype, apply_changes, load_model
from calibrate.progress import progress_bar
from calibrate.sensitivity import measure_sensitivity, measurements
from octet.checkpoint import Checkpoint
from octet.recipe import Recipe

__all__ = ["Measured", "measure_model"]

# Held-out tokens that everything is measured on: some 30 samples of 512, whose mean KL has a
# standard error of a twentieth or so.
_TOKENS = 16_384


@dataclass(frozen=True)
class Measured:
    """The recipe that is to be used, and what was measured, as JSON for the report."""

    recipe: Recipe
    sensitivity: dict[str, Any] | None = None
    budget: dict[str, Any] | None = None


def measure_model(
    checkpoint: Checkpoint,
    recipe: Recipe,
    scales: Mapping[str, NDArray[np.float32]],
    histograms: Mapping[str, Histogram],
    inputs: Inputs,
    limit: Limit | None,
    *,
    dtype: ComputeDtype,
    device: torch.device,
    console: Console | None,
) -> Measured:
    """What each part of the model loses by `recipe`, and what to change to stay within `limit`.

    The reference is the model as it was, also where `checkpoint` has changed weights. ConfigError
    if no choice of weights can meet the limit.
    """
    model = load_model(checkpoint.unchanged(), dtype).to(device)
    batches = evaluation_batches(inputs.evaluation, _TOKENS)
    reference = Reference(model, checkpoint.spec, batches)
    apply_changes(model, checkpoint)
    if limit is not None:
        check_reachable(model, checkpoint, recipe, histograms, limit, reference)
    tokens = sum(batch.tokens for batch in batches)
    with progress_bar(console, "Sensitivity", tokens * measurements(checkpoint, recipe)) as advance:
        sensitivity = measure_sensitivity(
            model, checkpoint, recipe, scales, histograms, reference, advance=advance
        )
    measured = sensitivity.as_json() | {"evaluated_on": inputs.evaluated_on}
    if limit is None:
        return Measured(recipe, measured)
    waiting = nullcontext() if console is None else console.status(f"choosing layers for {limit}")
    with waiting:
        budget = choose(
            model,
            checkpoint,
            recipe,
            scales,
            histograms,
            sensitivity,
            limit,
            reference,
            evaluated_on=inputs.evaluated_on,
        )
    return Measured(budget.recipe, measured, budget.as_json())

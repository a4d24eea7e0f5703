"""Derives the scales of a recipe from histograms and, with a budget, the recipe itself."""

from dataclasses import dataclass
from typing import Any

from calibrate.algorithms.apply import ChangedModel
from calibrate.job import Job
from calibrate.journal.steps import Steps
from calibrate.observe.histogram import Histograms
from calibrate.observe.sweep import Observed
from calibrate.quality.gate import Outcome
from calibrate.quality.measure import Bench, Measured, measure_gate, measure_model
from calibrate.scales.convergence import Convergence, convergence
from calibrate.scales.derive import Quantization, check_alive, derive_scales
from calibrate.scales.expert_fallback import of_enough_tokens, with_fallback

__all__ = ["Solution", "solve"]


@dataclass(frozen=True)
class Solution:
    """Result of a calibration.

    In the histograms of `quantization`, experts that saw too few tokens have their layer's.
    `sensitivity`, `budget` and `experts` are JSON for the report; `gate` is the outcome of the
    accuracy gate.
    """

    quantization: Quantization
    convergence: Convergence
    experts: dict[str, Any] | None
    sensitivity: dict[str, Any] | None = None
    budget: dict[str, Any] | None = None
    gate: Outcome | None = None


def solve(job: Job, changed: ChangedModel, observed: Observed, steps: Steps) -> Solution:
    """Derives the scales of the recipe or, with a budget, of the recipe chosen to meet it.

    Judges the cost of that recipe by the gate. Scales that an algorithm fitted the weights to are
    not derived again. Finished measurements are kept in `steps`, and not made again.
    """
    options, checkpoint, recipe = job.options, changed.checkpoint, job.options.recipe
    counts, experts = with_fallback(checkpoint.spec, observed.histograms)
    mean_squares = of_enough_tokens(observed.mean_squares, experts)
    histograms = Histograms(counts, observed.observations, mean_squares)
    check_alive(checkpoint, recipe, histograms)
    layers = job.weights if checkpoint == job.checkpoint else None
    weight_only = options.weight_only
    found = derive_scales(
        checkpoint, recipe, histograms, changed.scales, layers, job.console, weight_only=weight_only
    )
    measured, outcome, known = Measured(recipe), None, None
    measures = options.sensitivity or options.budget is not None
    if measures or options.gate is not None:
        job.weights.free()  # the whole model takes their place
        bench = Bench(
            checkpoint,
            job.inputs,
            unseen=options.gate is not None and options.chooses,
            dtype=job.dtype,
            device=job.device,
            steps=steps,
            console=job.console,
        )
        if measures:
            measured = measure_model(bench, found, options.budget)
            known = measured.sensitivity
            if measured.recipe != recipe:
                recipe = measured.recipe
                found = derive_scales(
                    checkpoint, recipe, histograms, changed.scales, weight_only=weight_only
                )
        if options.gate is not None:
            auto = options.algorithm == "auto"
            outcome, own = measure_gate(bench, options.gate, found, measured, auto=auto)
            known = own if known is None else known  # with a budget, that of the first recipe
    return Solution(
        quantization=found,
        convergence=convergence(counts, observed.observations, recipe, job.inputs.plan.chunk_ends),
        experts=experts or None,
        sensitivity=known,
        budget=measured.budget,
        gate=outcome,
    )

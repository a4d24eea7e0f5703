"""Measures the cost of a recipe on held-out text, with the whole model in memory."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from calibrate.decoder.loading import ComputeDtype, apply_changes, load_model
from calibrate.journal.identity import digest_of_batches, run_identity
from calibrate.journal.steps import Steps
from calibrate.quality.budget import check_reachable, choose
from calibrate.quality.divergence import Divergence, Reference, evaluation_batches
from calibrate.quality.gate import Gate, Outcome, Part
from calibrate.quality.sensitivity import (
    EMBEDDINGS,
    HEAD,
    Sensitivity,
    measure_sensitivity,
    measurements,
)
from calibrate.samples.inputs import CALIBRATION, Inputs
from calibrate.scales.derive import Quantization
from calibrate.simulate.model import simulate
from calibrate.simulate.scales import digest_of_scales
from octet.limit import LEAST_SAMPLES, Limit
from octet.model.checkpoint import Checkpoint
from octet.progress import progress_bar
from octet.recipe import Recipe

__all__ = ["Bench", "Measured", "measure_gate", "measure_model"]

# Held-out tokens for all measurements: about 30 samples of 512. The standard error of their mean KL
# is about a twentieth of it.
_TOKENS = 16_384


@dataclass(frozen=True)
class Measured:
    """The recipe to use, and the measurements as JSON for the report."""

    recipe: Recipe
    sensitivity: dict[str, Any] | None = None
    budget: dict[str, Any] | None = None

    @property
    def chosen(self) -> bool:
        """True if a budget changed the recipe."""
        return self.budget is not None and bool(self.budget["chosen"])


class Bench:
    """The whole model in memory, and its output on held-out text before its weights changed.

    All measurements use the text of `reference`. `unseen` is of other text, for judging a choice
    that was made on the first; None if there is too little, or if it is not requested. Finished
    measurements are kept in `steps`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        inputs: Inputs,
        *,
        unseen: bool,
        dtype: ComputeDtype,
        device: torch.device,
        steps: Steps,
        console: Console | None,
    ) -> None:
        self.checkpoint, self.dtype, self.console = checkpoint, dtype, console
        self.evaluated_on = inputs.evaluated_on
        counts = run_identity(checkpoint, inputs.plan.batches, dtype, device)
        self._steps = steps.depending_on(json.dumps(counts))
        self.model = load_model(checkpoint.unchanged(), dtype).to(device)
        batches = evaluation_batches(inputs.evaluation, _TOKENS)
        self.reference = Reference(self.model, checkpoint.spec, batches)
        self.unseen: Reference | None = None
        used = {id(batch) for batch in batches}
        rest = [batch for batch in inputs.evaluation if id(batch) not in used]
        if unseen and sum(len(batch.lengths) for batch in rest) >= LEAST_SAMPLES:
            rest = evaluation_batches(rest, _TOKENS)
            self.unseen = Reference(self.model, checkpoint.spec, rest)
        apply_changes(self.model, checkpoint)

    def sensitivity(self, quantization: Quantization, reference: Reference) -> Sensitivity:
        """Measures the cost of each part alone."""
        tokens = _tokens_of(reference) * measurements(quantization)
        with progress_bar(self.console, "Sensitivity", tokens) as advance:
            return measure_sensitivity(
                self.model,
                quantization,
                reference,
                advance=advance,
                steps=self.steps(quantization, reference),
            )

    def steps(self, quantization: Quantization, reference: Reference) -> Steps:
        """Returns what keeps the measurements of `quantization` against `reference`."""
        return self._steps.depending_on(
            quantization.recipe.model_dump_json(),
            digest_of_scales(quantization.scales),
            digest_of_batches(reference.batches),
            *quantization.weight_only,
        )


def _tokens_of(reference: Reference) -> int:
    return sum(batch.tokens for batch in reference.batches)


def measure_model(bench: Bench, quantization: Quantization, limit: Limit | None) -> Measured:
    """Measures the cost of each part under the recipe, and changes the recipe to meet `limit`.

    The reference is the original model, even if the checkpoint has changed weights. Raises
    ConfigError if no choice of weights can meet the limit.
    """
    steps = bench.steps(quantization, bench.reference)
    if limit is not None:
        check_reachable(bench.model, quantization, limit, bench.reference, steps)
    sensitivity = bench.sensitivity(quantization, bench.reference)
    measured = sensitivity.as_json() | {"evaluated_on": bench.evaluated_on}
    if limit is None:
        return Measured(quantization.recipe, measured)
    console, saying = bench.console, f"choosing layers for {limit}"
    with nullcontext() if console is None else console.status(saying):
        budget = choose(
            bench.model,
            quantization,
            sensitivity,
            limit,
            bench.reference,
            evaluated_on=bench.evaluated_on,
            steps=steps,
        )
    return Measured(budget.recipe, measured, budget.as_json())


def measure_gate(
    bench: Bench,
    gate: Gate,
    quantization: Quantization,
    measured: Measured,
    *,
    auto: bool = False,
) -> tuple[Outcome, dict[str, Any] | None]:
    """Judges the cost of the recipe by `gate`; if it fails, also measures each part alone.

    If a budget chose the recipe, or `auto` the algorithm, the gate uses text that the choice did
    not see. If there is too little of that, or the text is what scales were chosen on, the outcome
    has a caveat. `measured` holds earlier measurements. Also returns the recipe's sensitivity as
    JSON, if known.
    """
    reference, on = bench.reference, bench.evaluated_on
    caveat = "its scales were chosen on them" if on == CALIBRATION else None
    if (measured.chosen or auto) and bench.unseen is not None:
        chooser = "the budget" if measured.chosen else "--algorithm auto"
        reference, on = bench.unseen, f"{bench.evaluated_on} that {chooser} did not see"
    elif measured.chosen:
        caveat = "a budget chose its formats on them"
    elif auto:
        caveat = "--algorithm auto chose on them"

    def simulated() -> Divergence:
        spec = bench.checkpoint.spec
        with (
            progress_bar(bench.console, "Gate", _tokens_of(reference)) as advance,
            simulate(
                bench.model,
                spec,
                quantization.recipe,
                quantization.scales,
                quantization.weight_only,
            ),
        ):
            return reference.compare(advance=advance)

    cost = bench.steps(quantization, reference).once("gate", Divergence, simulated)
    how = f"simulated{' weight-only' if quantization.weight_only else ''} in {bench.dtype}"
    outcome = gate.judge(cost, on, how, caveat)
    known = None if measured.chosen else measured.sensitivity
    if outcome.met:
        return outcome, known
    if known is None:
        sensitivity = bench.sensitivity(quantization, reference)
        known = sensitivity.as_json() | {"evaluated_on": on}
    parts = [
        Part(unit["name"], tuple(unit["linears"]), unit["kl"], unit["kl_error"])
        for unit in known["units"]
        if unit["name"] not in (EMBEDDINGS, HEAD)  # no recipe quantizes these
    ]
    return outcome.blaming(parts), known

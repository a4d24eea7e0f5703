"""Summarizes a report: if the samples sufficed, which tensor is worst, and what to do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from calibrate.report.findings import Finding, all_promoted, cost_served
from calibrate.report.tensors import TensorReport
from calibrate.scales.convergence import Convergence
from octet.artifacts.serving_path import EXPECTED_FILE, ExpectedSet, power_text
from octet.recipe import Recipe

__all__ = ["Summary", "divergence_text", "summarise"]

LEAST_TOKENS = 2048  # a calibration set of less text settles nothing: 128 samples of 16 tokens


@dataclass(frozen=True)
class Summary:
    """Sentences of the summary; `worst_tensor` is the observation to inspect first.

    `expected` is empty without a prediction, `trained` without a training, `measured` without a
    measurement, and `budget` without a budget.
    """

    status: Literal["ready", "look"]
    title: str
    subject: str
    enough: str
    trained: str
    expected: str
    examined: str
    worst: str
    worst_tensor: str | None
    measured: str
    budget: str
    todo: tuple[str, ...]


def summarise(
    recipe: Recipe,
    model: str,
    tensors: Mapping[str, TensorReport],
    weights_db: Mapping[str, float],
    findings: Sequence[Finding],
    notes: Sequence[str],
    *,
    samples: int | None,
    tokens: int | None,
    distinct: int | None = None,
    expected: ExpectedSet | None = None,
    examined: str = "",
    training: Mapping[str, Any] | None = None,
    convergence: Convergence | None,
    sensitivity: Mapping[str, Any] | None,
    budget: Mapping[str, Any] | None,
) -> Summary:
    """Summarizes a report; its status is "ready" if there is nothing to read before export.

    `examined` says what the golden prompts examine. `training` has what `octet recover` did and
    measured. `weights_db` are SQNR by linear; `notes` are warnings found elsewhere; `distinct` of
    the samples differ.
    """
    warnings = len(findings) + len(notes)
    counted = "" if samples is None else f", {samples:,} samples"
    counted += "" if tokens is None else f", {tokens:,} tokens"
    todo = list(dict.fromkeys(finding.remedy for finding in findings))
    if notes and findings:
        todo.append("Read the other warnings." if len(notes) > 1 else "Read the other warning.")
    measured = not (expected is None and training is None and sensitivity is None)
    unmeasured = not measured and any(
        t.format == "e2m1" and t.sqnr_db is None for t in tensors.values()
    )
    if unmeasured:
        todo.append(
            "Measure what FP4 inputs do to the output before serving them:"
            " octet calibrate --sensitivity."
        )
    if not todo:
        todo = ["Read the warnings, then export."] if notes else ["Nothing: export it."]
    title = f"{model} as {recipe.name}: "
    if all_promoted(budget):
        title += "the budget promoted every layer, "
    if warnings:
        title += f"{warnings} warning{'s' if warnings > 1 else ''} to read before export"
    elif unmeasured:
        title += "what FP4 costs is not measured"
    else:
        title += "nothing to warn about"
    return Summary(
        status="look" if warnings or unmeasured else "ready",
        title=title,
        subject=f"Recipe {recipe.name}, model {model}{counted}.",
        enough=_enough(convergence, samples, tokens, distinct),
        trained=_trained(training, samples),
        expected=_expected(expected),
        examined=" ".join(x for x in (examined, _power(expected)) if x),
        worst=_worst(tensors, weights_db),
        worst_tensor=_worst_tensor(tensors),
        measured=_measured(sensitivity, budget),
        budget=_budget(budget),
        todo=tuple(todo),
    )


def _enough(
    convergence: Convergence | None, samples: int | None, tokens: int | None, distinct: int | None
) -> str:
    if convergence is None:
        return "It is not known whether the set was enough, because it was not counted in parts."
    if convergence.moved or not convergence.decides:
        return convergence.verdict
    doubt = None
    if tokens is not None and tokens < LEAST_TOKENS:
        doubt = f"hold {tokens:,} tokens in all, and even {LEAST_TOKENS:,} would be few"
    elif None not in (samples, distinct) and 2 * (distinct or 0) < (samples or 0):
        doubt = f"hold only {distinct} distinct sample{'' if distinct == 1 else 's'}"
    if doubt is None:
        return convergence.verdict
    return f"Whether {convergence.counts[-1]} samples are enough is not known: they {doubt}."


def divergence_text(held_out: Mapping[str, Any]) -> str:
    """Describes the held-out divergence before and after a training, and by how much it changed."""
    before, after = held_out["before"], held_out["after"]
    mean, low, high = (held_out["less"][key] / before for key in ("mean", "low", "high"))
    change = "less"
    if mean < 0:
        change, mean, low, high = "more", -mean, -high, -low
    return (
        f"{after:.4g} nats a token, and {before:.4g} before: {mean:.1%} {change} (95 % interval"
        f" {low:.1%} to {high:.1%})"
    )


def _trained(training: Mapping[str, Any] | None, samples: int | None) -> str:
    if training is None:
        return ""
    held_out, epochs, steps = training["held_out"], training["epochs"], training["steps"]
    on = "" if samples is None else f" on {samples:,} samples"
    return (
        f"Trained{on} for {epochs} epoch{'' if epochs == 1 else 's'}, {steps:,}"
        f" step{'' if steps == 1 else 's'}{_for(training)}: the divergence on"
        f" {held_out['tokens']:,} tokens of {held_out['on']} is {divergence_text(held_out)}."
    )


def _for(training: Mapping[str, Any]) -> str:
    schemes = training.get("weight_only")  # not in reports of earlier versions
    return f", for GPUs that run {' and '.join(schemes)} weight-only" if schemes else ""


def _expected(expected: ExpectedSet | None) -> str:
    """Describes the first serving path, which is that of the recipe on a GPU."""
    if expected is None:
        return ""
    first = expected.expectations[0]
    return (
        f"Expected KL from the original, over {first.prompts} prompts: {first.mean:.2g} nats"
        f" ({first.low:.2g} to {first.high:.2g}) with {first.path.label}; other ways to serve it"
        f" are in {EXPECTED_FILE}."
    )


def _power(expected: ExpectedSet | None) -> str:
    """Says how small a fault passes the proof."""
    if expected is None or not expected.power:
        return ""
    text = power_text(expected.power)
    return f"{text[0].upper()}{text[1:]}."


def _worst_tensor(tensors: Mapping[str, TensorReport]) -> str | None:
    """Returns the tensor with the lowest SQNR, whole or of small values; known before estimated."""
    known = {name: t for name, t in tensors.items() if t.sqnr_db is not None}
    some = known or {name: t for name, t in tensors.items() if t.quantized} or tensors
    return min(some, key=lambda name: _left(some[name])) if some else None


def _sqnr(tensor: TensorReport) -> float:
    return math.inf if tensor.sqnr_db is None else tensor.sqnr_db


def _left(tensor: TensorReport) -> float:
    values = (tensor.sqnr_db, tensor.small_left_db)
    return min((value for value in values if value is not None), default=math.inf)


def _worst(tensors: Mapping[str, TensorReport], weights_db: Mapping[str, float]) -> str:
    known = {name: t for name, t in tensors.items() if t.sqnr_db is not None}
    parts = []
    if known:
        name = min(known, key=lambda name: _sqnr(known[name]))
        parts.append(f"{name}, {_db(_sqnr(known[name]))} in {known[name].format}")
        name = min(known, key=lambda name: _left(known[name]))
        left = _left(known[name])
        if left < _sqnr(known[name]) - 1:
            parts.append(f"of the smallest 90 % of values {name}, {left:.1f} dB")
    if weights_db:
        name = min(weights_db, key=lambda name: weights_db[name])
        parts.append(f"of the weights {name}, {_db(weights_db[name])}")
    unknown = sum(t.quantized and t.sqnr_db is None for t in tensors.values())
    if unknown:
        parts.append(f"that of {unknown} inputs, scaled at run time, is not known")
    return f"Lowest SQNR: {'; '.join(parts)}." if parts else ""


def _db(value: float) -> str:
    return f"{value:.1f} dB" if math.isfinite(value) else "without error"


def _measured(sensitivity: Mapping[str, Any] | None, budget: Mapping[str, Any] | None) -> str:
    cost = cost_served(sensitivity, budget)
    if sensitivity is None or cost is None:
        return ""
    reference, perplexity = cost
    kl = (budget["curve"][-1] if budget else sensitivity["all"])["kl"]
    text = sensitivity.get("evaluated_on", "held-out samples")
    return (
        f"On {sensitivity['tokens']:,} tokens of {text}, with all of it quantized: KL {kl:.2g} nats"
        f" a token and perplexity {perplexity:.4g}, where the original has {reference:.4g}."
    )


def _budget(budget: Mapping[str, Any] | None) -> str:
    if budget is None:
        return ""
    perplexity = budget["metric"] == "perplexity"
    limit, reached, bound = (
        f"{budget[key]:.2%}" if perplexity else f"{budget[key]:.2g}"
        for key in ("limit", "reached", "bound")
    )
    name = "a perplexity higher by" if perplexity else "KL"
    verb = "is met" if budget["met"] else "is not met"
    steps = len(budget["curve"]) - 1
    sentence = (
        f"The budget of {name} {limit} {verb} on {budget['tokens']:,} tokens of"
        f" {budget['evaluated_on']}: {reached} (95 % bound {bound}) after {steps}"
        f" promotion{'' if steps == 1 else 's'} to a higher precision"
    )
    return f"{sentence}, chosen on the same text." if steps else f"{sentence}."

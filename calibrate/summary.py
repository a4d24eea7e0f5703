"""The few sentences that a person must read: was it enough, what is worst, what to do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from calibrate.convergence import Convergence
from calibrate.findings import Finding
from calibrate.tensor_report import TensorReport
from octet.recipe import Recipe

__all__ = ["Summary", "summarise"]


@dataclass(frozen=True)
class Summary:
    """Sentences; `worst_tensor` is the observation to look at first, `measured` may be empty."""

    status: Literal["ready", "look"]
    title: str
    subject: str
    enough: str
    worst: str
    worst_tensor: str | None
    measured: str
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
    convergence: Convergence | None,
    sensitivity: Mapping[str, Any] | None,
    budget: Mapping[str, Any] | None,
) -> Summary:
    """`weights_db` are SQNR by linear; `notes` are warnings found elsewhere."""
    warnings = len(findings) + len(notes)
    counted = "" if samples is None else f", {samples:,} samples"
    counted += "" if tokens is None else f", {tokens:,} tokens"
    todo = list(dict.fromkeys(finding.remedy for finding in findings))
    if notes:
        plural = "s" if len(notes) > 1 else ""
        todo.append(f"Read the {len(notes)} other warning{plural}." if findings else "")
    todo = [line for line in todo if line]
    if not todo:
        todo = ["Read the warnings, then export."] if notes else ["Nothing: export it."]
    title = f"{model} as {recipe.name}: "
    if not warnings:
        title += "nothing to warn about"
    else:
        title += f"{warnings} warning{'s' if warnings > 1 else ''} to read before export"
    return Summary(
        status="look" if warnings else "ready",
        title=title,
        subject=f"Recipe {recipe.name}, model {model}{counted}.",
        enough="Whether the set was enough is not known: it was not counted in parts."
        if convergence is None
        else convergence.verdict,
        worst=_worst(tensors, weights_db),
        worst_tensor=_worst_tensor(tensors),
        measured=_measured(sensitivity, budget),
        todo=tuple(todo),
    )


def _worst_tensor(tensors: Mapping[str, TensorReport]) -> str | None:
    """That of which least is left, in all or among its small values; known before estimated."""
    known = {name: t for name, t in tensors.items() if t.sqnr_db is not None}
    some = known or {name: t for name, t in tensors.items() if t.quantized} or tensors
    return min(some, key=lambda name: _left(some[name])) if some else None


def _left(tensor: TensorReport) -> float:
    small = tensor.small_sqnr_db if tensor.measured_sqnr_db is None else None
    values = (tensor.sqnr_db, small, tensor.measured_small_sqnr_db)
    return min((value for value in values if value is not None), default=math.inf)


def _worst(tensors: Mapping[str, TensorReport], weights_db: Mapping[str, float]) -> str:
    known = {name: t for name, t in tensors.items() if t.sqnr_db is not None}
    parts = []
    name = _worst_tensor(known)
    if name is not None:
        tensor = known[name]
        assert tensor.sqnr_db is not None
        low = _left(tensor)
        hidden = f" ({low:.1f} dB for its smallest 90 %)" if low < tensor.sqnr_db - 1 else ""
        parts.append(
            f"{name}, {_db(tensor.sqnr_db)}{hidden} in {tensor.format}"
        )
    if weights_db:
        name = min(weights_db, key=lambda name: weights_db[name])
        parts.append(f"of the weights {name}, {_db(weights_db[name])}")
    return f"Lowest SQNR: {'; '.join(parts)}." if parts else ""


def _db(value: float) -> str:
    return f"{value:.1f} dB" if math.isfinite(value) else "without error"


def _measured(sensitivity: Mapping[str, Any] | None, budget: Mapping[str, Any] | None) -> str:
    parts = []
    if sensitivity is not None and sensitivity.get("all"):
        everything = sensitivity["all"]
        parts.append(
            f"Measured with all of it quantized: KL {everything['kl']:.2g} nats a token,"
            f" perplexity {everything['perplexity']:.4g} where the original has"
            f" {sensitivity['reference_perplexity']:.4g}."
        )
    if budget is not None:
        verb = "is met" if budget["met"] else "is not met"
        parts.append(
            f"The budget of {budget['metric']} {budget['limit']:g} {verb}:"
            f" {budget['reached']:.2g} with the chosen recipe."
        )
    return " ".join(parts)

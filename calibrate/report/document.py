"""Builds the report of a calibration as data: `report.json`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.report.findings import Finding, Unknown, find, find_unknown
from calibrate.report.summary import Summary, summarise
from calibrate.report.tensors import (
    STEPS,
    TensorReport,
    distribution,
    layer_of,
    report_tensors,
    role_of,
)
from calibrate.scales.convergence import Convergence
from calibrate.scales.derive import Quantization, scales_in_use
from calibrate.scales.weights import WeightScale
from octet.artifacts.calibration import Observation
from octet.artifacts.serving_path import ExpectedSet
from octet.model.spec import ModelSpec
from octet.numerics import formats
from octet.recipe import Recipe

__all__ = ["Report", "build_report"]

SCHEMA_VERSION = 1

# Distributions of experts kept in report.json, the worst first: there can be tens of thousands. A
# dense model has 6 a layer, all kept. histograms.safetensors has all.
_EXPERTS_PLOTTED = 400


@dataclass(frozen=True)
class Report:
    """Report of one calibration, with `tensors` by observation and `weights` by linear.

    `warnings` are lines of text. `sensitivity`, `budget`, `experts` and `training` come from their
    own stages, None if those did not run. `distributions` have 8 bins per octave, see
    `distribution`.
    """

    recipe: Recipe
    model: Mapping[str, Any]
    samples: Mapping[str, Any]
    tensors: Mapping[str, TensorReport]
    weights: Mapping[str, WeightScale]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    scale_notes: tuple[str, ...]  # those of `notes` that are about these scales alone
    distributions: Mapping[str, dict[str, Any]]
    convergence: Convergence | None = None
    sensitivity: Mapping[str, Any] | None = None
    budget: Mapping[str, Any] | None = None
    experts: Mapping[str, Any] | None = None
    training: Mapping[str, Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    expected: ExpectedSet | None = None  # divergence of each serving path, if it was predicted
    examined: str = ""  # what the golden prompts examine

    @cached_property
    def summary(self) -> Summary:
        return summarise(
            self.recipe,
            self.model["name"] or self.model["architecture"],
            self.tensors,
            {name: weight.sqnr_db for name, weight in self.weights.items()},
            self.findings,
            self._notes,
            samples=self.samples["count"],
            tokens=self.samples["tokens"],
            distinct=self.samples["distinct"],
            expected=self.expected,
            examined=self.examined,
            training=self.training,
            convergence=self.convergence,
            sensitivity=self.sensitivity,
            budget=self.budget,
        )

    @property
    def unknown(self) -> tuple[Unknown, ...]:
        return tuple(
            find_unknown(
                self.tensors,
                self.convergence,
                self.sensitivity,
                predicted=self.expected is not None,
                trained=self.training is not None,
            )
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings passed in, then those found here; one line each."""
        return (*self._notes, *(finding.text for finding in self.findings))

    @property
    def _notes(self) -> tuple[str, ...]:
        """Returns warnings that are no findings."""
        return self.notes if self.expected is None else (*self.notes, *self.expected.warnings)

    def as_json(self) -> dict[str, Any]:
        """Returns all data for the page; infinite values (an SQNR without error) become null."""
        used = sorted({tensor.format for tensor in self.tensors.values()} & set(formats.FORMATS))
        data = {
            "schema_version": SCHEMA_VERSION,
            "model": dict(self.model),
            "samples": dict(self.samples),
            "recipe": self.recipe.model_dump(mode="json"),
            "facts": dict(self.facts),
            "summary": asdict(self.summary),
            "warnings": list(self.warnings),
            "notes": list(self.notes),  # the warnings that were passed in
            "scale_notes": list(self.scale_notes),
            "unknown": [asdict(unknown) for unknown in self.unknown],
            "formats": {name: _format_json(name) for name in used},
            "tensors": {name: _tensor_json(tensor) for name, tensor in self.tensors.items()},
            "weights": {name: _weight_json(name, w) for name, w in self.weights.items()},
            "distributions": {
                "bins_per_octave": STEPS,
                "left_out": len(self.tensors) - len(self.distributions),
                "tensors": dict(self.distributions),
            },
            "convergence": self._convergence_json(),
            "sensitivity": None if self.sensitivity is None else dict(self.sensitivity),
            "budget": None if self.budget is None else dict(self.budget),
            "experts": None if self.experts is None else dict(self.experts),
            "training": None if self.training is None else dict(self.training),
        }
        finite: dict[str, Any] = _finite(data)
        return finite

    def _convergence_json(self) -> dict[str, Any] | None:
        """Returns convergence, without settled experts if there are many (see convergence.json)."""
        if self.convergence is None:
            return None
        data = self.convergence.as_json()
        kept = {*self.distributions, *data["moved"]}
        courses = data["tensors"]
        data["tensors"] = {name: course for name, course in courses.items() if name in kept}
        data["left_out"] = len(courses) - len(data["tensors"])
        return data


def build_report(
    quantization: Quantization,
    observations: Mapping[str, Observation],
    *,
    model: str = "",
    samples: int | None = None,
    tokens: int | None = None,
    distinct: int | None = None,
    convergence: Convergence | None = None,
    sensitivity: Mapping[str, Any] | None = None,
    budget: Mapping[str, Any] | None = None,
    experts: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    unfolded: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
    scale_warnings: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
) -> Report:
    """Builds the report of one calibration; a pure function, at 25 ms a dense tensor.

    Its histograms are the sums over all samples; its scales are those that the artifact stores.
    `distinct` of the samples differ. `sensitivity`, `budget`, `experts` and `training` (the details
    of `calibrate.recover`) are JSON. `unfolded` says why a cache keeps its scale. `warnings` were
    found elsewhere and come first, before them `scale_warnings`, which do not hold for other scales
    of the same samples. `facts` are shown unchanged (dtype, policy for long samples,
    ...).
    """
    recipe, spec = quantization.recipe, quantization.checkpoint.spec
    histograms, scales = quantization.histograms, quantization.scales
    tensors = report_tensors(
        recipe,
        observations,
        histograms,
        scales_in_use(observations, scales),
        global_scales=_global_scales(observations, scales),
        sensitivity=_still_true(sensitivity, budget),
    )
    trained = training is not None
    findings = find(recipe, tensors, convergence, sensitivity, budget, unfolded, trained=trained)
    return Report(
        recipe=recipe,
        model={"name": model, **_model_json(spec)},
        samples={"count": samples, "tokens": tokens, "distinct": distinct},
        tensors=tensors,
        weights=dict(quantization.weights),
        findings=tuple(findings),
        notes=(*scale_warnings, *warnings),
        scale_notes=tuple(scale_warnings),
        distributions={name: distribution(histograms[name]) for name in _plotted(tensors)},
        convergence=convergence,
        sensitivity=sensitivity,
        budget=budget,
        experts=experts,
        training=training,
        facts=facts or {},
    )


def _still_true(
    sensitivity: Mapping[str, Any] | None, budget: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Drops the units that the budget moved to another format after they were measured."""
    if sensitivity is None or budget is None:
        return sensitivity
    moved = {chosen["unit"] for chosen in budget["chosen"]}
    return {"units": [unit for unit in sensitivity["units"] if unit["name"] not in moved]}


def _global_scales(
    observations: Mapping[str, Observation], scales: Mapping[str, NDArray[np.float32]]
) -> dict[str, float]:
    return {
        name: float(scales[key])
        for name, observation in observations.items()
        for consumer in observation.consumers
        if (key := f"{consumer}.input_global_scale") in scales
    }


def _plotted(tensors: Mapping[str, TensorReport]) -> list[str]:
    """Returns tensor names in their order: all but experts, and the worst of the experts."""
    experts = [name for name, tensor in tensors.items() if tensor.expert is not None]
    left_out: set[str] = set()
    if len(experts) > _EXPERTS_PLOTTED:
        ranked = sorted(experts, key=lambda name: tensors[name].small_sqnr_db or 0.0)
        left_out = set(ranked[_EXPERTS_PLOTTED:])
    return [name for name in tensors if name not in left_out]


def _model_json(spec: ModelSpec) -> dict[str, Any]:
    return {"architecture": spec.architecture, "layers": spec.layers}


def _format_json(name: str) -> dict[str, Any]:
    fmt = formats.FORMATS[name]
    return {
        "bits": fmt.bits,
        "max": fmt.max,
        "smallest_normal": fmt.smallest_normal,
        "smallest_subnormal": fmt.smallest_subnormal,
        "grid": [float(value) for value in formats.grid(fmt)],
    }


def _tensor_json(tensor: TensorReport) -> dict[str, Any]:
    return {
        **asdict(tensor),
        "sqnr_db": tensor.sqnr_db,
        "underflow_at_most": tensor.underflow_at_most,
    }


def _weight_json(name: str, weight: WeightScale) -> dict[str, Any]:
    return {
        "layer": layer_of(name),
        "role": role_of([name]),
        "format": weight.format,
        "scales": list(weight.scale.shape),
        "sqnr_db": weight.sqnr_db,
    }


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data

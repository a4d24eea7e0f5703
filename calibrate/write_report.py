"""Builds the report of a calibration, and the files that hold it."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibrate.algorithms.apply import ChangedModel
from calibrate.job import Job
from calibrate.observe.sweep import Observed
from calibrate.quality.gate import Outcome
from calibrate.quality.refused import EVIDENCE_FILE, keep_refused
from calibrate.report.document import Report, build_report
from calibrate.report.html import render_html
from calibrate.scales.convergence import Convergence
from calibrate.scales.expert_fallback import fallback_warnings
from calibrate.simulate.predict import Prediction
from calibrate.solve import Solution
from octet.artifacts.calibration import Content
from octet.artifacts.golden import GoldenSet
from octet.artifacts.scenarios import SCENARIOS_FILE
from octet.artifacts.serving_path import EXPECTED_FILE
from octet.model.folding import describe_folds
from octet.storage.tensors import Tensor, write_tensors

__all__ = ["PAGE", "keep_evidence", "report_files", "report_on"]

PAGE = "report.html"


def report_on(job: Job, changed: ChangedModel, solution: Solution, observed: Observed) -> Report:
    """Builds the report on a calibration."""
    plan, gate = job.inputs.plan, solution.gate
    lines = describe_folds(job.checkpoint.spec, changed.details.get("folded", {}))
    compared = changed.details.get("compared")
    return build_report(
        solution.quantization,
        observed.observations,
        model=job.options.name or job.checkpoint.path.resolve().name,
        samples=job.inputs.sample_set.count,
        tokens=plan.tokens,
        distinct=job.inputs.split.distinct,
        convergence=solution.convergence,
        sensitivity=solution.sensitivity,
        budget=solution.budget,
        experts=solution.experts,
        training=changed.details["algorithm"] if job.options.training is not None else None,
        unfolded=changed.unfolded,
        scale_warnings=gate.warnings if gate else (),
        warnings=[
            *changed.warnings,
            *job.checkpoint.warnings,
            *job.inputs.warnings,
            *fallback_warnings(solution.experts or {}),
        ],
        facts={
            "compute_dtype": job.dtype,
            **observed.facts,
            **plan.facts,
            **({"folded": lines} if lines else {}),
            **({"algorithm": compared["summary"]} if compared else {}),
            **(gate.facts if gate else {}),
        },
    )


def report_files(
    report: Report, course: Convergence | None, prediction: Prediction | None
) -> dict[str, Content]:
    """Returns files by name: the report as JSON and as a page, convergence, expected divergence."""
    data = report.as_json()
    files: dict[str, Content] = {
        "report.json": json.dumps(data, indent=1) + "\n",
        PAGE: render_html(data),
    }
    if course is not None:
        files["convergence.json"] = json.dumps(course.as_json(), indent=1) + "\n"
    if prediction is not None:
        files[EXPECTED_FILE] = prediction.expected.to_json()
        files[SCENARIOS_FILE] = prediction.scenarios.save
    return files


def keep_evidence(
    refused: Path,
    report: Report,
    course: Convergence | None,
    scales: Mapping[str, NDArray[np.float32]],
    golden: GoldenSet,
    gate: Outcome,
) -> Path:
    """Writes to `refused` why a calibration failed its gate; returns the report page's path."""
    with keep_refused(refused) as directory:
        for name, text in report_files(report, course, None).items():
            (directory / name).write_text(str(text), "utf-8")
        recipe = report.recipe.model_dump(mode="json")
        (directory / EVIDENCE_FILE).write_text(gate.evidence(recipe=recipe), "utf-8")
        golden.save(directory)
        tensors = {name: Tensor.of(np.asarray(scale)) for name, scale in scales.items()}
        write_tensors(directory / "scales.safetensors", tensors)
    return refused / PAGE

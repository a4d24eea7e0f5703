"""Derives the calibration of another recipe from an existing one, without running the samples.

Histograms, golden records and observations stay the same. The model runs only on the golden
prompts, to predict the cost of the recipe. Weights are read from the checkpoint, or as the
calibration changed them. A histogram cannot give the error of scales computed at run time, nor the
effect of all errors on the output: the report lists both as unknown, with the reason. Earlier
measurements (sensitivity, a budget, a training) belong to the other recipe and are not carried
over.

Live histograms (octet/artifacts/live.py) can take the place of the calibration's. A tensor that
servers did not count keeps the calibration's. Static scales of activations can be those of a
training's amaxes (scales/transformer_engine.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from calibrate.golden import examined
from calibrate.journal.identity import arithmetic_of
from calibrate.observe.histogram import Histograms
from calibrate.options import validate_rescale
from calibrate.quality.gate import Gate, Outcome
from calibrate.quality.golden_cost import PromptCost, check_prompts, judge_prompts
from calibrate.quality.refused import drop_refused, refused_directory
from calibrate.report.console import print_report
from calibrate.report.document import build_report
from calibrate.scales.convergence import Convergence, convergence
from calibrate.scales.derive import check_alive, derive_scales
from calibrate.scales.expert_fallback import (
    MIN_TOKENS,
    fallback_warnings,
    of_enough_tokens,
    with_fallback,
)
from calibrate.scales.transformer_engine import TrainedInputs
from calibrate.simulate.predict import expected_divergence
from calibrate.write_report import keep_evidence, report_files
from octet.artifacts.calibration import WEIGHTS_FILE, Calibration
from octet.artifacts.live import read_live
from octet.artifacts.manifest import Manifest, software
from octet.errors import ArtifactError, ConfigError
from octet.hardware.support import used_of
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.storage.files import MAX_JSON_BYTES, read_object

__all__ = ["rescale"]

_SPANS = 8  # of consecutive live windows, whose counts are kept apart
_LEAST_TOKENS = 4096
_MEASURED = (
    "sensitivity",
    "budget",
    "training",
)  # parts of report.json that hold for one recipe only


def rescale(
    calibration: Path,
    out: Path,
    *,
    recipe: Recipe,
    model: Path | None = None,
    gate: Gate | None = None,
    histograms: Path | None = None,
    te_state: Path | None = None,
    predict: bool = True,
    force: bool = False,
    console: Console | None = None,
) -> Calibration:
    """Writes to `out` what `calibrate` would have written for `recipe`, from `calibration`.

    With `histograms`, a directory of live ones, the scales of activations are for that traffic.
    With `te_state`, a file of Transformer Engine's states, those that it has are the training's.
    `model` overrides the checkpoint path that the calibration recorded. For the calibration's own
    recipe the scales are bit-identical, unless an earlier version chose others. Raises
    ArtifactError if the calibration or the checkpoint was altered, ConfigError for a recipe that
    does not fit the model, and GateError for one that costs more on the golden prompts than `gate`
    allows; each leaves `out` unchanged.
    """
    opened = validate_rescale(calibration, out, recipe=recipe, model=model, gate=gate, force=force)
    origin = Calibration.load(calibration)
    live = None if histograms is None else _Live(histograms, origin)
    checkpoint = _as_calibrated(opened, origin)
    if gate is not None:
        check_prompts(gate, origin.golden)
    fitted = _fitted(origin, recipe)
    trained, taken = None, dict[str, NDArray[np.float32]]()
    if te_state is not None:
        trained = TrainedInputs.read(te_state, checkpoint.spec)
        taken = trained.scales(checkpoint.spec, recipe)
        if (origin.path / WEIGHTS_FILE).exists() or origin.manifest.folds:
            raise ConfigError(
                f"{origin.path}: its weights were changed after the training, and with them its"
                f" activations, so the amaxes of {te_state} are not theirs; calibrate again without"
                " --algorithm, or leave --te-state out"
            )

    old_report = _report_of(origin)
    experts = old_report.get("experts") or {}
    least = experts.get("min_tokens", MIN_TOKENS)
    observed = origin.histograms if live is None else live
    counts, experts = with_fallback(checkpoint.spec, observed, least)
    mean_squares = of_enough_tokens(origin.mean_squares, experts)
    exact = Histograms(counts, origin.observations, mean_squares)
    check_alive(checkpoint, recipe, exact)
    weight_only = used_of(origin.manifest.runs_weight_only, recipe)
    found = derive_scales(
        checkpoint, recipe, exact, fitted | taken, console=console, weight_only=weight_only
    )

    judged = None
    if gate is not None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        cost = PromptCost(
            checkpoint,
            recipe,
            found.scales,
            origin.golden,
            weight_only=weight_only,
            device=device,
        )
        how = f"simulated{' weight-only' if weight_only else ''} in float32"
        judged = judge_prompts(gate, cost, how, console)

    of_samples = live is None and trained is None
    course = _convergence(origin, recipe, checkpoint, least) if of_samples else None
    before = origin.weight_scales  # an earlier version may have chosen others
    kept = all(np.array_equal(found.scales.get(name, np.nan), x) for name, x in before.items())
    same = recipe == origin.manifest.recipe and of_samples and kept
    samples = origin.manifest.samples
    report = build_report(
        found,
        origin.observations,
        model=origin.manifest.model.name,
        samples=samples.count if samples else None,
        tokens=samples.tokens if samples else None,
        distinct=(old_report.get("samples") or {}).get("distinct"),
        convergence=course,
        experts=experts or None,
        scale_warnings=[
            *_unweighted(origin, recipe),
            *(trained.warnings(exact) if trained else ()),
            *(judged.warnings if judged else ()),
        ],
        warnings=[
            *(live.warnings() if live else ()),  # whose counts are stored, for the next recipe too
            *(
                note
                for note in old_report.get("notes", fallback_warnings(experts))
                if note not in old_report.get("scale_notes", ())
            ),
        ],
        facts=_facts(old_report, judged),
        **{part: old_report.get(part) for part in _MEASURED if same},
    )
    if judged is not None and not judged.met:
        refused = refused_directory(out)
        keep_evidence(refused, report, course, found.scales, origin.golden, judged)
        raise judged.error(out, refused, again="rescale", budget="calibrate again")
    prediction, predicted = None, dict[str, Any]()
    if predict:
        predicted["prediction"] = arithmetic_of(torch.device("cpu"))
        prediction = expected_divergence(
            checkpoint, recipe, found.scales, origin.golden, console=console
        )
    predicted["predicted"] = prediction is not None
    facts: dict[str, Any] = {} if live is None else {"live_tokens": live.tokens}
    if weight_only:
        facts["runs_weight_only"] = list(weight_only)
    if trained is not None:
        facts["te_state"] = {"inputs": len(trained.amaxes), "steps": trained.steps}
    expected = prediction.expected if prediction else None
    report = replace(report, expected=expected, examined=examined(origin.golden))
    extra = report_files(report, course, prediction)
    if (origin.path / WEIGHTS_FILE).exists():
        extra[WEIGHTS_FILE] = origin.path / WEIGHTS_FILE
    written = Calibration.save(
        out,
        _manifest(origin, checkpoint, recipe, list(report.warnings), judged, predicted | facts),
        origin.observations,
        origin.chunks if live is None else live,
        found.scales,
        origin.golden,
        mean_squares=origin.mean_squares,
        extra_files=extra,
        force=force,
    )
    if judged is not None:
        drop_refused(refused_directory(out))
    if console is not None:
        console.print(
            f"derived {recipe.name} from {calibration} ({origin.manifest.recipe.name}); no sample"
            " was run",
            highlight=False,
            markup=False,
        )
        print_report(console, report, page=out / "report.html")
    return written


class _Live(Mapping[str, NDArray[np.int64]]):
    """Live counts of an origin's observations, int64 [spans, 32768], each summed on access.

    Spans of windows are kept apart, so that `octet drift` can judge later traffic by them.
    """

    def __init__(self, directory: Path, origin: Calibration) -> None:
        """Raises ConfigError and ArtifactError as `read_live` does, and for too few tokens."""
        windows = read_live(directory, origin)
        self.tokens = sum(window.tokens for window in windows)
        if self.tokens < _LEAST_TOKENS or len(windows) < _SPANS:
            raise ConfigError(
                f"{directory}: {self.tokens:,} live tokens in {len(windows)} windows are too few to"
                f" derive scales from; wait for {_LEAST_TOKENS:,} in {_SPANS}"
            )
        counted = frozenset[str]().union(*(window.names for window in windows))
        self._uncounted = [name for name in origin.observations if name not in counted]
        self._origin = origin
        # Each span holds consecutive windows. If windows were dealt out in turn, parts of one
        # conversation would be in all spans, which would hide how much traffic varies.
        starts = [len(windows) * index // _SPANS for index in range(_SPANS + 1)]
        self._spans = [windows[start:end] for start, end in pairwise(starts)]

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        if name in self._uncounted:
            return self._origin.chunks[name]
        return np.array([sum(window.counts(name) for window in span) for span in self._spans])

    def __iter__(self) -> Iterator[str]:
        return iter(self._origin.observations)

    def __len__(self) -> int:
        return len(self._origin.observations)

    def warnings(self) -> list[str]:
        found = [
            f"scales of activations are for {self.tokens:,} tokens of live traffic, of the model as"
            " it was served; weights are weighed by the samples of the calibration"
        ]
        if self._uncounted:
            found.append(
                f"{len(self._uncounted)} tensors were not counted live and keep the calibration's"
                f" counts: {self._uncounted[0]}{' and others' * (len(self._uncounted) > 1)}"
            )
        return found


def _unweighted(origin: Calibration, recipe: Recipe) -> list[str]:
    """Returns a warning if the recipe's 4-bit weights need mean squares that were not observed."""
    if not recipe.weighs_inputs or origin.mean_squares:
        return []
    return [
        f"{origin.path} has no mean squares of activations, because an earlier release wrote it:"
        " the scales of 4-bit weights minimize the error of the weights, not of the outputs;"
        " calibrate again to minimize the latter"
    ]


def _as_calibrated(checkpoint: Checkpoint, origin: Calibration) -> Checkpoint:
    """Verifies the calibrated checkpoint, and returns it with the calibration's changed weights."""
    origin.manifest.model.require(checkpoint)
    return origin.applied_to(checkpoint)


def _fitted(origin: Calibration, recipe: Recipe) -> dict[str, NDArray[np.float32]]:
    """Returns the weight scales that GPTQ or recover fitted the weights to, which have to stay.

    Returns {} for other algorithms, after which scales can be derived again. SmoothQuant's weights
    suit any recipe, because the model computes what it did before. Raises ConfigError if any other
    algorithm fitted the weights to another recipe.
    """
    algorithm = (origin.manifest.details.get("algorithm") or {}).get("name")
    if algorithm in (None, "smoothquant"):
        return {}
    before = origin.manifest.recipe
    schemes = [(r.weights, r.overrides, r.exclude) for r in (recipe, before)]
    if schemes[0] != schemes[1]:
        raise ConfigError(
            f"{origin.path}: its weights were fitted to recipe {before.name} by {algorithm};"
            f" calibrate again for recipe {recipe.name}"
        )
    if algorithm == "awq":
        return {}
    return origin.weight_scales


def _convergence(
    origin: Calibration, recipe: Recipe, checkpoint: Checkpoint, least: int
) -> Convergence | None:
    """Recomputes convergence for `recipe`.

    Returns None if the calibration did not keep the counts of its sample spans separately.
    """
    path = origin.path / "convergence.json"
    if not path.exists():
        return None
    counts = read_object(path, ArtifactError).get("counts")
    if not isinstance(counts, list) or not all(type(count) is int for count in counts):
        raise ArtifactError(f"{path}: counts is no list of integers; calibrate again")
    chunks, _ = with_fallback(checkpoint.spec, origin.chunks, least)
    if any(len(chunks[name]) != len(counts) for name in list(origin.observations)[:1]):
        return None
    return convergence(chunks, origin.observations, recipe, counts)


def _report_of(origin: Calibration) -> dict[str, Any]:
    path = origin.path / "report.json"
    return read_object(path, ArtifactError, 8 * MAX_JSON_BYTES) if path.exists() else {}


def _facts(old_report: Mapping[str, Any], judged: Outcome | None) -> dict[str, Any]:
    """Returns the origin's facts, with its gate, which was for its recipe, replaced by `judged`."""
    facts = {key: value for key, value in (old_report.get("facts") or {}).items() if key != "gate"}
    return facts | (judged.facts if judged else {})


def _manifest(
    origin: Calibration,
    checkpoint: Checkpoint,
    recipe: Recipe,
    warnings: list[str],
    judged: Outcome | None,
    predicted: dict[str, Any],
) -> Manifest:
    """Returns the origin's manifest, updated with the recipe, its origin and the prediction."""
    before = origin.manifest
    details = {
        **before.details,
        "source": str(checkpoint.path.absolute()),
        "warnings": warnings,
        "rescaled_from": {"identity": before.identity, "recipe": before.recipe.name},
    }
    replaced = (*_MEASURED, "gate", "prediction", "te_state", "runs_weight_only")
    details = {key: value for key, value in details.items() if key not in replaced} | predicted
    if judged is not None:
        details["gate"] = judged.details()
    return Manifest(
        kind="calibration",
        model=before.model,
        recipe=recipe,
        samples=before.samples,
        details=details,
        software=before.software | software("numpy", "numba"),
    )

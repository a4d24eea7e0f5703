"""Verifies a calibration: every scale that its recipe needs is present, positive and finite."""

import math
from pathlib import Path

import numpy as np

from octet.artifacts.calibration import Calibration
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError
from octet.numerics.scaling import Granularity
from verify.checks.findings import Verification

__all__ = ["verify_calibration"]


def verify_calibration(path: Path, manifest: Manifest, found: Verification) -> None:
    """Checks the calibration at `path` and adds to `found`."""
    found.format = f"recipe {manifest.recipe.name}"
    if found.problems:
        return  # the files have changed: `load` would report the same
    try:
        calibration = Calibration.load(path)
        records = calibration.golden.records
    except ArtifactError as error:
        found.problem("files", path.name, str(error))
        return
    for name, scale in calibration.scales.items():
        bad = int(np.count_nonzero(~(np.isfinite(scale) & (scale > 0))))
        if bad:
            found.problem("scales", name, f"{bad} of {scale.size} are not positive and finite")
    for name, shape in _needed(manifest).items():
        known = calibration.scales.get(name)
        if known is None:
            found.problem("names", name, f"missing: recipe {manifest.recipe.name} needs it")
        elif known.shape != shape:
            what = f"has shape {list(known.shape)}, the recipe needs {list(shape)}"
            found.problem("names", name, what)
    for index, record in enumerate(records):
        mass = sum(math.exp(value) for value in record.tops[0].logprobs)
        if not math.isfinite(mass) or mass > 1 + 1e-6:
            what = f"the probabilities of its most likely tokens add up to {mass:.6g}"
            found.problem("files", f"golden.json, record {index}", what)
    for key, observation in calibration.observations.items():
        if key not in calibration.histograms:
            found.problem("names", key, f"no histogram of this {observation.kind}")
    found.notes.append(
        f"{len(calibration.scales)} scales, {len(calibration.observations)} histograms and"
        f" {len(records)} golden records; it holds no weights to compare"
    )


def _needed(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the scales that an export will need."""
    needed: dict[str, tuple[int, ...]] = {}
    for linear in manifest.model.spec.linears():
        schemes = manifest.recipe.scheme_of(linear.name)
        if schemes is None:
            continue
        weights, inputs = schemes
        tiles = Granularity.of(weights.granularity, weights.group_size)
        shape = (linear.out_features, linear.in_features)
        needed[f"{linear.name}.weight_scale"] = tiles.scale_shape(shape)
        if weights.two_level:
            needed[f"{linear.name}.weight_global_scale"] = ()
        if not inputs.dynamic:
            needed[f"{linear.name}.input_scale"] = ()
        elif inputs.two_level:
            needed[f"{linear.name}.input_global_scale"] = ()
    return needed

"""Calibrations with scales of one's own, made without the calibrate stage."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import GoldenRecord, GoldenSet, Top
from octet.artifacts.manifest import Manifest, software
from octet.artifacts.provenance import ModelIdentity
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe


def save_calibration(
    path: Path,
    checkpoint: Checkpoint,
    recipe: Recipe,
    scales: Mapping[str, np.ndarray],
    extra_files: Mapping[str, str | Path] | None = None,
) -> Path:
    """A calibration without histograms, and with one golden record that no model answers so."""
    record = GoldenRecord(
        prompt="a",
        prompt_token_ids=(5,),
        continuation_token_ids=(1,),
        tops=(Top(token_ids=(1, 2), logprobs=(-0.1, -3.0)),),
    )
    golden = GoldenSet(weights_sha256="0", compute_dtype="float32", software={}, records=(record,))
    manifest = Manifest(
        kind="calibration",
        model=ModelIdentity.of(checkpoint),
        recipe=recipe,
        details={"source": str(checkpoint.path)},
        software=software(),
    )
    Calibration.save(path, manifest, {}, {}, scales, golden, extra_files=extra_files)
    return path

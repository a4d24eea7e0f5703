"""Chooses samples to calibrate with and samples to hold out for the golden records."""

from dataclasses import dataclass, field
from typing import Any

from calibrate.samples.source import MINIMUM, Sample, SampleFile, require_enough

__all__ = ["CALIBRATION", "Split", "split_samples"]

CALIBRATION = "calibration samples"  # the source of golden prompts if nothing was held out

_HELD_OUT = 256  # held-out samples that golden prompts are cut from, at most


@dataclass(frozen=True)
class Split:
    """Samples to run and samples to hold out; `facts` about the latter go into the manifest."""

    sha256: str  # of the calibration file
    kind: str  # of the calibration file, such as "JSONL"
    calibration: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    facts: dict[str, Any]
    warnings: tuple[str, ...] = field(default=())


def split_samples(
    file: SampleFile, held_out: SampleFile | None, count: int, *, allow_few: bool
) -> Split:
    """Takes the first `count` of `file`, and holds out `held_out` or else what follows in `file`.

    No more than that is read. If nothing follows, golden prompts come from the calibration samples,
    with a warning. Raises SampleError for too few samples, and for a sample that cannot be read.
    """
    found, empty = file.first(count + (_HELD_OUT if held_out is None else 0))
    chosen = require_enough(file.path, len(found), count, allow_few=allow_few)
    calibration, rest = found[:chosen], found[chosen:]
    warnings = []
    if chosen < MINIMUM:
        warnings.append(f"{chosen} samples are few: {MINIMUM} to 512 are usual")
    if empty:
        warnings.append(f"{file.path.name}: {empty} samples without text were left out")
    sha256, shared = file.sha256, 0
    if held_out is not None:
        (held, _), source, sha256 = held_out.first(_HELD_OUT), "file", held_out.sha256
        seen = {sample.key for sample in calibration}
        shared = sum(sample.key in seen for sample in held)
        if shared:
            warnings.append(f"{shared} held-out samples are also calibration samples")
    elif rest:
        held, source = rest, "rest of the calibration file"
    else:
        held, source = calibration[:_HELD_OUT], CALIBRATION
        shared = len(held)
        warnings.append(
            "no sample is held out: golden prompts are taken from the calibration samples;"
            " give --held-out or a smaller --count"
        )
    facts = {"source": source, "sha256": sha256, "count": len(held), "also_calibrated": shared}
    return Split(file.sha256, file.kind, calibration, held, facts, tuple(warnings))

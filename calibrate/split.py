"""Which texts to calibrate with and which to hold out for the golden records."""

from dataclasses import dataclass, field
from typing import Any

from calibrate.samples import MINIMUM, Sample, SampleFile, require_enough

__all__ = ["Split", "split_samples"]

_HELD_OUT = 256  # held-out samples that golden prompts are cut from, at most


@dataclass(frozen=True)
class Split:
    """Samples to run and samples to hold out; `facts` about the latter go into the manifest."""

    sha256: str  # of the calibration file
    calibration: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    facts: dict[str, Any]
    warnings: tuple[str, ...] = field(default=())


def split_samples(
    file: SampleFile, held_out: SampleFile | None, count: int, *, allow_few: bool
) -> Split:
    """The first `count` of `file`, and `held_out` or else what follows them in `file`.

    If nothing follows, golden prompts come from the calibration samples, with a warning. Raises
    SampleError for too few samples.
    """
    chosen = require_enough(file.path, len(file), count, allow_few=allow_few)
    calibration = file.samples[:chosen]
    warnings = []
    if chosen < count:
        warnings.append(f"{file.path.name} has {chosen} samples, {count} were asked for")
    if chosen < MINIMUM:
        warnings.append(f"{chosen} samples are few: {MINIMUM} to 512 are usual")
    if file.empty:
        warnings.append(f"{file.path.name}: {file.empty} samples without text were left out")
    if held_out is not None:
        rest, source = held_out, "file"
        seen = {sample.text for sample in calibration}
        shared = sum(sample.text in seen for sample in held_out.samples)
        if shared:
            warnings.append(f"{shared} held-out samples are also calibration samples")
    elif file.samples[chosen:]:
        rest, source, shared = file, "rest of the calibration file", 0
    else:
        rest, source, shared = file, "calibration samples", min(chosen, _HELD_OUT)
        warnings.append(
            "no sample is held out: golden prompts are taken from the calibration samples;"
            " give --held-out or a smaller --count"
        )
    texts = rest.samples[chosen:] if source.startswith("rest") else rest.samples
    texts = texts[:_HELD_OUT]
    facts = {
        "source": source,
        "sha256": rest.sha256,
        "count": len(texts),
        "also_calibrated": shared,
    }
    return Split(file.sha256, calibration, texts, facts, tuple(warnings))

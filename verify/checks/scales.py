"""Scales against those of the calibration, to the last bit: what no error of a weight can show.

A static scale of inputs is not in any weight, and the low bits of a weight's scale move no number
by as much as its rounding.
"""

import numpy as np
from numpy.typing import NDArray

from verify.checks.findings import Verification
from verify.checks.names import Names
from verify.checks.original import Original
from verify.reader.checkpoint import Written

__all__ = ["check_calibrated_scales"]

_ULPS = 2.0**-22  # relative: a reciprocal, and back


def check_calibrated_scales(
    written: Written, names: Names, original: Original | None, found: Verification
) -> None:
    """Adds to `found` each scale that is not the calibration's; a note where that is not known."""
    if original is None or original.calibration is None:
        inputs = sum(group.stored.input_scale is not None for group in names.quantized.values())
        if inputs:
            found.notes.append(
                f"{inputs} input scales are positive and finite; their values can be compared"
                " with --calibration"
            )
        return
    known = original.calibration.scales
    for module, group in names.quantized.items():
        stored = group.stored
        inputs_of = "input_global_scale" if stored.global_scale else "input_scale"
        for name, key in (
            (stored.scale, "weight_scale"),
            (stored.global_scale, "weight_global_scale"),
            (stored.input_scale, inputs_of),
        ):
            wanted = known.get(f"{module}.{key}")
            if name is not None and wanted is not None:
                divides = stored.divides and name != stored.scale
                values = written.values(f"{module}.{name}")
                _compare(f"{module}.{name}", values, wanted, divides, found)


def _compare(
    name: str,
    values: NDArray[np.float32],
    wanted: NDArray[np.float32],
    divides: bool,
    found: Verification,
) -> None:
    values, wanted = values.reshape(-1), np.asarray(wanted, np.float32).reshape(-1)
    if values.size != wanted.size:
        return  # of another shape: that has been said
    scales = np.float32(1) / values if divides else values
    same = np.isclose(scales, wanted, rtol=_ULPS if divides else 0, atol=0)
    if same.all():
        return
    first = int(np.argmin(same))
    have, want = float(values[first]), float(wanted[first])
    if np.isclose(1 / scales[first], want, rtol=1e-3):
        way = "multiply" if divides else "divide"
        why = f"it seems to {way}, and this format wants the reciprocal"
    else:
        why = f"calibration has {1 / want if divides else want:.9g}"
    count = int(np.count_nonzero(~same))
    which = "" if values.size == 1 else f"{count} of {values.size}, the first at {first}: "
    found.problem("scales", name, f"{which}{have:.9g}, and {why}")

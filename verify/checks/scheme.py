"""Compares a checkpoint's configuration with its recipe, and its scales with the calibration's.

The configuration covers weights and activations. No tensor shows how activations are rounded at run
time: an engine does what the configuration says.

Scales are compared to the last bit, because the error of a weight cannot show every wrong one: a
static activation scale is not in any weight, and the low bits of a weight's scale change its values
by less than rounding does.
"""

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.manifest import Manifest
from octet.model.spec import ModelSpec
from octet.recipe import TensorScheme
from verify.checks.findings import Verification
from verify.checks.names import Names
from verify.checks.original import Original
from verify.reader.checkpoint import Written
from verify.reader.scheme import Inputs, Stored

__all__ = ["check_calibrated_scales", "check_recipe"]


def check_recipe(
    written: Written, names: Names, manifest: Manifest, spec: ModelSpec, found: Verification
) -> None:
    """Adds to `found` each linear whose storage or declared GEMM differs from the recipe.

    A cause that many linears share is reported for the first, with their number.
    """
    if written.quantization is None:
        found.problem("configuration", "config.json", "has no quantization_config")
        return
    reported = {problem.where for problem in found.problems}
    wrong: dict[str, list[str]] = {}
    for linear in spec.linears():
        if linear.name in reported:
            continue
        scheme = manifest.recipe.scheme_of(linear.name)
        group = names.quantized.get(linear.name)
        declared = written.quantization.group_of(linear.name)
        what = ""
        if scheme is None and group is not None:
            what = f"quantized, and recipe {manifest.recipe.name} leaves it in full precision"
        elif scheme is not None and declared is None:
            weights = scheme[0]
            what = f"not quantized, and recipe {manifest.recipe.name} has {_described(weights)}"
        elif scheme is not None and group is not None:
            what = _difference(group.stored, *scheme, manifest.recipe.name)
        if what:
            wrong.setdefault(what, []).append(linear.name)
    for what, linears in wrong.items():
        rest = f"; so are {len(linears) - 1} others" if len(linears) > 1 else ""
        found.problem("configuration", linears[0], what + rest)


def _difference(stored: Stored, weights: TensorScheme, inputs: TensorScheme, recipe: str) -> str:
    """Describes how `stored` differs from the recipe; "" if it does not.

    Tiles are not compared, because the check of names reports wrong shapes of scales.
    """
    kind = (stored.elements, stored.granularity, stored.scale_format)
    if kind != (weights.format, weights.granularity, weights.scale_format):
        return (
            f"stored as {stored.elements} by {stored.granularity}, {stored.scale_format} scales,"
            f" and recipe {recipe} has {_described(weights)}"
        )
    wanted = Inputs(
        inputs.format, inputs.granularity, inputs.dynamic, inputs.scale_format, inputs.group_size
    )
    if stored.inputs == wanted:
        return ""
    if stored.inputs is None:
        return f"its inputs are not rounded (weight-only), and recipe {recipe} has them {wanted}"
    return f"its inputs are rounded to {stored.inputs}, and recipe {recipe} has {wanted}"


def _described(scheme: TensorScheme) -> str:
    return f"{scheme.format} weights by {scheme.granularity}, {scheme.scale_format} scales"


_ULPS = 2.0**-22  # relative: the error of a reciprocal and back


def check_calibrated_scales(
    written: Written, names: Names, original: Original | None, found: Verification
) -> None:
    """Adds to `found` each scale that differs from the calibration's; a note without one."""
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
        return  # another shape, which the check of names has reported
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

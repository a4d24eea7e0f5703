"""Whether a checkpoint's configuration says what its recipe says: of weights, and of inputs.

No tensor shows how inputs are rounded at run time: an engine does what the configuration says.
"""

from octet.artifacts.manifest import Manifest
from octet.model.spec import ModelSpec
from octet.recipe import TensorScheme
from verify.checks.findings import Verification
from verify.checks.names import Names
from verify.reader.checkpoint import Written
from verify.reader.scheme import Inputs, Stored

__all__ = ["check_recipe"]


def check_recipe(
    written: Written, names: Names, manifest: Manifest, spec: ModelSpec, found: Verification
) -> None:
    """Adds to `found` each linear that is quantized, or that an engine would multiply, otherwise.

    A cause that many linears share is told of the first, with their number.
    """
    if written.quantization is None:
        found.problem("configuration", "config.json", "has no quantization_config")
        return
    told = {problem.where for problem in found.problems}
    wrong: dict[str, list[str]] = {}
    for linear in spec.linears():
        if linear.name in told:
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
    """What is not the recipe's; of a weight whose tile is wrong, the names have said it."""
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

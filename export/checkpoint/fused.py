"""Groups linears that an engine fuses into one: q/k/v, gate/up, and all experts of a layer.

A fused group must have one scheme and, where a scale covers a whole tensor, one scale: vLLM applies
the largest of a group's NVFP4 global scales to the whole group and does not quantize again.
Tensor parallelism splits these groups over GPUs, which only some sizes allow.
"""

from collections.abc import Iterable

from export.source import Source
from octet.errors import ArtifactError, UnsupportedError
from octet.model.spec import Linear
from octet.model.tensor_parallel import DEGREES, groups_by_input, problem_of
from octet.recipe import TensorScheme

__all__ = [
    "check_fused",
    "check_tensor_parallel",
    "describe",
    "groups_by_kernel",
]

Schemes = tuple[TensorScheme, TensorScheme] | None


def check_tensor_parallel(source: Source, degree: int) -> None:
    """Raises UnsupportedError if the model cannot be split over `degree` GPUs.

    The message names the first layer that cannot be split, and the degrees that would do.
    """
    problem = problem_of(source.spec, source.recipe, degree)
    if problem is None:
        return
    works = [str(x) for x in DEGREES if problem_of(source.spec, source.recipe, x) is None]
    advice = f"--tp {' or '.join(works)} would do" if works else "use recipe fp8"
    what = f"tensor parallel {degree}" if degree != 1 else f"recipe {source.recipe.name}"
    raise UnsupportedError(f"{what}: {problem}; {advice}")


def groups_by_kernel(linears: Iterable[Linear]) -> list[list[Linear]]:
    """Groups as `groups_by_input`, but puts all linears of a layer's experts into one group."""
    found: dict[str, list[Linear]] = {}
    for linear in linears:
        experts, inside, _ = linear.name.partition(".experts.")
        found.setdefault(experts if inside else linear.input, []).append(linear)
    return list(found.values())


def check_fused(source: Source) -> None:
    """Raises an error if the linears of a fused group do not match.

    UnsupportedError names two linears of one kernel whose schemes differ; ArtifactError names two
    that should share a scale and do not.
    """
    for group in groups_by_kernel(source.spec.linears()):
        first = group[0]
        for other in group[1:]:
            if _stored(source.schemes(other)) != _stored(source.schemes(first)):
                raise UnsupportedError(
                    f"recipe {source.recipe.name} gives {first.name} {describe(source, first)} and"
                    f" {other.name} {describe(source, other)}: engines run them as one; give both"
                    " the same"
                )
    for group in groups_by_input(source.spec.linears()):
        for other in group[1:]:
            for kind in _shared(source.schemes(other)):
                _check_equal(source, kind, group[0], other)


def describe(source: Source, linear: Linear) -> str:
    """Describes a scheme, as "fp8 channel weights with token inputs" or "full precision"."""
    schemes = source.schemes(linear)
    if schemes is None:
        return "full precision"
    weights, inputs = schemes
    text = f"{weights.kind} {weights.granularity} weights"
    other = "" if inputs.kind == weights.kind else f"{inputs.kind} "
    return f"{text} with {other}{inputs.granularity} inputs"


def _stored(schemes: Schemes) -> tuple[object, ...] | None:
    """Returns the fields of the schemes that a checkpoint stores: not how scales were chosen."""
    if schemes is None:
        return None
    return tuple((x.kind, x.granularity, x.dynamic, x.group_size) for x in schemes)


def _shared(schemes: Schemes) -> list[str]:
    """Lists the kinds of scale of which a fused kernel has only one."""
    if schemes is None:
        return []
    weights, inputs = schemes
    kinds = ["weight_scale"] if weights.granularity == "tensor" else []
    kinds += ["weight_global_scale"] if weights.two_level else []
    kinds += [] if inputs.dynamic else ["input_scale"]
    return kinds + (["input_global_scale"] if inputs.dynamic and inputs.two_level else [])


def _check_equal(source: Source, kind: str, first: Linear, other: Linear) -> None:
    scales = source.calibration.scales
    one, two = (scales[f"{linear.name}.{kind}"] for linear in (first, other))
    if one != two:
        raise ArtifactError(
            f"{source.calibration.path / 'scales.safetensors'}: {kind} is {float(one):.6g} of"
            f" {first.name} and {float(two):.6g} of {other.name}, which engines run as one;"
            " calibrate again"
        )

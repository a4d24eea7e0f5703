"""Groups linears that an engine fuses into one: q/k/v, gate/up, and all experts of a layer.

A fused group must have one scheme and, where a scale covers a whole tensor, one scale: vLLM applies
the largest of a group's NVFP4 global scales to the whole group and does not quantize again.
Tensor parallelism splits these groups over GPUs, which only some sizes allow.
"""

from collections.abc import Iterable, Iterator

from export.source import Source
from octet.errors import ArtifactError, UnsupportedError
from octet.model.spec import Linear
from octet.recipe import BLOCK, TensorScheme

__all__ = [
    "check_fused",
    "check_tensor_parallel",
    "describe",
    "groups_by_input",
    "groups_by_kernel",
]

_BY_COLUMNS = ("o_proj", "down_proj", "w2")
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
_DEGREES = (1, 2, 4, 8, 16, 32)


def check_tensor_parallel(source: Source, degree: int) -> None:
    """Raises UnsupportedError if the model cannot be split over `degree` GPUs.

    The message names the first layer that cannot be split, and the degrees that would do.
    """
    problem = _problem(source, degree)
    if problem is None:
        return
    works = [str(other) for other in _DEGREES if _problem(source, other) is None]
    advice = f"--tp {' or '.join(works)} would do" if works else "use recipe fp8"
    what = f"tensor parallel {degree}" if degree != 1 else f"recipe {source.recipe.name}"
    raise UnsupportedError(f"{what}: {problem}; {advice}")


def _problem(source: Source, degree: int) -> str | None:
    return next(_problems(source, degree), None)


def _problems(source: Source, degree: int) -> Iterator[str]:
    spec = source.spec
    if degree < 1:
        yield "is no number of GPUs"
        return
    if spec.heads % degree:
        yield f"{spec.heads} attention heads do not divide"
    if max(spec.kv_heads, degree) % min(spec.kv_heads, degree):
        yield f"{spec.kv_heads} KV heads do not divide, nor are they a divisor of it"
    for group in groups_by_input(spec.linears()):
        for linear in group:
            yield from _of_linear(source, linear, degree)
        schemes = source.schemes(group[0])
        if schemes is not None and schemes[0].granularity == "block":
            yield from _of_blocks(source, group, degree)


def _of_linear(source: Source, linear: Linear, degree: int) -> Iterator[str]:
    """Yields problems of a shard that does not have whole rows, columns and groups of inputs."""
    for part in _rows(source, linear, degree):
        if part is None:
            yield f"{linear.name} has {linear.out_features} outputs, which do not divide"
    columns = _columns(linear, degree)
    if columns is None:
        yield f"{linear.name} has {linear.in_features} inputs, which do not divide"
        return
    for scheme in source.schemes(linear) or ():
        if scheme.group_size is not None and columns % scheme.group_size:
            yield (
                f"{linear.name} has {columns} inputs{_each(degree)}, no multiple of"
                f" {scheme.group_size}, the group of {scheme.kind} scales"
            )


def _of_blocks(source: Source, group: list[Linear], degree: int) -> Iterator[str]:
    """Yields problems of parts that do not end at the edge of a block.

    Parts that are joined, or cut from a whole, must end there; the last of joined parts need not.
    """
    parts = [(linear, size) for linear in group for size in _rows(source, linear, degree) if size]
    experts = ".experts." in group[0].name
    name = group[0].name.rpartition(".")[2]
    if degree == 1 and not (experts and name not in _BY_COLUMNS):
        parts = parts[:-1]
    elif name in _BY_COLUMNS:
        parts = []  # rows are not split
    for linear, size in parts:
        if size % BLOCK:
            yield (
                f"{linear.name} has {size} outputs{_each(degree)}, no multiple of {BLOCK}, the"
                " block of its scales"
            )


def _rows(source: Source, linear: Linear, degree: int) -> list[int | None]:
    """Returns the outputs on one GPU, for each part stored in the linear; None if not divisible."""
    spec, name = source.spec, linear.name.rpartition(".")[2]
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if name in _BY_COLUMNS:
        return [linear.out_features]
    if name in ("k_proj", "v_proj"):
        return [_divide(linear.out_features, min(degree, spec.kv_heads))]
    if name == "qkv_proj" and linear.out_features == q + 2 * kv:
        copies = min(degree, spec.kv_heads)
        return [_divide(q, degree), _divide(kv, copies), _divide(kv, copies)]
    if name == "gate_up_proj":
        return [_divide(linear.out_features // 2, degree)] * 2
    return [_divide(linear.out_features, degree)]


def _columns(linear: Linear, degree: int) -> int | None:
    """Returns the inputs on one GPU; None if not divisible.

    A linear of unknown name is treated as if both rows and columns were split.
    """
    if linear.name.rpartition(".")[2] in (*_BY_ROWS, "w1", "w3"):
        return linear.in_features
    return _divide(linear.in_features, degree)


def _divide(size: int, parts: int) -> int | None:
    return None if size % parts else size // parts


def _each(degree: int) -> str:
    return " on each GPU" if degree > 1 else ""


Schemes = tuple[TensorScheme, TensorScheme] | None


def groups_by_input(linears: Iterable[Linear]) -> list[list[Linear]]:
    """Groups linears by the activations they read: q/k/v, gate/up, and each other linear alone."""
    found: dict[str, list[Linear]] = {}
    for linear in linears:
        found.setdefault(linear.input, []).append(linear)
    return list(found.values())


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

"""Splits the linears of a model over GPUs as vLLM, SGLang and TensorRT-LLM do.

q, k, v, gate and up are split by rows (outputs), o and down by columns (inputs). With fewer KV
heads than GPUs, each KV head is on several of them.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from octet.model.spec import Linear, ModelSpec
from octet.recipe import BLOCK, Recipe, TensorScheme

__all__ = ["DEGREES", "Schemes", "columns_of", "groups_by_input", "problem_of", "rows_of"]

Schemes = tuple[TensorScheme, TensorScheme] | None  # None: full precision
DEGREES = (1, 2, 4, 8, 16, 32)
_BY_COLUMNS = ("o_proj", "down_proj", "w2")
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")


def problem_of(spec: ModelSpec, recipe: Recipe | None, degree: int) -> str | None:
    """Returns why `degree` GPUs cannot share the model, naming the first such layer.

    None if they can. `recipe` is None for the unquantized model.
    """
    return next(_problems(spec, recipe, degree), None)


def groups_by_input(linears: Iterable[Linear]) -> list[list[Linear]]:
    """Groups linears by the activations they read: q/k/v, gate/up, and each other linear alone."""
    found: dict[str, list[Linear]] = {}
    for linear in linears:
        found.setdefault(linear.input, []).append(linear)
    return list(found.values())


def rows_of(spec: ModelSpec, linear: Linear, degree: int) -> list[int | None]:
    """Returns the outputs of one GPU, for each part such as q, k and v; None if not divisible."""
    name = linear.name.rpartition(".")[2]
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


def columns_of(linear: Linear, degree: int) -> int | None:
    """Returns the inputs on one GPU; None if not divisible.

    A linear of unknown name is treated as if both rows and columns were split.
    """
    if linear.name.rpartition(".")[2] in (*_BY_ROWS, "w1", "w3"):
        return linear.in_features
    return _divide(linear.in_features, degree)


def _problems(spec: ModelSpec, recipe: Recipe | None, degree: int) -> Iterator[str]:
    if degree < 1:
        yield "is no number of GPUs"
        return
    if spec.heads % degree:
        yield f"{spec.heads} attention heads do not divide"
    if max(spec.kv_heads, degree) % min(spec.kv_heads, degree):
        yield f"{spec.kv_heads} KV heads do not divide, nor are they a divisor of it"
    for group, schemes in _groups(spec, recipe):
        for linear in group:
            yield from _linear_problems(spec, schemes, linear, degree)
        if schemes is not None and schemes[0].granularity == "block":
            yield from _block_problems(spec, group, degree)


@lru_cache(maxsize=8)
def _groups(spec: ModelSpec, recipe: Recipe | None) -> list[tuple[list[Linear], Schemes]]:
    """Returns the groups by input with their schemes; of equal groups, only the first."""
    found: dict[object, tuple[list[Linear], Schemes]] = {}
    for group in groups_by_input(spec.linears()):
        schemes = None if recipe is None else recipe.scheme_of(group[0].name)
        names = [(x.name.rpartition(".")[2], ".experts." in x.name) for x in group]
        sizes = [(x.out_features, x.in_features) for x in group]
        found.setdefault((*names, *sizes, schemes), (group, schemes))
    return list(found.values())


def _linear_problems(
    spec: ModelSpec, schemes: Schemes, linear: Linear, degree: int
) -> Iterator[str]:
    """Yields why one GPU's shard of a linear would not have whole rows, columns and groups."""
    for part in rows_of(spec, linear, degree):
        if part is None:
            yield f"{linear.name} has {linear.out_features} outputs, which do not divide"
    columns = columns_of(linear, degree)
    if columns is None:
        yield f"{linear.name} has {linear.in_features} inputs, which do not divide"
        return
    for scheme in schemes or ():
        if scheme.group_size is not None and columns % scheme.group_size:
            yield (
                f"{linear.name} has {columns} inputs{_per_gpu(degree)}, no multiple of"
                f" {scheme.group_size}, the group of {scheme.kind} scales"
            )


def _block_problems(spec: ModelSpec, group: list[Linear], degree: int) -> Iterator[str]:
    """Yields the parts whose rows do not end at the edge of a block of scales.

    They must if a part is joined with others, or is one GPU's shard; the last of joined parts need
    not.
    """
    parts = [(linear, size) for linear in group for size in rows_of(spec, linear, degree) if size]
    experts = ".experts." in group[0].name
    name = group[0].name.rpartition(".")[2]
    if degree == 1 and not (experts and name not in _BY_COLUMNS):
        parts = parts[:-1]
    elif name in _BY_COLUMNS:
        parts = []  # rows are not split
    for linear, size in parts:
        if size % BLOCK:
            yield (
                f"{linear.name} has {size} outputs{_per_gpu(degree)}, no multiple of {BLOCK}, the"
                " block of its scales"
            )


def _divide(size: int, parts: int) -> int | None:
    """Returns `size` / `parts`; None if not divisible."""
    return None if size % parts else size // parts


def _per_gpu(degree: int) -> str:
    return " on each GPU" if degree > 1 else ""

"""Finds tensors that an engine would miss, ignore or use wrongly, by their names.

Follows what vLLM 0.24 to 0.32 creates and loads. Its weight loader silently drops a cache scale
whose name it does not map, takes the largest of the NVFP4 global scales that it fuses, and uses 1.0
for a missing cache scale.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from verify.checks.findings import Verification
from verify.reader.checkpoint import Written
from verify.reader.scheme import Group, Quantization

__all__ = ["FUSED", "Names", "cache_scale_of", "check_names"]

FUSED = "engines fuse them and take the largest for all"
_SCALE = re.compile(
    r"(scale|scales|scale_inv|scale_2|zero_point|_packed|blocks|_shape|g_idx|amax|_quantizer\..*)$"
)
# Names that vLLM maps to scales of attention layers, by dialect (weight_utils.py, base_config.py).
_CACHE = re.compile(r"^(.*\.self_attn)\.(?:[kv]_proj\.)?([kv])_scale$|^(.*\.self_attn)\.(q)_scale$")
_CACHE_FP8 = re.compile(r"^(.*\.self_attn)\.([qkv])_proj\.output_scale$")
# Matches every name of a cache scale, including those that no engine maps.
_CACHE_LIKE = re.compile(
    r"(^|[._])(k|v|q|kv|key|value|cache)_?(cache_)?(scale|scale_inv)$|\.[qkv]_proj\.output_scale$"
)


@dataclass
class Names:
    """Tensors and modules sorted by name: how each is stored, and which weights can be read."""

    quantized: dict[str, Group]  # modules whose tensors are all there
    plain: list[str]  # tensors to compare bit for bit
    cache: dict[str, dict[str, str]]  # attention module -> "q", "k", "v" -> tensor
    linears: tuple[str, ...]


def check_names(
    written: Written,
    originals: Collection[str],
    linears: Mapping[str, tuple[int, int]],
    fused: Iterable[tuple[str, ...]],
    found: Verification,
    *,
    ours: bool = False,
) -> Names:
    """Sorts the tensors of `written`, and adds the problems of their names to `found`.

    `originals` are the names of the tensors before quantization. `linears` maps each module that an
    engine makes a linear layer of to its [N, K]. `fused` are the groups of modules that it joins.
    If `ours`, scales have to be in a dtype that Octet writes; engines convert those of others.
    """
    names = Names({}, [], {}, tuple(linears))
    expected: set[str] = set()
    quantization = written.quantization
    _check_index(written, found)
    for module, shape in linears.items():
        group = quantization.group_of(module) if quantization else None
        if group is None:
            expected |= _unquantized(written, quantization, module, found)
            names.plain.append(f"{module}.weight")
        elif _complete(written, module, shape, group, found, expected, ours):
            names.quantized[module] = group
    expected |= set(names.plain)
    weights = {f"{module}.weight" for module in linears}
    for name in originals:
        if name in weights:
            continue
        expected.add(name)
        names.plain.append(name)
    _leftovers(written, names, expected, found)
    if quantization is not None:
        modules = {name.rpartition(".")[0] for name in originals} | {*linears}
        _check_groups(quantization, linears, modules, found)
    _check_fused(written, names, fused, found)
    return names


def _check_index(written: Written, found: Verification) -> None:
    for name in written.lost:
        found.problem("names", name, "the index lists it, no shard holds it")
    for name in written.unlisted:
        found.problem("names", name, "a shard holds it, the index does not list it")


def _unquantized(
    written: Written, quantization: Quantization | None, module: str, found: Verification
) -> set[str]:
    """Checks that a module which the configuration does not quantize is not quantized.

    Returns the names of its tensors that only a quantized module has.
    """
    extra = [
        name
        for name in written.names
        if name.startswith(f"{module}.") and _SCALE.search(name) and not _CACHE_LIKE.search(name)
    ]
    dtype = written.dtype(f"{module}.weight") if f"{module}.weight" in written else None
    if extra or dtype in ("U8", "F8_E4M3"):
        ignored = quantization is not None and quantization.ignores(module)
        why = "ignore lists it" if ignored else "no config group matches it"
        stored = f"stored as {dtype}" if dtype in ("U8", "F8_E4M3") else f"has {extra[0]}"
        found.problem(
            "configuration",
            module,
            f"{stored}, and {why}: engines would read its codes as plain weights",
        )
    return set(extra)


def _complete(
    written: Written,
    module: str,
    shape: tuple[int, int],
    group: Group,
    found: Verification,
    expected: set[str],
    ours: bool,
) -> bool:
    """Checks that a quantized module has all its tensors, in a dtype and shape that load."""
    stored = group.stored
    before = len(found.problems)
    expected |= {f"{module}.{name}" for name in stored.tensors}
    weight = f"{module}.{stored.weight}"
    wanted = "U8" if stored.packed else "F8_E4M3"
    plain = f"{module}.weight"
    if plain in written and written.dtype(plain) in ("BF16", "F16", "F32"):
        dtype = written.dtype(plain)
        expected.add(plain)
        missing = f"{module}.{stored.scale}" not in written
        advice = "; add it to the ignore list, or quantize it" if missing else ""
        found.problem(
            "configuration",
            plain,
            f"stored as {dtype}, not quantized, and group {group.name} says {stored.label}{advice}",
        )
        return False
    for name in stored.tensors:
        if f"{module}.{name}" not in written:
            found.problem("names", f"{module}.{name}", f"missing: {stored.label} needs it")
    if weight in written:
        _check_tensor(written, weight, (wanted,), (stored.weight_shape(*shape),), found)
    scale = f"{module}.{stored.scale}"
    if scale in written:
        shapes = stored.scale_shapes(*shape)
        dtypes = stored.scale_dtypes
        if (
            ours
        ):  # blocks of a checkpoint that was in FP8 are copied, with BF16 scales if it has them
            dtypes = ("F32", "BF16") if stored.granularity == "block" else dtypes[:1]
        _check_tensor(written, scale, dtypes, shapes, found)
    scalars = [name for name in (stored.global_scale, stored.input_scale) if name is not None]
    for name in scalars:
        if f"{module}.{name}" in written:
            kinds = ("F32",) if ours else ("F32", "BF16", "F16")
            _check_tensor(written, f"{module}.{name}", kinds, ((), (1,)), found)
    if len(found.problems) == before:
        for name in (stored.scale, *scalars):
            _check_positive(written, f"{module}.{name}", found)
    return len(found.problems) == before


def _check_tensor(
    written: Written,
    name: str,
    dtypes: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    found: Verification,
) -> None:
    dtype, shape = written.dtype(name), written.shape(name)
    if dtype not in dtypes:
        found.problem("names", name, f"stored as {dtype}, and should be {' or '.join(dtypes)}")
    if shape not in shapes:
        turned = "; it is transposed" if shape[::-1] in shapes and len(shape) == 2 else ""
        wanted = " or ".join(str(list(one)) for one in shapes)
        found.problem("names", name, f"has shape {list(shape)}, and should be {wanted}{turned}")


def _check_positive(written: Written, name: str, found: Verification) -> None:
    values = written.values(name)
    nans = int(np.count_nonzero(~np.isfinite(values)))
    zeros, negative = int(np.count_nonzero(values == 0)), int(np.count_nonzero(values < 0))
    if written.dtype(name) == "F8_E4M3":
        zeros = 0  # the scale of a group of zeros; the check of the numbers confirms it
    for count, what in ((nans, "not finite"), (zeros, "zero"), (negative, "negative")):
        if count:
            found.problem("scales", name, f"{count} of {values.size} scales are {what}")


def _leftovers(written: Written, names: Names, expected: set[str], found: Verification) -> None:
    """Assigns cache scales to their attention module, and reports tensors that no engine reads."""
    dialect = written.quantization.dialect if written.quantization else None
    for name in written.names:
        if name in expected:
            continue
        known = cache_scale_of(name, dialect)
        if known is not None:
            attention, kind = known
            names.cache.setdefault(attention, {})[kind] = name
            _check_tensor(written, name, ("F32", "BF16", "F16"), ((), (1,)), found)
            _check_positive(written, name, found)
            if written.quantization is None:
                found.problem("names", name, "the model is not quantized: no engine reads it")
        elif name.endswith("rotary_emb.inv_freq"):
            continue  # written by old transformers releases; engines skip it
        elif name == "lm_head.weight":
            found.notes.append("lm_head.weight is there beside tied embeddings; engines skip it")
        elif _CACHE_LIKE.search(name):
            found.problem("names", name, "no engine maps this name to a cache scale: it is dropped")
        else:
            found.problem("names", name, f"no engine reads it{_hint(name, names, expected)}")


def cache_scale_of(name: str, dialect: str | None) -> tuple[str, str] | None:
    """Returns the attention module and "k", "v" or "q" that an engine maps a name to, if any."""
    match = _CACHE.match(name) or (_CACHE_FP8.match(name) if dialect == "fp8" else None)
    if match is None:
        return None
    attention, kind = [part for part in match.groups() if part is not None]
    return attention, kind


def _hint(name: str, names: Names, expected: set[str]) -> str:
    module = name.rpartition(".")[0]
    if module in names.linears:
        waited = sorted(
            other for other in expected if other.startswith(f"{module}.") and other != name
        )
        return f"; of {module} it reads {', '.join(one.rpartition('.')[2] for one in waited)}"
    return ""


def _check_groups(
    quantization: Quantization,
    linears: Collection[str],
    modules: Collection[str],
    found: Verification,
) -> None:
    """Reports targets and exceptions of the configuration that match nothing.

    `modules` are all modules, linear or not.
    """
    for group in quantization.groups:
        for target in group.targets:
            if target == "Linear":
                used = any(quantization.group_of(module) is group for module in linears)
            else:
                used = any(quantization.matches(target, module) for module in linears)
            if not used:
                where = f"config group {group.name}"
                found.problem("configuration", where, f"target '{target}' matches no module")
    for pattern in quantization.ignore:
        # Tied embeddings have no head, and patterns are often written for a family of models.
        if "lm_head" in pattern or pattern.startswith("re:") or "*" in pattern:
            continue
        if not any(quantization.matches(pattern, module) for module in modules):
            found.problem("configuration", "ignore", f"'{pattern}' matches no module")


def _check_fused(
    written: Written, names: Names, fused: Iterable[tuple[str, ...]], found: Verification
) -> None:
    """Checks that fused modules are quantized in the same way, with equal scalar scales."""
    quantization = written.quantization
    if quantization is None:
        return
    reported = {problem.where for problem in found.problems}
    for modules in fused:
        if reported & set(modules):
            continue  # one cause is reported once
        groups = {module: quantization.group_of(module) for module in modules}
        if len({None if group is None else group.stored for group in groups.values()}) > 1:
            odd = next(module for module in modules if groups[module] != groups[modules[0]])
            found.problem(
                "configuration", odd, f"stored in another way than {modules[0]}: engines fuse them"
            )
            continue
        group = groups[modules[0]]
        if group is None or not all(module in names.quantized for module in modules):
            continue
        stored = group.stored
        for name in (stored.global_scale, stored.input_scale):
            if name is None:
                continue
            values = {
                module: float(written.values(f"{module}.{name}").reshape(-1)[0])
                for module in modules
            }
            odd_one = next((m for m, v in values.items() if v != values[modules[0]]), None)
            if odd_one is not None:
                found.problem(
                    "scales",
                    f"{odd_one}.{name}",
                    f"{values[odd_one]:.6g}, while {modules[0]} has {values[modules[0]]:.6g}:"
                    f" {FUSED}",
                )

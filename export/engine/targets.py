"""Checks which formats a GPU supports, and which GPUs each builder compiles for.

Everything here is decided from names, before a graph is built or parsed.
"""

from collections.abc import Iterable, Sequence

from export.engine.library import RTX, RTX_TARGETS, Gpu, Name
from export.source import Source
from octet.errors import UnsupportedError, nearest
from octet.recipe import SchemeKind

__all__ = ["capability", "check_names", "check_recipe_on", "kinds_of", "resolve_targets"]

_KNOWN = (*RTX_TARGETS, "sm90", "sm100", "sm103", "sm110")
_RTX_FP8 = tuple(target for target in RTX_TARGETS if int(target.removeprefix("sm")) >= 89)
_DEFAULTS = ("sm89", "sm120")  # TensorRT-RTX's targets on a machine without a GPU

# The lowest compute capability, times ten, whose GEMMs take that format.
_NEEDS: dict[SchemeKind, int] = {"fp8": 89, "mxfp8": 100, "nvfp4": 100, "mxfp4": 100}
_CALLED: dict[SchemeKind, str] = {"fp8": "FP8", "mxfp8": "MXFP8", "nvfp4": "FP4"}


def capability(target: str) -> str:
    """Formats a target as a compute capability, such as "8.9" for "sm89"."""
    digits = target.removeprefix("sm")
    return f"{digits[:-1]}.{digits[-1]}"


def check_names(targets: Iterable[str]) -> list[str]:
    """Returns the targets in lower case, each once; empty ones are left out.

    Raises UnsupportedError if none is left, and for a target without FP8, which every recipe needs.
    """
    stripped = (target.strip().lower() for target in targets)
    names = list(dict.fromkeys(name for name in stripped if name))
    if not names:
        raise UnsupportedError(
            "--target names no GPU; leave it out, or give names such as sm89,sm120"
        )
    for name in names:
        if name in _KNOWN and not _supports(name, "fp8"):
            raise UnsupportedError(
                f"target {name}: compute capability {capability(name)} has no FP8, which begins"
                f" with 8.9; {RTX} builds FP8 for {', '.join(_RTX_FP8)}"
            )
    return names


def resolve_targets(
    name: Name, wanted: Sequence[str] | None, gpu: Gpu | None, kinds: Iterable[SchemeKind]
) -> list[str]:
    """Returns the targets that the builder `name` compiles for: `wanted`, or else this GPU's.

    Without a GPU, TensorRT-RTX compiles for those of sm89 and sm120 that support the formats
    `kinds`. Raises UnsupportedError for a target that is unknown, or that this builder lacks.
    """
    if name != RTX:
        assert gpu is not None
        if wanted is not None and list(wanted) != [gpu.target]:
            raise UnsupportedError(
                f"target {', '.join(wanted)}: {name} builds for the GPU that is here ({gpu.name},"
                f" {gpu.target}); leave --target out, or take --builder tensorrt-rtx"
            )
        return [gpu.target]
    if wanted is None:
        if gpu is not None:
            wanted = [gpu.target]
        else:
            wanted = [item for item in _DEFAULTS if all(_supports(item, kind) for kind in kinds)]
    for target in wanted:
        if target not in _KNOWN:
            raise UnsupportedError(f"{RTX}: unknown target '{target}'{nearest(target, _RTX_FP8)}")
        if target not in RTX_TARGETS:
            raise UnsupportedError(
                f"target {target}: {RTX} does not run on compute capability {capability(target)};"
                f" it builds for {', '.join(_RTX_FP8)}; for {target}, build on such a GPU with"
                " TensorRT (--builder tensorrt)"
            )
    return list(wanted)


def check_recipe_on(name: Name, targets: Sequence[str], gpu: Gpu | None, source: Source) -> None:
    """Raises UnsupportedError for a target that cannot run the recipe's GEMMs.

    The message names what would work.
    """
    for kind in kinds_of(source):
        for target in targets:
            who = f"this GPU ({gpu.name})" if gpu and gpu.target == target else f"target {target}"
            why = _why_not(name, kind, target, who)
            if why is not None:
                recipe = source.recipe.name
                raise UnsupportedError(f"recipe {recipe} {why}; {_what_runs(target)}")


def _why_not(name: Name, kind: SchemeKind, target: str, who: str) -> str | None:
    """Explains why GEMMs of that kind do not run in 8 or 4 bits; returns None if they do."""
    if kind == "mxfp4":
        return "has MXFP4, and TensorRT has no operator that rounds inputs to it"
    if kind == "mxfp8" and name == RTX:
        return (
            f"has MXFP8, which {RTX} takes but multiplies in FP16 after decoding it in every step"
        )
    if _supports(target, kind):
        return None
    where = {
        "fp8": ", such as --builder tensorrt-rtx --target sm89",
        "nvfp4": ", such as --builder tensorrt-rtx --target sm120",
        "mxfp8": ", with --builder tensorrt there (not tried)",
    }[kind]
    return (
        f"needs {_CALLED[kind]}, which {who} with compute capability {capability(target)} does not"
        f" have: it begins with {_NEEDS[kind] // 10}.{_NEEDS[kind] % 10}{where}"
    )


def _what_runs(target: str) -> str:
    """Names the recipes that run on a target, for a message."""
    if not _supports(target, "fp8"):
        return f"no recipe runs on {target}"
    if not _supports(target, "nvfp4"):
        return f"the recipes fp8, fp8-static and fp8-block run on {target}"
    return f"the recipes fp8, fp8-static, fp8-block and nvfp4 run on {target}"


def kinds_of(source: Source) -> list[SchemeKind]:
    """Lists the formats of the linears that the recipe quantizes."""
    linears = source.quantized_linears().values()
    return sorted({scheme.kind for item in linears for scheme in source.schemes(item) or ()})


def _supports(target: str, kind: SchemeKind) -> bool:
    """Returns whether a target's tensor cores take a format."""
    return int(target.removeprefix("sm")) >= _NEEDS[kind]

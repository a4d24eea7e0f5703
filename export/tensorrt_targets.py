"""Which GPUs hold which formats, and for which of them each builder compiles.

Everything here is decided from names, before a graph is built or parsed.
"""

from collections.abc import Iterable, Sequence

from export.source import Source
from export.tensorrt_device import Gpu
from export.tensorrt_library import RTX, RTX_TARGETS, Name
from octet.errors import UnsupportedError, nearest
from octet.recipe import SchemeKind

__all__ = ["capability", "check_names", "check_recipe_on", "kinds_of", "resolve_targets"]

_ALL = (*RTX_TARGETS, "sm90", "sm100", "sm103", "sm110")
_DEFAULTS = ("sm89", "sm120")  # of TensorRT-RTX on a machine without a GPU

# The least compute capability, times ten, whose products take that format.
_NEEDS: dict[SchemeKind, int] = {"fp8": 89, "mxfp8": 100, "nvfp4": 100, "mxfp4": 100}
_CALLED: dict[SchemeKind, str] = {"fp8": "FP8", "mxfp8": "MXFP8", "nvfp4": "FP4", "mxfp4": "FP4"}


def capability(target: str) -> str:
    """Such as "8.9" for "sm89"."""
    digits = target.removeprefix("sm")
    return f"{digits[:-1]}.{digits[-1]}"


def check_names(targets: Iterable[str]) -> list[str]:
    """The targets in lower case, each once.

    Raises UnsupportedError for one that is unknown, or has no FP8, which every recipe needs.
    """
    names = list(dict.fromkeys(target.strip().lower() for target in targets))
    known = [name for name in _ALL if _holds(name, "fp8")]
    for name in names:
        if name not in _ALL:
            raise UnsupportedError(f"unknown target '{name}'{nearest(name, known)}")
        if not _holds(name, "fp8"):
            usable = ", ".join(target for target in RTX_TARGETS if _holds(target, "fp8"))
            raise UnsupportedError(
                f"target {name}: compute capability {capability(name)} has no FP8, which begins"
                f" with 8.9; {RTX} builds FP8 for {usable}"
            )
    return names


def resolve_targets(
    name: Name, asked: Sequence[str] | None, gpu: Gpu | None, kinds: Iterable[SchemeKind]
) -> list[str]:
    """What the builder `name` compiles for: what was asked for, or else this GPU's.

    Without a GPU, TensorRT-RTX compiles for those of sm89 and sm120 that hold the formats `kinds`.
    Raises UnsupportedError for a target that this builder has not.
    """
    if name != RTX:
        assert gpu is not None
        if asked is not None and list(asked) != [gpu.target]:
            raise UnsupportedError(
                f"target {', '.join(asked)}: {name} builds for the GPU that is here ({gpu.name},"
                f" {gpu.target}); leave --target out, or take --builder tensorrt-rtx"
            )
        return [gpu.target]
    if asked is None:
        if gpu is not None:
            asked = [gpu.target]
        else:
            asked = [item for item in _DEFAULTS if all(_holds(item, kind) for kind in kinds)]
    for target in asked:
        if target not in RTX_TARGETS:
            usable = ", ".join(item for item in RTX_TARGETS if _holds(item, "fp8"))
            raise UnsupportedError(
                f"target {target}: {RTX} does not run on compute capability {capability(target)};"
                f" it builds for {usable}; for {target}, build on such a GPU with TensorRT"
                " (--builder tensorrt)"
            )
    return list(asked)


def check_recipe_on(name: Name, targets: Sequence[str], gpu: Gpu | None, source: Source) -> None:
    """Raises UnsupportedError for a target that cannot multiply what the recipe asks for.

    It names the compute capability, and what would work.
    """
    recipe = source.recipe.name
    kinds = kinds_of(source)
    for target in targets:
        for kind in kinds:
            if _holds(target, kind):
                continue
            who = f"this GPU ({gpu.name})" if gpu and gpu.target == target else f"target {target}"
            least = f"{_NEEDS[kind] // 10}.{_NEEDS[kind] % 10}"
            others = "fp8, fp8-static and fp8-block run" if _holds(target, "fp8") else "none runs"
            raise UnsupportedError(
                f"recipe {recipe} needs {_CALLED[kind]}, which {who} with compute capability"
                f" {capability(target)} does not have: it begins with {least}, such as"
                f" --builder tensorrt-rtx --target {'sm89' if kind == 'fp8' else 'sm120'};"
                f" of the recipes {others} on {target}"
            )
    if name == RTX and "mxfp8" in kinds:
        raise UnsupportedError(
            f"recipe {recipe} is mxfp8, which {RTX} takes but multiplies in FP16 after"
            " decoding it in every step; recipes fp8, fp8-static, fp8-block and, on sm120, nvfp4"
            " run in 8 and 4 bits"
        )


def kinds_of(source: Source) -> list[SchemeKind]:
    """The formats of the linears that the recipe quantizes."""
    linears = source.quantized_linears().values()
    return sorted({scheme.kind for item in linears for scheme in source.schemes(item) or ()})


def _holds(target: str, kind: SchemeKind) -> bool:
    return int(target.removeprefix("sm")) >= _NEEDS[kind]

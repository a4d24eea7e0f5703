"""What a person must know of a calibration: warnings, what is not known, and a summary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calibrate.convergence import Convergence
from calibrate.tensor_report import TensorReport
from octet.recipe import Recipe

__all__ = ["HIDDEN_DB", "Finding", "Unknown", "find", "find_unknown"]

HIDDEN_DB = 6.0  # that small values may lose to large ones: four times their noise
_COSTLY_DB = 1.0
_FLOAT16_MAX = 65_504.0


@dataclass(frozen=True)
class Finding:
    """A warning in one line, and what to do about it."""

    text: str
    remedy: str


@dataclass(frozen=True)
class Unknown:
    """What the report does not know, why, and how to know it; `tensors` are those concerned."""

    what: str
    why: str
    remedy: str
    tensors: tuple[str, ...] = ()


def find(
    recipe: Recipe, tensors: Mapping[str, TensorReport], convergence: Convergence | None
) -> list[Finding]:
    """The gravest first."""
    return [
        *_hidden(tensors),
        *_overflowing(tensors),
        *_moved(convergence),
        *_clipped(recipe, tensors),
        *_cache_scales(recipe, tensors),
    ]


def find_unknown(
    tensors: Mapping[str, TensorReport],
    convergence: Convergence | None,
    sensitivity: Mapping[str, Any] | None,
) -> list[Unknown]:
    """In the order of the questions that people ask."""
    unknown = []
    by_treatment: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.quantized and tensor.sqnr_db is None:
            by_treatment.setdefault(tensor.treatment, []).append(name)
    for treatment, names in by_treatment.items():
        unknown.append(
            Unknown(
                f"the error of {len(names)} inputs quantized {treatment}",
                "it depends on which values come together in a token or group, and a histogram"
                " holds each value alone; shown instead is what one static scale would do",
                "measure it by running the model: --sensitivity",
                tuple(names),
            )
        )
    if sensitivity is None:
        unknown.append(
            Unknown(
                "what these errors do to the model's output",
                "no forward pass was made with them; SQNR says how large an error is, not how much"
                " it matters",
                "measure it: --sensitivity, or let --budget choose what stays in higher precision",
            )
        )
    if convergence is None:
        unknown.append(
            Unknown(
                "whether the set was enough",
                "the samples were not counted in parts, so there is nothing to compare",
                "calibrate from the samples again",
            )
        )
    unknown.append(
        Unknown(
            "inputs unlike these samples",
            "all figures are of this set; longer contexts, other languages or other tasks can"
            " reach values that it does not",
            "calibrate on samples of the traffic to be served",
        )
    )
    return unknown


def _hidden(tensors: Mapping[str, TensorReport]) -> list[Finding]:
    """Large values that carry the SQNR while the rest is lost; exact for static scales."""
    lost, maybe = [], []
    for name, tensor in tensors.items():
        if (tensor.small_lost_db or 0.0) <= HIDDEN_DB:
            continue
        small = tensor.small_left_db
        assert small is not None
        if tensor.sqnr_db is not None:
            lost.append((small, name))
        elif tensor.granularity == "token":  # smaller groups may well have none of them
            maybe.append((small, name))
    found = []
    if lost:
        small, name = min(lost)
        found.append(
            Finding(
                f"a few large values set the scale of {len(lost)} tensors, and the small ones are"
                f" lost under it; the worst is {name}, whose smallest 90 % keep an SQNR of"
                f" {small:.1f} dB (the SQNR of all hides it)",
                "Tame the large values with --algorithm smoothquant, or let --budget keep those"
                " linears in higher precision.",
            )
        )
    if maybe:
        small, name = min(maybe)
        found.append(
            Finding(
                f"{len(maybe)} inputs hold a few values so large that a token with one loses its"
                f" small values; the worst is {name} ({small:.1f} dB for the smallest 90 %, if"
                " every token has one)",
                "Measure it with --sensitivity; if it matters, use --algorithm smoothquant or"
                " --budget.",
            )
        )
    return found


def _overflowing(tensors: Mapping[str, TensorReport]) -> list[Finding]:
    names = [n for n, t in tensors.items() if t.format == "float16" and t.absmax > _FLOAT16_MAX]
    if not names:
        return []
    return [
        Finding(
            f"{len(names)} caches exceed what float16 holds (65,504), first {names[0]}, which"
            f" reaches {tensors[names[0]].absmax:.3g}",
            "Serve with a bfloat16 cache, or choose kv_cache e4m3, which is scaled.",
        )
    ]


def _moved(convergence: Convergence | None) -> list[Finding]:
    if convergence is None or not convergence.moved:
        return []
    count = convergence.counts[-1]
    return [Finding(convergence.verdict.rstrip("."), f"Calibrate on {2 * count} samples or more.")]


def _clipped(recipe: Recipe, tensors: Mapping[str, TensorReport]) -> list[Finding]:
    worse = [
        (tensor.methods["max"].sqnr_db - tensor.chosen.sqnr_db, name)
        for name, tensor in tensors.items()
        if tensor.kind == "input" and tensor.chosen is not None
    ]
    worse = [item for item in worse if item[0] > _COSTLY_DB]
    if not worse:
        return []
    loss, name = max(worse)
    return [
        Finding(
            f"method '{recipe.activations.method}' clips {len(worse)} inputs at a cost of over"
            f" {_COSTLY_DB:g} dB against max; the worst is {name} ({loss:.1f} dB)",
            "Use activations.method max.",
        )
    ]


def _cache_scales(recipe: Recipe, tensors: Mapping[str, TensorReport]) -> list[Finding]:
    if recipe.kv_cache != "e5m2":
        return []
    return [
        Finding(
            f"{name} reaches {tensor.absmax:.3g}: its E5M2 cache needs the scale"
            f" {tensor.chosen.scale:.3g}; an engine that does not apply it will be wrong",
            "Serve with an engine that applies scales to an E5M2 cache, or choose kv_cache e4m3.",
        )
        for name, tensor in tensors.items()
        if tensor.kind != "input" and tensor.chosen is not None and tensor.chosen.scale != 1.0
    ]

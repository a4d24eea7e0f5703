"""Derives the warnings of a calibration, and the list of what it could not determine."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calibrate.report.tensors import TensorReport
from calibrate.scales.convergence import Convergence
from octet.recipe import Recipe

__all__ = [
    "COSTLY",
    "HIDDEN_DB",
    "Finding",
    "Unknown",
    "all_promoted",
    "cost_served",
    "find",
    "find_unknown",
]

COSTLY = 0.01  # a larger relative increase of perplexity is a warning

HIDDEN_DB = 6.0  # that large values may cost small ones: four times their noise
_COSTLY_DB = 1.0
_FLOAT16_MAX = 65_504.0


@dataclass(frozen=True)
class Finding:
    """A warning in one line, and what to do about it."""

    text: str
    remedy: str


@dataclass(frozen=True)
class Unknown:
    """Something the report cannot determine, why, how to measure it, and for which `tensors`."""

    what: str
    why: str
    remedy: str
    tensors: tuple[str, ...] = ()


def find(
    recipe: Recipe,
    tensors: Mapping[str, TensorReport],
    convergence: Convergence | None,
    sensitivity: Mapping[str, Any] | None = None,
    budget: Mapping[str, Any] | None = None,
    unfolded: Mapping[str, str] | None = None,
    *,
    trained: bool = False,
) -> list[Finding]:
    """Returns findings, the gravest first; `sensitivity` and `budget` are JSON.

    `unfolded` has the reason for each cache scale that is not folded into the weights. `trained`
    says that the calibration is of `octet recover`, which lacks options that remedies name.
    """
    return [
        *_over_budget(budget),
        *_all_promoted(budget),
        *_costly(sensitivity, budget, trained=trained),
        *_hidden(tensors, met=budget is not None and bool(budget["met"]), trained=trained),
        *_overflowing(tensors),
        *_moved(convergence, trained=trained),
        *_clipped(recipe, tensors, trained=trained),
        *_cache_scales(recipe, tensors, unfolded or {}),
    ]


def find_unknown(
    tensors: Mapping[str, TensorReport],
    convergence: Convergence | None,
    sensitivity: Mapping[str, Any] | None,
    *,
    predicted: bool = False,
    trained: bool = False,
) -> list[Unknown]:
    """Returns what is not known, in the order in which readers want to know it.

    `predicted` says that the divergence of the whole model was simulated, `trained` that `octet
    recover` measured it.
    """
    unknown = []
    before = "`octet calibrate --sensitivity` measures {}, with the weights from before training"
    by_treatment: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.quantized and tensor.sqnr_db is None:
            by_treatment.setdefault(tensor.treatment, []).append(name)
    for treatment, names in by_treatment.items():
        unknown.append(
            Unknown(
                f"the error of {len(names)} activation tensors quantized {treatment}",
                "it depends on which values occur together in a token or group, which a histogram"
                " does not record; shown instead is the error with one static scale",
                before.format("it")
                if trained
                else "measure it by running the model: octet calibrate --sensitivity",
                tuple(names),
            )
        )
    if sensitivity is None and (predicted or trained):
        unknown.append(
            Unknown(
                "which layers cost most",
                f"the {'held-out' if trained else 'expected'} divergence is that of all of them"
                " together",
                before.format("each")
                if trained
                else "measure each: octet calibrate --sensitivity, or let its --budget choose what"
                " stays in more bits",
            )
        )
    elif sensitivity is None:
        unknown.append(
            Unknown(
                "what these errors do to the model's output",
                "the quantized model was not simulated; SQNR says how large an error is, not how"
                " much it matters",
                "measure it: octet calibrate --sensitivity, or let its --budget choose what stays"
                " in higher precision",
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
    static = any(x.chosen is not None and x.format == "e4m3" for x in tensors.values())
    unknown.append(
        Unknown(
            "inputs unlike these samples",
            "all figures are of this set; longer contexts, other languages or other tasks can"
            " reach values that it does not",
            f"{'train' if trained else 'calibrate'} on samples of the traffic to be served"
            + ("; `octet replay` shows what other text does to static scales" if static else ""),
        )
    )
    return unknown


def cost_served(
    sensitivity: Mapping[str, Any] | None, budget: Mapping[str, Any] | None
) -> tuple[float, float] | None:
    """Returns the perplexities of the original and of the final recipe; None if not measured.

    With a budget, the second comes from the budget's last step: `sensitivity` was measured before
    the budget promoted any unit.
    """
    if sensitivity is None:
        return None
    before = sensitivity["reference_perplexity"]
    after = (budget["curve"][-1] if budget else sensitivity["all"])["perplexity"]
    return None if before is None or after is None else (before, after)


def _over_budget(budget: Mapping[str, Any] | None) -> list[Finding]:
    if budget is None or budget["met"]:
        return []
    shown = "{:.2%}" if budget["metric"] == "perplexity" else "{:.2g}"
    limit, reached, bound = (shown.format(budget[key]) for key in ("limit", "reached", "bound"))
    remedy = "Allow a larger budget, or keep the cache in float16."
    if budget["reached"] <= budget["limit"]:
        remedy = "Give more held-out samples, which narrow the bound, or allow a larger budget."
    metric = "of perplexity" if budget["metric"] == "perplexity" else "of KL"
    return [
        Finding(
            f"the budget of {limit} {metric} is not met: {reached} (95 % bound {bound}) with every"
            " layer promoted as far as it goes",
            remedy,
        )
    ]


def all_promoted(budget: Mapping[str, Any] | None) -> bool:
    """Decides if a budget left no unit in the recipe's own format."""
    return budget is not None and len(budget["chosen"]) == budget["units"]


def _all_promoted(budget: Mapping[str, Any] | None) -> list[Finding]:
    if budget is None or not all_promoted(budget):
        return []
    formats = Counter(unit["to"] for unit in budget["chosen"])
    quantized = [name for name in formats if name != "bfloat16"]
    if not quantized:
        return [
            Finding(
                f"the budget promoted all {budget['units']} groups of layers to bfloat16: no weight"
                " is quantized",
                "Allow a larger budget, choose another recipe, or serve the original model.",
            )
        ]
    to = " and ".join(f"{count} to {name}" for name, count in formats.items())
    return [
        Finding(
            f"the budget promoted all {budget['units']} groups of layers, {to}: none keeps the"
            " recipe's format",
            f"Allow a larger budget, or calibrate with recipe {quantized[0]} in its place.",
        )
    ]


def _remedy(text: str, *, trained: bool) -> str:
    """Returns a remedy by `octet calibrate`, in full where `octet recover` has run since."""
    return f"{text.removesuffix('.')}, and recover from that." if trained else text


def _costly(
    sensitivity: Mapping[str, Any] | None, budget: Mapping[str, Any] | None, *, trained: bool
) -> list[Finding]:
    """Warns of a perplexity increase over `COSTLY`, unless a perplexity budget set the limit."""
    cost = cost_served(sensitivity, budget)
    if cost is None or (budget is not None and budget["metric"] == "perplexity"):
        return []
    before, after = cost
    change = after / before - 1
    if not change > COSTLY:
        return []
    return [
        Finding(
            f"quantization raises perplexity by {change:.1%}, from {before:.4g} to {after:.4g},"
            f" which is over {COSTLY:.0%}",
            _remedy(
                f"Let octet calibrate --budget ppl={100 * COSTLY:g}% choose what stays in higher"
                " precision, or choose another recipe or cache.",
                trained=trained,
            ),
        )
    ]


def _hidden(tensors: Mapping[str, TensorReport], *, met: bool, trained: bool) -> list[Finding]:
    """Warns of tensors whose large values dominate the SQNR while the small ones are lost.

    Exact for static scales. `met` means that a budget is met in spite of that.
    """
    lost, maybe = [], []
    for name, tensor in tensors.items():
        if (tensor.small_lost_db or 0.0) <= HIDDEN_DB:
            continue
        small = tensor.small_left_db
        assert small is not None
        if tensor.sqnr_db is not None:
            lost.append((small, name))
        elif tensor.granularity == "token":  # a smaller group may contain no large value
            maybe.append((small, name))
    found = []
    if lost:
        small, name = min(lost)
        found.append(
            Finding(
                f"a few large values set the scale of {len(lost)} tensor"
                f"{'s' if len(lost) > 1 else ''}, and the small ones are"
                f" rounded away; the worst is {name}, whose smallest 90 % keep an SQNR of"
                f" {small:.1f} dB (the SQNR of all hides it)",
                "The large values may stay: the budget is met. octet calibrate --algorithm"
                " smoothquant may meet it in fewer bytes."
                if met
                else _remedy(
                    "Reduce the large values with octet calibrate --algorithm smoothquant, or let"
                    " its --budget keep those linear layers in higher precision.",
                    trained=trained,
                ),
            )
        )
    if maybe:
        small, name = min(maybe)
        found.append(
            Finding(
                f"{len(maybe)} activation tensors have a few values so large that a token with one"
                f" loses its small values; the worst is {name} ({small:.1f} dB for the smallest"
                " 90 %, if every token has one)",
                _remedy(
                    "Measure it with octet calibrate --sensitivity; if it matters, use its"
                    " --algorithm smoothquant or --budget.",
                    trained=trained,
                ),
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
            "Serve with a bfloat16 cache, or choose kv_cache e4m3, whose scale fits them.",
        )
    ]


def _moved(convergence: Convergence | None, *, trained: bool) -> list[Finding]:
    if convergence is None or not convergence.moved:
        return []
    count = convergence.counts[-1]
    remedy = f"{'Train' if trained else 'Calibrate'} on {2 * count} samples or more."
    return [Finding(convergence.verdict.rstrip("."), remedy)]


def _clipped(
    recipe: Recipe, tensors: Mapping[str, TensorReport], *, trained: bool
) -> list[Finding]:
    worse = [
        (tensor.methods["max"].sqnr_db - tensor.chosen.sqnr_db, name)
        for name, tensor in tensors.items()
        if tensor.kind == "input" and tensor.chosen is not None and tensor.chosen.saturated
    ]
    worse = [item for item in worse if item[0] > _COSTLY_DB]
    if not worse:
        return []
    loss, name = max(worse)
    return [
        Finding(
            f"method '{recipe.activations.method}' clips {len(worse)} activation tensors, which"
            f" costs over {_COSTLY_DB:g} dB against max; the worst is {name} ({loss:.1f} dB)",
            _remedy("Use activations.method max.", trained=trained),
        )
    ]


def _cache_scales(
    recipe: Recipe, tensors: Mapping[str, TensorReport], unfolded: Mapping[str, str]
) -> list[Finding]:
    if recipe.kv_cache != "e5m2":
        return [
            Finding(
                f"an E5M2 cache of {name} would need a scale, which is not folded into the weights:"
                f" {why}",
                f"Serve with the {recipe.kv_cache} cache of the recipe.",
            )
            for name, why in unfolded.items()
        ]
    return [
        Finding(
            f"{name} reaches {tensor.absmax:.3g}: its E5M2 cache needs the scale"
            f" {tensor.chosen.scale:.3g}{_not_folded(unfolded.get(name))}; an engine that does not"
            " apply it will be wrong",
            "Serve with an engine that applies scales to an E5M2 cache, or choose kv_cache e4m3 or"
            " float16.",
        )
        for name, tensor in tensors.items()
        if tensor.kind != "input" and tensor.chosen is not None and tensor.chosen.scale != 1.0
    ]


def _not_folded(why: str | None) -> str:
    return "" if why is None else f", which is not folded into the weights ({why})"

"""What calibration found, as data (`report.json`) and as a few lines for people."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibrate.histogram import Histogram
from calibrate.scales import WeightScale
from calibrate.search import METHODS, Quality, find_scale, measure
from octet import formats
from octet.calibration import Observation
from octet.formats import Format
from octet.recipe import Recipe, ScaleMethod

__all__ = ["Report", "TensorReport", "print_report", "report_tensors", "scale_warnings"]

_COSTLY_DB = 1.0
_WORST = 3  # tensors of each kind shown to people; report.json has all


@dataclass(frozen=True)
class TensorReport:
    """One observed tensor: what each method would do to it, and what was chosen.

    `chosen` is None where no per-tensor scale is used: inputs quantized dynamically.
    """

    kind: str
    format: str
    elements: int
    absmax: float
    methods: dict[ScaleMethod, Quality]
    chosen: Quality | None


@dataclass(frozen=True)
class Report:
    """`tensors` by observation, `weights` by linear, and whatever the user should know."""

    tensors: Mapping[str, TensorReport]
    weights: Mapping[str, WeightScale]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data; an infinite SQNR (no error at all) is null."""
        data = {
            "tensors": {name: asdict(tensor) for name, tensor in self.tensors.items()},
            "weights": {
                name: {"format": weight.format, "sqnr_db": weight.sqnr_db}
                for name, weight in self.weights.items()
            },
            "warnings": list(self.warnings),
        }
        return _finite(data)  # type: ignore[no-any-return]


def report_tensors(
    recipe: Recipe,
    observations: Mapping[str, Observation],
    histograms: Mapping[str, Histogram],
    chosen: Mapping[str, float],
) -> dict[str, TensorReport]:
    """Every method on every observed tensor; `chosen` are the scales in use, by observation.

    A cache that stays in float16 is left out: there is nothing to search.
    """
    reports = {}
    for name, observation in observations.items():
        fmt = _format_of(recipe, observation)
        if fmt is None:
            continue
        histogram = histograms[name]
        qualities = {}
        for method in METHODS:
            scale = find_scale(histogram, fmt, method, percentile=recipe.activations.percentile)
            qualities[method] = measure(histogram, fmt, scale)
        reports[name] = TensorReport(
            kind=observation.kind,
            format=fmt.name,
            elements=histogram.total,
            absmax=histogram.absmax,
            methods=qualities,
            chosen=measure(histogram, fmt, chosen[name]) if name in chosen else None,
        )
    return reports


def scale_warnings(recipe: Recipe, tensors: Mapping[str, TensorReport]) -> list[str]:
    """What the user should know about the scales in use, one line each."""
    warnings = []
    worse = []
    for name, tensor in tensors.items():
        if tensor.chosen is None:
            continue
        if tensor.kind == "input":
            loss = tensor.methods["max"].sqnr_db - tensor.chosen.sqnr_db
            if loss > _COSTLY_DB:
                worse.append((loss, name))
        elif recipe.kv_cache == "e5m2" and tensor.chosen.scale != 1.0:
            warnings.append(
                f"{name} reaches {tensor.absmax:.3g}: its E5M2 cache needs the scale"
                f" {tensor.chosen.scale:.3g}; an engine that does not apply it will be wrong"
            )
    if worse:
        loss, name = max(worse)
        warnings.append(
            f"method '{recipe.activations.method}' clips {len(worse)} inputs at a cost of over"
            f" {_COSTLY_DB:g} dB against max; the worst is {name} ({loss:.1f} dB)"
        )
    return warnings


def print_report(console: Console, report: Report, *, tokens: int, seconds: float) -> None:
    """The rate, the worst tensors, what clipping would do, and the warnings."""
    rate = tokens / seconds if seconds > 0 else math.inf
    console.print(
        f"observed {len(report.tensors)} tensors over {tokens:,} tokens"
        f" in {seconds:.1f} s ({rate:,.0f} tokens/s)"
    )
    console.print(_worst(report))
    for line in _clipping(report):
        console.print(line, highlight=False)
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False)


def _worst(report: Report) -> Table:
    """The tensors of each kind that lose most, lowest SQNR first."""
    table = Table(box=None, pad_edge=False, title="lowest SQNR of each kind", title_justify="left")
    table.add_column("tensor", overflow="fold")
    for column in ("format", "scale", "SQNR dB", "clipped", "to zero"):
        table.add_column(column, justify="right", no_wrap=True)
    for kinds in (("input",), ("key", "value")):
        rows = [
            (tensor.chosen or tensor.methods["max"], name, tensor)
            for name, tensor in report.tensors.items()
            if tensor.kind in kinds
        ]
        for quality, name, tensor in sorted(rows, key=lambda row: row[0].sqnr_db)[:_WORST]:
            table.add_row(
                name.removeprefix("model."),
                tensor.format,
                f"{quality.scale:.3g}" if tensor.chosen else "dynamic",
                f"{quality.sqnr_db:.1f}",
                f"{quality.saturated:.2%}",
                f"{quality.underflow:.2%}",
            )
    for name, weight in sorted(report.weights.items(), key=lambda item: item[1].sqnr_db)[:_WORST]:
        shape = "x".join(str(size) for size in weight.scale.shape)
        scale = shape or f"{float(weight.scale):.3g}"
        shown = f"{name.removeprefix('model.')}.weight"
        table.add_row(shown, weight.format, scale, f"{weight.sqnr_db:.1f}", "", "")
    return table


def _clipping(report: Report) -> list[str]:
    """For each format, how far the other methods are from `max`: whether clipping would help."""
    lines = []
    for fmt in sorted({tensor.format for tensor in report.tensors.values()}):
        tensors = [tensor for tensor in report.tensors.values() if tensor.format == fmt]
        parts = []
        for method in METHODS[1:]:
            gains = [t.methods[method].sqnr_db - t.methods["max"].sqnr_db for t in tensors]
            known = [gain for gain in gains if math.isfinite(gain)]
            if known:
                parts.append(f"{method} {median(known):+.2f} ({min(known):+.2f} at worst)")
        if parts:
            lines.append(
                f"{fmt}, SQNR against max in dB, median of {len(tensors)}: {', '.join(parts)}"
            )
    return lines


def _format_of(recipe: Recipe, observation: Observation) -> Format | None:
    if observation.kind == "input":
        return formats.format_named(recipe.activations.format)
    return formats.FORMATS.get(recipe.kv_cache)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data

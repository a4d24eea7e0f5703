"""Prints a summary of the calibration report; report.json and report.html have all of it."""

import math
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibrate.report.document import Report
from calibrate.scales.activations import METHODS
from octet.tables import fitted

__all__ = ["print_report"]

_WORST = 3  # tensors shown of each kind


def print_report(
    console: Console,
    report: Report,
    *,
    tokens: int | None = None,
    seconds: float | None = None,
    page: Path | None = None,
) -> None:
    """Prints what was trained, what it costs, the worst tensors, clipping, warnings and what to do.

    `tokens` is the number observed in `seconds`, if the model ran; `page` is the HTML report.
    """
    if tokens is not None and seconds:
        console.print(
            f"observed {len(report.tensors)} tensors over {tokens:,} tokens"
            f" in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s)"
        )
    summary = report.summary
    costs = (summary.expected, summary.examined, summary.measured, summary.budget)
    for line in (summary.trained, *costs, summary.enough, summary.worst):
        if line:
            console.print(escape(line), highlight=False)
    console.print(fitted(_worst(report), console))
    for line in _clipping(report):
        console.print(line, highlight=False)
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False)
    console.print(f"to do: {escape(' '.join(summary.todo))}", highlight=False)
    if page is not None:
        shown = f"report: {escape(str(page))} (opens in a browser)"
        console.print(shown, highlight=False, soft_wrap=True)  # a path that is cut opens nothing


def _worst(report: Report) -> Table:
    """Returns a table of the tensors of each kind with the lowest SQNR, lowest first."""
    table = Table(box=None, pad_edge=False, title="lowest SQNR of each kind", title_justify="left")
    table.add_column("tensor", overflow="fold")
    for column in ("format", "SQNR dB", "scale", "clipped", "to zero"):
        table.add_column(column, justify="right", no_wrap=True)
    for kinds in (("input",), ("key", "value", "query")):
        rows = [
            (tensor.sqnr_db, name, tensor)
            for name, tensor in report.tensors.items()
            if tensor.kind in kinds and tensor.sqnr_db is not None
        ]
        for sqnr_db, name, tensor in sorted(rows, key=lambda row: row[0])[:_WORST]:
            quality = tensor.chosen
            table.add_row(
                name.removeprefix("model."),
                tensor.format,
                f"{sqnr_db:.1f}",
                f"{quality.scale:.3g}" if quality else "dynamic",
                f"{quality.saturated:.2%}" if quality else "",
                f"{quality.underflow:.2%}" if quality else "",
            )
    for name, weight in sorted(report.weights.items(), key=lambda item: item[1].sqnr_db)[:_WORST]:
        shape = "x".join(str(size) for size in weight.scale.shape)
        scale = shape or f"{float(weight.scale):.3g}"
        shown = f"{name.removeprefix('model.')}.weight"
        table.add_row(shown, weight.format, f"{weight.sqnr_db:.1f}", scale, "", "")
    return table


def _clipping(report: Report) -> list[str]:
    """Compares the other methods with `max` for each format, to show if clipping would help."""
    lines = []
    stored = [tensor for tensor in report.tensors.values() if tensor.chosen is not None]
    for fmt in sorted({tensor.format for tensor in stored}):
        tensors = [tensor for tensor in stored if tensor.format == fmt]
        parts = []
        for method in METHODS[1:]:
            gains = [
                tensor.methods[method].sqnr_db - tensor.methods["max"].sqnr_db
                for tensor in tensors
                if method in tensor.methods
            ]
            known = [gain for gain in gains if math.isfinite(gain)]
            if known:
                parts.append(f"{method} {median(known):+.2f} ({min(known):+.2f} at worst)")
        if parts:
            lines.append(
                f"{fmt}, SQNR against max in dB, median of {len(tensors)}: {', '.join(parts)}"
            )
    return lines

"""Renders a comparison as a table, with each figure above its interval."""

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octet.statistics import Interval
from octet.tables import Stacked
from verify.evaluation.comparison import Comparison, Row

__all__ = ["render", "render_tasks"]


def render(comparison: Comparison) -> RenderableType:
    """Renders the table, its caption with the warnings, and the tasks."""
    with_kl = comparison.reference is not None
    several = len(comparison.rows) > 1
    table = Table(box=None, padding=(0, 1, 0, 1), collapse_padding=True, show_lines=False)
    table.add_column("artifact", overflow="fold", min_width=12)
    table.add_column("perplexity", justify="right", no_wrap=True)
    if with_kl or several:
        table.add_column("change, %", justify="right", no_wrap=True)
    if with_kl:
        table.add_column("KL, mnat", justify="right", no_wrap=True)
        table.add_column("p90", justify="right", no_wrap=True)
    if with_kl and several:
        table.add_column("KL, more\nthan 1st", justify="right", no_wrap=True)
    for row in comparison.rows:
        table.add_row(*_cells(row, comparison, several))
    return Group(
        Stacked(table),
        Text(_caption(comparison)),
        *render_tasks([row.tasks for row in comparison.rows]),
    )


def _cells(row: Row, comparison: Comparison, several: bool) -> list[str | Text]:
    cells: list[str | Text] = [Text(row.name), _cell(row.perplexity, 1, "")]
    if comparison.reference is not None or several:
        cells.append(_cell(row.change, 100, "+"))
    if comparison.reference is not None:
        cells += [
            _cell(row.kl, 1000, ""),
            "" if row.kl_p90 is None else _figure(1000 * row.kl_p90, 1000 * row.kl_p90),
        ]
        if several:
            cells.append(_cell(row.kl_from_first, 1000, "+"))
    return cells


def _cell(interval: Interval | None, factor: float, sign: str) -> str:
    if interval is None:
        return ""
    mean, low, high = (factor * x for x in (interval.mean, interval.low, interval.high))
    if math.isnan(low):  # no interval
        return _figure(mean, mean, sign)
    return f"{_figure(mean, mean, sign)}\n{_figure(low, mean, sign)}..{_figure(high, mean, sign)}"


def _figure(value: float, beside: float, sign: str = "") -> str:
    """Formats with the decimals that give `beside` four digits, or three if it is a change."""
    digits = 3 if sign else 4
    size = math.floor(math.log10(abs(beside))) + 1 if beside else 1
    text = f"{value:{sign}.{min(max(digits - max(size, 0), 0), 4)}f}"
    return text if float(text) else text.lstrip("+-")


def _caption(comparison: Comparison) -> str:
    several = comparison.samples > 1
    below = "; below each figure its 95 % interval, over samples" if several else ""
    lines = [
        f"{comparison.samples:,} sample{'s' if several else ''} of {comparison.samples_path},"
        f" {comparison.tokens:,} predicted tokens{below}."
    ]
    if comparison.reference is not None:
        perplexity = comparison.reference_perplexity
        assert perplexity is not None
        lines.append(
            f"Change and KL are from {comparison.reference}, of perplexity {perplexity.mean:.4g};"
            f" KL is of the {comparison.k} most likely tokens and the rest: a lower bound."
        )
    elif len(comparison.rows) > 1:
        lines.append("Change is from the first, on the same tokens.")
    lines += [f"{row.name}: {row.proof}" for row in comparison.rows if row.proof is not None]
    lines += [f"warning: {warning}" for warning in comparison.warnings]
    return "\n".join(lines)


def render_tasks(rows: Sequence[Mapping[str, Interval]]) -> list[RenderableType]:
    """Renders lm-evaluation-harness' results for each artifact, if there are any."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return []
    table = Table(box=None, padding=(0, 1, 0, 1))
    table.add_column("task", overflow="fold")
    for number in range(1, len(rows) + 1):
        table.add_column(f"artifact {number}", justify="right")
    for name in names:
        table.add_row(name, *(_cell(row.get(name), 1, "") for row in rows))
    return [Stacked(table)]

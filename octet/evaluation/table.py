"""A comparison as a table for people: 80 columns, each figure above its interval."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octet.evaluation.comparison import Comparison, Row
from octet.evaluation.intervals import Interval

__all__ = ["render"]


def render(comparison: Comparison) -> RenderableType:
    """The table, what it is of, and its warnings."""
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
        table.add_column("KL - 1st", justify="right", no_wrap=True)
    for row in comparison.rows:
        table.add_row(*_cells(row, comparison, several))
    return Group(table, Text(_caption(comparison)), *_tasks(comparison))


def _cells(row: Row, comparison: Comparison, several: bool) -> list[str]:
    cells = [row.name, _cell(row.perplexity, 1, "")]
    if comparison.reference is not None or several:
        cells.append(_cell(row.change, 100, "+"))
    if comparison.reference is not None:
        cells += [_cell(row.kl, 1000, ""), "" if row.kl_p90 is None else _short(1000 * row.kl_p90)]
        if several:
            cells.append(_cell(row.kl_from_first, 1000, "+"))
    return cells


def _cell(interval: Interval | None, factor: float, sign: str) -> str:
    if interval is None:
        return ""
    mean, low, high = (factor * x for x in (interval.mean, interval.low, interval.high))
    if low != low:  # NaN: there is none
        return _short(mean, sign)
    return f"{_short(mean, sign)}\n{_short(low, sign)}..{_short(high, sign)}"


def _short(value: float, sign: str = "") -> str:
    """Four digits for a perplexity, three for what may be zero."""
    if not sign and abs(value) >= 1:
        return f"{value:.4g}"
    if abs(value) < 5e-4:
        return "0"
    return f"{value:{sign}.3f}" if abs(value) < 1 else f"{value:{sign}.3g}"


def _caption(comparison: Comparison) -> str:
    lines = [
        f"{comparison.samples:,} samples of {comparison.samples_path}, {comparison.tokens:,}"
        f" predicted tokens; below each figure its 95 % interval, over samples."
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
    lines += [f"warning: {warning}" for warning in comparison.warnings]
    return "\n".join(lines)


def _tasks(comparison: Comparison) -> list[RenderableType]:
    """lm-evaluation-harness' figures, where there are any."""
    names = list(dict.fromkeys(name for row in comparison.rows for name in row.tasks))
    if not names:
        return []
    table = Table(box=None, padding=(0, 1, 0, 1))
    table.add_column("task", overflow="fold")
    for number in range(1, len(comparison.rows) + 1):
        table.add_column(f"artifact {number}", justify="right")
    for name in names:
        values = [row.tasks.get(name) for row in comparison.rows]
        table.add_row(name, *("" if value is None else f"{value:.4f}" for value in values))
    return [table]

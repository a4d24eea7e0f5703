"""Fits a table to the terminal: what a narrow one has no room for is left out, not cut short."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

__all__ = ["fitted"]

_NAME = 16  # columns that names in the first column need, at least; longer ones fold
_UNLIMITED = 10_000


def fitted(table: Table, console: Console) -> Table:
    """Drops columns of `table` from the right until the others fit; the first two always stay."""
    names, wide = table.columns[0], console.options.update(max_width=_UNLIMITED)
    names.width = _NAME  # while the others are measured, for a long word counts as unbreakable
    while len(table.columns) > 2:
        if Measurement.get(console, wide, table).minimum <= console.width:
            break
        table.columns.pop()
    names.width = None
    return table

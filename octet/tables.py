"""Fits a table to the terminal, without cutting a cell short.

`fitted` drops columns, for tables whose first columns say most; `stacked` keeps every figure, for
results.
"""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table

__all__ = ["Stacked", "fitted"]

_NAME = 16  # columns that names in the first column need, at least; longer ones fold
_UNLIMITED = 10_000


def fitted(table: Table, console: Console) -> Table:
    """Drops columns of `table` from the right until the others fit; the first two always stay."""
    while len(table.columns) > 2 and _least_width(table, console) > console.width:
        table.columns.pop()
    return table


@dataclass(frozen=True)
class Stacked:
    """A table that lists each row's cells below its first one where the columns do not fit."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if _least_width(self.table, console) <= options.max_width:
            yield self.table
            return
        headers = [str(column.header).replace("\n", " ") for column in self.table.columns]
        for first, *cells in zip(*(column.cells for column in self.table.columns), strict=True):
            below = Table.grid(padding=(0, 2))
            below.add_column(overflow="fold")
            below.add_column(justify="right", no_wrap=True)
            for header, cell in zip(headers[1:], cells, strict=True):
                if cell:
                    below.add_row(header, cell)
            yield first
            yield Padding(below, (0, 0, 0, 2))


def _least_width(table: Table, console: Console) -> int:
    """Returns the columns that `table` needs if its names fold."""
    names, wide = table.columns[0], console.options.update(max_width=_UNLIMITED)
    before = names.width
    names.width = _NAME  # while the others are measured, for a long word counts as unbreakable
    least = Measurement.get(console, wide, table).minimum
    names.width = before
    return least

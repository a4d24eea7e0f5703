"""Tables on narrow terminals: fewer columns, or a line for each figure, but nothing cut short."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from octet.tables import Stacked, fitted


@pytest.mark.parametrize(("width", "shown"), [(30, 2), (40, 3), (80, 4), (200, 4)])
def test_a_column_is_shown_whole_or_not_at_all(width: int, shown: int) -> None:
    table = Table(box=None)
    table.add_column("tensor", overflow="fold")
    for name in ("SQNR dB", "expected", "the largest error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("layers.0.self_attn.q_proj.weight", "31.87", "31.90", "0.0124")
    stream = io.StringIO()
    console = Console(file=stream, width=width)
    console.print(fitted(table, console))
    printed = stream.getvalue()
    assert "…" not in printed and max(map(len, printed.splitlines())) <= width
    found = [x for x in ("SQNR dB", "expected", "the largest error") if x in printed]
    assert len(found) == shown - 1
    folded = "".join(line[: width - 9 * (shown - 1)].strip() for line in printed.splitlines()[1:])
    assert "layers.0.self" in folded


@pytest.mark.parametrize("width", [40, 80])
def test_a_stacked_table_keeps_every_figure(width: int) -> None:
    table = Table(box=None)
    table.add_column("artifact", overflow="fold")
    for name in ("perplexity", "KL, more\nthan 1st"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("/models/a-name-as-long-as-they-are-on-the-hub", "12.34\n12.11..12.57", "")
    table.add_row("b", "13.00\n12.91..13.10", "+0.125\n+0.101..+0.149")
    stream = io.StringIO()
    Console(file=stream, width=width).print(Stacked(table))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in stream.getvalue()
    assert all(x in stream.getvalue() for x in ("12.11..12.57", "+0.101..+0.149", "+0.125"))
    alone = [line for line in lines if line.startswith("  KL, more than 1st  ")]
    assert len(alone) == (width == 40)  # the first row has no such figure

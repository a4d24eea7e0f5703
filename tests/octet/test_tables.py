"""Tables on narrow terminals: fewer columns, each of them whole."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from octet.tables import fitted


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

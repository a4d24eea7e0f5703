"""The page and the table of a benchmark: complete, self-contained, safe with any name."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from octet.statistics import Interval
from verify.bench.console import render
from verify.bench.figures import Bench, Cell, Spread
from verify.bench.html import write_page
from verify.bench.load import FIGURES
from verify.evaluation.comparison import Comparison, Row

NAMES = ("http://a:1", "http://b:2/</script><b>x")


def bench(*, quality: bool) -> Bench:
    figures = {name: Spread(1.5, 1.25, 1.75) for name in FIGURES}
    ratios: dict[str, Spread | None] = dict(figures)
    ratios["itl_p50_ms"] = None
    first = Cell(figures, None, Spread(2.0**33, 2.0**33, 2.0**33), None, 3)
    second = Cell(figures, ratios, None, None, 3)
    comparison = None
    if quality:
        some = Interval(3.0, 2.0, 4.0)
        kl = Interval(0.01, math.nan, math.nan)
        rows = tuple(Row(name, some, some, kl, 0.1, 0.2, kl, some, 9, 1) for name in NAMES)
        comparison = Comparison("s.jsonl", 1, 9, 64, 20, "ref", some, rows, ("one sample",))
    loads = ("1x8x4", "16x8x4")
    cells = ((first, second), (first, second))
    warnings = ("short", *(comparison.warnings if comparison else ()))
    return Bench(NAMES, loads, 3, 8, cells, (None, 4096), comparison, warnings)


def test_a_page_holds_every_figure_and_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, bench(quality=True))
    text = path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    own = re.sub(r"<script>\s*/\*\*.*?</script>", "", text, flags=re.DOTALL)  # without Plotly
    assert "default-src 'none'" in own and not re.search(r"(src|href)\s*=(?!\"#summary)", own)
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', own)
    data = json.loads(embedded)
    assert data["targets"] == list(NAMES) and data["loads"] == ["1x8x4", "16x8x4"]
    assert data["quality"]["values"][0] == [0.01, None, None]
    assert data["figures"]["tokens_per_s"][1][0] == [1.5, 1.25, 1.75]
    assert "KL from the reference" in own and "prefers-color-scheme: dark" in own
    assert "&lt;/script&gt;&lt;b&gt;x" in own and "4,096" in own and "short" in own
    assert own.index('id="quality"') < own.index('id="throughput"') < own.index('id="itl"')


def test_without_samples_there_is_no_quality_to_show(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", bench(quality=False))
    text = (tmp_path / "page.html").read_text()
    assert 'id="quality"' not in text and "Quality was not measured" in text


@pytest.mark.parametrize("width", [40, 80])
def test_the_table_fits_a_terminal(width: int) -> None:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as shown:
        console.print(render(bench(quality=True)))
    text = shown.get()
    assert all(len(line) <= width for line in text.splitlines())
    assert "target 2: http://b:2/</script><b>x (KV cache: 4,096 tokens)" in " ".join(text.split())
    assert "1.25..1.75" in text and "to target 1" in text and "8.00" in text
    assert text.count("one sample") == 1 and "warning: short" in text


def faster(low: float, middle: float, high: float) -> Cell:
    figures = {name: Spread(1.0, 1.0, 1.0) for name in FIGURES}
    return Cell(figures, dict.fromkeys(FIGURES, Spread(middle, low, high)), None, None, 3)


@pytest.mark.parametrize(
    ("second", "title"),
    [
        (faster(1.1, 1.2, 1.3), "b:2/&lt;/script&gt;&lt;b&gt;x is fastest"),
        (faster(0.7, 0.8, 0.9), "a:1 is fastest"),
        (faster(0.5, 1.1, 1.7), "No server is clearly the fastest"),
    ],
)
def test_no_server_is_called_fastest_that_was_slower_in_some_round(
    second: Cell, title: str, tmp_path: Path
) -> None:
    some = bench(quality=False)
    cells = tuple((first, second) for first, _ in some.cells)
    write_page(tmp_path / "page.html", replace(some, cells=cells))
    text = (tmp_path / "page.html").read_text()
    assert f"{title} at 16x8x4</h1>" in text
    assert "GPU memory, GiB" in text and "GPU power, W" not in text  # nobody measured it

"""Renders a benchmark as one HTML file that needs nothing else: no network, no server.

Plotly is inlined as in `verify.evaluation.html`; the content security policy forbids every request.
"""

import json
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from verify.bench.figures import Bench, Spread
from verify.bench.load import FIGURES
from verify.evaluation.comparison import plain

__all__ = ["render_page", "write_page"]

_TITLES = {
    "tokens_per_s": "output tokens/s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99, ms",
}


def write_page(path: Path, bench: Bench) -> None:
    """Writes the page atomically."""
    text = render_page(bench)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def render_page(bench: Bench) -> str:
    template = (resources.files("verify.bench") / "page.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = _figure
    text = json.dumps(_data(bench), allow_nan=False, separators=(",", ":"))
    return environment.from_string(template).render(
        bench=bench,
        quality=bench.quality(),
        figures=_TITLES,
        json=Markup(text.replace("<", "\\u003c")),  # nothing in it can end the script element
        plotly=Markup(get_plotlyjs()),
    )


def _data(bench: Bench) -> Any:
    """Returns what the plots show."""
    quality = bench.quality()
    return plain(
        {
            "targets": list(bench.targets),
            "loads": list(bench.loads),
            "quality": None
            if quality is None
            else {
                "name": quality.name,
                "values": [[x.mean, x.low, x.high] for x in quality.values],
            },
            "figures": {
                name: [[_ends(cell.figures[name]) for cell in cells] for cells in bench.cells]
                for name in FIGURES
            },
        }
    )


def _ends(spread: Spread) -> list[float]:
    return [spread.median, spread.low, spread.high]


def _figure(value: float, factor: float = 1.0) -> str:
    value *= factor
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

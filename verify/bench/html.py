"""Renders a benchmark as one HTML file that needs nothing else: no network, no server.

Plotly is inlined as in `verify.evaluation.html`; the content security policy forbids every request.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from octet import page
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
    page.write_page(path, render_page(bench))


def render_page(bench: Bench) -> str:
    template = (resources.files("verify.bench") / "page.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = _figure
    text = json.dumps(_data(bench), allow_nan=False, separators=(",", ":"))
    return environment.from_string(template).render(
        bench=bench,
        verdict=_verdict(bench),
        quality=bench.quality(),
        figures=_TITLES,
        json=Markup(text.replace("<", "\\u003c")),  # nothing in it can end the script element
        plotly=Markup(get_plotlyjs()),
        style=Markup(page.stylesheet()),
        policy=Markup(page.POLICY),
    )


def _data(bench: Bench) -> Any:
    """Returns what the plots show."""
    quality = bench.quality()
    return plain(
        {
            "names": [_brief(name) for name in bench.targets],
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


def _brief(name: str) -> str:
    """Returns the last part of a path, and a URL without its scheme."""
    return name.partition("://")[2] or Path(name).name or name


def _verdict(bench: Bench) -> dict[str, Any]:
    """Returns what the page says first: which server is fastest, and by how much."""
    lines = []
    for number, target in enumerate(bench.targets):
        parts = []
        for load, cells in zip(bench.loads, bench.cells, strict=True):
            cell = cells[number]
            text = f"{_figure(cell.figures['tokens_per_s'].median)} tokens/s at {load}"
            ratio = None if cell.ratios is None else cell.ratios["tokens_per_s"]
            parts.append(text + ("" if ratio is None else f" ({ratio.median:.2f} times)"))
        if (tokens := bench.kv_capacity_tokens[number]) is not None:
            parts.append(f"cache of {tokens:,} tokens")
        lines.append((f"{number + 1}. {_brief(target)}", "; ".join(parts)))
    last = bench.cells[-1]
    fastest = max(range(len(last)), key=lambda i: last[i].figures["tokens_per_s"].median)
    title = f"{_brief(bench.targets[fastest])} is fastest at {bench.loads[-1]}"
    return {"status": "ready", "title": title, "lines": lines}

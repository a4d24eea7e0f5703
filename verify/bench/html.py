"""Renders a benchmark as one HTML file that needs nothing else: no network, no server.

Plotly is inlined as in `verify.evaluation.html`; the content security policy forbids every request.
"""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from octet import page
from verify.bench.figures import Bench, Cell, Spread
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


_GPU = {"GPU memory, GiB": ("gpu_memory_bytes", 2.0**-30), "GPU power, W": ("gpu_power_w", 1.0)}


def write_page(path: Path, bench: Bench) -> None:
    """Writes the page atomically."""
    page.write_page(path, render_page(bench))


def render_page(bench: Bench) -> str:
    template = (resources.files("verify.bench") / "page.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = _figure
    environment.filters["brief"] = _brief
    text = json.dumps(_data(bench), allow_nan=False, separators=(",", ":"))
    return environment.from_string(template).render(
        bench=bench,
        verdict=_verdict(bench),
        quality=bench.quality(),
        figures=_TITLES,
        gpu=_measured_of_gpus(bench),
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


def _measured_of_gpus(bench: Bench) -> dict[str, tuple[str, float]]:
    """Returns the columns of which some cell has a value."""
    cells = [cell for cells in bench.cells for cell in cells]
    return {
        title: (name, factor)
        for title, (name, factor) in _GPU.items()
        if any(getattr(cell, name) is not None for cell in cells)
    }


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
    load = bench.loads[-1]
    fastest = _fastest(bench.cells[-1])
    if fastest is not None:
        title = f"{_brief(bench.targets[fastest])} is fastest at {load}"
        return {"status": "ready", "title": title, "lines": lines}
    todo = "Measure more --rounds to tell them apart, or take the better one in quality or memory."
    title = f"No server is clearly the fastest at {load}"
    return {"status": "look", "title": title, "lines": [*lines, ("To do", todo)]}


def _fastest(cells: Sequence[Cell]) -> int | None:
    """Returns the target that was faster than every other in every round, if there is one.

    Ratios to the first target compare the same round; a slow round slows all targets.
    """
    speeds = [
        Spread(1.0, 1.0, 1.0) if cell.ratios is None else cell.ratios["tokens_per_s"]
        for cell in cells
    ]
    if len(speeds) == 1:
        return 0
    found = [speed or Spread(0.0, 0.0, 0.0) for speed in speeds]
    best = max(range(len(found)), key=lambda index: found[index].median)
    others = [speed.high for index, speed in enumerate(found) if index != best]
    return best if found[best].low > max(others) else None

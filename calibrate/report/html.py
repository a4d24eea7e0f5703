"""Renders `report.json` as one self-contained HTML file: no network, no server.

Text is rendered here. The page's own scripts draw plots and tables from the embedded JSON. Plotly
(MIT licence) is inlined; the `plotly` package ships only the whole library, 4.8 MB. The page's
content security policy forbids all requests.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

__all__ = ["render_html"]

_SCRIPTS = ("base.js", "distribution.js", "layers.js", "measured.js", "table.js", "main.js")


def render_html(data: Mapping[str, Any]) -> str:
    """Renders the page of a report's JSON (`Report.as_json`, or report.json read back)."""
    folder = resources.files("calibrate") / "report_page"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["count"] = lambda value: f"{value:,}"
    environment.filters["sentence"] = lambda text: text[:1].upper() + text[1:]
    return environment.from_string(read("page.html.jinja")).render(
        report=data,
        json=_embedded(data),
        style=Markup(read("style.css")),
        plotly=Markup(get_plotlyjs()),
        scripts=Markup("\n".join(read(name) for name in _SCRIPTS)),
        recipe=json.dumps(data["recipe"], indent=1),
    )


def _embedded(data: Mapping[str, Any]) -> Markup:
    """Encodes JSON for a script element; escapes "<", which could end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))

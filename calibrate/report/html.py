"""`report.json` as one HTML file that needs nothing else: no network, no server.

Text is rendered here, plots and tables by the page's own scripts from the JSON within it. Plotly
(MIT licence) is inlined: the `plotly` package carries the whole library alone, 4.8 MB. The page's
content security policy forbids it every request.
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
    """The page of a report's JSON (`Report.as_json`, or report.json read back)."""
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
    """JSON inside a script element: no "<", which could end it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))

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

from octet.page import stylesheet

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
        style=Markup(stylesheet()),
        facts=_facts(data["facts"]),
        plotly=Markup(get_plotlyjs()),
        scripts=Markup("\n".join(read(name) for name in _SCRIPTS)),
        recipe=json.dumps(data["recipe"], indent=1),
    )


def _embedded(data: Mapping[str, Any]) -> Markup:
    """Encodes JSON for a script element; escapes "<", which could end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


_FACTS = {  # of report.json, as the page calls them; others by their names
    "compute_dtype": "arithmetic",
    "bf16_matmuls": "BF16 matmuls in",
    "torch_threads": "threads",
    "max_length": "tokens in a row, at most",
    "long": "longer samples are",
    "over_long": "longer samples",
    "tokens_cut": "tokens cut",
    "tokens_joining": "tokens between joined samples",
    "padding_share": "padding",
    "chunk_ends": "judged after samples",
}


def _facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns the facts of a run in words; what was not used is left out."""
    shown = {}
    for name, value in facts.items():
        if value is None:
            continue
        if name == "batch_shapes":
            rows, tokens = (max(shape[axis] for shape in value) for axis in (0, 1))
            text = f"up to {rows} rows of {tokens:,} tokens"
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        elif name == "padding_share":
            text = f"{value:.1%}"
        elif isinstance(value, int):
            text = f"{value:,}"
        elif isinstance(value, list):
            text = ", ".join(map(str, value))
        else:
            text = str(value)
        shown[_FACTS.get(name, name.replace("_", " "))] = text
    return shown

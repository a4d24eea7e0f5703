"""Renders a comparison as one HTML file that needs nothing else: no network, no server.

Plotly (MIT licence) is inlined: the `plotly` package ships the whole library. The page's content
security policy forbids every request.
"""

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from plotly.offline import get_plotlyjs

from octet import page
from verify.evaluation.comparison import Comparison
from verify.evaluation.scores import Evaluation, Scores
from verify.evaluation.worst import CONTEXT, COUNT

__all__ = ["render_page", "write_page"]

_PER_DECADE = 8  # bins of the divergence's distribution
_LEAST_DECADE, _MOST_DECADE = -8, 2  # nats: smaller values are rounding


def write_page(path: Path, evaluation: Evaluation, comparison: Comparison) -> None:
    """Writes the page atomically."""
    page.write_page(path, render_page(evaluation, comparison))


def render_page(evaluation: Evaluation, comparison: Comparison) -> str:
    template = (resources.files("verify.evaluation") / "page.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = _figure
    environment.filters["brief"] = _brief
    environment.filters["percent"] = _percent
    environment.filters["plain_text"] = _plain_text
    environment.filters["visible"] = _visible
    sizes = [_bytes(row.name) for row in comparison.rows]
    data = comparison.as_json() | {
        "names": [_brief(row.name) for row in comparison.rows],
        "origins": list(evaluation.sequences.origins),
        "distributions": [_distribution(scores) for scores in evaluation.targets],
        "per_sample": [_per_sample(scores, evaluation) for scores in evaluation.targets],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return environment.from_string(template).render(
        comparison=comparison,
        verdict=_verdict(comparison),
        compared=any(row.change is not None for row in comparison.rows),
        count=COUNT,
        context=CONTEXT,
        decodes=evaluation.decode is not None,
        sizes=sizes if any(sizes) else None,
        json=Markup(text.replace("<", "\\u003c")),  # nothing in it can end the script element
        plotly=Markup(get_plotlyjs()),
        style=Markup(page.stylesheet()),
        policy=Markup(page.POLICY),
    )


def _figure(value: float | None, factor: float = 1.0, sign: str = "") -> str:
    if value is None or math.isnan(value):
        return "-"
    value *= factor
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.4g}"


def _percent(logprob: float) -> str:
    percent = 100 * math.exp(logprob)
    return "below 0.001 %" if percent < 0.001 else f"{percent:.3g} %"


# Control characters draw nothing, and direction marks reorder the text around them.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_PICTURES |= dict.fromkeys((0x7F, *range(0x80, 0xA0)), "\u2421")
_PICTURES |= dict.fromkeys(
    (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"
)


def _plain_text(text: str) -> str:
    """Returns a quotation with a picture for each character that does not draw itself."""
    return text.translate(_PICTURES)


def _visible(token: str) -> str:
    """Returns a token with its white space made visible."""
    return _plain_text(token).replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥") or "(empty)"


def _brief(name: str) -> str:
    """Returns the last part of a path, and a URL without its scheme."""
    return name.partition("://")[2] or Path(name).name or name


def _bytes(name: str) -> int | None:
    """Returns the size of an artifact on this machine; None for a server."""
    files = [] if "://" in name else [x for x in Path(name).rglob("*") if x.is_file()]
    return sum(file.stat().st_size for file in files) or None


_HARMLESS = 0.01  # of the perplexity: a change that the verdict does not warn of


def _verdict(comparison: Comparison) -> dict[str, Any]:
    """Returns what the page says first: is it good, what does it cost, what is to be done."""
    lines = []
    for row in comparison.rows:
        text = f"perplexity {_figure(row.perplexity.mean)}"
        if row.change is not None:
            mean, low, high = (
                f"{100 * x:+.2f}" for x in (row.change.mean, row.change.low, row.change.high)
            )
            text = f"{mean} % of perplexity ({low} to {high} %)"
        if row.kl is not None:
            text += f", KL {_figure(row.kl.mean, 1000)} thousandths of a nat"
        lines.append((_brief(row.name), text))
    changed = [row for row in comparison.rows if row.change is not None]
    if not changed:
        title = f"Perplexity {_figure(comparison.rows[0].perplexity.mean)} on held-out text"
        return {"status": "ready", "title": title, "lines": lines}
    worst = max(changed, key=lambda row: row.change.high if row.change else 0.0)
    assert worst.change is not None
    if worst.change.high <= _HARMLESS:
        todo = "Nothing: serve the one that is fastest, or smallest."
        title = "No artifact costs more than 1 % of perplexity"
        return {"status": "ready", "title": title, "lines": [*lines, ("To do", todo)]}
    todo = (
        "See which layers cost it (calibrate --sensitivity), or keep them in a better format"
        " (calibrate --budget ppl=1%)."
    )
    title = f"{_brief(worst.name)} may cost {100 * worst.change.high:.2f} % of perplexity"
    return {"status": "look", "title": title, "lines": [*lines, ("To do", todo)]}


def _distribution(scores: Scores) -> dict[str, Any] | None:
    """Returns the share of tokens by divergence, in bins of an eighth of a decade.

    The first bin also counts all smaller values.
    """
    if scores.kl is None:
        return None
    decades = np.log10(np.maximum(np.concatenate(scores.kl), 10.0**_LEAST_DECADE))
    edges = np.linspace(
        _LEAST_DECADE, _MOST_DECADE, (_MOST_DECADE - _LEAST_DECADE) * _PER_DECADE + 1
    )
    counts, _ = np.histogram(np.minimum(decades, _MOST_DECADE), edges)
    centres = 10.0 ** ((edges[:-1] + edges[1:]) / 2)
    return {"nats": centres.tolist(), "share": (counts / len(decades)).tolist()}


def _per_sample(scores: Scores, evaluation: Evaluation) -> dict[str, Any]:
    """Returns means per token of each sample: divergence, and change of the log-perplexity.

    Of one target without a reference, the log-perplexity itself.
    """
    kl = None if scores.kl is None else _means(scores.kl)
    if evaluation.reference is None and len(evaluation.targets) == 1:
        return {"kl": kl, "change": _means(scores.nll)}
    base = evaluation.reference or evaluation.targets[0]
    changes = [a - b for a, b in zip(_means(scores.nll), _means(base.nll), strict=True)]
    return {"kl": kl, "change": changes}


def _means(values: tuple[NDArray[np.float64], ...]) -> list[float]:
    return [float(value.mean()) for value in values]

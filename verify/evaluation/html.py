"""Renders a comparison as one HTML file that needs nothing else: no network, no server.

Plotly (MIT licence) is inlined: the `plotly` package ships the whole library. The page's content
security policy forbids every request.
"""

import json
import math
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from plotly.offline import get_plotlyjs

from verify.evaluation.comparison import Comparison
from verify.evaluation.scores import Evaluation, Scores

__all__ = ["render_page", "write_page"]

_PER_DECADE = 8  # bins of the divergence's distribution
_LEAST_DECADE, _MOST_DECADE = -8, 2  # nats: smaller values are rounding


def write_page(path: Path, evaluation: Evaluation, comparison: Comparison) -> None:
    """Writes the page atomically."""
    text = render_page(evaluation, comparison)
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


def render_page(evaluation: Evaluation, comparison: Comparison) -> str:
    template = (resources.files("verify.evaluation") / "page.html.jinja").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = _figure
    data = comparison.as_json() | {
        "origins": list(evaluation.sequences.origins),
        "distributions": [_distribution(scores) for scores in evaluation.targets],
        "per_sample": [_per_sample(scores, evaluation) for scores in evaluation.targets],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return environment.from_string(template).render(
        comparison=comparison,
        json=Markup(text.replace("<", "\\u003c")),  # nothing in it can end the script element
        plotly=Markup(get_plotlyjs()),
    )


def _figure(value: float | None, factor: float = 1.0, sign: str = "") -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{factor * value:{sign}.4g}"


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
    """Returns means per token of each sample: divergence, and change of the log-perplexity."""
    base = evaluation.reference or evaluation.targets[0]
    kl = None if scores.kl is None else _means(scores.kl)
    return {
        "kl": kl,
        "change": [a - b for a, b in zip(_means(scores.nll), _means(base.nll), strict=True)],
    }


def _means(values: tuple[NDArray[np.float64], ...]) -> list[float]:
    return [float(value.mean()) for value in values]

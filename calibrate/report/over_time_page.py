"""Renders a replay as one HTML page: scales over time in SVG, and tables, without scripts."""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from calibrate.report.over_time import Replay, nats, share
from calibrate.scales.over_time import RULES, Point, TensorOverTime
from octet import page

__all__ = ["render_page", "write_page"]

_PLOTS = 6  # tensors, those first that differ most
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 900, 250, 60, 44, 24
_STYLE = """
svg { width: 100%; min-width: 620px; height: auto; display: block; }
svg text { fill: var(--text); font-size: 13px; }
svg .quiet { fill: var(--muted); font-size: 12px; } svg .grid { stroke: var(--grid); }
svg path { fill: none; stroke-width: 2; } svg .band { fill: var(--grid); opacity: .6; }
svg .frozen { stroke: var(--c5); } svg .delayed { stroke: var(--c1); }
svg .current { stroke: var(--c0); stroke-width: 1.5; }
"""


def write_page(path: Path, replay: Replay) -> None:
    """Writes the page atomically."""
    page.write_page(path, render_page(replay))


def render_page(replay: Replay) -> str:
    lines = [*replay.lines(), *(f"note: {note}" for note in replay.notes)]
    sections = {
        "Domains": _list(lines) + _rules(replay),
        "Scales over time": _help(
            "Log scale; a larger scale saturates later. Each step is quantized with the frozen, the"
            " delayed or the current scale. Stripes are domains."
            " Delayed scaling begins with the scale 1, which may lie outside the plot."
        )
        + "".join(_plot(name, replay.tensors[name]) for name in replay.differing[:_PLOTS]),
        "What the scale of one domain costs on another": _help(
            "The largest relative squared error of any tensor, with the scale that a calibration on"
            " the row's domain alone would have, on the column's. On the diagonal is its own."
        )
        + _exchange(replay),
        "Tensors": _help(
            "Those first whose scales differ most. Distance is the largest difference of the"
            " cumulative distributions of two domains (Kolmogorov-Smirnov)."
        )
        + _tensors(replay),
        "Tensors by domain": _by_domain(replay),
    }
    title = f"Replay of {Path(replay.stream).name} over {Path(replay.calibration).name}"
    return page.static_page("replay", title, replay.head, sections, _STYLE)


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _help(text: str) -> str:
    return f'<p class="help">{escape(text)}</p>'


def _rules(replay: Replay) -> str:
    rows = []
    for domain in replay.ordered:
        for rule in RULES:
            found = replay.outcome(domain, rule)
            shares = share(found.saturated), share(found.underflow)
            errors = f"{found.error:.3g}", f"{found.worst_error:.3g}"
            rows.append((domain, rule, *nats(found.kl), *shares, *errors, found.worst))
    kl = ("KL, nats",) if replay.kl else ()
    titles = ("domain", "scaling", *kl, "saturated", "to zero", "error, median", "worst", "in")
    return page.table("Domains by rule", titles, rows)


def _exchange(replay: Replay) -> str:
    def cell(of: str, on: str) -> str:
        errors = [
            (compared.own[on] if of == on else compared.costs[of, on]).relative_error
            for compared in replay.compared.values()
            if of in compared.scales and on in compared.scales
        ]
        return f"{max(errors):.3g}" if errors else ""

    names = replay.ordered
    rows = [(of, *(cell(of, on) for on in names)) for of in names]
    return page.table("Cost of exchanged scales", ("scale of", *(f"on {x}" for x in names)), rows)


def _tensors(replay: Replay) -> str:
    rows = []
    for name in replay.differing:
        found, cells = replay.compared[name], ["", "", "", ""]
        if found.worst is not None:
            of, on = found.worst
            cost, own = found.costs[of, on], found.own[on]
            errors = f"{own.relative_error:.3g}", f"{cost.relative_error:.3g}"
            cells = [f"{of} on {on}", *errors, share(cost.saturated / cost.elements)]
        rows.append((name, f"{found.ratio:.3g}", f"{found.distance:.3f}", *cells))
    titles = ("tensor", "scales differ by", "distance", "worst exchange", "own error")
    return page.table("Tensors", (*titles, "error then", "saturated then"), rows)


def _by_domain(replay: Replay) -> str:
    rows = []
    for name in replay.differing:
        tensor, scales = replay.tensors[name], replay.compared[name].scales
        for domain in replay.ordered:
            if domain not in scales:
                continue
            effects = [tensor.effects[domain, rule] for rule in RULES]
            cells = [
                text
                for effect in effects
                for text in (
                    share(effect.saturated / effect.elements),
                    share(effect.underflow / effect.elements),
                    f"{effect.relative_error:.3g}",
                )
            ]
            scale = scales[domain]
            own = f"{scale:.3g}", f"{scale / tensor.frozen:.3g}"
            rows.append((name, domain, tensor.format.name, *own, *cells))
    titles = [f"{rule}: {what}" for rule in RULES for what in ("saturated", "to zero", "error")]
    first = ("tensor", "domain", "format", "own scale", "over frozen")
    return page.table("Tensors by domain", (*first, *titles), rows)


def _plot(name: str, tensor: TensorOverTime) -> str:
    """Draws the three scales of a tensor over the steps, on a logarithmic axis.

    Delayed scaling begins with a scale of 1, which may lie outside the axis.
    """
    points, frozen = tensor.course.points, tensor.frozen
    values = [frozen, *(x.current for x in points), *(x.delayed for x in points[1:])]
    low, high = (math.log2(f(values)) for f in (min, max))
    low, high = math.floor(low - 0.1), math.ceil(high + 0.1)
    floor = _HEIGHT - _BOTTOM

    def y(value: float) -> float:
        part = (math.log2(value) - low) / (high - low)
        return floor - min(max(part, 0.0), 1.0) * (floor - _TOP)

    def x(index: float) -> float:
        return _LEFT + index * (_WIDTH - _LEFT) / len(points)

    def line(kind: str, heights: Sequence[float]) -> str:
        steps = "".join(
            f"L{x(i):.1f} {y(value):.1f}H{x(i + 1):.1f}" for i, value in enumerate(heights)
        )
        return f'<path class="{kind}" d="M{steps[1:]}"/>'

    parts = list(_bands(points, x, floor))
    step = max(1, (high - low) // 6)
    for power in range(low, high + 1, step):
        at = y(2.0**power)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(_LEFT - 6, at + 4, f"2^{power}", "end"))
    parts.append(line("current", [point.current for point in points]))
    parts.append(line("delayed", [point.delayed for point in points]))
    parts.append(line("frozen", [frozen] * len(points)))
    for index, rule in enumerate(RULES):
        left = _LEFT + 110 * index
        parts.append(f'<path class="{rule}" d="M{left} 12H{left + 24}"/>')
        parts.append(_text(left + 30, 16, rule))
    steps = f"{tensor.course.width} step{'s' if tensor.course.width > 1 else ''} a point"
    parts.append(_text(_WIDTH, _HEIGHT - 6, f"time, {steps}", "end"))
    return (
        f'<figure><figcaption>{escape(name)}</figcaption><div class="scroll" role="region"'
        f' aria-label="{escape(name)}, plot" tabindex="0"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' role="img" aria-label="Scales of {escape(name)} over time">{"".join(parts)}</svg></div>'
        "</figure>"
    )


def _bands(points: Sequence[Point], x: Callable[[float], float], floor: float) -> Iterator[str]:
    """Yields a stripe for every other run of points of one domain, and the domains' names."""
    start, end = 0, -1.0
    for number, (domain, run) in enumerate(groupby(points, key=lambda point: point.domain)):
        stop = start + len(list(run))
        if number % 2:
            yield (
                f'<rect class="band" x="{x(start):.1f}" y="{_TOP}"'
                f' width="{x(stop) - x(start):.1f}" height="{floor - _TOP}"/>'
            )
        if x(start) > end:  # where there is room for it
            yield _text(x(start) + 2, _TOP - 8, domain)
            end = x(start) + 8 * len(domain)
        start = stop


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    quiet = f'class="quiet" text-anchor="{anchor}"'
    return f'<text {quiet} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'

"""Renders a plan as one HTML page: two plots in SVG and a table, without scripts or requests."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from octet import page
from octet.plan.console import BOUND, cost_of, gib, joined, options, speed_of
from octet.plan.planner import Plan, Row
from octet.plan.vllm_memory import BLOCK

__all__ = ["render_page", "write_page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"
_WIDTH, _LEFT, _RIGHT = 900, 190, 20
_BAR, _GAP = 20, 10
_DASHES = ("", "7 4", "2 4", "9 3 2 3", "12 4", "4 2", "1 3")  # one a recipe, beside its colour
_STYLE = """
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--text); font-size: 13px; }
svg .quiet { fill: var(--muted); font-size: 12px; } svg .grid { stroke: var(--grid); }
svg .goal { fill: var(--text); }
""" + "".join(
    f"svg .fill{i} {{ fill: var(--c{i}); }} svg .line{i} {{ stroke: var(--c{i}); fill: none;"
    " stroke-width: 2; }\n"
    for i in range(6)
)


def write_page(path: Path, plan: Plan) -> None:
    """Writes the page atomically."""
    page.write_page(path, render_page(plan))


def render_page(plan: Plan) -> str:
    goal, rows = plan.goal, joined(plan.rows)
    title = f"Plan of {plan.model} on {goal.device.name}"
    lead = (
        f"{goal.concurrency:,} requests of {goal.context:,} tokens each, of which"
        f" {goal.output:,} are generated; {gib(plan.usable_bytes)} GiB of memory on each GPU."
    )
    notes = [*options(plan), *(f"left out: {line}" for line in plan.left_out)]
    notes += [BOUND] if any(row.basis == "roofline" for row in plan.rows) else []
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{page.stylesheet()}{_STYLE}</style>
</head>
<body>
<header><p class="brand">Octet <span>plan</span></p></header>
<main>
<section class="card"><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></section>
<section><h2>Memory of each GPU</h2>{_memory_plot(plan, rows)}</section>
<section><h2>Largest batch by context</h2>
<p class="help">On the GPUs of its row, one request per unit; the dot is what is planned.</p>
{_batch_plot(plan, rows)}</section>
<section><h2>All figures</h2>{_table(rows)}</section>
<section><h2>Options and notes</h2>
<ul class="warnings">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul></section>
</main>
</body>
</html>
"""


def _label(group: Sequence[Row]) -> str:
    first = group[0]
    gpus = f" ×{first.tensor_parallel}" if first.tensor_parallel > 1 else ""
    return f"{first.recipe} {'/'.join(row.kv_cache for row in group)}{gpus}"


def _memory_plot(plan: Plan, rows: Sequence[Sequence[Row]]) -> str:
    """Draws a bar for each row: weights, activations and others, cache needed, cache to spare."""
    parts, names = [], ("weights", "activations, graphs, other", "cache needed", "cache to spare")
    scale = (_WIDTH - _LEFT - _RIGHT) / plan.usable_bytes
    blocks = -(-plan.goal.context // BLOCK) * plan.goal.concurrency
    top = 30
    for index, name in enumerate(names):
        x = _LEFT + index * 175
        parts.append(f'<rect class="fill{index}" x="{x}" y="4" width="12" height="12"/>')
        parts.append(f'<text x="{x + 18}" y="15">{name}</text>')
    for number, group in enumerate(rows):
        memory, y = group[0].memory, top + number * (_BAR + _GAP)
        needed = blocks * BLOCK * memory.token_bytes
        other = memory.activations + memory.graphs + memory.other
        sizes = (memory.weights, other, needed, memory.cache - needed)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">')
        parts.append(f"{escape(_label(group))}</text>")
        x = float(_LEFT)
        for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
            width = size * scale
            parts.append(
                f'<rect class="fill{index}" x="{x:.1f}" y="{y}" width="{width:.1f}"'
                f' height="{_BAR}"><title>{name}: {gib(size)} GiB</title></rect>'
            )
            x += width
    height = top + len(rows) * (_BAR + _GAP) + 22
    step = _round_step(plan.usable_bytes / 2**30)
    for value in range(0, int(plan.usable_bytes / 2**30) + 1, step):
        x = _LEFT + value * 2**30 * scale
        parts.append(f'<text class="quiet" x="{x:.1f}" y="{height - 6}" text-anchor="middle">')
        parts.append(f"{value} GiB</text>")
    return _svg(height, "Memory of each GPU by recipe and cache", parts)


def _line(x1: float, x2: float, y1: float, y2: float, style: str = 'class="grid"') -> str:
    return f'<line {style} x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text {style} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _batch_plot(plan: Plan, rows: Sequence[Sequence[Row]]) -> str:
    """Draws, on two logarithmic axes, how many requests of a context fit into the cache."""
    height, top, bottom, left = 400, 16, 36, 60
    least, most = 256, max(row.longest_context for row in plan.rows)
    most = max(most, plan.goal.context, 2 * least)
    batches = [group[0].memory.tokens / least for group in rows]
    highest = max(*batches, plan.goal.concurrency, 2)
    right = _WIDTH - 230

    def across(context: float) -> float:
        return left + (right - left) * math.log(context / least) / math.log(most / least)

    def up(batch: float) -> float:
        return (
            height - bottom - (height - top - bottom) * math.log(max(batch, 1)) / math.log(highest)
        )

    parts = []
    bottom_y = height - bottom
    for power in range(int(math.log2(least)), int(math.log2(most)) + 1, 2):
        x, text = across(2**power), f"{2**power // 1024}k" if power >= 10 else f"{2**power}"
        parts.append(_line(x, x, top, bottom_y))
        parts.append(_text(x, height - 16, text, 'class="quiet" text-anchor="middle"'))
    for power in range(int(math.log10(highest)) + 1):
        y = up(10**power)
        parts.append(_line(left, right, y, y))
        parts.append(_text(left - 6, y + 4, f"{10**power:,}", 'class="quiet" text-anchor="end"'))
    recipes = list(dict.fromkeys(group[0].recipe for group in rows))
    for number, group in enumerate(rows):
        tokens, kind = group[0].memory.tokens, recipes.index(group[0].recipe)
        ends = [(least, tokens / least), (min(most, tokens), max(1.0, tokens / most))]
        points = " ".join(f"{across(c):.1f},{up(b):.1f}" for c, b in ends)
        style = f'class="line{kind % 6}" stroke-dasharray="{_DASHES[kind % len(_DASHES)]}"'
        style += ' stroke-opacity="0.55"' if group[0].kv_cache == "float16" else ""
        name = _label(group)
        parts.append(
            f'<polyline {style} points="{points}"><title>{escape(name)}</title></polyline>'
        )
        y = top + 10 + number * 20
        parts.append(_line(right + 14, right + 44, y, y, style))
        parts.append(_text(right + 50, y + 4, name))
    x, y = across(plan.goal.context), up(plan.goal.concurrency)
    parts.append(f'<circle class="goal" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
    return _svg(max(height, top + 20 * len(rows) + 20), "Largest batch by context", parts)


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _round_step(most: float) -> int:
    """Returns a step of 1, 2 or 5 times a power of ten that makes at most ten marks."""
    power = 10 ** max(0, math.floor(math.log10(most / 10)))
    return int(next(power * x for x in (1, 2, 5, 10) if power * x >= most / 10))


def _table(rows: Sequence[Sequence[Row]]) -> str:
    titles = ("recipe", "matmuls", "GPUs", "checkpoint GB", "weights GiB", "activations GiB")
    titles += ("graphs, other GiB", "cache GiB", "blocks", "longest context", "largest batch")
    titles += ("output tokens/s", "from", "$ a million output tokens")
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = []
    for group in rows:
        row, memory = group[0], group[0].memory
        cells = (
            _label(group),
            row.support,
            str(row.tensor_parallel),
            f"{row.checkpoint_bytes / 1e9:.2f}",
            *map(gib, (memory.weights, memory.activations, memory.graphs + memory.other)),
            gib(memory.cache),
            *(f"{x:,}" for x in (memory.blocks, row.longest_context, row.largest_batch)),
            speed_of(row),
            row.basis,
            cost_of(row) or "-",
        )
        body.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return (
        '<div class="scroll" role="region" aria-label="Table of figures" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )

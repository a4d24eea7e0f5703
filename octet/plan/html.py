"""Renders a plan as one HTML page: two plots in SVG and a table, without scripts or requests."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from octet import page
from octet.plan.console import BOUND, cost_of, gib, joined, options, speed_of
from octet.plan.planner import Plan, Row
from octet.plan.vllm_memory import BLOCK, GIB

__all__ = ["render_page", "write_page"]

_WIDTH, _LEFT, _RIGHT = 900, 190, 20
_BAR, _GAP = 20, 10
_STYLE = """
svg { width: 100%; min-width: 760px; height: auto; display: block; }
svg text { fill: var(--text); font-size: 13px; }
svg .quiet { fill: var(--muted); font-size: 12px; } svg .grid { stroke: var(--grid); }
""" + "".join(f"svg .fill{i} {{ fill: var(--c{i}); }}\n" for i in range(4))


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
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    sections = {
        "Memory of each GPU, GiB": _memory_plot(plan, rows),
        "Output tokens/s a GPU": _speed_plot(rows),
        "All figures": _table(rows),
        "Options and notes": f'<ul class="warnings">{listed}</ul>',
    }
    return page.static_page("plan", title, lead, sections, _STYLE)


def _label(group: Sequence[Row]) -> str:
    first = group[0]
    gpus = f" on {first.tensor_parallel}" if first.tensor_parallel > 1 else ""
    return f"{first.recipe} {'/'.join(row.kv_cache for row in group)}{gpus}"


def _memory_plot(plan: Plan, rows: Sequence[Sequence[Row]]) -> str:
    """Draws for each row: weights, activations and others, cache needed, cache to spare."""
    names = ("weights", "activations, other", "cache needed", "cache to spare")
    blocks = -(-plan.goal.context // BLOCK) * plan.goal.concurrency
    bars, most = [], plan.usable_bytes / GIB
    for group in rows:
        memory = group[0].memory
        needed = blocks * BLOCK * memory.token_bytes
        other = memory.activations + memory.graphs + memory.other
        parts = (memory.weights, other, needed, memory.cache - needed)
        bars.append(tuple(part / GIB for part in parts))
    return _plot("Memory of each GPU, GiB", rows, bars, names, most)


def _speed_plot(rows: Sequence[Sequence[Row]]) -> str:
    """Draws the output tokens per second of each row, divided by its GPUs; 0 if not known."""
    bars = [((row.tokens_per_s or 0.0) / row.tensor_parallel,) for row, *_ in rows]
    most = max(bar for (bar,) in bars) or 1.0
    name = "output tokens/s a GPU" + (" (≤)" if rows[0][0].basis == "roofline" else "")
    return _plot("Output tokens/s a GPU", rows, bars, (name,), most)


def _plot(
    label: str,
    rows: Sequence[Sequence[Row]],
    bars: Sequence[tuple[float, ...]],
    names: Sequence[str],
    most: float,
) -> str:
    """Draws a stacked bar for each row, on an axis from 0 to `most`, under the names' legend."""
    scale, top, parts = (_WIDTH - _LEFT - _RIGHT) / most, 30, []
    height = top + len(rows) * (_BAR + _GAP) + 22
    for index, name in enumerate(names):
        x = float(_LEFT + index * 175)
        parts.append(f'<rect class="fill{index}" x="{x}" y="4" width="12" height="12"/>')
        parts.append(_text(x + 18, 15, name))
    step = _round_step(most)
    for mark in range(int(most / step) + 1):
        x = _LEFT + mark * step * scale
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - 20}"/>'
        )
        parts.append(_text(x, height - 6, f"{mark * step:,}", 'class="quiet" text-anchor="middle"'))
    for number, (group, sizes) in enumerate(zip(rows, bars, strict=True)):
        x, y = float(_LEFT), top + number * (_BAR + _GAP)
        parts.append(_text(_LEFT - 8, y + 15, _label(group), 'text-anchor="end"'))
        for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
            width = size * scale
            parts.append(
                f'<rect class="fill{index}" x="{x:.1f}" y="{y}" width="{width:.1f}"'
                f' height="{_BAR}"><title>{name}: {size:,.1f}</title></rect>'
            )
            x += width
    return (
        f'<div class="scroll" role="region" aria-label="{label}, plot" tabindex="0">'
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg></div>"
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text {style} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _round_step(most: float) -> int:
    """Returns a step of 1, 2 or 5 times a power of ten that makes at most ten marks."""
    power = 10 ** max(0, math.floor(math.log10(most / 10)))
    return int(next(power * x for x in (1, 2, 5, 10) if power * x >= most / 10))


def _table(rows: Sequence[Sequence[Row]]) -> str:
    titles = (
        *("recipe", "matmuls", "GPUs", "checkpoint GB", "weights GiB", "activations GiB"),
        *("other GiB", "cache GiB", "blocks", "longest context", "largest batch"),
        *("output tokens/s", "from", "$ a million output tokens"),
    )
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
            "-" if row.tokens_per_s is None else row.basis,
            cost_of(row) or "-",
        )
        body.append(cells)
    return page.table("Table of figures", titles, body)

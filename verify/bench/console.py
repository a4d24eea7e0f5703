"""Renders a benchmark as one table per load, with each median above its range over the rounds."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octet.tables import Stacked
from verify.bench.figures import Bench, Cell, Spread
from verify.bench.load import FIGURES
from verify.evaluation.console import render as render_quality

__all__ = ["render"]

_TITLES = {
    "tokens_per_s": "output\ntokens/s",
    "ttft_p50_ms": "TTFT\np50, ms",
    "ttft_p99_ms": "TTFT\np99, ms",
    "itl_p50_ms": "ITL\np50, ms",
    "itl_p99_ms": "ITL\np99, ms",
}
GIB = 2**30


def render(bench: Bench) -> RenderableType:
    """Renders the tables, their caption with the warnings, and the quality if it was measured."""
    parts: list[RenderableType] = []
    for number, name in enumerate(bench.targets):
        capacity = bench.kv_capacity_tokens[number]
        cache = "" if capacity is None else f" (KV cache: {capacity:,} tokens)"
        parts.append(Text(f"target {number + 1}: {name}{cache}"))
        parts += [Text(f"  {proof}") for proof in bench.proofs[number : number + 1]]
    for load, cells in zip(bench.loads, bench.cells, strict=True):
        clients, prompt, output = load.split("x")
        plural = "s" if clients != "1" else ""
        head = f"\n{load}: {clients} client{plural}, {prompt} tokens in, {output} out"
        parts += [Text(head), Stacked(_table(cells))]
    parts.append(Text(_caption(bench)))
    if bench.comparison is not None:
        parts += [Text(""), render_quality(bench.comparison)]
    return Group(*parts)


def _table(cells: tuple[Cell, ...]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 1), collapse_padding=True, show_lines=False)
    table.add_column("", no_wrap=True)
    for name in FIGURES:
        table.add_column(_TITLES[name], justify="right", no_wrap=True)
    memory = any(cell.gpu_memory_bytes for cell in cells)
    power = any(cell.gpu_power_w for cell in cells)
    if memory:
        table.add_column("GPU\nGiB", justify="right", no_wrap=True)
    if power:
        table.add_column("GPU\nW", justify="right", no_wrap=True)
    for number, cell in enumerate(cells, start=1):
        row = [f"target {number}", *(_spread(cell.figures[name]) for name in FIGURES)]
        row += [_spread(cell.gpu_memory_bytes, 1 / GIB)] if memory else []
        row += [_spread(cell.gpu_power_w)] if power else []
        table.add_row(*row)
        if cell.ratios is not None:
            ratios = [_spread(cell.ratios[name]) for name in FIGURES]
            table.add_row("  to target 1", *ratios, *[""] * (memory + power))
    return table


def _spread(spread: Spread | None, factor: float = 1.0) -> str:
    if spread is None:
        return "-"
    middle, low, high = (
        _figure(factor * value) for value in (spread.median, spread.low, spread.high)
    )
    return middle if low == high else f"{middle}\n{low}..{high}"


def _figure(value: float) -> str:
    """Formats with three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def _caption(bench: Bench) -> str:
    several = bench.rounds > 1
    below = f"median of {bench.rounds} rounds, its range below" if several else "one round"
    lines = [
        f"\n{below}; {bench.requests} requests per client and run. A ratio compares runs of one"
        " round: above 1 is faster in tokens/s, and slower in TTFT and ITL."
    ]
    own = {line for line in (bench.comparison.warnings if bench.comparison else ())}
    lines += [f"warning: {line}" for line in bench.warnings if line not in own]
    return "\n".join(lines)

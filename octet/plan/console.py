"""Renders a plan as tables for the terminal: memory, then speed, then the options of vLLM."""

from collections.abc import Callable, Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octet.plan.planner import SHARED, Plan, Row
from octet.tables import Stacked

__all__ = ["BOUND", "cost_of", "gib", "joined", "options", "render", "speed_of"]

# What the figures of `≤` mean. The range is of benchmarks/results/recipe_grid-h200.json: the lowest
# and the highest ratio of a measured speed to its roofline.
BOUND = (
    "≤ is a roofline of the GPU's data sheet, not a measurement: vLLM 0.24 on an H200 reached 0.25"
    " to 0.67 of it, with an 8B model and up to 16 requests. Give --bench to plan with your own"
)
_MEASURED = {"measured": "", "interpolated": "~", "extrapolated": "~", "roofline": "≤ "}


def render(plan: Plan) -> RenderableType:
    """Renders the tables and their caption."""
    goal = plan.goal
    head = (
        f"{plan.model} on {goal.device.name} ({gib(plan.usable_bytes)} GiB): {goal.concurrency}"
        f" requests of {goal.context:,} tokens, {goal.output:,} of them generated"
    )
    rows = joined(plan.rows)
    parts: list[RenderableType] = [Text(head), Text("")]
    parts += [Stacked(_memory(rows)), Text(""), Stacked(_speed(rows)), Text("")]
    parts += [Text(line) for line in options(plan)]
    parts += [Text(f"left out: {line}") for line in plan.left_out]
    bases = {row.basis for row in plan.rows if row.tokens_per_s is not None}
    if "roofline" in bases:
        parts += [Text(""), Text(BOUND)]
    if "extrapolated" in bases:
        parts += [Text(""), Text("~ is extrapolated from other loads of --bench")]
    return Group(*parts)


def options(plan: Plan) -> list[str]:
    """Returns the suggested options of `vllm serve`: those of all rows, and what differs."""
    first, *others = (row.flags for row in plan.rows)
    if not others:
        return [f"vllm serve {' '.join(first)}"]
    shared = " ".join(first[:SHARED])
    lines = [f"vllm serve {shared}"]
    if any(row.tensor_parallel > 1 for row in plan.rows):
        lines.append("  and --tensor-parallel-size: the GPUs of the row, if more than one")
    eight = [row.kv_cache for row in plan.rows if row.kv_cache != "float16"]
    if eight:
        names = " or ".join(f"fp8_{name}" for name in dict.fromkeys(eight))
        lines.append(f"  and --kv-cache-dtype {names}: the cache of the row, if not float16")
    return lines


def joined(rows: Iterable[Row]) -> list[list[Row]]:
    """Puts rows together that differ in their cache's format alone, as E4M3 and E5M2 often do."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        figures = (row.recipe, row.support, row.tensor_parallel, row.memory, row.tokens_per_s)
        found.setdefault(figures, []).append(row)
    return list(found.values())


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f}"


def speed_of(row: Row) -> str:
    """Formats the output tokens per second, with a sign for what they rest on."""
    if row.tokens_per_s is None:
        return "unknown"
    return f"{_MEASURED[row.basis]}{row.tokens_per_s:,.0f}"


def cost_of(row: Row) -> str:
    """Formats the dollars per million output tokens; at least so much if the speed is a bound."""
    sign = "≥ " if row.basis == "roofline" else _MEASURED[row.basis]
    return "" if row.cost is None else f"{sign}{row.cost:.3g}"


def _memory(rows: list[list[Row]]) -> Table:
    columns: dict[str, Callable[[Row], str]] = {
        "GPUs": lambda row: str(row.tensor_parallel),
        "weights\nGiB": lambda row: gib(row.memory.weights),
        "activations\nGiB": lambda row: gib(row.memory.activations),
        "other\nGiB": lambda row: gib(row.memory.graphs + row.memory.other),
        "cache\nGiB": lambda row: gib(row.memory.cache),
        "cache\nblocks": lambda row: f"{row.memory.blocks:,}",
        "longest\ncontext": lambda row: f"{row.longest_context:,}",
        "largest\nbatch": lambda row: f"{row.largest_batch:,}",
    }
    return _table("each GPU", rows, columns)


def _speed(rows: list[list[Row]]) -> Table:
    columns: dict[str, Callable[[Row], str]] = {
        "GPUs": lambda row: str(row.tensor_parallel),
        "matmuls": lambda row: row.support,
        "checkpoint\nGB": lambda row: f"{row.checkpoint_bytes / 1e9:.1f}",
        "output\ntokens/s": speed_of,
        "from": lambda row: "" if row.tokens_per_s is None else row.basis,
    }
    if any(row.cost is not None for group in rows for row in group):
        columns["$ a million\noutput tokens"] = cost_of
    return _table("all GPUs", rows, columns)


def _table(title: str, rows: list[list[Row]], columns: dict[str, Callable[[Row], str]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 1), collapse_padding=True, show_lines=False)
    table.add_column(title, overflow="fold", min_width=10)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for group in rows:
        table.add_row(_label(group), *(cell(group[0]) for cell in columns.values()))
    return table


def _label(group: list[Row]) -> str:
    return f"{group[0].recipe} {'/'.join(row.kv_cache for row in group)}"

"""Checks, prints and records how many of an engine's GEMMs really run in FP8 or FP4."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from export.engine.builder import Precision
from export.source import Source
from octet.errors import ExportError

__all__ = ["check_precision", "precision_details", "print_report"]

_OF = {
    "engine": "the compiled engine, layer by layer",
    "network": "the parsed network, which the compiler may have changed",
}


def check_precision(precision: Precision, source: Source, who: str) -> None:
    """Raises ExportError unless every linear that the recipe names runs in the recipe's bits.

    `who` names the builder of the engine and its targets, for the message.
    """
    wanted = {
        name: "fp4" if schemes[0].format == "e2m1" else "fp8"
        for name, linear in source.quantized_linears().items()
        if (schemes := source.schemes(linear)) is not None
    }
    other = [name for name, bits in wanted.items() if precision.products.get(name) != bits]
    if other:
        first = other[0]
        raise ExportError(
            f"{who} runs {len(other)} of {len(wanted)} linear layers of recipe"
            f" {source.recipe.name} in another precision than the recipe has: {first} in"
            f" {precision.products.get(first, 'one that the builder does not report')}, not"
            f" {wanted[first]}; recipes fp8 and fp8-static are the safest choice"
        )


def precision_details(precision: Precision) -> dict[str, Any]:
    """Returns for the manifest: the source of the facts, counts, and each linear's precision."""
    counts = Counter(precision.products.values())
    return {
        "of": _OF[precision.of],
        "layers": precision.layers,
        "matmuls": precision.matmuls,
        "fp8_matmuls": counts["fp8"],
        "fp4_matmuls": counts["fp4"],
        "products": dict(precision.products),
    }


def print_report(console: Console, details: Mapping[str, Any]) -> None:
    """Prints a table of the engine's GEMMs, and lines about the build."""
    table = Table(
        title=f"GEMMs of {details['precision']['of']}",
        title_justify="left",
        box=None,
        padding=(0, 1),
    )
    table.add_column("linears", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("precision")
    rows = Counter(
        (_kind(name), precision) for name, precision in details["precision"]["products"].items()
    )
    for (kind, precision), count in rows.items():
        table.add_row(kind, str(count), precision)
    others = details["precision"]["matmuls"] - sum(rows.values())
    if others:
        table.add_row("in full precision by the recipe", str(others), "float16")
    console.print(table)
    builder, scratch = details["builder"], details["scratch_bytes"]
    console.print(
        f"{builder['name']} {builder['version']} for {', '.join(details['targets'])}:"
        f" {details['plan_bytes'] / 1e6:,.1f} MB in {details['build_seconds']:.1f} s"
        + (f", {scratch / 1e6:,.1f} MB of scratch memory at most" if scratch else ""),
        markup=False,
    )
    console.print(details["status"], markup=False)  # may hold octet-llm[an extra]


def _kind(name: str) -> str:
    """Returns the linear's name with * for its layer's number: model.layers.*.mlp.up_proj."""
    return re.sub(r"\.\d+\.", ".*.", name)

"""Prints the conditions of a benchmark before its figures, and writes them beside the figures."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octet.artifacts.manifest import software

__all__ = ["conditions", "report"]

PACKAGES = (
    "numpy",
    "torch",
    "transformers",
    "onnx",
    "onnxruntime",
    "numba",
    "tokenizers",
    "xxhash",
)


def conditions(**facts: Any) -> dict[str, Any]:
    """The machine, the versions and the commit; `facts` are the benchmark's own conditions."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "software": software(*PACKAGES),
        "commit": _commit(),
        **facts,
    }


def report(
    title: str,
    card: Mapping[str, Any],
    rows: list[dict[str, Any]],
    output: Path | None,
) -> None:
    """Prints the card, a table and one JSON object; writes the JSON to `output` if given."""
    console = Console()
    console.rule(title)
    for key, value in card.items():
        console.print(f"{key}: {value}", highlight=False)
    table = Table()
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console.print(table)
    result = json.dumps({"benchmark": title, "conditions": dict(card), "results": rows}, indent=1)
    print(result)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(result + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    found = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    name = found.get("model name", "unknown")
    family = f"family {found.get('cpu family', '?')} model {found.get('model', '?')}"
    wanted = ("avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    flags = [flag for flag in wanted if flag in found.get("flags", "").split()]
    return f"{name} ({family}; {' '.join(flags)})"


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    dirty = subprocess.run(
        ["git", "diff", "--quiet", "HEAD"], cwd=Path(__file__).parent, check=False
    )
    return (done.stdout.strip() or "unknown") + ("+changes" if dirty.returncode == 1 else "")

"""Options that several commands share, and what they print when they have written something."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from octet.recipe import PRESETS

__all__ = [
    "RECIPES",
    "Force",
    "Json",
    "Model",
    "ModelOption",
    "Out",
    "Source",
    "TextField",
    "console_for",
    "wrote",
]

RECIPES = ", ".join(PRESETS)

Model = Annotated[Path, typer.Argument(help="Directory of a Hugging Face checkpoint.")]
Source = Annotated[Path, typer.Argument(metavar="CALIBRATION", help="What `calibrate` wrote.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Directory to write; whole or not at all.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an artifact that exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a report.")]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="The checkpoint, if it has moved since calibration.")
]
TextField = Annotated[str, typer.Option(help="Field of each sample that holds its text.")]


def console_for(as_json: bool) -> Console | None:
    """Where progress and reports go: standard error, or nowhere beside JSON."""
    return None if as_json else Console(stderr=True)


def wrote(out: Path, manifest: Any, as_json: bool, **more: Any) -> None:
    """Says what was written where, and every choice that was made; `more` is for JSON alone."""
    if as_json:
        facts = {"identity": manifest.identity, "kind": manifest.kind, "details": manifest.details}
        print(json.dumps({"path": str(out), **facts, **more}))
        return
    table = Table.grid(padding=(0, 2))
    for name in manifest.files:
        size = (out / name).stat().st_size
        table.add_row(f"  {name}", f"{size:,} B")
    if manifest.kind != "calibration":  # whose report has said them
        for warning in manifest.details.get("warnings", ()):
            Console(stderr=True).print(f"warning: {warning}", style="yellow", markup=False)
    console = Console()
    console.print(f"wrote [bold]{out}[/bold] ({manifest.kind}, {manifest.recipe.name})")
    console.print(table)
    for key, value in manifest.details.items():  # every choice is said, none made in silence
        if isinstance(value, str | bool | int):
            console.print(f"  {key.replace('_', ' ')}: {value}", highlight=False, markup=False)
    if expected := manifest.details.get("expected_divergence"):
        console.print(
            "  next-token KL to expect, in nats, by what is rounded, cache and arithmetic:"
        )
        ranges = Table.grid(padding=(0, 2))
        for path, nats in expected.items():
            ranges.add_row(f"    {path}", f"{nats['mean']:.4f}", _range(nats["low"], nats["high"]))
        console.print(ranges, highlight=False, markup=False)


def _range(low: float, high: float) -> str:
    return f"({low:.4f} to {high:.4f})"

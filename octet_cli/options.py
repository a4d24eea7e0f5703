"""Options that several commands share, and the report that they print after writing."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from octet.errors import ConfigError
from octet.recipe import PRESETS

__all__ = [
    "RECIPES",
    "Force",
    "Gate",
    "Golden",
    "Json",
    "Key",
    "MaxKl",
    "MaxPplChange",
    "Model",
    "ModelOption",
    "Out",
    "Source",
    "TextField",
    "console_for",
    "words_of",
    "wrote",
]

RECIPES = ", ".join(PRESETS)

Model = Annotated[Path, typer.Argument(help="Directory of a Hugging Face checkpoint.")]
Source = Annotated[Path, typer.Argument(metavar="CALIBRATION", help="What `calibrate` wrote.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Directory to write, atomically.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an artifact that exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a report.")]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="The checkpoint, if it has moved since calibration.")
]
MaxKl = Annotated[
    str | None,
    typer.Option(
        "--max-kl",
        metavar="NATS",
        help="Fail unless the next-token KL is below this, with 95 % confidence (such as 0.005).",
    ),
]
MaxPplChange = Annotated[
    str | None,
    typer.Option(
        "--max-ppl-change",
        metavar="PERCENT",
        help="Fail unless perplexity rises by less than this, with 95 % confidence (such as 1%).",
    ),
]
Gate = Annotated[
    Literal["default", "off"],
    typer.Option(
        help="Without these limits: apply the default one to the predicted KL, or none (recorded)."
    ),
]
Golden = Annotated[
    Path | None,
    typer.Option(
        "--golden",
        help="An export, calibration or proof pack: each server must match it to be measured.",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option("--key", help="Public Ed25519 key that must have signed --golden."),
]
TextField = Annotated[str, typer.Option(help="Field of each sample that holds its text.")]


def words_of(vllm_options: str) -> list[str]:
    """Splits the value of --vllm-options as a shell does. Raises ConfigError if a shell cannot."""
    try:
        return shlex.split(vllm_options)
    except ValueError as error:
        raise ConfigError(f"--vllm-options {vllm_options}: {error}") from None


def console_for(as_json: bool) -> Console | None:
    """Returns the console for progress and reports: standard error, or None beside JSON.

    Prose is wrapped for a terminal alone: in a log, a warning is one line.
    """
    return None if as_json else Console(stderr=True, soft_wrap=not sys.stderr.isatty())


def wrote(out: Path, manifest: Any, as_json: bool, **more: Any) -> None:
    """Says what was written where, and every choice that was made; `more` is for JSON alone."""
    if as_json:
        facts = {"identity": manifest.identity, "kind": manifest.kind, "details": manifest.details}
        print(json.dumps({"path": str(out), **facts, **more}))
        return
    table = Table.grid(padding=(0, 2))
    for name in manifest.files:
        size = (out / name).stat().st_size
        table.add_row(Text(f"  {name}"), f"{size:,} B")
    console = Console(soft_wrap=not sys.stdout.isatty())
    warn = Console(stderr=True, style="yellow", highlight=False, markup=False, soft_wrap=True)
    details = manifest.details
    expected = details.get("expected_divergence")
    if manifest.kind != "calibration":  # its report has shown them
        for warning in details.get("warnings", ()):
            warn.print(f"warning: {warning}")
        if expected is None and details.get("quantized", True):
            warn.print(
                "warning: the calibration predicts no divergence (an architecture that Octet does"
                " not know, or --no-predict), so nothing checks the divergence of this export"
            )
    console.print(Text.assemble("wrote ", (str(out), "bold")), end="")
    console.print(f" ({manifest.kind}, {manifest.recipe.name})", markup=False, highlight=False)
    console.print(table)
    for key, value in details.items():  # no choice is made silently
        if isinstance(value, str | bool | int):
            console.print(f"  {key.replace('_', ' ')}: {value}", highlight=False, markup=False)
    for judged in details.get("gate", ()):
        console.print(f"  {judged['text']}", highlight=False, markup=False)
    if expected:
        console.print("  next-token KL to expect, in thousandths of a nat:")
        ranges = Table.grid(padding=(0, 2))
        for path, nats in expected.items():
            low, mean, high = (f"{1000 * nats[key]:.3g}" for key in ("low", "mean", "high"))
            ranges.add_row(Text(f"  {path}"), mean, f"({low} to {high})")
        console.print(ranges, highlight=False, markup=False)

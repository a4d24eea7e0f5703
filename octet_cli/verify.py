"""`octet verify`: checks an artifact against the original, or a server against an artifact."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from octet.artifacts.manifest import Manifest
from octet.errors import ConfigError, nearest
from octet.hardware.devices import find_device
from octet.interrupts import held_back
from octet.tables import fitted
from octet_cli.options import Json, console_for

if TYPE_CHECKING:
    from verify.checks.findings import Divergence, LayerRow, Row, Verification

__all__ = ["report", "verify"]

_WORST, _PROBLEMS = 10, 30  # rows of the tables that are shown without --all
_SERVER = "For a server's URL"


def _of_url(flag: str, text: str, least: int | None = None) -> Any:
    return typer.Option(flag, help=text, min=least, rich_help_panel=_SERVER)


_WHERE = 48  # columns that a tensor's name may take before it wraps


def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH|URL",
            help="An export, a calibration or another tool's checkpoint; or a running server:"
            " http://HOST:PORT with OpenAI's API, triton://HOST:PORT/MODEL.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="The original checkpoint, to compare with; for a URL, the model's name."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            help="The calibration of an export, through which the original is found.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            help="Public Ed25519 key that must have signed it; for a URL: that signed --golden.",
        ),
    ] = None,
    numbers_only: Annotated[
        bool, typer.Option("--no-tokens", help="Compare files only; run no model.")
    ] = False,
    show_all: Annotated[
        bool,
        typer.Option(
            "--all", help="Show every tensor; for a URL, send every prompt and show every scenario."
        ),
    ] = False,
    golden: Annotated[
        Path | None,
        _of_url("--golden", "The export, calibration or proof pack that it must match."),
    ] = None,
    weights: Annotated[
        Literal["quantized", "original"] | None,
        _of_url("--weights", "Weights that it should serve (default: the recipe's)."),
    ] = None,
    kv_cache: Annotated[
        Literal["e5m2", "e4m3", "float16"] | None,
        _of_url("--kv-cache", "Cache that it should use (default: that of --golden)."),
    ] = None,
    engine: Annotated[
        Literal["vllm-gpu", "vllm-cpu", "tensorrt", "onnxruntime"] | None,
        _of_url("--engine", "Serving engine. Restricts which numerics count as correct."),
    ] = None,
    device: Annotated[
        str | None,
        _of_url(
            "--device", "Its GPU, such as h100 or 9.0. Restricts the correct numerics further."
        ),
    ] = None,
    api_key_env: Annotated[
        str | None, _of_url("--api-key-env", "The environment variable that holds its key.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        _of_url("--checkpoint", "Local directory of the checkpoint that it serves; verified too."),
    ] = None,
    seed: Annotated[
        int | None,
        _of_url(
            "--seed",
            "Seed for the order of golden prompts; those with simulated faults come first.",
            0,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check an artifact against the original model, or a server against its artifact.

    For a directory: checks the error of every quantized tensor, compares the others bit for bit,
    finds names that an engine would drop, and measures the divergence of the next token on the
    golden prompts.

    For a URL: compares the server's answers to the golden prompts of --golden with those that were
    simulated for its declared configuration, and for known faults.

    Exit code 0: correct. 1: wrong. 2: something could not be checked. 3: the server is within a
    coarse bound, and the artifact has no predictions for a finer check.
    """
    console = console_for(as_json)
    served = {
        "golden": golden,
        "weights": weights,
        "kv_cache": kv_cache,
        "engine": engine,
        "device": device,
        "api_key_env": api_key_env,
        "checkpoint": checkpoint,
        "seed": seed,
    }
    if "://" in path:
        files = {"calibration": calibration, "no_tokens": numbers_only or None}
        _refuse(files, f"is for files; {path} is a server")
        served["key"] = key
        raise typer.Exit(_verify_url(path, model, served, show_all, as_json, console))
    if not Path(path).exists() and re.fullmatch(r"(https?:/?)?[\w.-]+:\d+(/.*)?", path):
        host = re.sub(r"^https?:/?", "", path)
        raise ConfigError(f"{path}: no such file or directory; of a server, write http://{host}")
    _refuse(served, f"is for a server's URL; {path} is none")
    from verify.artifact import verify as check

    original = None if model is None else Path(model)
    found = check(path, model=original, calibration=calibration, key=key, console=console)
    if not numbers_only:
        with held_back():
            from verify.next_tokens import add_divergence
        add_divergence(found, console=console)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        report(found, Console(soft_wrap=not sys.stdout.isatty()), show_all=show_all)
    raise typer.Exit(found.exit_code)


def _refuse(options: Mapping[str, object], reason: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {reason}")


def _verify_url(
    url: str,
    model: str | None,
    served: Mapping[str, Any],
    show_all: bool,
    as_json: bool,
    console: Console | None,
) -> int:
    from verify.server.connect import SCHEMES, Query

    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise ConfigError(f"{url}: unknown scheme{nearest(scheme, SCHEMES)}")
    if served["golden"] is None:
        raise ConfigError(
            f"{url}: give --golden, the directory of the export that it serves, or its calibration"
        )
    Manifest.load(served["golden"], verify=False)
    if served["device"] is not None:
        find_device(served["device"])
    from verify.server.verify import verify_url

    given = {name: value for name, value in served.items() if value is not None}
    query = Query(url=url, model=model, every_prompt=show_all, **given)
    return verify_url(query, as_json=as_json, console=console)


def report(found: "Verification", console: Console, *, show_all: bool = False) -> None:
    """One table for people, the worst first, readable in 80 columns."""
    console.print(Text.assemble((str(found.path), "bold"), f": {found.kind}, {found.format}"))
    if found.problems:
        most = len(found.problems) if show_all else _PROBLEMS
        console.print(_problems(found, most, console.width))
    if found.rows:
        rows = found.worst_first
        shown = rows if show_all else rows[:_WORST]
        wrong = {problem.where for problem in found.problems}
        console.print(fitted(_tensors(shown, len(rows), wrong), console))
        console.print(fitted(_layers(found.layers), console))
    if found.divergence is not None:
        console.print(_sentence(found.divergence), highlight=False)
    for note in found.notes:
        console.print(f"  {note}", highlight=False, markup=False, style="dim")
    for text in found.unchecked:
        console.print(f"  not checked: {text}", highlight=False, markup=False, style="yellow")
    console.print(_verdict(found), highlight=False)


def _problems(found: "Verification", most: int, width: int) -> Table:
    count = len(found.problems)
    title = f"first {most} of {count} problems"
    if count <= most:
        title = f"{count} problem{'s' if count > 1 else ''}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    longest = max(len(problem.where) for problem in found.problems[:most])
    where = max(5, min(longest, _WHERE, width // 2 + 8))
    table.add_column("where", style="red", overflow="fold", width=where)
    table.add_column("what is wrong", overflow="fold", width=max(13, width - where - 4))
    for problem in found.problems[:most]:
        table.add_row(Text(problem.where), Text(problem.what))
    return table


def _tensors(rows: "list[Row]", total: int, wrong: set[str]) -> Table:
    which = f"{total} quantized tensors" if len(rows) == total else f"worst of {total} tensors"
    title = f"{which}, w, and their errors, e"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    table.add_column("tensor", overflow="fold")
    for name in ("SQNR dB", "expected", "max |e|", "‖e‖/‖w‖", "not\nnearest"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        style = "red" if row.tensor in wrong else ""
        expected = "" if row.expected is None else f"{row.expected:.2f}"
        numbers = (f"{row.sqnr:.2f}", expected, f"{row.max_abs:.3g}", f"{row.relative:.3g}")
        table.add_row(Text(_short(row.tensor)), *numbers, f"{row.unrounded:,}", style=style)
    return table


def _layers(layers: "list[LayerRow]") -> Table:
    table = Table(title="by layer", title_justify="left", box=None, padding=(0, 1))
    table.add_column("layer", overflow="fold")
    for name in ("tensors", "SQNR dB", "expected", "max |e|"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst", overflow="fold")
    for layer in layers:
        expected = "" if layer.expected is None else f"{layer.expected:.2f}"
        numbers = (str(layer.tensors), f"{layer.sqnr:.2f}", expected, f"{layer.max_abs:.3g}")
        worst = _short(layer.worst.removeprefix(f"{layer.layer}."))
        table.add_row(Text(_short(layer.layer)), *numbers, Text(worst))
    return table


def _short(tensor: str) -> str:
    """Returns a tensor's name without the common prefix and the suffix of weights.

    --json and problems keep the full name.
    """
    module = tensor.removesuffix(".weight_packed").removesuffix(".weight")
    return re.sub(r"^.*?\b(?=layers\.\d)", "", module)


def _sentence(divergence: "Divergence") -> str:
    text = (
        f"next tokens: KL {divergence.mean:.3g} nats from the original, mean over"
        f" {divergence.prompts} golden prompts ({divergence.path})"
    )
    inside = "inside" if divergence.inside else "[red]outside[/red]"
    accepted = f"{divergence.low:.3g} to {divergence.high:.3g} ({divergence.source})"
    return f"{text}; {inside} what is accepted, {accepted}"


def _verdict(found: "Verification") -> str:
    if found.problems:
        count = len(found.problems)
        return f"[red]wrong[/red]: {count} problem{'s' if count > 1 else ''}"
    facts = []
    if found.rows:
        facts.append(f"{len(found.rows)} quantized tensors as expected")
    if found.copied:
        facts.append(f"{found.copied} others equal to the original, bit for bit")
    said = ", ".join(facts) or "names, scales and files"
    if found.unchecked:
        return f"[yellow]not all could be checked[/yellow]; right so far: {said}"
    return f"[green]right[/green]: {said}"

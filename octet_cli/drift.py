"""`octet drift`: whether a calibration still holds for live traffic."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from octet.errors import ConfigError
from octet.interrupts import held_back
from octet.page import write_page
from octet_cli.evaluate import standard_output
from octet_cli.options import Json, Source

if TYPE_CHECKING:
    from calibrate.drift import Drift
    from octet.artifacts.calibration import Calibration

__all__ = ["GAUGES", "drift"]

_SHOWN = 12  # tensors in the table
GAUGES = {  # of --metrics, with labels `model` and `calibration`
    "octet_calibration_drifted": "1 if the calibration does not hold for live traffic.",
    "octet_calibration_distance": "Distance of live traffic from the calibration.",
    "octet_calibration_distance_limit": "Distance above which the traffic is another.",
    "octet_calibration_misfits": "Stored scales that no longer fit.",
    "octet_calibration_live_until_seconds": "End of the newest window, in seconds since 1970.",
}


def drift(
    calibration: Source,
    live: Annotated[
        Path,
        typer.Option(
            "--live",
            exists=True,
            file_okay=False,
            help="Directory in which servers count live activations.",
        ),
    ],
    false_alarms: Annotated[
        float,
        typer.Option(
            min=1e-6, max=0.2, help="Chance of an alarm for traffic like the calibration's samples."
        ),
    ] = 0.001,
    metrics: Annotated[
        Path | None,
        typer.Option(
            "--metrics", help="Write the result for Prometheus: a .prom file for node_exporter."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare live activations with those of a calibration.

    Exits with 0 if the calibration holds, with 1 if the traffic is another or stored scales no
    longer fit it, and with 2 if that cannot be judged. Servers count activations as configured
    (`count`), without any text.
    """
    if metrics is not None and not metrics.parent.is_dir():
        raise ConfigError(f"{metrics}: there is no directory {metrics.parent}")
    from octet.artifacts.calibration import Calibration
    from octet.artifacts.live import read_live

    opened = Calibration.load(calibration)
    windows = read_live(live, opened)
    with held_back():
        from calibrate.drift import compare_live

    found = compare_live(opened, windows, false_alarms=false_alarms)
    if as_json:
        known = {"calibration": opened.manifest.identity, "model": opened.manifest.model.name}
        print(json.dumps(known | found.as_json()))
    else:
        _show(standard_output(), opened, found)
    if metrics is not None:
        write_page(metrics, _prometheus(opened, found))
    if found.drifted:
        raise typer.Exit(1)


def _show(console: Console, calibration: "Calibration", found: "Drift") -> None:
    manifest = calibration.manifest
    began, ended = (
        datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
        for at in (found.began, found.ended)
    )
    console.print(
        f"{manifest.model.name}, {manifest.recipe.name}: {found.tokens:,} live tokens in"
        f" {found.windows} windows, {began} to {ended} UTC"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("tensor", "distance", "largest", "saturated", "to zero", "error dB", "with new"):
        table.add_column(column, justify="left" if column == "tensor" else "right")
    misfits = found.misfits
    others = sorted(found.tensors.keys() - misfits, key=lambda x: -found.tensors[x].distance)
    for name in [*misfits, *others][:_SHOWN]:
        tensor = found.tensors[name]
        table.add_row(
            name.removeprefix("model."),
            f"{tensor.distance:.4f}",
            f"{tensor.largest_then:.3g} → {tensor.largest_now:.3g}",
            _change(tensor.saturated_then, tensor.saturated_now, ".2%"),
            _change(tensor.underflow_then, tensor.underflow_now, ".2%"),
            _change(tensor.decibels("then"), tensor.decibels("now"), ".1f"),
            "" if tensor.reachable is None else f"{tensor.decibels('reachable'):.1f}",
        )
    console.print(table)
    if len(found.tensors) > _SHOWN:
        console.print(f"and {len(found.tensors) - _SHOWN} more tensors: --json has all")
    if found.uncounted:
        console.print(f"not counted: {len(found.uncounted)} tensors, {found.uncounted[0]} first")
    console.print(
        f"distance of all tensors {found.distance:.4f}, limit {found.limit:.4f} ({found.tolerance}"
        f" of rounding, {found.noise:.4f} of chance; false alarms {found.false_alarms:g})"
    )
    if found.changed:
        fit = "No stored scale would gain by it yet" if not misfits else "Some scales do not fit it"
        console.print(
            f"DRIFTED: the traffic is another than the calibration's samples. {fit}; calibrate with"
            " samples of it, as golden records and fitted weights depend on them too."
        )
    for name in misfits[:_SHOWN]:
        console.print(
            f"DRIFTED: the scale of {name} no longer fits: a new one saves"
            f" {found.tensors[name].gain_db:.1f} dB of error. Run `octet rescale --histograms`."
        )
    if not found.drifted:
        console.print("The calibration holds.")


def _change(then: float | None, now: float | None, form: str) -> str:
    return "" if then is None or now is None else f"{then:{form}} → {now:{form}}"


def _prometheus(calibration: "Calibration", found: "Drift") -> str:
    """Returns gauges in Prometheus's text format."""
    manifest = calibration.manifest
    name = json.dumps(manifest.model.name)  # escapes quotes, backslashes and line ends, as it does
    labels = f'{{model={name},calibration="{manifest.identity[:12]}"}}'
    values = (found.drifted, found.distance, found.limit, len(found.misfits), found.ended)
    return "".join(
        f"# HELP {gauge} {text}\n# TYPE {gauge} gauge\n{gauge}{labels} {float(value)!r}\n"
        for (gauge, text), value in zip(GAUGES.items(), values, strict=True)
    )

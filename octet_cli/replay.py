"""`octet replay`: what a stream of other text does to the scales of a calibration."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from octet.interrupts import held_back
from octet.recipe import MOST_MARGIN
from octet_cli.evaluate import finish, require_page
from octet_cli.options import Json, ModelOption, Source, TextField, console_for

__all__ = ["replay"]


def replay(
    calibration: Source,
    samples: Annotated[
        Path,
        typer.Option("--samples", help="JSONL, in order; each line has a domain and a text."),
    ],
    history: Annotated[
        int, typer.Option(min=1, help="Steps that delayed scaling remembers.")
    ] = 1024,
    algorithm: Annotated[
        Literal["max", "most_recent"],
        typer.Option(
            help="Which of those sets the next scale: the step of the largest value, or the last."
        ),
    ] = "max",
    margin: Annotated[
        int,
        typer.Option(min=0, max=MOST_MARGIN, help="Powers of two of head-room in delayed scaling."),
    ] = 0,
    model: ModelOption = None,
    text_field: TextField = "text",
    messages_field: Annotated[
        str, typer.Option(help="Field of each sample that holds its conversation.")
    ] = "messages",
    max_length: Annotated[int, typer.Option(min=1, help="Tokens of a sample, at most.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of one domain in a step.")] = 8,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")
    ] = "auto",
    divergence: Annotated[
        bool,
        typer.Option(
            "--divergence", help="Also measure next-token KL. Holds the whole model in memory."
        ),
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", "-o", help="Write one page with plots and all figures.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a stream of tagged samples over the static scales of a calibration.

    Compares the calibration's scales (frozen), Transformer Engine's delayed scaling and current
    scaling, domain by domain: what saturates, what becomes zero, and the squared error. Compares
    the domains themselves, and what the scale of one costs on another. If it is interrupted, it
    reports the samples until then.
    """
    require_page(html)

    from calibrate.options import ReplayOptions, validate_replay

    options = ReplayOptions(
        calibration=calibration,
        samples=samples,
        history=history,
        algorithm=algorithm,
        margin=margin,
        model=model,
        text_field=text_field,
        messages_field=messages_field,
        max_length=max_length,
        batch_size=batch_size,
        device=device,
        divergence=divergence,
    )
    opened = validate_replay(options)  # before torch is loaded
    with held_back():
        from calibrate.decoder.arithmetic import fit_threads
        from calibrate.replay import replay as run

    fit_threads()
    found = run(opened, options, console=console_for(as_json))
    report = "calibrate.report.over_time"
    finish(found, html, as_json, page=f"{report}_page", report=report)
    if found.interrupted:
        raise KeyboardInterrupt  # for the exit code

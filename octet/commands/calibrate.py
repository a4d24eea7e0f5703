"""`octet calibrate`: samples and a checkpoint become a calibration."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from octet.commands.options import RECIPES, Force, Json, Model, Out, console_for, wrote
from octet.recipe import Recipe

__all__ = ["calibrate"]


def calibrate(
    model: Model,
    samples: Annotated[Path, typer.Option("--samples", help="JSONL, one text a line.")],
    out: Out,
    recipe: Annotated[str, typer.Option(help=f"{RECIPES}, or a YAML file.")] = "fp8",
    name: Annotated[
        str | None, typer.Option(help="What to serve the model as [its directory's name].")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Samples to run.")] = 256,
    held_out: Annotated[
        Path | None, typer.Option(help="JSONL for the golden records; not used for scales.")
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="Field of each line that holds the text.")
    ] = "text",
    max_length: Annotated[int, typer.Option(min=1, help="Tokens kept of each sample.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a forward pass.")] = 8,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="Arithmetic of the forward pass.")
    ] = "auto",
    allow_few_samples: Annotated[
        bool, typer.Option("--allow-few-samples", help="Accept fewer than 128 samples.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Observe a model on representative samples, and find its scales."""
    chosen = Recipe.load(recipe)
    import calibrate as stage

    calibration = stage.run(
        model,
        samples,
        out,
        recipe=chosen,
        name=name,
        count=count,
        held_out=held_out,
        text_field=text_field,
        max_length=max_length,
        batch_size=batch_size,
        dtype=dtype,
        allow_few_samples=allow_few_samples,
        force=force,
        console=console_for(as_json),
    )
    wrote(out, calibration.manifest, as_json)

"""`octet evaluate`: how well an artifact answers, on text that it has not seen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from octet.artifact import PLAN_FILE
from octet.commands.options import Json, console_for
from octet.errors import ConfigError
from octet.interrupts import held_back

__all__ = ["evaluate"]


def evaluate(
    target: Annotated[Path, typer.Argument(help="A checkpoint, an ONNX export or an engine.")],
    samples: Annotated[Path, typer.Option("--samples", help="Held-out JSONL, one text a line.")],
    count: Annotated[int | None, typer.Option("--count", "-n", min=1)] = None,
    text_field: Annotated[
        str, typer.Option(help="Field of each line that holds the text.")
    ] = "text",
    max_length: Annotated[int, typer.Option(min=2, help="Tokens kept of each sample.")] = 512,
    as_json: Json = False,
) -> None:
    """Held-out perplexity, as the artifact would serve it."""
    for path in (target, samples):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or directory")
    score: Callable[..., Any]
    with held_back():
        if any((target / name).exists() for name in ("model.onnx", PLAN_FILE)):
            from serve.evaluate import perplexity as score
        else:
            from calibrate.reference import perplexity as score
    result = score(
        target,
        samples,
        count=count,
        text_field=text_field,
        max_length=max_length,
        console=console_for(as_json),
    )
    if as_json:
        print(json.dumps({"perplexity": result.perplexity, "tokens": result.tokens}))
    else:
        print(f"{target}: perplexity {result.perplexity:.4f} over {result.tokens} tokens")

"""`octet serve` and `octet evaluate`: what an artifact answers, and how well."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from octet.artifact import PLAN_FILE
from octet.commands.options import Json, console_for
from octet.errors import ConfigError
from octet.interrupts import held_back

__all__ = ["evaluate", "serve"]


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


def serve(
    target: Annotated[
        Path | None, typer.Argument(help="An ONNX export or an engine, served in this process.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML with pools of backends.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port (default: 8000).")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say what the configuration holds, and end.")
    ] = False,
) -> None:
    """Serve OpenAI's API over the embedded engine, vLLM, Triton or any other server of it."""
    if (target is None) == (config is None):
        raise ConfigError("give either an export to serve, or --config FILE")
    if check and config is None:
        raise ConfigError("--check is for a configuration: give --config FILE")
    if check and config is not None:
        _check(config)
        return
    from serve.server import run

    run(target, config=config, host=host, port=port)


def _check(config: Path) -> None:
    """Prints what the file holds; or every problem of it, and exits 2."""
    from serve.check import check
    from serve.config.load import Refused

    try:
        print("\n".join(check(config)))
    except Refused as error:
        print("\n".join(f"error: {line}" for line in error.lines), file=sys.stderr)
        raise typer.Exit(2) from None

"""`octet serve`: what an artifact answers."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from octet.errors import ConfigError

__all__ = ["serve"]


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
    proof: Annotated[
        bool,
        typer.Option(
            "--proof/--no-proof",
            help="Serve a backend only once its answers match its artifact.",
        ),
    ] = True,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check the configuration, print what it holds, and exit."),
    ] = False,
) -> None:
    """Serve OpenAI's API over the embedded engine, vLLM, Triton or any other server of it."""
    if (target is None) == (config is None):
        raise ConfigError("give either an export to serve, or --config FILE")
    if check and config is None:
        raise ConfigError("--check is for a configuration: give --config FILE")
    if check and config is not None:
        _check(config, proof=proof)
        return
    from serve.settings import settings_of

    settings = settings_of(target, config)
    from serve.run import run  # loads the web server, after the mistakes in the settings

    run(settings, config=config, host=host, port=port, proof=proof)


def _check(config: Path, *, proof: bool) -> None:
    """Prints a summary of the configuration, or all its problems and exits 2."""
    from serve.check import check
    from serve.config.load import Refused

    try:
        print("\n".join(check(config, proof=proof)))
    except Refused as error:
        print("\n".join(f"error: {line}" for line in error.lines), file=sys.stderr)
        raise typer.Exit(2) from None

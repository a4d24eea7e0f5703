"""`octet deploy`: the gateway and its engines on a cluster."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from octet.errors import ConfigError
from octet_cli.help import Command, Group, examples_of

__all__ = ["deploy"]

RAY = "2.60"  # whose autoscaling policies and late ASGI applications we use

deploy = typer.Typer(
    help="The gateway and its engines on a cluster.",
    cls=Group,
    epilog=examples_of("deploy"),
    no_args_is_help=True,
)


@deploy.command(cls=Command, epilog=examples_of("deploy ray"))
def ray(
    config: Annotated[Path, typer.Argument(help="YAML with pools of backends, and `ray`.")],
    address: Annotated[
        str | None,
        typer.Option(help="Address of the cluster (default: RAY_ADDRESS, or this machine)."),
    ] = None,
) -> None:
    """Serve a configuration with Ray Serve: gateways, and replicas of its engines behind them.

    Each replica is proven before it gets a request. Ray adds and removes replicas by the number of
    outstanding tokens. The command ends once all replicas serve. Afterwards, use Ray's own
    `serve status` and `serve shutdown`.
    """
    _require_ray()
    if not config.is_file():
        raise ConfigError(f"configuration {config}: no such file")
    from serve.config.load import Refused
    from serve.ray.cluster import deploy as deploy_to_ray

    try:
        deploy_to_ray(config, address, lambda line: print(line, flush=True))
    except Refused as error:
        print("\n".join(f"error: {line}" for line in error.lines), file=sys.stderr)
        raise typer.Exit(2) from None


def _require_ray() -> None:
    """Raises ConfigError without Ray Serve, or with another version than Octet works with."""
    remedy = "pip install 'octet-llm[ray]'"
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise ConfigError(f"octet deploy ray needs Ray Serve {RAY}: {remedy}") from None
    if not found.startswith(f"{RAY}."):
        raise ConfigError(f"Ray {found} is installed, and Octet works with Ray {RAY}: {remedy}")

"""`octet doctor`: what this machine can serve, and what to repair."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octet.errors import ConfigError
from octet_cli.options import Json

__all__ = ["doctor"]


def doctor(
    artifact: Annotated[
        Path | None, typer.Argument(help="An export, a calibration, an engine or a checkpoint.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML with pools of backends.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="The Python that has vLLM (default: Octet's own).")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="Judge another machine, from what --json printed there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Inspect this machine: what runs natively, what falls back, what is refused, and the remedy.

    Inspects GPUs, drivers, packages, disks, ports and kernel caches. Multiplies in FP8, rounds a
    cache, and compares both with Octet's codecs. With an artifact or a configuration, also reports
    whether and how it runs here. Exit code 0: nothing to repair. 1: something does not work.
    2: nothing could be checked.
    """
    if artifact is not None and config is not None:
        raise ConfigError("give an artifact or --config FILE, not both")
    if recorded is not None and python is not None:
        raise ConfigError("--python is for this machine, and --recorded for another one")
    from octet.hardware.machine import Machine, inspect
    from verify.machine.diagnose import diagnose
    from verify.machine.diagnosis import Finding, Target
    from verify.machine.target import judge_artifact, judge_configuration, ports_of

    ports = ports_of(config) if config is not None else []
    machine = (
        inspect(python=python, ports=ports or (8000,))
        if recorded is None
        else Machine.load(recorded)
    )
    found = diagnose(machine, wanted_ports=ports)
    targets: list[Target] = []
    more: list[Finding] = []
    if artifact is not None:
        targets, more = judge_artifact(artifact, machine)
    elif config is not None:
        targets, more = judge_configuration(config, machine)
    found = found.model_copy(
        update={"targets": tuple(targets), "findings": (*found.findings, *more)}
    )
    if as_json:
        facts = {"machine": machine.model_dump(mode="json"), **found.model_dump(mode="json")}
        print(json.dumps({**facts, "exit_code": found.exit_code}))
    else:
        from verify.machine.report import show

        show(machine, found, Console(soft_wrap=not sys.stdout.isatty()))
    raise typer.Exit(found.exit_code)

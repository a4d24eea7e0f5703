"""`octet plan`: the memory, GPUs, speed and cost of serving a model, from its config alone."""

from pathlib import Path
from typing import Annotated

import typer

from octet.errors import ConfigError
from octet_cli.evaluate import finish, require_page
from octet_cli.options import Json

__all__ = ["plan"]

_OUTPUT = 256


def plan(
    model: Annotated[
        Path, typer.Argument(help="A directory with the model's config.json, or an artifact.")
    ],
    gpu: Annotated[str, typer.Option(help="The kind of GPU, such as h100, l40s or b200.")],
    context: Annotated[
        str, typer.Option(help="Tokens of a request, in and out, such as 8192 or 32k.")
    ],
    concurrency: Annotated[int, typer.Option(help="Requests that are served at the same time.")],
    output: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of the context that are generated (default: {_OUTPUT}, or half of it).",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Dollars per GPU and hour: adds the cost of tokens.")
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(help="Output of `octet bench --json` on this GPU: replaces the roofline."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page with plots and all figures.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Estimate the memory, GPUs, speed and cost of serving a model, by recipe and cache.

    Needs no weights and no GPU. Memory is divided as vLLM does it.
    """
    if concurrency < 1:
        raise ConfigError(f"--concurrency {concurrency}: give 1 or more requests")
    if price is not None and not 0 < price < float("inf"):
        raise ConfigError(f"--price {price:g}: give dollars per GPU and hour, above 0")
    require_page(html)

    from octet.hardware.devices import find_device
    from octet.plan.measured import read_bench
    from octet.plan.planner import Goal, Model, make_plan, parse_tokens

    device, tokens = find_device(gpu), parse_tokens(context)
    generated = min(_OUTPUT, max(1, tokens // 2)) if output is None else output
    measurements = () if bench is None else read_bench(bench, device)
    goal = Goal(device, tokens, concurrency, generated, price)
    found = make_plan(Model.open(model), goal, measurements)
    finish(found, html, as_json, page="octet.plan.html", report="octet.plan.console")

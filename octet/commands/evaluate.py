"""`octet evaluate`: how well artifacts answer text that they have not seen."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from octet.commands.options import Json, TextField, console_for
from octet.commands.targets import open_target, read_samples
from octet.errors import BackendError, ConfigError
from octet.evaluation.comparison import compare
from octet.evaluation.evaluator import Advance
from octet.evaluation.evaluator import evaluate as score
from octet.evaluation.table import render

__all__ = ["evaluate"]

TOP_K = 20  # what vLLM returns at most unless told otherwise


def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="Checkpoints, ONNX exports, engines, or servers as http://host:port[/model].",
        ),
    ],
    samples: Annotated[
        Path, typer.Option("--samples", help="Held-out texts: JSONL; with a checkpoint, any kind.")
    ],
    reference: Annotated[
        Path | None,
        typer.Option("--reference", help="The original checkpoint, to measure divergence from."),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="Samples used, from the first.")
    ] = None,
    text_field: TextField = "text",
    max_length: Annotated[int, typer.Option(min=2, help="Tokens kept of each sample.")] = 512,
    top_k: Annotated[
        int, typer.Option(min=1, help="Tokens of each distribution that are compared.")
    ] = TOP_K,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Keep every answer here: a later run goes on from it."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page with tables and plots.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to a server at a time.")] = 4,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the servers' API key.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Held-out perplexity and divergence of several artifacts, with confidence intervals."""
    local = [Path(target) for target in targets if "://" not in target]
    for path in (*local, samples, *([reference] if reference else [])):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or directory")
    console, say = console_for(as_json), Console(stderr=True, highlight=False, markup=False)
    origin = None if reference is None else open_target(str(reference), None, 1)
    opened = [open_target(name, api_key_env, concurrency) for name in targets]
    every = opened if origin is None else [origin, *opened]
    sequences = read_samples(
        every, samples, count=count, text_field=text_field, max_length=max_length
    )
    vocabularies = [target.vocabulary for target in every if target.vocabulary is not None]
    try:
        with _progress(console) as advance:
            evaluation = score(
                opened,
                origin,
                sequences,
                k=min([top_k, *vocabularies]),
                out=out,
                advance=advance,
                note=lambda line: say.print(f"note: {line}", soft_wrap=True),
            )
    except (KeyboardInterrupt, BackendError) as error:
        kept = f"what was answered is kept in {out}: the same command goes on from there"
        hint = kept if out else "give --out DIR, and a later run goes on from what was answered"
        if isinstance(error, BackendError):
            raise BackendError(f"{error}; {hint}", kind=error.kind) from None
        say.print(hint, soft_wrap=True)
        raise
    result = compare(evaluation)
    if html is not None:
        from octet.evaluation.page import write_page

        write_page(html, evaluation, result)
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        Console(highlight=False, markup=False).print(render(result))


@contextmanager
def _progress(console: Console | None) -> Iterator[Advance]:
    """A bar for each target, over predicted tokens; silent without a console."""
    if console is None:
        yield lambda name, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(escape(name), total=total)
            progress.update(tasks[name], completed=done)

        yield advance

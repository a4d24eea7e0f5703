"""`octet evaluate`: how well artifacts answer text that they have not seen."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from octet.commands.harness import run_tasks
from octet.commands.options import Json, TextField, console_for
from octet.commands.targets import AskedByUrl, open_target, read_samples
from octet.errors import BackendError, ConfigError
from octet.evaluation.comparison import compare, plain
from octet.evaluation.evaluator import Advance
from octet.evaluation.evaluator import evaluate as score
from octet.evaluation.scores import Evaluation
from octet.evaluation.table import render, render_tasks
from octet.intervals import Interval

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
        Path | None,
        typer.Option("--samples", help="Held-out texts: JSONL; with a checkpoint, any kind."),
    ] = None,
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
    tasks: Annotated[
        str | None,
        typer.Option(help="Of lm-evaluation-harness, asked of servers: arc_easy,hellaswag,..."),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="The harness: a directory with tasks of your own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The harness: items of a task.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to a server at a time.")] = 4,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the servers' API key.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Held-out perplexity and divergence of several artifacts, with confidence intervals."""
    local = [Path(target) for target in targets if "://" not in target]
    for path in (*local, *filter(None, (samples, reference, include_path))):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or directory")
    if samples is None and tasks is None:
        raise ConfigError("nothing to evaluate on: give --samples FILE, or --tasks for servers")
    if samples is None and html is not None:
        raise ConfigError("--html shows what --samples measures: give --samples FILE too")
    if tasks is not None and local:
        raise ConfigError(
            f"{local[0]}: --tasks are asked of running servers; `octet serve {local[0]}` makes one"
        )
    origin = None if reference is None else open_target(str(reference), None, 1)
    opened = [open_target(name, api_key_env, concurrency) for name in targets]
    console = console_for(as_json)
    evaluation = None
    if samples is not None:
        every = opened if origin is None else [origin, *opened]
        sequences = read_samples(
            every, samples, count=count, text_field=text_field, max_length=max_length
        )
        vocabularies = [target.vocabulary for target in every if target.vocabulary is not None]
        k = min([top_k, *vocabularies])
        with _kept(out), _progress(console) as advance:
            evaluation = score(opened, origin, sequences, k=k, out=out, advance=advance, note=_note)
    figures: list[dict[str, Interval]] = []
    for target in opened if tasks else ():
        assert isinstance(target, AskedByUrl) and tasks is not None
        figures.append(
            run_tasks(
                target.url,
                target.model,
                tasks.split(","),
                tokenizer=reference,
                include=include_path,
                limit=limit,
                concurrency=concurrency,
                api_key_env=api_key_env,
            )
        )
    _report(evaluation, figures, targets, html, as_json)


def _report(
    evaluation: Evaluation | None,
    figures: list[dict[str, Interval]],
    targets: list[str],
    html: Path | None,
    as_json: bool,
) -> None:
    """On standard output, and as a page."""
    console = Console(highlight=False, markup=False)
    if evaluation is None:
        if as_json:
            rows = [
                {"name": name, "tasks": {task: asdict(x) for task, x in row.items()}}
                for name, row in zip(targets, figures, strict=True)
            ]
            print(json.dumps(plain({"rows": rows})))
            return
        for line in (f"artifact {i}: {name}" for i, name in enumerate(targets, start=1)):
            console.print(line)
        console.print(*render_tasks(figures))
        return
    result = compare(evaluation, figures)
    if html is not None:
        from octet.evaluation.page import write_page

        write_page(html, evaluation, result)
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        console.print(render(result))


def _note(line: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(f"note: {line}", soft_wrap=True)


@contextmanager
def _kept(out: Path | None) -> Iterator[None]:
    """Says how to go on after an interruption, or a server that failed."""
    hint = f"what was answered is kept in {out}: the same command goes on from there"
    if out is None:
        hint = "give --out DIR, and a later run goes on from what was answered"
    try:
        yield
    except BackendError as error:
        raise BackendError(f"{error}; {hint}", kind=error.kind) from None
    except KeyboardInterrupt:
        _note(hint)
        raise


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

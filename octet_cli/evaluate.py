"""`octet evaluate`: the perplexity and divergence of artifacts on held-out text."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from octet.errors import BackendError, ConfigError, OctetError, RequestError
from octet.limit import Limit
from octet.model.not_a_checkpoint import explain_missing, is_hub_name
from octet.progress import progress_bars
from octet_cli.options import Golden, Json, Key, TextField, console_for

if TYPE_CHECKING:
    from octet.statistics import Interval
    from verify.evaluation.comparison import Comparison
    from verify.evaluation.gate import Judged
    from verify.evaluation.lm_eval import Harness
    from verify.evaluation.scores import Evaluation
    from verify.evaluation.target import ServedTarget

__all__ = [
    "TOP_K",
    "evaluate",
    "finish",
    "note",
    "prove",
    "require_golden",
    "require_page",
    "require_room",
    "standard_output",
]

_PIPE = 200  # columns of a table that is written to a pipe
TOP_K = 20  # the most that vLLM returns by default


def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="Checkpoints, ONNX exports, engines, or servers as http://host:port\\[/model].",
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
    golden: Golden = None,
    key: Key = None,
    text_field: TextField = "text",
    max_length: Annotated[int, typer.Option(min=2, help="Tokens kept of each sample.")] = 512,
    top_k: Annotated[
        int, typer.Option(min=1, help="Tokens of each distribution that are compared.")
    ] = TOP_K,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Keep every answer here: the same command continues."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page with tables and plots.")
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT",
            help="Exit with 1 unless the 95 % interval is within ppl:1% or kl:0.005; repeatable.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of lm-evaluation-harness, for servers: arc_easy,hellaswag,..."),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="Directory with harness tasks of your own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each harness task.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to a server at a time.")] = 4,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the servers' API key.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure held-out perplexity and divergence of artifacts, with confidence intervals."""
    local = [Path(target) for target in targets if "://" not in target]
    for path in (*local, *filter(None, (samples, reference, include_path))):
        if path != samples and is_hub_name(path):
            raise explain_missing(path)
        if not path.exists():
            raise ConfigError(f"{path}: no such file or directory")
    if samples is None and tasks is None:
        raise ConfigError("nothing to evaluate on: give --samples FILE, or --tasks for servers")
    if samples is None and html is not None:
        raise ConfigError("--html shows what --samples measures: give --samples FILE too")
    if tasks is not None and local:
        raise ConfigError(
            f"{local[0]}: --tasks are for running servers: start one (an export or engine:"
            " `octet serve`, a checkpoint: `vllm serve`) and give its URL"
        )
    limits = [Limit.parse(text, "--gate") for text in gate or ()]
    if limits and samples is None:
        raise ConfigError(
            f"--gate {limits[0]} needs held-out texts to measure: give --samples FILE"
        )
    require_room(out, html)
    require_golden(golden, key)
    if golden is not None and len(local) == len(targets):
        raise ConfigError(
            "--golden checks servers, and no target is one: give a server as http://..."
        )

    from verify.evaluation.evaluator import evaluate as score
    from verify.evaluation.gate import check_gate, judge, require_met
    from verify.evaluation.lm_eval import Harness
    from verify.evaluation.target import ServedTarget
    from verify.evaluation.targets.open import open_target, read_samples

    check_gate(limits, reference=reference is not None, targets=len(targets))
    origin = None if reference is None else open_target(str(reference), None, 1)
    opened = [open_target(name, api_key_env, concurrency) for name in targets]
    servers = [target for target in opened if isinstance(target, ServedTarget)]
    harness = None
    if tasks is not None:
        names = tuple(tasks.split(","))
        harness = Harness(names, reference, include_path, limit, concurrency, api_key_env)
        harness.require_installed(servers[0])
    console = console_for(as_json)
    proofs = prove(servers, golden, key, api_key_env, console)
    evaluation, judged = None, list["Judged"]()
    if samples is not None:
        every = opened if origin is None else [origin, *opened]
        sequences = read_samples(
            every, samples, count=count, text_field=text_field, max_length=max_length
        )
        vocabularies = [target.vocabulary for target in every if target.vocabulary is not None]
        k = min([top_k, *vocabularies])
        with _kept(out), progress_bars(console, transient=True) as bars:
            evaluation = score(
                opened, origin, sequences, k=k, out=out, advance=bars.update, note=note
            )
            evaluation = replace(evaluation, proofs=proofs)
            # before the harness, which is slow and may fail
            shown = _show(evaluation, as_json)
            judged = judge(shown, limits)
            if html is not None and harness is not None:
                try:
                    _write_page(html, evaluation, shown)
                except ConfigError as error:  # what is left to do may still be done
                    note(f"warning: {error}")
    figures, failure = _tasks(harness, servers)
    _report(evaluation, figures, targets, html, as_json, judged)
    if failure is not None:
        raise failure
    require_met(judged)


def require_golden(golden: Path | None, key: Path | None) -> None:
    """Raises an OctetError for a --golden that holds no proof, or is not signed by --key."""
    if golden is not None:
        from octet.proof.reference import load_proofs

        load_proofs(golden, key)
    elif key is not None:
        raise ConfigError("--key checks the signature of --golden: give that, too")


def prove(
    servers: "Sequence[ServedTarget]",
    golden: Path | None,
    key: Path | None,
    api_key_env: str | None,
    console: Console | None,
) -> dict[str, str]:
    """Returns what proves each server, by its name; {} without `golden`.

    Raises GateError for a server that does not match it, before anything is measured.
    """
    if golden is None:
        return {}
    from verify.server.connect import Query
    from verify.server.verify import require_proven

    found = {}
    for one in servers:
        query = Query(url=one.url, golden=golden, key=key, model=one.model, api_key_env=api_key_env)
        found[one.name] = require_proven(query, console=console)
        note(f"{one.name}: {found[one.name]}")
    return found


def require_room(out: Path | None, html: Path | None) -> None:
    """Raises ConfigError if --out or --html cannot be written; called before hours of work."""
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file; give a directory, in which answers are kept")
    require_page(html)
    if html is not None and find_spec("plotly") is None:
        raise ConfigError("--html needs plotly: pip install 'octet-llm[evaluate]'")


def require_page(html: Path | None) -> None:
    """Raises ConfigError if --html cannot be written."""
    if html is not None and html.is_dir():
        raise ConfigError(f"--html {html}: is a directory; give the page's own path")
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError(f"--html {html}: there is no directory {html.parent}; make it first")
    if html is not None and not os.access(html.absolute().parent, os.W_OK):
        raise ConfigError(f"--html {html}: {html.parent} cannot be written to; choose another")


def _tasks(
    harness: "Harness | None", servers: "Sequence[ServedTarget]"
) -> "tuple[list[dict[str, Interval]], OctetError | None]":
    """Returns the harness' figures per server, and the error that ended it early, if any.

    Servers that it did not reach have no figures.
    """
    figures: list[dict[str, Interval]] = []
    if harness is None:
        return figures, None
    try:
        for server in servers:
            figures.append(harness.figures(server))
    except OctetError as error:
        return [*figures, *({} for _ in servers[len(figures) :])], error
    return figures, None


def _show(evaluation: "Evaluation", as_json: bool) -> "Comparison":
    from verify.evaluation.comparison import compare
    from verify.evaluation.console import render

    result = compare(evaluation)
    if not as_json:
        standard_output().print(render(result))
    return result


def _report(
    evaluation: "Evaluation | None",
    figures: "list[dict[str, Interval]]",
    targets: list[str],
    html: Path | None,
    as_json: bool,
    judged: "list[Judged]",
) -> None:
    """Prints the rest of the results: the harness' figures and the gate, or everything as JSON.

    Then writes the page: a full disk costs no figure.
    """
    from verify.evaluation.comparison import compare, plain
    from verify.evaluation.console import render_tasks

    if evaluation is None:
        rows = [
            {"name": name, "tasks": {task: asdict(x) for task, x in row.items()}}
            for name, row in zip(targets, figures, strict=True)
        ]
        data = plain({"rows": rows})
    else:
        result = compare(evaluation, figures)
        data = result.as_json()
    if as_json:
        print(json.dumps(data | ({"gate": [one.as_json() for one in judged]} if judged else {})))
    else:
        for one in judged:
            standard_output().print(str(one), soft_wrap=True)
        if any(figures):
            console = standard_output()
            for line in (f"artifact {i}: {name}" for i, name in enumerate(targets, start=1)):
                console.print(line, soft_wrap=True)
            console.print(*render_tasks(figures))
    if html is not None and evaluation is not None:
        _write_page(html, evaluation, result)


def _write_page(html: Path, evaluation: "Evaluation", result: "Comparison") -> None:
    from verify.evaluation.html import write_page

    write_page(html, evaluation, result)


def standard_output() -> Console:
    """Returns a console for standard output; in a pipe, wide enough for long names."""
    free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, markup=False, width=_PIPE if free else None)


def finish(result: Any, html: Path | None, as_json: bool, *, page: str, report: str) -> None:
    """Prints the result, as JSON or as a report; then writes `--html`, if given.

    `page` and `report` are the modules with `write_page` and `render`.
    """
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        standard_output().print(import_module(report).render(result))
    if html is not None:
        import_module(page).write_page(html, result)


def note(line: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(f"note: {line}", soft_wrap=True)


@contextmanager
def _kept(out: Path | None) -> Iterator[None]:
    """Adds to an interruption, or a server's error, how to continue the run."""
    hint = f"finished answers are kept in {out}: the same command continues from there"
    if out is None:
        hint = "nothing was kept: with --out DIR, a run that ends early can be continued"
    try:
        yield
    except BackendError as error:
        raise BackendError(f"{error}; {hint}", kind=error.kind) from None
    except RequestError as error:
        raise BackendError(f"{error}; {hint}", kind="failed") from None
    except KeyboardInterrupt:
        note(hint)
        raise

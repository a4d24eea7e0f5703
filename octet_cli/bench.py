"""`octet bench`: the speed of several servers under the same load, beside their quality."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated

import typer

from octet.errors import BackendError, ConfigError
from octet.model.not_a_checkpoint import explain_missing, is_hub_name
from octet.progress import progress_bars
from octet_cli.evaluate import (
    TOP_K,
    finish,
    note,
    prove,
    require_golden,
    require_room,
)
from octet_cli.options import Golden, Json, Key, TextField, console_for, words_of

if TYPE_CHECKING:
    from verify.bench.load import Load
    from verify.evaluation.comparison import Comparison
    from verify.evaluation.targets.server import Server

__all__ = ["bench"]

LOADS = ["1x128x128", "16x1024x128"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def bench(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="Running servers, as http://host:port\\[/model], or checkpoints that vLLM is"
            " started on; the others are compared with the first.",
        ),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Directory with the model's tokenizer (default: --reference or --golden)."
        ),
    ] = None,
    loads: Annotated[
        list[str] | None,
        typer.Option(
            "--load",
            metavar="CONCURRENCYxINPUTxOUTPUT",
            help="Requests at a time, and tokens in and out of each; repeatable. Default:"
            f" {' '.join(LOADS)}.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds; in each, every target runs every load once.")
    ] = 5,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of a run per concurrent client.")
    ] = 8,
    vllm: Annotated[
        str,
        typer.Option(
            metavar="COMMAND", help="The vllm that generates the load and serves checkpoints."
        ),
    ] = "vllm",
    vllm_options: Annotated[
        str,
        typer.Option(help="Options of each vLLM that is started, such as '--max-model-len 8192'."),
    ] = "",
    samples: Annotated[
        Path | None, typer.Option(help="Held-out texts: measures quality too, as `evaluate` does.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="The original checkpoint, to measure divergence from.")
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
        typer.Option("--out", "-o", help="Keep every run here: the same command continues."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page with plots and tables.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the servers' API key.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the speed of several servers under the same load, and their quality.

    All servers run at once, and take turns under load. The vLLM servers that are started on
    checkpoints share the GPU's memory equally.
    """
    _require_targets(targets)
    tokenizer = _require_tokenizer(tokenizer, reference, golden)
    if samples is not None and not samples.exists():
        raise ConfigError(f"{samples}: no such file or directory")
    require_room(out, html)
    require_golden(golden, key)

    from verify.bench.load import Generator, Load

    matrix = list(dict.fromkeys(map(Load.parse, loads or LOADS)))
    Generator(vllm, tokenizer).require_installed()
    if find_spec("aiohttp") is None:
        raise ConfigError("this command needs aiohttp: pip install 'octet-llm[serve]'")

    from serve.config.backends import key_in
    from verify.bench.figures import summarise
    from verify.bench.load import Place, Served
    from verify.bench.machine import gpu_name, is_local, kv_capacity
    from verify.bench.rounds import Plan, measure

    secret = key_in(api_key_env)
    api_key = None if secret is None else secret.get_secret_value()
    generator = Generator(vllm, tokenizer, api_key)
    with _kept(out), _opened(targets, vllm, vllm_options, out, api_key_env) as servers:
        _require_context(servers, matrix)
        console = console_for(as_json)
        proofs = prove(servers, golden, key, api_key_env, console)
        places = [
            Place(
                one.name,
                one.url,
                one.model,
                one.identity.get("owned_by") == "vllm",
                None if _is_url(target) else Served.of(Path(target), vllm_options),
            )
            for target, one in zip(targets, servers, strict=True)
        ]
        plan = Plan(places, [one.identity for one in servers], matrix, rounds, requests)
        comparison = None
        if samples is not None:
            answers = None if out is None else out / "answers"
            comparison = _quality(
                servers, reference, samples, count, text_field, max_length, top_k, answers, as_json
            )
        with progress_bars(console, "runs", transient=True) as bars:
            runs = measure(
                plan,
                generator,
                out=out,
                advance=lambda done, total: bars.update("bench", done, total),
            )
        capacities = [kv_capacity(one.url, api_key) for one in servers]
    gpu = gpu_name() if all(is_local(place.url) for place in places) else None
    result = summarise(plan, runs, capacities, comparison, proofs=[*proofs.values()], gpu=gpu)
    finish(result, html, as_json, page="verify.bench.html", report="verify.bench.console")


def _require_targets(targets: list[str]) -> None:
    if len(targets) < 2:
        raise ConfigError(f"{targets[0]}: a comparison needs two servers or more: give another")
    for target in targets:
        if not _is_url(target) and is_hub_name(Path(target)):
            raise explain_missing(Path(target))
        if not _is_url(target) and not (Path(target) / "config.json").is_file():
            raise ConfigError(
                f"{target}: neither a server's URL (http://host:port) nor a checkpoint (no"
                " config.json there); start other kinds of artifacts yourself: `octet serve DIR`"
            )


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


@contextmanager
def _opened(
    targets: list[str], vllm: str, options: str, out: Path | None, api_key_env: str | None
) -> "Iterator[list[Server]]":
    """Opens the servers, and starts vLLM on checkpoints, one after the other."""
    from serve.vllm.server import VllmServer
    from verify.evaluation.targets.server import Server

    count = sum(not _is_url(target) for target in targets)
    share = ["--gpu-memory-utilization", f"{0.9 / max(count, 1):.3f}", *words_of(options)]
    with ExitStack() as stack:
        logs = out or Path(mkdtemp(prefix="octet-bench-"))
        logs.mkdir(parents=True, exist_ok=True)
        if out is None:
            stack.push(lambda kind, *_: _discard(logs, failed=kind is not None))
        servers = []
        for number, target in enumerate(targets, start=1):
            if _is_url(target):
                servers.append(Server(target, api_key_env=api_key_env))
                continue
            note(f"starting vLLM on {target}")
            log = logs / f"target{number}.log"
            server = VllmServer(Path(target), log=log, command=vllm, options=share)
            stack.enter_context(server)
            servers.append(Server(server.url, name=target))
        yield servers


def _discard(logs: Path, *, failed: bool) -> None:
    """Removes the servers' logs, unless they say what failed."""
    if not failed or not any(logs.iterdir()):
        shutil.rmtree(logs)


def _require_tokenizer(tokenizer: Path | None, reference: Path | None, golden: Path | None) -> Path:
    for path in filter(None, (tokenizer, reference, golden)):
        if not path.is_dir():
            raise ConfigError(f"{path}: no such directory")
    chosen = tokenizer or reference or golden
    if chosen is None:
        raise ConfigError(
            "prompts need the model's tokenizer: give --tokenizer DIR, or --reference DIR"
        )
    if not any((chosen / name).exists() for name in _TOKENIZERS):
        raise ConfigError(f"{chosen}: has no tokenizer.json: give --tokenizer DIR")
    return chosen


def _require_context(servers: "list[Server]", loads: "list[Load]") -> None:
    """Raises ConfigError if a load does not fit into the context of one of the servers."""
    for server in servers:
        for load in loads:
            context = None if server.longest is None else server.longest + 1
            if context is not None and load.prompt + load.output > context:
                raise ConfigError(
                    f"{server.name}: has a context of {context} tokens, and --load {load} needs"
                    f" {load.prompt + load.output}: give a smaller load"
                )


def _quality(
    servers: "list[Server]",
    reference: Path | None,
    samples: Path,
    count: int | None,
    text_field: str,
    max_length: int,
    top_k: int,
    out: Path | None,
    as_json: bool,
) -> "Comparison":
    """Evaluates the servers as `octet evaluate` does."""
    from verify.evaluation.comparison import compare
    from verify.evaluation.evaluator import evaluate
    from verify.evaluation.targets.open import open_target, read_samples

    origin = None if reference is None else open_target(str(reference), None, 1)
    every = [*servers] if origin is None else [origin, *servers]
    sequences = read_samples(
        every, samples, count=count, text_field=text_field, max_length=max_length
    )
    k = min([top_k, *(one.vocabulary for one in every if one.vocabulary is not None)])
    with progress_bars(console_for(as_json), transient=True) as bars:
        return compare(
            evaluate(servers, origin, sequences, k=k, out=out, advance=bars.update, note=note)
        )


@contextmanager
def _kept(out: Path | None) -> Iterator[None]:
    """Adds to an interruption, or a failed run, how to continue."""
    hint = f"finished runs are kept in {out}: the same command continues from there"
    if out is None:
        hint = "nothing was kept: with --out DIR, a benchmark that ends early can be continued"
    try:
        yield
    except BackendError as error:
        raise BackendError(f"{error}; {hint}", kind=error.kind) from None
    except KeyboardInterrupt:
        note(hint)
        raise

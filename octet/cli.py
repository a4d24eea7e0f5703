"""The command line: one typer app, whose commands import their stage when they are called."""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from octet import __version__
from octet.errors import ConfigError, OctetError
from octet.recipe import PRESETS, Recipe

__all__ = ["app", "build_engine_main", "calibrate_main", "main"]

app = typer.Typer(
    help="From a Hugging Face checkpoint to an FP8 service that can prove what it serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ExportTarget = Literal["checkpoint", "onnx", "triton-python", "triton-vllm"]
KvCache = Literal["e5m2", "float16"]
_RECIPES = ", ".join(PRESETS)

Model = Annotated[Path, typer.Argument(help="Directory of a Hugging Face checkpoint.")]
Source = Annotated[Path, typer.Argument(metavar="CALIBRATION", help="What `calibrate` wrote.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Directory to write; whole or not at all.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an artifact that exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a report.")]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="The checkpoint, if it has moved since calibration.")
]


@app.command()
def calibrate(
    model: Model,
    samples: Annotated[Path, typer.Option("--samples", help="JSONL, one text a line.")],
    out: Out,
    recipe: Annotated[str, typer.Option(help=f"{_RECIPES}, or a YAML file.")] = "fp8",
    name: Annotated[
        str | None, typer.Option(help="What to serve the model as [its directory's name].")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Samples to run.")] = 256,
    held_out: Annotated[
        Path | None, typer.Option(help="JSONL for the golden records; not used for scales.")
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="Field of each line that holds the text.")
    ] = "text",
    max_length: Annotated[int, typer.Option(min=1, help="Tokens kept of each sample.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a forward pass.")] = 8,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], typer.Option(help="Arithmetic of the forward pass.")
    ] = "auto",
    allow_few_samples: Annotated[
        bool, typer.Option("--allow-few-samples", help="Accept fewer than 128 samples.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Observe a model on representative samples, and find its scales."""
    chosen = Recipe.load(recipe)
    import calibrate as stage

    calibration = stage.run(
        model,
        samples,
        out,
        recipe=chosen,
        name=name,
        count=count,
        held_out=held_out,
        text_field=text_field,
        max_length=max_length,
        batch_size=batch_size,
        dtype=dtype,
        allow_few_samples=allow_few_samples,
        force=force,
        console=_console(as_json),
    )
    _wrote(out, calibration.manifest, as_json)


@app.command()
def export(
    calibration: Source,
    out: Out,
    to: Annotated[ExportTarget, typer.Option(help="What to write.")] = "checkpoint",
    model: ModelOption = None,
    kv_cache: Annotated[
        KvCache | None, typer.Option(help="onnx: the cache's type, if not the recipe's.")
    ] = None,
    full_precision: Annotated[
        bool, typer.Option("--full-precision", help="onnx: the same graph without quantization.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="triton: the name of the model.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a calibrated model for an engine: checkpoint, ONNX or a Triton repository entry."""
    _only(to, "onnx", "--kv-cache", kv_cache is not None)
    _only(to, "onnx", "--full-precision", full_precision)
    _only(to, "triton", "--name", name is not None)
    if to == "checkpoint":
        from export.checkpoint import export_checkpoint

        manifest = export_checkpoint(calibration, out, model=model, force=force)
    elif to == "onnx":
        from export.onnx import export_onnx

        manifest = export_onnx(
            calibration,
            out,
            model=model,
            kv_cache=kv_cache,
            quantize=not full_precision,
            force=force,
        )
    else:
        from export.triton import export_triton

        backend: Literal["python", "vllm"] = "vllm" if to == "triton-vllm" else "python"
        manifest = export_triton(
            calibration, out, backend=backend, model=model, name=name, force=force
        )
    _wrote(out, manifest, as_json)


@app.command("build-engine")
def build_engine(
    calibration: Source,
    out: Out,
    model: ModelOption = None,
    target: Annotated[
        str, typer.Option(help="GPU architectures to build for, such as sm89 or sm89,sm120.")
    ] = "sm89",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Build a TensorRT-RTX engine from a calibration; needs no GPU."""
    from export.engine import build_engine as build

    manifest = build(
        calibration,
        out,
        model=model,
        targets=target.split(","),
        force=force,
        console=_console(as_json),
    )
    _wrote(out, manifest, as_json)


@app.command()
def evaluate(
    target: Annotated[Path, typer.Argument(help="A checkpoint, or an ONNX export.")],
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
    if (target / "model.onnx").exists():
        from serve.evaluate import perplexity
    else:
        from calibrate.reference import perplexity  # type: ignore[assignment]
    result = perplexity(
        target,
        samples,
        count=count,
        text_field=text_field,
        max_length=max_length,
        console=_console(as_json),
    )
    if as_json:
        print(json.dumps({"perplexity": result.perplexity, "tokens": result.tokens}))
    else:
        print(f"{target}: perplexity {result.perplexity:.4f} over {result.tokens} tokens")


@app.command()
def serve(
    target: Annotated[
        Path | None, typer.Argument(help="An ONNX export, served by the embedded engine.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML with pools of backends.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port [8000].")] = None,
) -> None:
    """Serve OpenAI's completion API over the embedded engine, vLLM or Triton."""
    if (target is None) == (config is None):
        raise ConfigError("give either an ONNX export to serve, or --config FILE")
    from serve.server import run

    run(target, config=config, host=host, port=port)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"octet {__version__}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command; exits 2 with one line on standard error for a user's mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _terminate)
    command: Any = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="octet", standalone_mode=False) or 0
        if code == 130:  # typer has turned KeyboardInterrupt into this code
            raise KeyboardInterrupt
        sys.exit(code)
    except OctetError as error:
        _fail(str(error))
    except OSError as error:
        if error.strerror is None or isinstance(error, BrokenPipeError):
            raise
        _fail(f"{error.filename or 'input or output'}: {error.strerror}")
    except ModuleNotFoundError as error:
        _fail(_missing(error))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except Exception as error:
        # Typer carries its own copy of click, so its errors are known by this method alone.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        if not message():
            sys.exit(2)  # the help has been printed
        _fail(message())


def calibrate_main() -> NoReturn:
    """`calibrate`, as a command of its own."""
    main(["calibrate", *sys.argv[1:]])


def build_engine_main() -> NoReturn:
    """`build-engine`, as a command of its own."""
    main(["build-engine", *sys.argv[1:]])


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # so that what is half-written is removed on SIGTERM too


_EXTRA_OF = {
    "torch": "calibrate",
    "transformers": "calibrate",
    "numba": "calibrate",
    "onnx": "export",
    "onnxruntime": "export",
    "fastapi": "serve",
    "uvicorn": "serve",
    "aiohttp": "serve",
    "tokenizers": "serve",
    "prometheus_client": "serve",
    "tritonclient": "serve",
    "jinja2": "serve",
}


def _missing(error: ModuleNotFoundError) -> str:
    package = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF.get(package)
    if extra is None:
        raise error
    return f"this command needs {package}: pip install 'octet[{extra}]'"


def _console(as_json: bool) -> Console | None:
    return None if as_json else Console(stderr=True)


def _only(to: str, target: str, flag: str, given: bool) -> None:
    if given and not to.startswith(target):
        raise ConfigError(f"{flag} applies to --to {target} only, not to {to}")


def _wrote(out: Path, manifest: Any, as_json: bool) -> None:
    if as_json:
        facts = {"identity": manifest.identity, "kind": manifest.kind, "details": manifest.details}
        print(json.dumps({"path": str(out), **facts}))
        return
    table = Table.grid(padding=(0, 2))
    for name in manifest.files:
        size = (out / name).stat().st_size
        table.add_row(f"  {name}", f"{size:,} B")
    console = Console()
    console.print(f"wrote [bold]{out}[/bold] ({manifest.kind}, {manifest.recipe.name})")
    console.print(table)
    for key, value in manifest.details.items():  # every choice is said, none made in silence
        if isinstance(value, str | bool | int):
            console.print(f"  {key.replace('_', ' ')}: {value}", highlight=False, markup=False)


if __name__ == "__main__":
    main()

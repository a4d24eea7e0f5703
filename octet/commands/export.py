"""`octet export` and `octet build-engine`: a calibration becomes what an engine loads."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from octet.commands.options import (
    Force,
    Json,
    ModelOption,
    Out,
    Source,
    console_for,
    wrote,
)
from octet.errors import ConfigError

__all__ = ["build_engine", "export"]

export = typer.Typer(
    help="Write a calibrated model for an engine: checkpoint, ONNX or Triton entry.",
    no_args_is_help=True,
)

Format = Literal["compressed-tensors", "modelopt", "fp8"]
Kv = Annotated[
    Literal["e5m2", "e4m3", "float16"] | None,
    typer.Option("--kv", "--kv-cache", help="The cache to export for, if not the recipe's."),
]
TritonBackend = Literal["python", "vllm", "tensorrt", "onnxruntime"]


@export.command("checkpoint")
def export_checkpoint(
    calibration: Source,
    out: Out,
    format: Annotated[
        Format, typer.Option(help="compressed-tensors is what vLLM serves with an E5M2 cache.")
    ] = "compressed-tensors",
    kv: Kv = None,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", "--tp", min=1, help="GPUs that will share it.")
    ] = 1,
    model: ModelOption = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """A checkpoint for vLLM, SGLang or TensorRT-LLM."""
    from export.checkpoint import export_checkpoint as write

    manifest = write(
        calibration,
        out,
        model=model,
        format=format,
        kv_cache=kv,
        tensor_parallel=tensor_parallel,
        force=force,
        console=console_for(as_json),
    )
    wrote(out, manifest, as_json)


@export.command("onnx")
def export_onnx(
    calibration: Source,
    out: Out,
    target: Annotated[
        Literal["onnxruntime", "tensorrt"],
        typer.Option("--for", help="tensorrt: the graph that build-engine compiles."),
    ] = "onnxruntime",
    kv: Kv = None,
    full_precision: Annotated[
        bool, typer.Option("--full-precision", help="The same graph without quantization.")
    ] = False,
    model: ModelOption = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """The decoder as an ONNX graph."""
    from export.onnx import export_onnx as write

    manifest = write(
        calibration,
        out,
        model=model,
        target=target,
        kv_cache=kv,
        quantize=not full_precision,
        force=force,
    )
    wrote(out, manifest, as_json)


@export.command("triton")
def export_triton(
    calibration: Source,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The entry; with --all, the repository [triton_models]."),
    ] = None,
    backend: Annotated[TritonBackend, typer.Option(help="What runs it inside Triton.")] = "python",
    engine: Annotated[
        Path | None, typer.Option(help="What `build-engine` wrote, for an entry that runs it.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every entry that can be written here.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="The name of the model.")] = None,
    model: ModelOption = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """An entry of a Triton model repository, or all of them."""
    from export import triton

    if every:
        repository = out or Path("triton_models")
        written = triton.export_all(
            calibration, repository, engine=engine, name=name, model=model, force=force
        )
        entries = {entry: manifest.identity for entry, manifest in written.manifests.items()}
        if as_json:
            facts = {"path": str(repository), "entries": entries, "left_out": written.left_out}
            print(json.dumps(facts))
            return
        console = Console()
        for entry in entries:
            console.print(f"wrote [bold]{repository / entry}[/bold]", highlight=False)
        for entry, reason in written.left_out.items():
            console.print(f"left out {entry}: {reason}", highlight=False, markup=False)
        return
    if out is None:
        raise ConfigError("say where to with --out, or write all entries with --all")
    manifest = triton.export_triton(
        calibration, out, backend=backend, engine=engine, model=model, name=name, force=force
    )
    wrote(out, manifest, as_json)


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
        console=console_for(as_json),
    )
    wrote(out, manifest, as_json)

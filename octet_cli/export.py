"""`octet export` and `octet build-engine`: convert a calibration into what an engine loads."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from octet.artifacts.manifest import Manifest, check_destination
from octet.errors import ConfigError
from octet.tables import fitted
from octet_cli.help import Command, Group, examples_of
from octet_cli.options import (
    Force,
    Gate,
    Json,
    MaxKl,
    MaxPplChange,
    ModelOption,
    Out,
    Source,
    console_for,
    wrote,
)
from verify.export_gate import DefaultGate, ExportGate, export_gate

__all__ = ["build_engine", "export"]

export = typer.Typer(
    help="Write a calibrated model for an engine: checkpoint, ONNX or Triton entry.",
    cls=Group,
    epilog=examples_of("export"),
    no_args_is_help=True,
)

Format = Literal["compressed-tensors", "modelopt", "fp8"]
Kv = Annotated[
    Literal["e5m2", "e4m3", "float16"] | None,
    typer.Option("--kv", "--kv-cache", help="The cache to export for, if not the recipe's."),
]
TritonBackend = Literal["python", "vllm", "tensorrt", "onnxruntime"]


@export.command("checkpoint", cls=Command, epilog=examples_of("export checkpoint"))
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
    max_kl: MaxKl = None,
    max_ppl_change: MaxPplChange = None,
    gate: Gate = "default",
    model: ModelOption = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """A checkpoint for vLLM, SGLang or TensorRT-LLM."""
    console = console_for(as_json)
    judge = _judge(calibration, out, max_kl, max_ppl_change, gate, model, console, force=force)
    from export.checkpoint.write import export_checkpoint as write

    manifest = write(
        calibration,
        out,
        model=model,
        format=format,
        kv_cache=kv,
        tensor_parallel=tensor_parallel,
        force=force,
        console=console,
        judge=judge,
    )
    _supersede(judge, out)
    wrote(out, manifest, as_json)


@export.command("onnx", cls=Command, epilog=examples_of("export onnx"))
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
    max_kl: MaxKl = None,
    max_ppl_change: MaxPplChange = None,
    gate: Gate = "default",
    model: ModelOption = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """The decoder as an ONNX graph."""
    console = console_for(as_json)
    judge = _judge(calibration, out, max_kl, max_ppl_change, gate, model, console, force=force)
    from export.onnx.write import export_onnx as write

    manifest = write(
        calibration,
        out,
        model=model,
        target=target,
        kv_cache=kv,
        quantize=not full_precision,
        force=force,
        judge=judge,
    )
    _supersede(judge, out)
    wrote(out, manifest, as_json)


@export.command("triton", cls=Command, epilog=examples_of("export triton"))
def export_triton(
    calibration: Source,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The entry; with --all, the repository (default: triton_models)."
        ),
    ] = None,
    backend: Annotated[
        TritonBackend | None, typer.Option(help="Triton backend that runs it (default: python).")
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(help="Directory that `build-engine` wrote, for an entry that runs it."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every entry that can be written here.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="The name of the model.")] = None,
    instances: Annotated[
        int | None, typer.Option(min=1, help="Instances on each device (default: 1).")
    ] = None,
    queue_delay: Annotated[
        int | None,
        typer.Option(min=0, metavar="US", help="Microseconds a step may wait for others."),
    ] = None,
    preferred_batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Batch size that Triton should wait for; may be repeated."),
    ] = None,
    max_kl: MaxKl = None,
    max_ppl_change: MaxPplChange = None,
    gate: Gate = "default",
    model: ModelOption = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """An entry of a Triton model repository, or all of them."""
    if every and backend is not None:
        raise ConfigError("--all writes the entries of every backend: leave --backend out")
    tuned = (instances, queue_delay, preferred_batch)
    if every and any(given is not None for given in tuned):
        raise ConfigError("--all writes entries as they are: tune one with --backend and --out")
    if out is None and not every:
        raise ConfigError("give --out DIR, or write all entries with --all")
    Manifest.load(calibration, "calibration", verify=False)
    from export.triton import write as triton
    from export.triton.entries import Tuning

    out = out or Path("triton_models")
    judge = export_gate(
        max_kl,
        max_ppl_change,
        calibration,
        out,
        model=model,
        console=console_for(as_json),
        entries=triton.all_entries(calibration, out, name) if every else [out],
        off=gate == "off",
    )
    if not every:
        manifest = triton.export_triton(
            calibration,
            out,
            backend=backend or "python",
            engine=engine,
            model=model,
            name=name,
            tuning=Tuning(instances, queue_delay, tuple(preferred_batch or ())),
            force=force,
            judge=judge,
        )
        _supersede(judge, out)
        wrote(out, manifest, as_json)
        return
    written = triton.export_all(
        calibration, out, engine=engine, name=name, model=model, force=force, judge=judge
    )
    _supersede(judge, *(out / entry for entry in written.manifests))
    if as_json:
        entries = {entry: manifest.identity for entry, manifest in written.manifests.items()}
        print(json.dumps({"path": str(out), "entries": entries, "left_out": written.left_out}))
        return
    console = Console(highlight=False, markup=False)
    for entry, manifest in written.manifests.items():
        cache = manifest.details.get("kv_cache")
        suffix = f" ({cache} cache)" if isinstance(cache, str) else ""
        console.print(f"wrote {out / entry}{suffix}")
    for entry, reason in written.left_out.items():
        console.print(f"left out {entry}: {reason}")


def build_engine(
    calibration: Source,
    out: Out,
    builder: Annotated[
        Literal["auto", "tensorrt", "tensorrt-rtx"],
        typer.Option(help="auto: tensorrt if it is installed and there is a GPU."),
    ] = "auto",
    target: Annotated[
        str | None,
        typer.Option(help="tensorrt-rtx: GPU architectures, such as sm89 or sm89,sm120."),
    ] = None,
    kv: Kv = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences in a decoding step.")] = 16,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a sequence (default: the model's, 8192 at most)."),
    ] = None,
    usual_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences of the step to tune kernels for (default: 4)."),
    ] = None,
    usual_length: Annotated[
        int | None,
        typer.Option(min=1, help="Cached tokens of each sequence in that step (default: 512)."),
    ] = None,
    full_precision: Annotated[
        bool, typer.Option("--full-precision", help="Build without quantization, as a baseline.")
    ] = False,
    workspace: Annotated[
        float, typer.Option(min=0.001, help="GiB of scratch memory that one layer may use.")
    ] = 1.0,
    timing_cache: Annotated[
        Path | None, typer.Option(help="File that remembers timings between builds.")
    ] = None,
    optimization_level: Annotated[
        int | None,
        typer.Option(min=0, max=5, help="The builder's effort (default: its own choice)."),
    ] = None,
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="Time the engine as trtexec does.")
    ] = False,
    max_kl: MaxKl = None,
    max_ppl_change: MaxPplChange = None,
    gate: Gate = "default",
    model: ModelOption = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Build a TensorRT engine, and prove it where it can run; TensorRT-RTX builds without a GPU."""
    console = console_for(as_json)
    judge = _judge(calibration, out, max_kl, max_ppl_change, gate, model, console, force=force)
    from export.engine.build import build_engine as build

    manifest = build(
        calibration,
        out,
        model=model,
        builder=builder,
        targets=None if target is None else target.split(","),
        kv_cache=kv,
        max_batch=max_batch,
        max_length=max_length,
        usual_batch=usual_batch,
        usual_length=usual_length,
        quantize=not full_precision,
        workspace_bytes=int(workspace * (1 << 30)),
        timing_cache=timing_cache,
        optimization_level=optimization_level,
        force=force,
        console=console,
        prove=_prove,
        judge=judge,
    )
    _supersede(judge, out)
    figures: dict[str, Any] = {}
    try:
        if benchmark:
            from serve.tensorrt.benchmark import benchmark as measure

            figures["benchmark"] = measure(out)
    finally:  # the engine is written even if its benchmark fails
        wrote(out, manifest, as_json, **figures)
    if figures and not as_json:
        from serve.tensorrt.benchmark import table

        terminal = Console()
        terminal.print(fitted(table(figures["benchmark"]), terminal))


def _judge(
    calibration: Path,
    out: Path,
    max_kl: str | None,
    max_ppl_change: str | None,
    gate: str,
    model: Path | None,
    console: Console | None,
    *,
    force: bool,
) -> ExportGate | DefaultGate:
    """Returns the judge of these limits, or the default one; refuses what cannot be used.

    Call it before the exporter is imported: that loads libraries.
    """
    check_destination(out, force=force, inputs=[calibration])
    Manifest.load(calibration, "calibration", verify=False)
    off = gate == "off"
    return export_gate(
        max_kl, max_ppl_change, calibration, out, model=model, console=console, off=off
    )


def _supersede(judge: ExportGate | DefaultGate, *written: Path) -> None:
    for out in written:
        judge.written(out)


def _prove(directory: Path) -> dict[str, Any]:
    """Runs the engine on the golden prompts; returns the reason if that is not possible."""
    try:
        from serve.engine.golden_check import prove
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install 'octet-llm[serve]'"
        return {"status": "unproven", "reason": missing}
    return prove(directory)

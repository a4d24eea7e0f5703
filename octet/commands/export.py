"""`octet export` and `octet build-engine`: a calibration becomes what an engine loads."""

from typing import Annotated, Literal

import typer

from octet.commands.options import Force, Json, ModelOption, Out, Source, console_for, only, wrote

__all__ = ["build_engine", "export"]

ExportTarget = Literal["checkpoint", "onnx", "triton-python", "triton-vllm"]
KvCache = Literal["e5m2", "float16"]


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
    only(to, "onnx", "--kv-cache", kv_cache is not None)
    only(to, "onnx", "--full-precision", full_precision)
    only(to, "triton", "--name", name is not None)
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

"""`octet golden`: a proof pack for a checkpoint that another tool quantized."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from octet.interrupts import held_back
from octet.recipe import KvCacheDtype
from octet_cli.options import Force, Json, Out, TextField, console_for, wrote

__all__ = ["golden"]


def golden(
    original: Annotated[
        Path,
        typer.Argument(help="The checkpoint before it was quantized: BF16, float32, FP8 blocks."),
    ],
    quantized: Annotated[
        Path,
        typer.Option(
            "--quantized",
            "-q",
            help="The checkpoint that llm-compressor, ModelOpt or another tool made of it.",
        ),
    ],
    samples: Annotated[
        Path, typer.Option("--samples", help="JSONL, text, folder of texts, Parquet or data set.")
    ],
    out: Out,
    kv_cache: Annotated[
        KvCacheDtype | None,
        typer.Option("--kv-cache", "--kv", help="Format of the cache, if not the checkpoint's."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model (default: its directory's).")
    ] = None,
    text_field: TextField = "text",
    messages_field: Annotated[
        str, typer.Option(help="Field of each sample that holds its conversation.")
    ] = "messages",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")
    ] = "auto",
    sign: Annotated[
        Path | None,
        typer.Option(help="Sign the pack with this private Ed25519 key."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make a proof pack: what proves a server of a checkpoint that another tool quantized.

    The pack holds golden records and simulations, and no weights. The gateway (`proof.golden`) and
    `octet verify URL --golden` take it like an export.
    """
    from verify.proof_pack import PackOptions, open_pair

    options = PackOptions(
        original=original,
        quantized=quantized,
        samples=samples,
        out=out,
        kv_cache=kv_cache,
        name=name,
        device=device,
        text_field=text_field,
        messages_field=messages_field,
        sign=sign,
        force=force,
    )
    pair = open_pair(options)  # before torch is loaded
    with held_back():
        from calibrate.decoder.arithmetic import fit_threads
        from verify.proof_pack import write_pack

    fit_threads()
    manifest = write_pack(pair, options, console=console_for(as_json))
    wrote(out, manifest, as_json, signed=sign is not None)

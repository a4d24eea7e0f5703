"""`octet prewarm`: fills the kernel caches of a machine, so that vLLM starts in seconds there."""

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer

from octet_cli.options import Json, console_for, words_of

__all__ = ["prewarm"]


def prewarm(
    checkpoint: Annotated[
        Path, typer.Argument(help="What `octet export checkpoint` wrote, or another checkpoint.")
    ],
    cache: Annotated[
        Path | None,
        typer.Option(help="Directory for the caches (default: where vLLM keeps them, in $HOME)."),
    ] = None,
    vllm: Annotated[
        str, typer.Option(metavar="COMMAND", help="The vllm that will serve it.")
    ] = "vllm",
    vllm_options: Annotated[
        str,
        typer.Option(help="The options it will be served with, such as '--max-model-len 8192'."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Compile what vLLM needs to serve a checkpoint on this machine, before it is needed.

    Starts vLLM, generates a few tokens, and stops it. The next start with the same options, vLLM
    and kind of GPU finds the compiled kernels. With --cache, the directory can be a volume, or be
    copied to machines of the same kind.
    """
    from serve.vllm.command import cache_variables, gpus, in_blocks, scale_variables
    from serve.vllm.server import VllmServer, complete, complete_every_length

    options = words_of(vllm_options)
    variables = {} if cache is None else cache_variables(cache.resolve())
    log = Path(mkdtemp(prefix="octet-prewarm-")) / "vllm.log"
    console = console_for(as_json)
    saying = f"starting vLLM; a first start compiles for minutes: {log}"
    started = time.monotonic()
    with (
        nullcontext() if console is None else console.status(saying),
        VllmServer(
            checkpoint, log=log, command=vllm, options=options, environment=variables
        ) as server,
    ):
        ready = time.monotonic()
        complete(server)
        first = time.monotonic()
        blocks = in_blocks(checkpoint)
        if blocks:  # DeepGEMM compiles some kernels only when a prompt needs them
            complete_every_length(server)
        last = time.monotonic()
    log.unlink()
    log.parent.rmdir()
    seconds = {
        "ready_s": ready - started,
        "first_answer_s": first - started,
        "last_answer_s": last - started,
    }
    kept = scale_variables(checkpoint, [gpu.capability for gpu in gpus()])
    variables |= {name: os.environ.get(name, value) for name, value in kept.items()}
    if as_json:
        print(json.dumps({**seconds, "environment": variables}))
        return
    print(f"ready after {seconds['ready_s']:.0f} s, first answer after {first - started:.0f} s")
    if blocks:
        print(f"prompts of all lengths answered after {last - started:.0f} s")
    if variables:
        copied = "" if cache is None else ", or copy the directory"
        print(f"start vLLM with these environment variables{copied}:")
        for name, value in variables.items():
            print(f"  {name}={value}")

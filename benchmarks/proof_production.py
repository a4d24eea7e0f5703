"""Proves conforming vLLM servers on a GPU under the settings and the load of production.

Exports a calibration for each cache, and starts vLLM on it as people do: compiled, with CUDA
graphs, prefix caching and chunked prefill, and otherwise where a row says so. The gateway's prover
must admit each server, without clients and with up to 256, and find all prompts right. Servers run
one after another: vLLM measures the GPU's memory as it starts, and fails if another one changes it.

    PYTHONPATH=. python benchmarks/proof_production.py MODEL CALIBRATION [--vllm CMD]

It needs a GPU with vLLM 0.24, and a calibration with predictions, such as one of
`examples/reference/train.py`, whose context of 8,192 tokens lets clients send long prompts.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from card import conditions, report
from proof_conforming import Setting, admitted

from octet.artifacts.calibration import Calibration
from octet.errors import OctetError
from serve.vllm.server import VllmServer

LONG = 24_000  # characters, 6,000 to 8,000 tokens


@dataclass(frozen=True)
class Start:
    """A server, and how many clients each of its admissions shares it with."""

    name: str
    kv: str = "e5m2"  # cache that the checkpoint is exported for; "": the original checkpoint
    options: tuple[str, ...] = ()
    clients: tuple[int, ...] = (0,)
    gpus: int = 1  # that share each layer


STARTS = (
    Start("E5M2, as `octet serve` starts it", clients=(0, 1, 32, 256)),
    Start("E4M3, as `octet serve` starts it", "e4m3", clients=(0, 1, 32, 256)),
    Start("16-bit cache, as `octet serve` starts it", "float16", clients=(0, 1, 32, 256)),
    Start("the original in BF16", "", clients=(0, 256)),
    Start("E5M2, eager", options=("--enforce-eager",), clients=(0, 32)),
    Start("E4M3, FlashInfer", "e4m3", ("--attention-backend", "FLASHINFER"), (0, 32)),
    Start("E4M3, eager", "e4m3", ("--enforce-eager",), (0, 32)),
    Start(
        "E4M3, prefill in chunks of 512, no prefix caching",
        "e4m3",
        ("--max-num-batched-tokens", "512", "--no-enable-prefix-caching"),
        (0, 32),
    ),
    Start("E5M2, on two GPUs", gpus=2, clients=(0, 32)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the original checkpoint")
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--vllm", default="vllm")
    parser.add_argument("--only", default="", help="starts whose name this pattern is found in")
    parser.add_argument("--seconds", type=float, default=600, help="that a start may take")
    parser.add_argument("--memory", type=float, default=0.5, help="of the GPU, for a server")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        manifest = Calibration.load(options.calibration).manifest
    except OctetError as error:
        sys.exit(str(error))
    card = conditions(
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        model=f"{manifest.model.name}, {manifest.recipe.name}",
        server="vLLM, alone on the GPU",
        load=f"prompts of up to {LONG:,} characters, 64 tokens each",
    )
    with tempfile.TemporaryDirectory(prefix="octet-") as name:
        for start in STARTS:
            if re.search(options.only, start.name):
                checkpoint = options.model
                if start.kv:
                    checkpoint = export(options.calibration, start, Path(name))
                rows += rows_of(start, checkpoint, options, Path(name))
                report("proof_production", card, rows, options.output)
    refused = [row["server"] for row in rows if row["admission"] != "proven"]
    if refused:
        sys.exit(f"not admitted: {'; '.join(refused)}")


def export(calibration: Path, start: Start, directory: Path) -> Path:
    """Returns the checkpoint that `start` serves, and writes it if it is not there."""
    out = directory / f"for-{start.kv}-{start.gpus}"
    if not out.exists():
        command = [sys.executable, "-m", "octet", "export", "checkpoint", str(calibration)]
        command += ["--kv", start.kv, "--tensor-parallel", str(start.gpus)]
        subprocess.run([*command, "--gate", "off", "--out", str(out)], check=True)
    return out


def rows_of(
    start: Start, checkpoint: Path, options: argparse.Namespace, logs: Path
) -> Iterator[dict[str, Any]]:
    """Starts a server, and yields a row for each load that it is proven under."""
    began = time.perf_counter()
    log = logs / f"{STARTS.index(start)}.log"
    words = ["--gpu-memory-utilization", str(options.memory), *start.options]
    server = VllmServer(checkpoint, log=log, command=options.vllm, options=words)
    golden = checkpoint if start.kv else options.calibration
    try:
        server.start()
        server.wait(options.seconds)
        seconds = round(time.perf_counter() - began, 1)
        for clients in start.clients:
            setting = Setting(start.name, kv=start.kv, clients=clients, characters=LONG)
            found = asyncio.run(admitted(setting, server.url, golden))
            row = {"server": start.name, "clients": clients, **found, "start s": seconds}
            print(row, flush=True)
            yield row
    except OctetError as error:
        yield {"server": start.name, "clients": None, "admission": "failed", "reason": str(error)}
    finally:
        server.stop()


if __name__ == "__main__":
    main()

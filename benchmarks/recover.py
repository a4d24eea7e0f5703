"""Compares `octet recover` with GPTQ and AWQ: divergence as served, on held-out text.

For each recipe, the model is calibrated as it is, with ModelOpt's GPTQ and AWQ, and recovered from
the first. All are exported, and `octet evaluate` measures what Octet's own engine answers, or vLLM.
`more` is the divergence of a row minus that of the last recovered one, paired by sample, with its
95 % interval; `simulated` is the divergence of the recipe's arithmetic, activations and cache
included, on the samples that decide about the training. Seconds and peak memory (of the host) are
of the whole command that made the calibration, predictions left out.

    python benchmarks/recover.py --modelopt .integration/modelopt/bin/python --output FILE
    python benchmarks/recover.py --model DIR --samples FILE --held-out FILE --recipes nvfp4 \\
        --train 128x6,512x6 --vllm vllm --plot plot.html --output FILE

The second serves with vLLM on a GPU, and plots divergence over tokens and seconds of training.
With `--keep DIR`, a later run continues with the calibrations that are there.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from card import conditions, report

from octet.artifacts.calibration import Calibration
from serve.vllm.server import VllmServer

OCTET = ("-m", "octet")
# The command trains layer by layer only if the whole model does not fit in memory.
LAYER_BY_LAYER = """
import calibrate.recover
from octet_cli.main import main
calibrate.recover._method = lambda job, training: "layer by layer"
main()
"""
EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model")
    parser.add_argument("--samples", type=Path, default=EXAMPLE / "samples" / "calibration.jsonl")
    parser.add_argument("--held-out", type=Path, default=EXAMPLE / "samples" / "heldout.jsonl")
    parser.add_argument("--evaluated", type=int, help="held-out samples that are evaluated")
    parser.add_argument("--recipes", default="nvfp4,mxfp4")
    parser.add_argument("--count", type=int, default=512, help="samples of each calibration")
    parser.add_argument("--train", default="512x6", help="samples x epochs, several with commas")
    parser.add_argument("--layers", action="store_true", help="also train layer by layer")
    parser.add_argument("--modelopt", help="an interpreter with ModelOpt, for GPTQ and AWQ")
    parser.add_argument("--recover", default="", help="further options of `octet recover`")
    parser.add_argument("--vllm", help="command of the vLLM that serves")
    parser.add_argument("--vllm-options", default="--gpu-memory-utilization 0.1")
    parser.add_argument("--keep", type=Path, help="directory for what is made")
    parser.add_argument("--plot", type=Path, help="page with divergence over tokens and seconds")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for recipe in options.recipes.split(","):
        with tempfile.TemporaryDirectory(prefix="octet-") as temporary:
            where = (options.keep or Path(temporary)) / recipe
            where.mkdir(parents=True, exist_ok=True)
            rows += measured(recipe, where, options)
    card = conditions(
        model=str(options.model.name),
        samples=options.count,
        held_out=str(options.held_out.name),
        recover=options.recover or "defaults",
        served_by=f"vLLM {options.vllm_options}" if options.vllm else "the embedded engine",
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        threads=os.environ.get("OMP_NUM_THREADS", "all cores"),
    )
    report("recover", card, rows, options.output)
    if options.plot is not None:
        plot(rows, options.plot)


def measured(recipe: str, where: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each way of making the calibration, the last trained one first."""
    samples = ["--samples", options.samples, "--held-out", options.held_out, "--no-predict"]
    calibrate = ["calibrate", options.model, *samples, "--recipe", recipe, "--count", options.count]
    plain = where / "plain"
    costs = {"plain": make(plain, *calibrate)}
    for algorithm in ("gptq", "awq") if options.modelopt else ():
        words = [*calibrate, "--algorithm", algorithm]
        costs[algorithm] = make(where / algorithm, *words, python=options.modelopt)
    for train in options.train.split(","):
        count, epochs = train.split("x")
        words = ["recover", plain, *samples, "--count", count, "--epochs", epochs]
        words += options.recover.split()
        if options.layers:
            name = f"{train}, layer by layer"
            layers = make(where / name, *words, start=("-c", LAYER_BY_LAYER))
            costs = {name: layers | trained(where / name), **costs}
        costs = {train: make(where / train, *words) | trained(where / train), **costs}
    with served(where, list(costs), options) as targets:
        evaluate = ["evaluate", *targets, "--samples", options.held_out]
        evaluate += ["--reference", options.model, "--concurrency", 16]
        evaluate += ["--count", options.evaluated] if options.evaluated else []
        done = subprocess.run(
            [sys.executable, "-m", "octet", *map(str, evaluate), "--json"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    found = json.loads(done.stdout)["rows"]
    return [
        {"recipe": recipe, "made by": name, **row(result), **NOT_TRAINED, **costs[name]}
        for name, result in zip(costs, found, strict=True)
    ]


COLORS = ("#1f77b4", "#d62728")
NOT_TRAINED = {"tokens": 0, "simulated before": None, "simulated": None}


def trained(calibration: Path) -> dict[str, Any]:
    """Returns what a recovered calibration says of its training."""
    details = Calibration.load(calibration).manifest.details["algorithm"]
    held_out = details["held_out"]
    return {
        "tokens": details["tokens"],
        "simulated before": held_out["before"],
        "simulated": held_out["after"],
    }


@contextmanager
def served(where: Path, names: list[str], options: argparse.Namespace) -> Iterator[list[object]]:
    """Exports calibrations of these names, and yields what `octet evaluate` measures."""
    if options.vllm is None:
        for name in names:
            onnx = where / f"{name}-onnx"
            run("export", "onnx", where / name, "--gate", "off", "--force", "-o", onnx)
        yield [where / f"{name}-onnx" for name in names]
        return
    servers: list[VllmServer] = []
    try:
        for name in names:
            checkpoint = where / f"{name}-served"
            run("export", "checkpoint", where / name, "--gate", "off", "--force", "-o", checkpoint)
            server = VllmServer(
                checkpoint,
                log=where / f"{name}.log",
                command=options.vllm,
                options=shlex.split(options.vllm_options),
            )
            servers.append(server)
            server.start()
            server.wait()  # vLLM measures the memory of the GPU while it starts
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.stop()


def make(out: Path, *arguments: object, **how: Any) -> dict[str, float]:
    """Runs a command that writes the calibration `out`, if there is none; returns its costs."""
    costs = out.with_name(f"{out.name}.json")
    if not costs.exists():
        costs.write_text(json.dumps(run(*arguments, "-o", out, **how)))
    return dict(json.loads(costs.read_text()))


def row(result: dict[str, Any]) -> dict[str, Any]:
    """Returns what is reported of one evaluated export."""
    kl, more = result["kl"], result["kl_from_first"]
    return {
        "kl": kl["mean"],
        "kl low": kl["low"],
        "kl high": kl["high"],
        "more": more and more["mean"],
        "more low": more and more["low"],
        "more high": more and more["high"],
        "ppl %": 100 * result["change"]["mean"],
    }


def run(
    *arguments: object, python: str = sys.executable, start: Sequence[str] = OCTET
) -> dict[str, float]:
    """Runs a command of Octet; returns its seconds and its peak memory in GB."""
    started = time.perf_counter()
    process = subprocess.Popen([python, *start, *map(str, arguments)])
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{arguments[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return {"seconds": time.perf_counter() - started, "peak GB": usage.ru_maxrss * 1024 / 1e9}


def plot(rows: Sequence[dict[str, Any]], page: Path) -> None:
    """Writes a page with the divergence over the tokens and seconds of training.

    As served, with its interval, and as simulated for what was trained.
    """
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.04)
    for number, recipe in enumerate(dict.fromkeys(row["recipe"] for row in rows)):
        mine = sorted(
            (row for row in rows if row["recipe"] == recipe), key=lambda row: row["tokens"]
        )
        curve = [row for row in mine if row["tokens"] or row["made by"] == "plain"]
        simulated = [row["simulated"] for row in curve]
        simulated[0] = curve[-1]["simulated before"]
        for column, over in enumerate(("tokens", "seconds"), start=1):
            common = {
                "x": [row[over] if row["tokens"] else 0 for row in curve],
                "text": [row["made by"] for row in curve],
                "mode": "lines+markers",
                "line": {"color": COLORS[number % len(COLORS)]},
                "showlegend": column == 1,
            }
            served = graph_objects.Scatter(
                **common,
                y=[row["kl"] for row in curve],
                error_y={
                    "array": [row["kl high"] - row["kl"] for row in curve],
                    "arrayminus": [row["kl"] - row["kl low"] for row in curve],
                },
                name=f"{recipe}, served",
            )
            as_trained = graph_objects.Scatter(**common, y=simulated, name=f"{recipe}, simulated")
            as_trained.line.dash = "dot"
            figure.add_traces([served, as_trained], rows=1, cols=column)
            figure.update_xaxes(title=f"{over} of training", row=1, col=column)
    figure.update_yaxes(title="divergence, nats a token", rangemode="tozero", col=1)
    figure.write_html(page, include_plotlyjs=True)


if __name__ == "__main__":
    main()

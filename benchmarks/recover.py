"""Compares `octet recover` with GPTQ and AWQ: divergence of the embedded engine on held-out text.

For each recipe, the model is calibrated as it is, with ModelOpt's GPTQ and AWQ, and recovered from
the first, with the whole model in memory and layer by layer; all are exported to ONNX, and `octet
evaluate` measures what Octet's own engine then answers. `more` is the divergence of a row minus
that of the recovered one, paired by sample, with its 95 % interval. Seconds and peak memory are of
the whole command that made the calibration, predictions left out.

    python benchmarks/recover.py --modelopt .integration/modelopt/bin/python --output FILE
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from card import conditions, report

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
    parser.add_argument("--recipes", default="nvfp4,mxfp4")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--modelopt", help="an interpreter with ModelOpt, for GPTQ and AWQ")
    parser.add_argument("--recover", default="", help="further options of `octet recover`")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for recipe in options.recipes.split(","):
        with tempfile.TemporaryDirectory(prefix="octet-") as where:
            rows += measured(recipe, Path(where), options)
    card = conditions(
        samples=options.count,
        held_out=str(options.held_out.name),
        recover=options.recover or "defaults",
        threads=os.environ.get("OMP_NUM_THREADS", "all cores"),
    )
    report("recover", card, rows, options.output)


def measured(recipe: str, where: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each way of making the calibration."""
    samples = ["--samples", options.samples, "--held-out", options.held_out, "--no-predict"]
    samples += ["--count", options.count]
    calibrate = ["calibrate", options.model, *samples, "--recipe", recipe]
    plain, recovered = where / "plain", where / "recovered"
    costs = {"plain": run(*calibrate, "-o", plain)}
    for algorithm in ("gptq", "awq") if options.modelopt else ():
        more = ["--algorithm", algorithm, "-o", where / algorithm]
        costs[algorithm] = run(*calibrate, *more, python=options.modelopt)
    train = ["recover", plain, *samples, *options.recover.split(), "-o"]
    whole = run(*train, recovered)
    layers = run(*train, where / "layer by layer", start=("-c", LAYER_BY_LAYER))
    costs = {"recovered": whole, "layer by layer": layers, **costs}
    for name in costs:
        run("export", "onnx", where / name, "--gate", "off", "-o", where / f"{name}-onnx")
    targets = [where / f"{name}-onnx" for name in costs]
    evaluate = ["evaluate", *targets, "--samples", options.held_out, "--reference", options.model]
    done = subprocess.run(
        [sys.executable, "-m", "octet", *map(str, evaluate), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)["rows"]
    return [
        {"recipe": recipe, "made by": name, **row(result), **costs[name]}
        for name, result in zip(costs, found, strict=True)
    ]


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


if __name__ == "__main__":
    main()

"""Exporting a checkpoint against copying its files: peak memory and speed, on a 3B Llama shape.

The claims it checks: the peak resident set stays under twice the largest input shard and 500 MB,
and the export takes a checkpoint in at 80 % or more of the speed at which its files are copied,
though it quantizes, and hashes what it reads and what it writes. Both start from files in the page
cache and are timed to the return of the call, and to the bytes on the disk (sync). Rounds of
copying and exporting alternate; the median of each counts. `cpu_seconds` are the export's, in user
code and in the kernel; `hash_cpu_seconds` of them are XXH3-128 of what is read and SHA-256 of what
is written, by the speed of one core. Random weights (see streaming_memory); scales are the weights'
maxima. Exits with 1 outside a limit.

    python benchmarks/export_checkpoint.py [--output FILE] [--recipe fp8] [--directory DIR]
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from card import conditions, report
from streaming_memory import CONFIG, write_checkpoint

from calibrate.scales.weights import weight_scales
from octet.artifacts.calibration import Calibration
from octet.artifacts.golden import GoldenRecord, GoldenSet, Top
from octet.artifacts.manifest import Manifest, software
from octet.artifacts.provenance import ModelIdentity
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.storage.files import Digest, xxh3

SPEED = 0.8  # of copying
MARGIN = 500e6  # bytes over twice the largest shard
RUN = """
import json, resource, sys, time
from pathlib import Path
from export.checkpoint.write import export_checkpoint
calibration, out, answer = map(Path, sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
before = used.ru_utime + used.ru_stime
started = time.perf_counter()
export_checkpoint(calibration, out)
seconds = time.perf_counter() - started
used = resource.getrusage(resource.RUSAGE_SELF)
lines = Path("/proc/self/status").read_text().splitlines()
(peak,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
written = sum(path.stat().st_size for path in out.glob("*.safetensors"))
cpu = used.ru_utime + used.ru_stime - before
facts = {"seconds": seconds, "cpu": cpu, "peak": peak, "written": written}
answer.write_text(json.dumps(facts))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where 20 GB are free")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octet-", dir=options.directory) as name:
        directory = Path(name)
        config = CONFIG | {"num_hidden_layers": options.layers}
        shards, size = write_checkpoint(directory / "model", config)
        calibrate(directory, Recipe.load(options.recipe))
        largest = max(path.stat().st_size for path in directory.glob("model/*.safetensors"))
        loads, rows, peak, written = [], [], 0, 0
        export(directory)  # compiles what is not compiled yet
        for _ in range(options.rounds):
            loads.append(os.getloadavg()[0])
            copied = timed(lambda: copy(directory), directory / "copy")
            exported = timed(lambda: export(directory), directory / "out")
            answer = json.loads((directory / "answer").read_text())
            peak, written = max(peak, answer["peak"]), answer["written"]
            # What the process took beside the export itself: the interpreter and its imports.
            start = exported[0] - answer["seconds"]
            both = exported[0] - start, exported[1] - start
            rows.append((*copied, *both, start, answer["cpu"]))
    copied, copied_disk, exported, exported_disk, start, cpu = map(
        statistics.median, zip(*rows, strict=True)
    )
    limit = 2 * largest + MARGIN
    row = {
        "checkpoint_gb": size / 1e9,
        "shards": shards,
        "largest_shard_gb": largest / 1e9,
        "peak_resident_gb": peak / 1e9,
        "limit_gb": limit / 1e9,
        "copy_seconds": copied,
        "export_seconds": exported,
        "export_speed": copied / exported,
        "copy_seconds_to_disk": copied_disk,
        "export_seconds_to_disk": exported_disk,
        "export_speed_to_disk": copied_disk / exported_disk,
        "start_seconds": start,
        "cpu_seconds": cpu,
        "hash_cpu_seconds": size / speed_of(xxh3()) + written / speed_of(hashlib.sha256()),
    }
    card = conditions(
        model=f"Llama 3B shape, {options.layers} layers, random weights, BF16, in the page cache",
        recipe=options.recipe,
        rounds=f"{options.rounds}, copy and export alternating; medians",
        load_before_rounds=[round(load, 2) for load in loads],
        speed="GB/s of the input, relative to shutil.copyfile of its shards",
    )
    report("export_checkpoint", card, [row], options.output)
    if peak > limit:
        sys.exit(f"peak resident set {peak / 1e9:.2f} GB is over {limit / 1e9:.2f} GB")
    if copied / exported < SPEED:
        sys.exit(f"{copied / exported:.0%} of the speed of copying is under {SPEED:.0%}")


def speed_of(digest: Digest | None) -> float:
    """Bytes per second of one core."""
    if digest is None:
        sys.exit("the xxhash package is not installed; pip install 'octet-llm[export]'")
    block = os.urandom(1 << 26)
    started = time.process_time()
    for _ in range(4):
        digest.update(block)
    return 4 * len(block) / (time.process_time() - started)


def timed(work: Callable[[], None], made: Path) -> tuple[float, float]:
    """Seconds until `work` returns, and until what it wrote is on the disk; removes it."""
    os.sync()
    started = time.perf_counter()
    work()
    returned = time.perf_counter() - started
    os.sync()
    written = time.perf_counter() - started
    shutil.rmtree(made)
    return returned, written


def copy(directory: Path) -> None:
    (directory / "copy").mkdir()
    for path in sorted(directory.glob("model/*.safetensors")):
        shutil.copyfile(path, directory / "copy" / path.name)


def export(directory: Path) -> None:
    """Exports in a process of its own, to measure its peak of memory; writes `answer`."""
    if (directory / "out").exists():
        shutil.rmtree(directory / "out")
    paths = (str(directory / name) for name in ("calibration", "out", "answer"))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", RUN, *paths], check=True, env=environment)


def calibrate(directory: Path, recipe: Recipe) -> None:
    """A calibration without samples: maxima of the weights, and inputs as if up to 8."""
    quick = {"weights": recipe.weights.model_copy(update={"method": "max"})}
    recipe = recipe.model_copy(update=quick)
    checkpoint = Checkpoint.open(directory / "model")
    scales: dict[str, Any] = {}
    for name, found in weight_scales(checkpoint, recipe):
        scales[f"{name}.weight_scale"] = found.scale
        if found.global_scale is not None:
            scales[f"{name}.weight_global_scale"] = found.global_scale
            scales[f"{name}.input_global_scale"] = np.asarray(8 / (448 * 6), np.float32)
        if not recipe.activations.dynamic:
            scales[f"{name}.input_scale"] = np.asarray(8 / 448, np.float32)
    for index in range(checkpoint.spec.layers):
        for which in "kv":
            scales[f"{checkpoint.spec.layer(index)}.self_attn.{which}_scale"] = np.ones((), "f4")
    record = GoldenRecord(
        prompt="a",
        prompt_token_ids=(5,),
        continuation_token_ids=(1,),
        tops=(Top(token_ids=(1, 2), logprobs=(-0.1, -3.0)),),
    )
    golden = GoldenSet(weights_sha256="0", compute_dtype="float32", software={}, records=(record,))
    manifest = Manifest(
        kind="calibration",
        model=ModelIdentity.of(checkpoint),
        recipe=recipe,
        details={"source": str(directory / "model")},
        software=software(),
    )
    Calibration.save(directory / "calibration", manifest, {}, {}, scales, golden)


if __name__ == "__main__":
    main()

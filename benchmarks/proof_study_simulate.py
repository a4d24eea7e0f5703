"""The reference and every scenario over the pool of the proof study, where there are cores and a
GPU: `python benchmarks/proof_study_simulate.py INPUTS OUT [--device cuda]`.

INPUTS holds `pool.json` and `<artifact>.npz`, the scales of each artifact's calibration; and the
reference, if it has been computed before. OUT gets
`golden.json.gz`, of the unscaled model: the artifacts' keys differ by a power of two, which changes
no bit of the reference; and `<artifact>-<n>.npz`, scenarios as `pack` writes them.
"""

import argparse
import gzip
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from octet.artifacts.golden import GoldenSet
from octet.artifacts.scenarios import Scenario, ScenarioSet

MODEL = Path(__file__).parents[1] / "examples" / "python-lm" / "model"
ARTIFACTS = {"under": -16, "plain": 0, "over": 14}  # keys times two to this power
GOLDEN = "golden.json.gz"
STEP = 1 / 2048  # nats to which simulated log-probabilities are kept: far below what rounding moves
UNKNOWN = -32768
FILE_BYTES = 15 << 20  # of scenarios in a file, before it is compressed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inputs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--draws", type=json.loads, default={"under": 32, "plain": 8, "over": 8})
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pool = json.loads((options.inputs / "pool.json").read_text())[: max(options.draws.values())]
    started = time.perf_counter()
    known = options.inputs / GOLDEN
    golden = load_golden(known) if known.exists() else reference(pool, options.processes)
    with gzip.open(options.out / GOLDEN, "wt", compresslevel=4) as file:
        file.write(golden.model_dump_json())
    print(f"golden: {time.perf_counter() - started:.1f} s", flush=True)
    for name, draws in options.draws.items():
        started = time.perf_counter()
        part = golden.model_copy(update={"records": golden.records[: draws * len(pool[0])]})
        found = simulate(name, dict(np.load(options.inputs / f"{name}.npz")), part, options.device)
        print(f"{name}: simulated in {time.perf_counter() - started:.1f} s", flush=True)
        pack(options.out, name, part, found)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)


def load_golden(path: Path) -> GoldenSet:
    with gzip.open(path, "rt") as file:
        return GoldenSet.model_validate_json(file.read())


def reference(pool: list[list[Any]], processes: int) -> GoldenSet:
    """A golden set of all draws, one after another."""
    with ProcessPoolExecutor(processes) as workers:
        parts = list(workers.map(_golden, pool))
    return parts[0].model_copy(update={"records": tuple(r for x in parts for r in x.records)})


def _golden(prompts: list[tuple[str, list[int]]]) -> GoldenSet:
    import torch

    from calibrate.golden import golden_set
    from octet.model.checkpoint import Checkpoint

    torch.set_num_threads(1)
    return golden_set(Checkpoint.open(MODEL), [(text, list(ids)) for text, ids in prompts])


def simulate(name: str, scales: Any, golden: GoldenSet, device: str) -> ScenarioSet:
    """Every scenario of the artifact, faults too, over all of `golden`."""
    from calibrate.simulate import predict
    from calibrate.simulate import schedule as simulate_runs
    from octet.model.checkpoint import Checkpoint
    from octet.recipe import PRESETS
    from tests.proof_servers import scale_keys

    simulate_runs.FAULT_RECORDS = len(golden.records)
    with tempfile.TemporaryDirectory() as directory:
        model = MODEL
        if ARTIFACTS[name]:
            model = scale_keys(MODEL, Path(directory) / name, ARTIFACTS[name])
        recipe = PRESETS["fp8"]
        return predict.scenarios(Checkpoint.open(model), recipe, scales, golden, device=device)


def pack(out: Path, name: str, golden: GoldenSet, found: ScenarioSet) -> None:
    """Differences from the reference in steps of `STEP`, int16 [repeats, records, 8, 20]."""
    reference = reference_of(golden)
    files: list[dict[str, Any]] = [{}]
    for scenario, values in found.logprobs.items():
        if sum(x.nbytes for x in files[-1].values()) + 2 * values.size > FILE_BYTES:
            files.append({})
        steps = np.round((values - reference) / STEP)
        known = np.where(np.isnan(steps), UNKNOWN, np.clip(steps, -32000, 32000))
        files[-1][scenario.model_dump_json()] = known.astype(np.int16)
    for number, arrays in enumerate(files):
        np.savez_compressed(out / f"{name}-{number}.npz", **arrays)


def unpack(directory: Path, name: str, golden: GoldenSet) -> ScenarioSet:
    """Reads what `pack` wrote."""
    reference = reference_of(golden)
    found: dict[Scenario, NDArray[np.float32]] = {}
    for path in sorted(directory.glob(f"{name}-*.npz")):
        with np.load(path) as file:
            for key in file.files:
                steps = file[key]
                values = np.where(steps == UNKNOWN, np.nan, reference + steps * np.float32(STEP))
                scenario = Scenario.model_validate_json(key)
                found[scenario] = values.astype(np.float32)
    return ScenarioSet(golden.weights_sha256, "fp8", found)


def reference_of(golden: GoldenSet) -> NDArray[np.float32]:
    """The reference's own log-probabilities, float32 [records, 8, 20]; NaN where there is none."""
    found = np.full((len(golden.records), 8, 20), np.nan, np.float32)
    for number, record in enumerate(golden.records):
        for position, top in enumerate(record.tops):
            found[number, position, : len(top.logprobs)] = top.logprobs
    return found


if __name__ == "__main__":
    main()

"""The servers of the proof study: right ones, and each fault that admission has to find.

    python benchmarks/proof_study_servers.py DIRECTORY [--draws 32] [--only NAMES]

Makes their checkpoints from the example, and `DIRECTORY/inputs` for `proof_study_simulate.py`; then
serves each with vLLM's CPU build (`make integration` installs it) and writes what it answers to the
pool of prompts to `answers-<server>.jsonl`. What is there already stays.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
from proof_study_pool import ask, make_pool, save_answers
from proof_study_simulate import ARTIFACTS, MODEL

from tests.integration.servers.launch import VllmServer
from tests.proof_servers import (
    fine_tune,
    halve_weight_scales,
    remove_key_scales,
    scale_keys,
    texts_of,
)

__all__ = ["SERVERS", "Served"]

ROOT = Path(__file__).parents[1]
SAMPLES = MODEL.parent / "samples"
CALIBRATION_SAMPLES = 128
# Steps and learning rate of fine-tuning, for models that are another one: one that has become
# another, and one that has hardly begun.
OTHERS = {"other": (30, 3e-4), "near": (10, 5e-5)}
LAYER = 3  # whose scales are halved


@dataclass(frozen=True)
class Served:
    """A vLLM on `checkpoint`, declared to be `artifact` with its E5M2 cache."""

    name: str
    artifact: Literal["under", "plain", "over"]
    checkpoint: str
    cache: Literal["fp8_e5m2", "fp8_e4m3", "auto"] = "fp8_e5m2"
    cause: str | None = None  # how what it has to be called begins; None: it is right

    @property
    def honest(self) -> bool:
        return self.cause is None

    def names(self, name: str) -> bool:
        return self.cause is not None and name.startswith(tuple(self.cause.split("|")))


HALVED = f"weight_scales_scaled, layer {LAYER}, x0.5"
E4M3 = "kv_scales_swapped|kv_cache_e4m3"
SERVERS = (
    Served("under-correct", "under", "under"),
    Served("under-nokscale", "under", "under-nokscale", cause="k_scale_dropped"),
    Served("under-halved", "under", "under-halved", cause=HALVED),
    # Its keys underflow too, for the original has no k_scale: both are true of it.
    Served("under-bf16-e5m2", "under", "under-model", cause="unquantized|k_scale_dropped"),
    Served("under-bf16-auto", "under", "under-model", "auto", cause="unquantized"),
    Served("under-e4m3", "under", "under", "fp8_e4m3", cause=E4M3),
    Served("other", "under", "other", cause="another_model"),
    Served("near", "under", "near", cause="another_model"),
    Served("plain-correct", "plain", "plain"),
    Served("plain-bf16-e5m2", "plain", "plain-model", cause="unquantized"),
    Served("plain-e4m3", "plain", "plain", "fp8_e4m3", cause=E4M3),
    Served("over-correct", "over", "over"),
    Served("over-nokscale", "over", "over-nokscale", cause="k_scale_dropped"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--only", help="a comma-separated part of the servers")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    make_checkpoints(options.directory)
    prompts = make_inputs(options.directory, options.draws)
    wanted = options.only.split(",") if options.only else [server.name for server in SERVERS]
    for server in SERVERS:
        if server.name in wanted:
            record(server, options.directory, prompts)


def make_checkpoints(directory: Path) -> None:
    """Models, calibrations, their exports and what is wrong with those."""
    for name, exponent in ARTIFACTS.items():
        model = directory / f"{name}-model"
        if not model.exists():
            if exponent:
                scale_keys(MODEL, model, exponent)
            else:
                model.symlink_to(MODEL)
        _export(model, directory, name)
    for name, (steps, rate) in OTHERS.items():
        model = directory / f"{name}-model"
        if not model.exists():
            texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
            tuned = directory / f"{name}-tuned"
            fine_tune(MODEL, tuned, texts, steps=steps, learning_rate=rate)
            scale_keys(tuned, model, ARTIFACTS["under"])
        _export(model, directory, name)
    for name in ("under", "over"):
        if not (directory / f"{name}-nokscale").exists():
            remove_key_scales(directory / name, directory / f"{name}-nokscale")
    if not (directory / "under-halved").exists():
        halve_weight_scales(directory / "under", directory / "under-halved", LAYER)


def _export(model: Path, directory: Path, name: str) -> None:
    """Calibrates and exports with the cache's scales, as before they were folded into the weights.

    Their loss is one of the faults that the study is about.
    """
    from calibrate.options import Options
    from calibrate.pipeline import run
    from calibrate.scales.folding import Folding
    from export.checkpoint.write import export_checkpoint
    from octet.recipe import PRESETS

    calibration = directory / f"{name}-cal"
    if not calibration.exists():
        with patch("calibrate.pipeline.find_folds", lambda *_: Folding({})):
            run(
                Options(
                    model=model,
                    samples=SAMPLES / "calibration.jsonl",
                    out=calibration,
                    recipe=PRESETS["fp8"],
                    held_out=SAMPLES / "heldout.jsonl",
                    count=CALIBRATION_SAMPLES,
                    predict=False,
                )
            )
    if not (directory / name).exists():
        export_checkpoint(calibration, directory / name)


def make_inputs(directory: Path, draws: int) -> list[list[int]]:
    """The pool, draw by draw, and the scales, as the simulation reads them; the prompts' ids."""
    from transformers import AutoTokenizer

    from octet.artifacts.calibration import Calibration

    inputs = directory / "inputs"
    inputs.mkdir(exist_ok=True)
    if not (inputs / "pool.json").exists():
        texts = texts_of(SAMPLES / "heldout.jsonl")
        texts += texts_of(SAMPLES / "calibration.jsonl")[CALIBRATION_SAMPLES:]
        pool = make_pool(
            texts, AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False), draws
        )
        by_draw = [[stratum[draw] for stratum in pool] for draw in range(draws)]
        (inputs / "pool.json").write_text(json.dumps(by_draw))
    for name in ARTIFACTS:
        scales: Mapping[str, Any] = Calibration.load(directory / f"{name}-cal").scales
        np.savez_compressed(inputs / f"{name}.npz", **scales)
    found = json.loads((inputs / "pool.json").read_text())
    return [ids for draw in found[:draws] for _, ids in draw]


def record(server: Served, directory: Path, prompts: list[list[int]]) -> None:
    """One server's answers. With more threads than one, barriers cost most of a busy machine."""
    answers = directory / f"answers-{server.name}.jsonl"
    if answers.exists():
        return
    running = VllmServer(
        model=directory / server.checkpoint,
        log=directory / f"{server.name}.log",
        kv_cache_dtype=server.cache,
        threads=1,
        ready_seconds=400,
    )
    with running:
        started = time.perf_counter()
        save_answers(answers, ask(running.url, running.served_name, prompts))
    print(f"{server.name}: {len(prompts)} prompts, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()

"""One rank of `tests/calibrate/test_recover.py`, started by torchrun."""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate import pipeline, recover, recover_layers
from calibrate.journal.distributed import process_group
from calibrate.options import Options, Training
from octet.errors import NumericsError
from octet.recipe import Recipe
from tests.calibrate.prompts import choose_once


def main(origin: Path, model: Path, samples: Path, out: Path) -> None:
    torch.set_num_threads(1)
    options = Options(
        model=model,
        samples=samples / "calibration.jsonl",
        held_out=samples / "heldout.jsonl",
        out=out / "refused",
        spill=out / "spill",
        recipe=Recipe.load("nvfp4"),
        count=128,
        max_length=32,
        predict=False,
        algorithm="recover",
        training=Training(calibration=origin, epochs=1, learning_rate=3e-4),
    )
    patch = pytest.MonkeyPatch()
    choose_once(patch)
    with process_group("cpu") as found:  # gloo does not begin twice in a process
        patch.setattr(pipeline, "process_group", lambda _device: nullcontext(found))
        train(options, out, patch)


def train(options: Options, out: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recover, "_KEEP_EVERY_S", -1.0)  # keeps every step
    for method, module, free_mb, steps in (
        ("whole model", recover, 1000, 5),
        ("layer by layer", recover_layers, 60, 8 + 3),
    ):
        patch.setattr(recover, "free_memory", lambda _device, mb=free_mb: mb * 1_000_000)
        pipeline.run(replace(options, out=out / f"{method}-straight"))
        with pytest.MonkeyPatch.context() as killing:
            interrupt(module, killing, after=steps)
            with pytest.raises(KeyboardInterrupt):
                pipeline.run(replace(options, out=out / f"{method}-resumed"))
        pipeline.run(replace(options, out=out / f"{method}-resumed"))
    rank = os.environ["RANK"]
    if rank == "1":
        patch.setattr(recover_layers, "backward", lambda *_: float("nan"))
    with pytest.raises(NumericsError) as error:
        pipeline.run(options)
    (out / f"error-{rank}").write_text(str(error.value), "utf-8")


def interrupt(module: Any, patch: pytest.MonkeyPatch, *, after: int) -> None:
    """Interrupts a training when it has taken `after` steps."""
    calls = 0
    backward = module.backward

    def until(*args: Any) -> float:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        loss: float = backward(*args)
        return loss

    patch.setattr(module, "backward", until)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""Measures what weights of any precision could win back of a recipe's divergence.

The student rounds activations and cache, but not its weights. It starts from the original model's
weights, and is trained as `octet recover` trains. It could find any 4-bit weights too, so these
should do no better. All divergences are simulated in float32, on held-out text.

    python benchmarks/recover_limit.py CALIBRATION --output FILE
"""

import argparse
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from card import conditions, report

from calibrate.algorithms.descent import Descent, order
from calibrate.algorithms.student import Student
from calibrate.decoder.loading import load_model
from calibrate.journal.distributed import Group
from calibrate.options import Options
from calibrate.quality.divergence import Reference, Sums, evaluation_batches
from calibrate.recover import backward
from calibrate.samples.inputs import read_inputs
from calibrate.simulate.model import simulate
from octet.artifacts.calibration import Calibration
from octet.errors import ConfigError, OctetError
from octet.model.checkpoint import Checkpoint
from octet.statistics import interval

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"
HELD_OUT = 16_384  # tokens, as `octet recover` judges on


class Unrounded(Student):
    """A student that serves its weights as they are."""

    def served(self) -> dict[str, torch.Tensor]:
        return dict(self.trained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model")
    parser.add_argument("--samples", type=Path, default=EXAMPLE / "samples" / "calibration.jsonl")
    parser.add_argument("--held-out", type=Path, default=EXAMPLE / "samples" / "heldout.jsonl")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1.5e-5, help="the highest learning rate")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    try:
        card, rows = measured(options)
    except OctetError as error:
        sys.exit(str(error))
    report("What unrounded weights win back", card, rows, options.output)


def measured(given: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    calibration, checkpoint = Calibration.load(given.calibration), Checkpoint.open(given.model)
    calibration.manifest.model.require(checkpoint)
    if calibration.applied_to(checkpoint).changed:
        raise ConfigError(
            f"{given.calibration}: an algorithm changed its weights; give a plain one"
        )
    recipe, scales, spec = calibration.manifest.recipe, calibration.scales, checkpoint.spec
    options = Options(
        model=given.model,
        samples=given.samples,
        held_out=given.held_out,
        count=given.count,
        out=given.calibration,
        recipe=recipe,
    )
    inputs = read_inputs(checkpoint, options)
    model = load_model(checkpoint, "float32")
    teacher = Reference(model, spec, inputs.plan.batches)
    reference = Reference(model, spec, evaluation_batches(inputs.evaluation, HELD_OUT))
    with simulate(model, spec, recipe, scales, ()):
        found = {"as calibrated": reference.tally().sums()}
    with closing(Unrounded(model, spec, recipe, scales, ("weights", "norms"))) as student:
        found["unrounded weights"] = reference.tally().sums()
        losses = train(student, teacher, given.epochs, given.rate)
        for name, value in student.trained.items():
            model.get_parameter(name).data.copy_(value.detach())
        found["unrounded weights, trained"] = reference.tally().sums()
    card = conditions(
        model=given.model.name,
        recipe=f"{recipe.name}, {recipe.kv_cache} cache",
        samples=f"{given.count}, {inputs.plan.tokens:,} tokens, {given.epochs} epochs",
        rate=given.rate,
        threads=torch.get_num_threads(),
        loss=f"{losses[0]:.5f} in the first epoch, {losses[-1]:.5f} in the last",
    )
    return card, [row(name, sums, found["as calibrated"]) for name, sums in found.items()]


def train(student: Student, teacher: Reference, epochs: int, rate: float) -> list[float]:
    """Trains as `octet recover` does; returns the mean loss of each epoch."""
    batches = teacher.batches
    descent = Descent(list(student.trained.values()), rate, epochs * len(batches), Group())

    def step(at: int) -> float:
        states = student.states(batches[at])
        return backward(states, batches[at], teacher.hidden[at], teacher.head)

    losses = []
    for epoch in range(epochs):
        places = [at for at in order(epoch, len(batches), len(batches)) if at is not None]
        found = [descent.step(partial(step, at), batches[at].tokens) for at in places]
        losses.append(sum(found) / len(found))
    return losses


def row(name: str, sums: Sums, before: Sums) -> dict[str, Any]:
    """The mean KL, and how much less it is than `before`, in percent with a 95 % interval."""
    less = interval(before.kl - sums.kl, before.tokens)
    was = float(before.kl.sum() / before.tokens.sum())
    mean, low, high = (100 * x / was for x in (less.mean, less.low, less.high))
    kl = float(sums.kl.sum() / sums.tokens.sum())
    return {"weights": name, "kl": kl, "less %": mean, "less % low": low, "less % high": high}


if __name__ == "__main__":
    main()

"""Chooses the algorithm that changes the weights, by divergence: `calibrate --algorithm auto`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from calibrate.algorithms.apply import ChangedModel
from calibrate.job import Job
from calibrate.journal.identity import digest_of_batches
from calibrate.journal.steps import NOT_KEPT, Steps
from calibrate.quality.divergence import Sums
from calibrate.quality.measure import Bench
from calibrate.samples.inputs import CALIBRATION
from calibrate.scales.derive import Quantization
from calibrate.simulate.model import simulate
from octet.errors import ConfigError, NumericsError
from octet.recipe import Recipe
from octet.statistics import interval

__all__ = ["UNCHANGED", "check_held_out", "choose_algorithm"]

UNCHANGED = "none"  # the weights of the checkpoint


@dataclass(frozen=True)
class _Choice:
    """The algorithm to use, and the divergence from the original of each, on `tokens` tokens.

    `kl` is by algorithm, in nats a token. `less` is how far it is below that of the unchanged
    weights: its mean and the ends of its 95 % interval.
    """

    name: str
    tokens: int
    on: str
    kl: dict[str, float]
    less: dict[str, dict[str, float]]

    def __str__(self) -> str:
        each = ", ".join(f"{name} {value:.4g}" for name, value in self.kl.items())
        text = f"divergence on {self.tokens:,} tokens of {self.on}, in nats a token: {each}; "
        if self.name == UNCHANGED:
            return f"{text}weights stay as they are: nothing is lower with 95 % confidence"
        less, before = self.less[self.name], self.kl[UNCHANGED]
        mean, low, high = (f"{less[key] / before:.1%}" for key in ("mean", "low", "high"))
        return f"{text}{self.name} is used: {mean} less (95 % interval {low} to {high})"


def check_held_out(evaluated_on: str) -> None:
    """Raises ConfigError if algorithms would be compared on samples that they fit weights to."""
    if evaluated_on == CALIBRATION:
        raise ConfigError(
            "--algorithm auto compares algorithms on text that they have not seen, and no sample is"
            " left for that: give --held-out, or a smaller --count"
        )


def choose_algorithm(
    job: Job,
    steps: Steps,
    change: Callable[[str], ChangedModel],
    quantize: Callable[[Job, ChangedModel], Quantization],
) -> ChangedModel:
    """Returns the model as changed by the algorithm whose divergence on held-out text is lowest.

    The weights stay as they are unless an algorithm's is lower with 95 % confidence. `change(name)`
    applies one algorithm, and `quantize` derives the scales of the result. An algorithm that fails
    on this model is left out. Everything is kept, so that an interrupted run continues.
    """
    options, inputs = job.options, job.inputs
    plain = replace(job, options=replace(options, sensitivity=False, budget=None, gate=None))
    names = [*_candidates(job, options.recipe), UNCHANGED]  # a missing ModelOpt is found at once

    def measured(name: str) -> Sums:
        found = quantize(plain, change(name))
        job.weights.free()  # the whole model takes their place
        bench = Bench(
            found.checkpoint,
            inputs,
            unseen=False,
            dtype=job.dtype,
            device=job.device,
            steps=NOT_KEPT,
            console=job.console,
        )
        spec = found.checkpoint.spec
        with simulate(bench.model, spec, found.recipe, found.scales, found.weight_only):
            return bench.reference.tally().sums()

    def compared() -> _Choice:
        sums: dict[str, Sums] = {}
        for name in names:
            try:
                sums[name] = measured(name)
            except NumericsError as error:
                if name == UNCHANGED:
                    raise
                if job.console is not None:
                    job.console.print(f"without {name}: {error}", highlight=False, markup=False)
        return _best(sums, inputs.evaluated_on)

    kept = steps.depending_on(
        options.recipe.model_dump_json(),
        digest_of_batches(inputs.plan.batches),
        digest_of_batches(inputs.evaluation),
        job.dtype,
        *names,
        *options.weight_only,
    )
    choice = kept.once("algorithm", _Choice, compared)
    if job.console is not None:
        job.console.print(str(choice), highlight=False, markup=False)
    changed = change(choice.name)
    return replace(changed, details=changed.details | {"compared": _details(choice)})


def _candidates(job: Job, recipe: Recipe) -> list[str]:
    """Returns the algorithms that can work on this recipe."""
    schemes = [recipe.scheme_of(name) for name in job.checkpoint.spec.linear_names]
    four_bits = any(scheme is not None and scheme[0].format == "e2m1" for scheme in schemes)
    # A budget changes the scales that gptq has moved weights onto.
    fitted = [] if job.options.budget is not None else ["gptq"]
    return ["smoothquant", *(["awq"] if four_bits else []), *fitted]


def _best(sums: dict[str, Sums], on: str) -> _Choice:
    plain = sums[UNCHANGED]
    less = {
        name: asdict(interval(plain.kl - found.kl, plain.tokens))
        for name, found in sums.items()
        if name != UNCHANGED
    }
    kl = {name: float(sums[name].kl.sum() / sums[name].tokens.sum()) for name in (UNCHANGED, *less)}
    lower = [name for name in less if less[name]["low"] > 0]
    best = min(lower, key=kl.__getitem__, default=UNCHANGED)
    return _Choice(best, int(plain.tokens.sum()), on, kl, less)


def _details(choice: _Choice) -> dict[str, Any]:
    return asdict(choice) | {"summary": str(choice)}

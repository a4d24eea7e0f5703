"""Estimates how small a fault can be and still be refused: the power of the tests.

A small fault perturbs weights or activations, and so does rounding: the rounding errors of a
computation are those of slightly perturbed data (Wilkinson, Rounding Errors in Algebraic Processes,
1963). To first order both move an answer in proportion to its sensitivity to such perturbations,
which differs widely between prompts. So the difference d of two repeats of another path, scaled,
stands for a small fault. A simulated fault, scaled down, would not do: most of them are large
enough to move all prompts about alike.

Let x be a repeat of the conforming path, in the Hellinger embedding. A faulty server answers
x + λ·d. It is refused if the test of fit or the outlier test rejects that at the level that they
have in an admission (`octet.proof.judge`), with x left out of the path's mean. The likelihood-ratio
test is for simulated faults, and left out. The effect of a fault is its divergence, the change of
log-perplexity on text that the reference would write: ½·λ²·|d|² per position, in nats, averaged
over all prompts. The smallest effect that is refused is found for each d and x, and their median is
the estimate. Faults of one place are less even than rounding, and half of them can need up to twice
as much (`Power.largest`): docs/explanation/power.md has measurements.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.golden import GoldenSet
from octet.artifacts.scenarios import Scenario, ScenarioSet
from octet.artifacts.serving_path import Power, ServingPath
from octet.proof.hellinger import Points
from octet.proof.judge import ALPHA
from octet.proof.likelihood_ratio import Comparison

__all__ = ["LOOKS", "power"]

LOOKS = 3  # interim analyses of an admission, by which the level of each test is divided
_LEVEL = ALPHA / 3 / LOOKS
_EFFECTS = (1e-8, 8.0)  # nats: the least and the largest that are tried
_STEPS = 16  # of the bisection of their logarithm


def power(
    golden: GoldenSet, scenarios: ScenarioSet, path: ServingPath, prompts: int
) -> Power | None:
    """Returns the power of `prompts` answers against faults of `path`.

    The answers are to the prompts on which every scenario was simulated, if these are enough, or
    else to all. None if no other path was simulated twice.
    """
    whole = Comparison.whole(golden, scenarios, [path])
    served = Scenario(path=path)
    if served not in whole.candidates or whole.candidates[served].repeats < 2:
        return None
    every = [candidate.points for candidate in whole.candidates.values()]
    among = ~np.any([np.isnan(points).any((0, 2, 3)) for points in every], 0)
    if among.sum() < prompts:
        among[:] = True
    found = [
        effect
        for other in whole.noise.fitted
        if other != served
        for effect in _refused(whole, served, _difference(whole, other), among, prompts)
    ]
    if not found:
        return None
    low, middle, high = (math.expm1(float(np.quantile(found, q))) for q in (0.1, 0.5, 0.9))
    return Power(prompts=prompts, low=low, middle=middle, high=high, meaning="half_refused")


def _difference(whole: Comparison, other: Scenario) -> Points:
    """Returns the difference of two repeats of `other`, with an effect of 1 nat."""
    first, second, *_ = whole.candidates[other].points
    squared = np.square(first - second).sum((1, 2)) / whole.answers.compared.sum(1)
    effect = float(squared.mean()) / 2
    return np.asarray((first - second) / math.sqrt(effect)) if effect else first - second


def _refused(
    whole: Comparison,
    path: Scenario,
    difference: Points,
    among: NDArray[np.bool_],
    prompts: int,
) -> Iterator[float]:
    """Yields the smallest effect along `difference` that is refused, for each repeat of `path`."""
    if not difference.any():
        return
    for number, served in enumerate(whole.candidates[path].points):
        low, high = map(math.log, _EFFECTS)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            answers = served + math.exp(middle / 2) * difference
            if whole.passes(path, answers, number, among, prompts, _LEVEL):
                low = middle
            else:
                high = middle
        yield math.exp(high)

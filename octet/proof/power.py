"""Estimates how small a fault can be and still pass: the power of the tests, from the scenarios.

Each simulated fault is scaled. Let m be the mean of the conforming path, f the fault's answer, and
x a repeat of the path, all in the Hellinger embedding. A fault of the same kind and λ times the
size answers x + λ·(f - m). It passes if neither the test of fit nor the outlier test rejects it at
β (`octet.proof.judge`), with x left out of m. The likelihood-ratio test is not used: it is for
faults that were simulated, and the question is about the others.

The effect of a fault is the change of log-perplexity on text that the reference would write. It is
KL(reference ‖ fault) - KL(reference ‖ path) in nats, and a squared distance is about 2·KL. The
largest λ that passes gives one effect per fault; the median over faults is the limit. Faults are
simulated on some prompts; for more prompts, z grows with their square root, and the outlier test
stays as it is.
"""

import math
from collections.abc import Iterator

import numpy as np

from octet.artifacts.golden import GoldenSet
from octet.artifacts.scenarios import Scenario, ScenarioSet
from octet.artifacts.serving_path import Power, ServingPath
from octet.proof.likelihood_ratio import Comparison

__all__ = ["power"]

_SIZES = 2.0 ** np.arange(-8, 3.25, 0.25)  # λ


def power(
    golden: GoldenSet, scenarios: ScenarioSet, path: ServingPath, prompts: int
) -> Power | None:
    """Returns the power of `prompts` answers against faults of `path`; None without scenarios."""
    whole = Comparison.whole(golden, scenarios, [path])
    faults = [h for h in whole.others if h.fault is not None and h.path == path]
    found = [effect for fault in faults for effect in _passing(whole, fault, prompts)]
    if not found:
        return None
    low, middle, high = (math.expm1(float(np.quantile(found, q))) for q in (0.1, 0.5, 0.9))
    return Power(prompts=prompts, low=low, middle=middle, high=high)


def _passing(whole: Comparison, fault: Scenario, prompts: int) -> Iterator[float]:
    """Yields the effect of the largest scaled `fault` that passes, for each repeat of its path."""
    path = Scenario(path=fault.path)
    answered = whole.candidates[fault].points.mean(0)
    among = ~np.isnan(answered).any((1, 2))
    repeats = whole.candidates[path].points
    shift = np.where(among[:, None, None], answered - repeats.mean(0), 0.0)
    squared = np.square(shift).sum((1, 2)) / whole.answers.compared.sum(1)
    unscaled = float(np.mean(squared[among])) / 2
    for number, served in enumerate(repeats):
        sizes = [0.0]
        for size in _SIZES:
            if not whole.passes(path, served + size * shift, number, among, prompts):
                break
            sizes.append(size)
        yield unscaled * sizes[-1] ** 2

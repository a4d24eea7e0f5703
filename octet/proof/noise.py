"""Computes how likely the answers are under each scenario (`Scenario`, h below).

The answers to prompt i are one point x_i (`octet.proof.hellinger`); its positions are not
independent, so they are taken together. Scenario h was simulated R times, with mean m_hi. FP8
rounding is chaotic, and a conforming server is one more repeat, so the expectation of |x_i - m_hi|²
is S_hi = σ²_hi·(1 + 1/R). Two repeats estimate σ²_hi badly. But to within that accuracy it is a
level of the scenario times a sensitivity of the prompt, σ²_hi = c_h·v_i, with v_i shared by all
scenarios: some prompts are close calls for every implementation. Both are fitted to the repeats by
iterating their conditional means, as in a two-way table with multiplicative effects. A scenario
that was simulated once takes the level of its path without the fault. A float32 path takes at least
the level of its bfloat16 twin, because real kernels lie between the two.

The noise is Student's t in as many directions as it has degrees of freedom, p: in the example's
repeats ln(|x - m|²/S) is symmetric about 0 with a variance of about 0.3, as for an F(14, 14). The
log-likelihood of a multivariate t with p dimensions and p degrees of freedom (Kotz and Nadarajah,
Multivariate t Distributions, 1.1) is then, up to a constant, p times

    l_hi = -½·ln S_hi - ln(1 + |x_i - m_hi|² / S_hi)

The common factor p is left out, because differences are judged by their own scatter. A few prompts
that are far off cannot outweigh the others, because l falls with the logarithm of the distance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.scenarios import Scenario
from octet.proof.hellinger import Points

__all__ = ["Candidate", "Noise", "Values", "distance", "z_score"]

Values = NDArray[np.float64]

LEAST = 1e-6  # squared distance per position: the error of float32 log-probabilities
_ROUNDS = 20  # of the fit, which converges by a factor of ten per round


@dataclass(frozen=True)
class Candidate:
    """A scenario and the points of its repeats [R, n, positions, axes].

    The points are NaN where it was not simulated.
    """

    scenario: Scenario
    points: Points

    @property
    def repeats(self) -> int:
        return len(self.points)

    def squared(self, served: Points, *, without: int | None = None) -> Values:
        """Returns [n]: squared distances from the mean of the repeats, except repeat `without`."""
        kept = [n for n in range(self.repeats) if n != without]
        return distance(served, self.points[kept].mean(0))

    def variance(self) -> Values:
        """Returns [n]: the unbiased variance of the repeats; NaN if there is only one."""
        if self.repeats < 2:
            return np.full(self.points.shape[1], np.nan)
        squares = distance(self.points, self.points.mean(0))
        return np.asarray(squares.sum(0) / (self.repeats - 1))


def distance(a: Points, b: Points) -> Values:
    """Returns squared distances [..., n], summed over positions and axes."""
    return np.asarray(np.square(a - b).sum((-1, -2)))


class Noise:
    """The fitted c_h and v_i of candidates on the same prompts.

    `positions` [n] are the numbers of compared positions.
    """

    def __init__(self, candidates: Sequence[Candidate], positions: NDArray[np.int64]) -> None:
        self.least = LEAST * positions  # [n]
        found = {x.scenario: x.variance() for x in candidates}
        known = {h: np.maximum(v, self.least) for h, v in found.items() if not np.isnan(v).all()}
        whole = {h: v for h, v in known.items() if not np.isnan(v).any()}
        chaotic = {h: v for h, v in whole.items() if h.path.compute == "bfloat16"} or whole
        table = np.array(list(chaotic.values()))  # [scenarios, n]
        levels = table.mean(1)
        for _ in range(_ROUNDS):
            prompts = (table / levels[:, None]).mean(0)
            prompts /= prompts.mean()
            levels = (table / prompts).mean(1)
        self.prompts = prompts
        self.fitted = tuple(chaotic)  # scenarios
        self._shares = dict(zip(chaotic, table / levels[:, None], strict=True))
        self._levels = {h: float(np.nanmean(v / prompts)) for h, v in known.items()}
        self._least = float(levels.min())

    def level(self, scenario: Scenario) -> float:
        """Returns c_h, with the mean of v_i being 1.

        The smallest fitted level for a path that was not simulated twice.
        """
        twin = scenario.path.model_copy(update={"compute": "bfloat16"})
        if scenario.fault is not None and scenario in self._levels:
            return self._levels[scenario]
        own = (Scenario(path=path) for path in (scenario.path, twin))
        return max((self._levels[h] for h in own if h in self._levels), default=self._least)

    def expected(self, candidate: Candidate, repeats: int | None = None) -> Values:
        """Returns [n]: S, the expected squared distance from the mean of `repeats` repeats.

        `repeats` defaults to all.
        """
        variance = self.level(candidate.scenario) * self.prompts
        factor = 1 + 1 / (repeats or candidate.repeats)
        return np.asarray(np.maximum(variance * factor, self.least))

    def others(self, scenario: Scenario) -> Values:
        """Returns [n]: v_i from all fitted scenarios (at least two) except `scenario`."""
        total = np.sum(list(self._shares.values()), 0)
        return np.asarray((total - self._shares[scenario]) / (len(self._shares) - 1))

    def likelihood(
        self, candidate: Candidate, served: Points, *, without: int | None = None
    ) -> Values:
        """Returns [n]: l of the answers `served`.

        `served` may be a repeat of the candidate; `without` then excludes it from the mean.
        """
        scale = self.expected(candidate, candidate.repeats - (without is not None))
        squared = candidate.squared(served, without=without)
        return np.asarray(-0.5 * np.log(scale) - np.log1p(squared / scale))


def z_score(differences: Values, margin: float = 0.0) -> tuple[float, int]:
    """Returns by how many standard errors the mean exceeds `margin`, and the number of prompts.

    Leaves out NaN. For differences of log-likelihoods this is the statistic of Vuong (Econometrica
    57, 1989) for two non-nested scenarios. Returns 0 or ±inf if the differences do not scatter.
    """
    known = differences[~np.isnan(differences)]
    count = len(known)
    if count < 2:
        return 0.0, count
    excess = float(known.mean()) - margin
    error = float(known.std(ddof=1)) / math.sqrt(count)
    if error < 1e-12:
        return (0.0 if abs(excess) < 1e-12 else math.copysign(math.inf, excess)), count
    return excess / error, count

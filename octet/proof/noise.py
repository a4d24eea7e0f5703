"""How likely answers are under each hypothesis.

Answers to prompt i are a point x_i (`octet.proof.hellinger`; all its positions together, for they
are not independent). Hypothesis h was simulated R times: its mean is m_hi. FP8 rounding is chaotic,
and an honest server is one more repeat, so that |x_i - m_hi|² is expected to be S_hi = σ²_hi·(1 +
1/R). Two repeats estimate σ²_hi badly. But it is, to within what that allows, a level of the
hypothesis times a sensitivity of the prompt, σ²_hi = c_h·v_i, and v_i is shared by all hypotheses:
some prompts are close calls whoever computes them. Both are fitted to the repeats by iteration of
their conditional means, as a two-way table with multiplicative effects is. What was simulated once
has the level of its path without the fault; a float32 path at least that of its bfloat16 twin, for
between them lie real kernels.

The noise is Student's t in as many directions as it has degrees of freedom, p: so in the example's
repeats, where ln(|x - m|²/S) is symmetric about 0 with a variance of about 0.3, that of an F(14,
14). The log-likelihood of a multivariate t with as many (Kotz and Nadarajah, Multivariate t
Distributions, 1.1), up to a constant, is then p times

    l_hi = -½·ln S_hi - ln(1 + |x_i - m_hi|² / S_hi)

and since p is common to all, it is left out: differences are judged by their own scatter. A few
prompts that are far off cannot outweigh the others, for l falls with the logarithm of distance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.scenarios import Hypothesis
from octet.proof.hellinger import Points

__all__ = ["Candidate", "Noise", "Values", "distance", "z_score"]

Values = NDArray[np.float64]

LEAST = 1e-6  # squared distance a position that float32 log-probabilities may be off by
_ROUNDS = 20  # of the fit, which converges by a factor of ten a round


@dataclass(frozen=True)
class Candidate:
    """A hypothesis, as the points of its repeats [R, n, positions, axes].

    NaN where it was not simulated.
    """

    hypothesis: Hypothesis
    points: Points

    @property
    def repeats(self) -> int:
        return len(self.points)

    def squared(self, served: Points, *, without: int | None = None) -> Values:
        """[n]: squared distances from the mean of the repeats, `without` one of them."""
        kept = [n for n in range(self.repeats) if n != without]
        return distance(served, self.points[kept].mean(0))

    def variance(self) -> Values:
        """[n]: of the repeats about their mean, unbiased; NaN if there is one."""
        if self.repeats < 2:
            return np.full(self.points.shape[1], np.nan)
        squares = distance(self.points, self.points.mean(0))
        return np.asarray(squares.sum(0) / (self.repeats - 1))


def distance(a: Points, b: Points) -> Values:
    """Squared, summed over positions and axes: [..., n]."""
    return np.asarray(np.square(a - b).sum((-1, -2)))


class Noise:
    """c_h and v_i, of candidates on the same prompts; `positions` [n] are those compared."""

    def __init__(self, candidates: Sequence[Candidate], positions: NDArray[np.int64]) -> None:
        self.least = LEAST * positions  # [n]
        found = {x.hypothesis: x.variance() for x in candidates}
        known = {h: np.maximum(v, self.least) for h, v in found.items() if not np.isnan(v).all()}
        whole = {h: v for h, v in known.items() if not np.isnan(v).any()}
        chaotic = {h: v for h, v in whole.items() if h.path.compute == "bfloat16"} or whole
        table = np.array(list(chaotic.values()))  # [hypotheses, n]
        levels = table.mean(1)
        for _ in range(_ROUNDS):
            prompts = (table / levels[:, None]).mean(0)
            prompts /= prompts.mean()
            levels = (table / prompts).mean(1)
        self.prompts = prompts
        self.fitted = tuple(chaotic)  # hypotheses
        self._shares = dict(zip(chaotic, table / levels[:, None], strict=True))
        self._levels = {h: float(np.nanmean(v / prompts)) for h, v in known.items()}
        self._quietest = float(levels.min())

    def level(self, hypothesis: Hypothesis) -> float:
        """c_h, where the mean of v_i is 1; of a path that was not simulated twice, the least."""
        twin = hypothesis.path.model_copy(update={"compute": "bfloat16"})
        if hypothesis.fault is not None and hypothesis in self._levels:
            return self._levels[hypothesis]
        own = (Hypothesis(path=path) for path in (hypothesis.path, twin))
        return max((self._levels[h] for h in own if h in self._levels), default=self._quietest)

    def expected(self, candidate: Candidate, repeats: int | None = None) -> Values:
        """[n]: S, of the squared distance from the mean of so many repeats; all, if not given."""
        variance = self.level(candidate.hypothesis) * self.prompts
        factor = 1 + 1 / (repeats or candidate.repeats)
        return np.asarray(np.maximum(variance * factor, self.least))

    def others(self, hypothesis: Hypothesis) -> Values:
        """[n]: v_i by all but one of those that it was fitted to, of two at least."""
        total = np.sum(list(self._shares.values()), 0)
        return np.asarray((total - self._shares[hypothesis]) / (len(self._shares) - 1))

    def likelihood(
        self, candidate: Candidate, served: Points, *, without: int | None = None
    ) -> Values:
        """[n]: l of the answers `served`, or of a repeat, which then is `without`."""
        scale = self.expected(candidate, candidate.repeats - (without is not None))
        squared = candidate.squared(served, without=without)
        return np.asarray(-0.5 * np.log(scale) - np.log1p(squared / scale))


def z_score(differences: Values, margin: float = 0.0) -> tuple[float, int]:
    """How many standard errors the mean over prompts is above `margin`; and how many prompts.

    NaN are left out. Differences of log-likelihoods: the statistic of Vuong (Econometrica 57, 1989)
    for two hypotheses of which neither contains the other. Without scatter: 0 or ±inf.
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

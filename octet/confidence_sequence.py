"""Confidence sequences of a mean per token: intervals that are valid at any number of analyses.

Answers are independent; answer i has a sum sᵢ over nᵢ tokens. For a candidate m, a gambler bets on
yᵢ(m) = sᵢ - m·nᵢ, clipped to ±C. The interval is of θ with E[y(θ)] = 0, which is E[s] / E[n] if
nothing is clipped. With any fraction f below 1, the wealth Πᵢ (1 + f·yᵢ(m)/C) is a supermartingale
if θ <= m: it ever reaches 40 with a probability of at most 1/40 (Ville's inequality). So does the
mean of such wealths over several f. Then m is rejected as too low; bets on -yᵢ reject it as too
high. The wealth falls as m grows, so all wrong rejections at one side are one event: that of θ.
(Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", J. R. Statist.
Soc. B 86 (2024) 1.)

The trap: one answer counts as at most C. Large sums in a few answers leave θ below the mean.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octet.statistics import CONFIDENCE

__all__ = ["ConfidenceSequence", "Running"]

_FRACTIONS = np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95])
_NEEDED = math.log(2 / (1 - CONFIDENCE))  # logarithm of the wealth that rejects, at each side


@dataclass(frozen=True, slots=True)
class Running:
    """A mean per token and its 95 % interval; the ends are 0 and inf until one is known."""

    answers: int
    tokens: int
    mean: float  # NaN without a token
    low: float
    high: float


class ConfidenceSequence:
    """Bets against every candidate of a fixed grid; the memory does not grow with the answers."""

    def __init__(self, grid: NDArray[np.float64], clip: float) -> None:
        """`grid` holds the candidates, ascending; `clip` is C, in the unit of an answer's sum."""
        self._grid = grid
        self._clip = clip
        # [grid, fractions]: ln of the wealth from bets that a candidate is too low, or too high.
        self._too_low = np.zeros((len(grid), len(_FRACTIONS)))
        self._too_high = np.zeros((len(grid), len(_FRACTIONS)))
        self._sum = 0.0
        self._answers = self._tokens = 0
        self._low, self._high = 0.0, math.inf

    def add(self, total: float, tokens: int) -> None:
        """Adds an answer with a sum of `total`, which may be infinite, over `tokens` tokens."""
        self._sum += total
        self._answers += 1
        self._tokens += tokens
        bets = np.clip((total - self._grid * tokens) / self._clip, -1.0, 1.0)[:, None] * _FRACTIONS
        self._too_low += np.log1p(bets)
        self._too_high += np.log1p(-bets)
        # A candidate that was rejected once stays rejected.
        if (low := self._grid[_wealth(self._too_low) >= _NEEDED]).size:
            self._low = max(self._low, float(low[-1]))
        if (high := self._grid[_wealth(self._too_high) >= _NEEDED]).size:
            self._high = min(self._high, float(high[0]))

    @property
    def now(self) -> Running:
        """The mean and the interval of all answers so far."""
        mean = self._sum / self._tokens if self._tokens else math.nan
        return Running(self._answers, self._tokens, mean, self._low, self._high)


def _wealth(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the logarithms of the mean wealths over the fractions."""
    return np.asarray(np.logaddexp.reduce(logarithms, axis=1) - math.log(len(_FRACTIONS)))

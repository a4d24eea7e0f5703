"""Outlier test: some prompts are farther off than chance allows, however close the others are.

A mean over prompts divided by its own standard error cannot show this: garbage in a share q of n
answers raises it to at most √(n·q/(1 - q)), however far off they are, and so never above a quantile
of 5 for a quarter of 64. So each prompt is compared with the known distribution of a conforming
server's r = ln(|x - m|²/S), and outliers are counted.

Both squares in that ratio estimate one variance, so e^r follows an F(2a, 2a) distribution, whose
upper tail falls as e^(-a·r). The probability of exceeding r is I_y(a, a), y = 1/(1 + e^r)
(Abramowitz and Stegun, 26.6.2): for an integer a, the probability of a or more successes in 2a - 1
trials of probability y (26.5.24). `heaviness` returns the largest a whose quantiles of 0.9, 0.95
and 0.99 the repeats do not exceed. Beyond those quantiles the tail is extrapolated.

If a prompt exceeds the k-th largest r with probability p, then k or more of n independent prompts
do with the binomial P(B(n, p) >= k). The smallest of these over k, times n (Bonferroni), is the
statistic of Berk and Jones (Z. Wahrsch. 47, 1979): it detects a few prompts that are far off, and
many that are slightly off. It is computed for all prompts and for each quarter of them by length,
to detect faults that appear only with a well-filled cache: five statistics, and Bonferroni over
them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Outliers", "exceeded", "find_outliers", "heaviness", "rank_tails"]

_QUANTILES = (0.9, 0.95, 0.99)
_PARTS = 4  # quarters of the prompts, by length
_LEAST, _MOST = 1, 7  # limits of a; F(14, 14) is the lightest tail ever observed in repeats


def heaviness(repeats: NDArray[np.float64]) -> int:
    """Returns a, fitted to the r of repeats; the smallest a if there are none."""
    if not len(repeats):
        return _LEAST
    found = [(1 - x, float(np.quantile(repeats, x))) for x in _QUANTILES]
    fitting = (a for a in range(_MOST, _LEAST, -1) if all(exceeded(r, a) >= p for p, r in found))
    return next(fitting, _LEAST)


def exceeded(r: float, a: int) -> float:
    """Returns the probability that ln F(2a, 2a) is above `r`."""
    if r > 700:  # e^r overflows a float
        return 0.0
    return _at_least(2 * a - 1, a, 1 / (1 + math.exp(r)))


@dataclass(frozen=True)
class Outliers:
    """The group of prompts least likely under a conforming server, and its probability."""

    chance: float  # of such a group among conforming answers
    prompts: tuple[int, ...]  # indices, farthest first


def find_outliers(
    excess: NDArray[np.float64], lengths: Sequence[int], a: int, level: float = math.inf
) -> Outliers:
    """Returns the outliers of `excess` [n]: r less a margin, for prompts of `lengths` tokens.

    The chance is 1 if there are no prompts. A chance of `level` or more may be returned as 1.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    groups = [order, *np.array_split(order, _PARTS)]
    chances = [exceeded(float(x), a) for x in excess]
    found = [_worst(excess, group, chances, level / len(groups)) for group in groups if len(group)]
    least = min(found, key=lambda x: x.chance, default=Outliers(1.0, ()))
    return replace(least, chance=min(least.chance * len(groups), 1.0))


def _worst(
    excess: NDArray[np.float64], group: NDArray[np.int64], chances: Sequence[float], level: float
) -> Outliers:
    """Returns the k farthest prompts of `group` for which Berk and Jones's statistic is least.

    A tail whose largest term is clearly above `level` is not summed. If no tail is summed, the
    chance is infinite.
    """
    count = len(group)
    ranked = [int(n) for n in sorted(group, key=lambda n: -excess[n])]
    found = [
        (count * _at_least(count, k, chances[n]), k)
        for k, n in enumerate(ranked, start=1)
        if not count * _exactly(count, int(max(k, count * chances[n])), chances[n]) > 2 * level
    ]
    chance, k = min(found, default=(math.inf, 0))
    return Outliers(chance, tuple(ranked[:k]))


@cache
def _binomials(trials: int) -> tuple[int, ...]:
    return tuple(math.comb(trials, k) for k in range(trials + 1))


def _exactly(trials: int, successes: int, p: float) -> float:
    """Returns P(B(trials, p) = successes)."""
    ways = _binomials(trials)[successes]
    return float(ways * p**successes * (1 - p) ** (trials - successes))


def _at_least(trials: int, successes: int, p: float) -> float:
    """Returns P(B(trials, p) >= successes)."""
    ways = _binomials(trials)
    return math.fsum(ways[k] * p**k * (1 - p) ** (trials - k) for k in range(successes, trials + 1))


def rank_tails(values: Sequence[float], chosen: Sequence[int]) -> tuple[float, float]:
    """Returns how likely `chosen`, indices of `values`, are as low, and as high, by chance.

    These are the exact tails of Wilcoxon's rank sum, with mean ranks for ties.
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (2 * counts.cumsum() - counts + 1)[inverse]  # twice the mean rank
    ways = np.zeros((len(chosen) + 1, int(ranks.sum()) + 1))  # subsets by size and sum
    ways[0, 0] = 1.0
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    chances = ways[-1] / ways[-1].sum()
    total = int(ranks[list(chosen)].sum())
    return float(chances[: total + 1].sum()), float(chances[total:].sum())

"""Are some prompts farther off than chance allows, whatever the others are?

A mean over prompts divided by its own standard error cannot tell: rubbish in a share q of n answers
puts it at √(n·q/(1 - q)) at most, however far off they are, and so never above a quantile of 5 for
a quarter of 64. So each prompt is held against what is known of an honest server's, the
distribution of r = ln(|x - m|²/S), and counted.

Both of the squares in that ratio are estimates of one variance, so that r is that of an F(2a, 2a),
whose upper tail falls as e^(-a·r). It exceeds r with I_y(a, a), y = 1/(1 + e^r) (Abramowitz and
Stegun, 26.6.2): for an integer a the probability of a or more successes in 2a - 1 trials of y
(26.5.24). `heaviness` is the largest a whose quantiles of 0.9, 0.95 and 0.99 the repeats do not
exceed. Beyond those the tail is extrapolated.

Of n independent prompts, k or more exceed the k-th largest r, which is exceeded with p, with the
binomial P(B(n, p) >= k). The least of these over k, times n (Bonferroni), is the statistic of Berk
and Jones (Z. Wahrsch. 47, 1979): it finds few that are far off, as well as many that are a little.
It is taken of all prompts, and of each quarter of them by length, for what is wrong in a
well-filled cache alone: five statistics, and Bonferroni over them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tail", "exceeded", "heaviness", "tail"]

_QUANTILES = (0.9, 0.95, 0.99)
_PARTS = 4  # by length
_LEAST, _MOST = 1, 7  # of a; F(14, 14) is the lightest tail that was ever seen of repeats


def heaviness(repeats: NDArray[np.float64]) -> int:
    """a, of the r that repeats have; the least where there are none."""
    if not len(repeats):
        return _LEAST
    found = [(1 - x, float(np.quantile(repeats, x))) for x in _QUANTILES]
    fitting = (a for a in range(_MOST, _LEAST, -1) if all(exceeded(r, a) >= p for p, r in found))
    return next(fitting, _LEAST)


def exceeded(r: float, a: int) -> float:
    """The probability that ln F(2a, 2a) is above `r`."""
    if r > 700:  # e^r is more than a float
        return 0.0
    return _or_more(2 * a - 1, a, 1 / (1 + math.exp(r)))


@dataclass(frozen=True)
class Tail:
    """The part of the prompts that is the least likely to be honest, and how likely it is."""

    chance: float  # that honest answers have such a part
    prompts: tuple[int, ...]  # indices, farthest first


def tail(excess: NDArray[np.float64], lengths: Sequence[int], a: int) -> Tail:
    """Of r [n], less a margin, of prompts of these lengths; a chance of 1 if there is none."""
    order = np.argsort(np.asarray(lengths), kind="stable")
    groups = [order, *np.array_split(order, _PARTS)]
    found = [_worst(excess, group, a) for group in groups if len(group)]
    least = min(found, key=lambda x: x.chance, default=Tail(1.0, ()))
    return replace(least, chance=min(least.chance * len(groups), 1.0))


def _worst(excess: NDArray[np.float64], group: NDArray[np.int64], a: int) -> Tail:
    count = len(group)
    ranked = [int(n) for n in sorted(group, key=lambda n: -excess[n])]
    found = [
        (count * _or_more(count, k, exceeded(float(excess[n]), a)), k)
        for k, n in enumerate(ranked, start=1)
    ]
    chance, k = min(found)
    return Tail(chance, tuple(ranked[:k]))


@cache
def _ways(trials: int) -> tuple[int, ...]:
    return tuple(math.comb(trials, k) for k in range(trials + 1))


def _or_more(trials: int, successes: int, p: float) -> float:
    """P(B(trials, p) >= successes)."""
    ways = _ways(trials)
    return math.fsum(ways[k] * p**k * (1 - p) ** (trials - k) for k in range(successes, trials + 1))

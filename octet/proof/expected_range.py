"""Estimates the expected range of a conforming server's mean divergence from simulated repeats.

FP8 rounding is chaotic: sums that differ in their last bit put some values on the other side of a
rounding boundary, a whole step away. Two conforming implementations end up as far from each other
as either is from the reference (docs/LOG.md). The prompts are the same for all, so rounding alone
spreads the mean. The spread is measured: each path runs a few times, from embeddings that differ in
the last bit, and the divergences d of prompt i scatter around their mean. With n prompts, R repeats
and s² the mean of their variances, the mean of another implementation has a standard error of
s·√((1 + 1/R)/n).

A few prompts, whose next token is a close call, carry most of the variance, and two repeats of one
path may both miss them. So the relative error s/mean is pooled over all paths of the same kind:
chaotic ones (activations are rounded, or everything is, to bfloat16) and the others. The degrees of
freedom of Student's t are from Satterthwaite's formula for variances that differ by prompt, and at
least 3 (measured with eight repeats, paths of the example have 3 to 9). Divergences are positive
and skewed, so the range is mean·e^±, not mean ±.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.serving_path import Expectation, ServingPath
from octet.statistics import t_quantile

__all__ = ["expectations"]

_CONFIDENCE = 0.975  # the quantile at either end of a two-sided 95 % range
_DEGREES = 3  # of freedom, the lower limit
_LEAST = 1e-6  # nats: the error of float32 log-probabilities, even of an exact server


def expectations(found: Mapping[ServingPath, NDArray[np.float64]]) -> Iterator[Expectation]:
    """Yields the expectation of each path from its divergences [repeats, prompts], in nats."""
    kinds: dict[bool, list[NDArray[np.float64]]] = {}
    for path, values in found.items():
        mean = values.mean()
        relative = values.var(axis=0, ddof=1) / mean**2 if mean > 0 else np.zeros(len(values[0]))
        kinds.setdefault(_chaotic(path), []).append(relative)
    for path, values in found.items():
        repeats, prompts = values.shape
        variances = np.mean(kinds[_chaotic(path)], axis=0)
        error = math.sqrt(variances.mean() * (1 + 1 / repeats) / prompts)
        spread = _quantile(variances, repeats) * error
        mean = float(values.mean())
        yield Expectation(
            path=path,
            mean=mean,
            low=min(mean * math.exp(-spread), max(mean - _LEAST, 0.0)),
            high=max(mean * math.exp(spread), mean + _LEAST),
            prompts=prompts,
        )


def _chaotic(path: ServingPath) -> bool:
    return path.activations or path.compute == "bfloat16"


def _quantile(variances: NDArray[np.float64], repeats: int) -> float:
    """Returns Student's t quantile for a sum of `variances`.

    Each variance has `repeats` - 1 degrees of freedom; 0 if all are 0.
    """
    squares = float(np.square(variances).sum())
    if squares == 0:
        return 0.0
    degrees = (repeats - 1) * float(variances.sum()) ** 2 / squares
    return t_quantile(_CONFIDENCE, max(_DEGREES, math.floor(degrees)))

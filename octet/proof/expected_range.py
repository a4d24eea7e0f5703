"""The range in which an honest server's mean divergence lies, from how repeats of it scatter.

FP8 rounding is chaotic: sums that differ in their last bit put some values on the
other side of a rounding boundary, a whole step away, and two honest implementations end up as far
from each other as either is from the reference (docs/LOG.md). The prompts are the same for all, so
that the spread of a mean over them comes from this alone. It is measured: each path runs
a few times, from embeddings that differ in the last bit, and the divergences d of prompt i
scatter around their mean. With n prompts, R repeats and s² the mean of their variances, the mean
that another implementation finds has a standard error of s·√((1 + 1/R)/n). A few prompts, whose
next token is a close call, carry most of it; two repeats of one path may both miss them. So the
relative error s/mean is pooled over all paths of the same kind, those that are chaotic (activations
are rounded, or everything is, to bfloat16) and those that are not, and Student's t has as many
degrees of freedom as Satterthwaite's formula gives for variances that differ by prompt (at least 3:
with eight repeats, which can tell, paths of the example have 3 to 9). Divergences are positive and
skewed: the range is mean·e^±, not mean ±.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.serving_path import Expectation, ServingPath
from octet.statistics import t_quantile

__all__ = ["expectations"]

_CONFIDENCE = 0.975  # one side of 95 %
_DEGREES = 3  # of freedom, at least
_LEAST = 1e-6  # nats that log-probabilities in float32 can be off by, however exact a server is


def expectations(found: Mapping[ServingPath, NDArray[np.float64]]) -> Iterator[Expectation]:
    """Of the divergences that were found, [repeats, prompts] by path, in nats."""
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
    """Student's t for a sum of `variances` that each have `repeats` - 1 degrees of freedom."""
    squares = float(np.square(variances).sum())
    if squares == 0:
        return 0.0
    degrees = (repeats - 1) * float(variances.sum()) ** 2 / squares
    return t_quantile(_CONFIDENCE, max(_DEGREES, math.floor(degrees)))

"""Measures how far a server is from the reference, in figures that can be checked by hand.

The divergence of a position is that of `octet.proof.top_k`: KL(reference ‖ served) in nats over
the shared most likely tokens, with the rest lumped together. Positions of one prompt are not
independent, so the mean is taken over the prompts' means. Its 95 % interval is clustered by
prompt, and asymmetric because divergences are skewed (`octet.statistics`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.coverage import Coverage, coverage
from octet.artifacts.golden import GoldenSet
from octet.proof.responses import Response, agreement, comparable
from octet.proof.top_k import TopK, top_k_divergence
from octet.statistics import Interval, interval

__all__ = ["Measure", "divergences", "measure"]

_INFINITE = (
    88.0  # nats, in place of an infinite divergence: about -ln of float32's smallest normal number
)


@dataclass(frozen=True)
class Measure:
    """Divergence figures, in nats; NaN where nothing could be compared."""

    kl_mean: float
    kl_low: float  # 95 % interval of the mean, over prompts
    kl_high: float
    kl_p90: float  # over positions
    kl_max: float
    agreement: float  # share of golden tokens that were generated before the first other one
    perplexity_change: float | None  # of the prompts, relative; None unless both sides report it
    prompts: int
    positions: int
    coverage: Coverage | None = None  # what the prompts examine


def measure(golden: GoldenSet, responses: Sequence[Response]) -> Measure:
    """Measures all comparable positions, over the prompts that have any."""
    values = divergences(golden, responses)
    found = [x for x in values if len(x)]
    compared = {x.record for x, kl in zip(responses, values, strict=True) if len(kl)}
    means = np.array([float(x.mean()) for x in found])
    positions = np.concatenate(found) if found else np.empty(0)
    over = _interval(means)
    return Measure(
        kl_mean=over.mean,
        kl_low=max(over.low, 0.0),
        kl_high=over.high,
        kl_p90=float(np.quantile(positions, 0.9)) if found else math.nan,
        kl_max=float(positions.max()) if found else math.nan,
        agreement=_agreement(golden, responses),
        perplexity_change=_perplexity_change(golden, responses),
        prompts=len(found),
        positions=len(positions),
        coverage=coverage(golden, compared),
    )


def divergences(golden: GoldenSet, responses: Sequence[Response]) -> list[NDArray[np.float64]]:
    """Returns for each response the divergences of its comparable positions, in nats."""
    found = []
    for response in responses:
        record = golden.records[response.record]
        at = comparable(record, response)
        reference = TopK.of([record.tops[j].mapping for j in at])
        values = top_k_divergence(reference, TopK.of([response.tops[j] for j in at]))
        found.append(np.minimum(values, _INFINITE))
    return found


def _interval(means: NDArray[np.float64]) -> Interval:
    """Returns the interval of the mean of `means`; infinite ends with fewer than two prompts."""
    if len(means) < 2:
        mean = float(means[0]) if len(means) else math.nan
        return Interval(mean, -math.inf, math.inf)
    return interval(means, np.ones(len(means)))


def _agreement(golden: GoldenSet, responses: Sequence[Response]) -> float:
    """Returns the share of golden tokens generated before the first that differs.

    Counts as many golden tokens as each response has.
    """
    wanted = agree = 0
    for response in responses:
        record = golden.records[response.record]
        wanted += min(len(record.continuation_token_ids), len(response.tokens))
        agree += agreement(record, response)
    return agree / wanted if wanted else math.nan


def _perplexity_change(golden: GoldenSet, responses: Sequence[Response]) -> float | None:
    """Returns exp of the mean excess of -ln p over the prompts' own tokens, less 1."""
    excess, tokens = 0.0, 0
    for response in responses:
        record = golden.records[response.record]
        returned = [x for x in response.prompt_logprobs or () if x is not None]
        if (
            record.prompt_nll is None
            or not returned
            or len(returned) != len(record.prompt_token_ids) - 1
        ):
            continue
        excess += -math.fsum(returned) - record.prompt_nll
        tokens += len(returned)
    return math.exp(min(excess / tokens, 700.0)) - 1 if tokens else None

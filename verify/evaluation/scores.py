"""Scores each artifact at every predicted token of the same samples.

The divergence is `octet.artifacts.golden.top_k_divergence`, at all positions of a sample at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from verify.evaluation.sequences import Sequences
from verify.evaluation.target import Answer

__all__ = ["Evaluation", "Scores", "divergences"]

_NOISE = 1e-6  # rounding of a sum of probabilities with no rest, as in octet.artifacts.golden
_AT_ONCE = 2**22  # pairs of tokens, 32 MB of float64
_LEAST = 1e-7  # smallest rest that float32 log-probabilities can leave; less is their rounding


def divergences(reference: Answer, served: Answer) -> NDArray[np.float64]:
    """Returns KL(reference ‖ served) in nats [P], from the k most likely tokens of both.

    It is a lower bound of the full divergence, see `octet.artifacts.golden.top_k_divergence`. It is
    never infinite: the rest of the served probabilities is at least what their rounding would hide.
    """
    positions, k = reference.top_ids.shape
    step = max(_AT_ONCE // (k * served.top_ids.shape[1]), 1)
    parts = [slice(start, start + step) for start in range(0, positions, step)]
    found = [_divergences(_part(reference, part), _part(served, part)) for part in parts]
    return np.concatenate(found)


def _part(answer: Answer, part: slice) -> Answer:
    return Answer(answer.logprobs[part], answer.top_ids[part], answer.top_logprobs[part])


def _divergences(reference: Answer, served: Answer) -> NDArray[np.float64]:
    same = reference.top_ids[:, :, None] == served.top_ids[:, None, :]  # [P, k, k]
    shared = same.any(axis=2)
    log_p = reference.top_logprobs.astype(np.float64)
    log_q = np.where(same, served.top_logprobs[:, None, :].astype(np.float64), 0.0).sum(axis=2)
    p = np.exp(log_p)
    found = np.where(shared, p * (log_p - log_q), 0.0).sum(axis=1)
    p_rest = 1.0 - p.sum(axis=1)
    p_rest[p_rest <= _NOISE] = 0.0
    q_left = np.maximum(1.0 - np.where(shared, np.exp(log_q), 0.0).sum(axis=1), 0.0)
    p_missing = np.where(shared, 0.0, p).sum(axis=1)
    # Each missing token is served with at most the least listed probability.
    least = np.exp(served.top_logprobs.min(axis=1).astype(np.float64))
    most = (~shared).sum(axis=1) * least
    outside = p_missing + p_rest
    share = np.divide(p_missing, outside, out=np.zeros_like(outside), where=outside > 0)
    q_missing = np.minimum(most, q_left * share)
    found += _terms(p_missing, q_missing) + _terms(p_rest, q_left - q_missing)
    least_divergence: NDArray[np.float64] = np.maximum(found, 0.0)
    return least_divergence


def _terms(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns p · ln(p / q), 0 where p is 0."""
    some = p > 0
    ratio = np.divide(p, np.maximum(q, _LEAST), out=np.ones_like(p), where=some)
    terms: NDArray[np.float64] = p * np.log(ratio)
    return terms


@dataclass(frozen=True)
class Scores:
    """Scores of one artifact, float64 [P] for each sample.

    `nll` are negative log-likelihoods in nats; `kl` is the divergence from the reference, None
    without one.
    """

    name: str
    nll: tuple[NDArray[np.float64], ...]
    kl: tuple[NDArray[np.float64], ...] | None

    @classmethod
    def of(cls, name: str, answers: Sequence[Answer], reference: Sequence[Answer] | None) -> Self:
        nll = tuple(-answer.logprobs.astype(np.float64) for answer in answers)
        if reference is None:
            return cls(name, nll, None)
        pairs = zip(reference, answers, strict=True)
        return cls(name, nll, tuple(divergences(p, q) for p, q in pairs))


@dataclass(frozen=True)
class Evaluation:
    """Scores of all targets on the samples; `k` tokens of each distribution are compared."""

    sequences: Sequences
    k: int
    reference: Scores | None
    targets: tuple[Scores, ...]

"""Scores each artifact at every predicted token of the same samples.

The divergence is that of the k most likely tokens (`octet.proof.top_k`). It is never infinite: the
rest of the served probabilities is at least what their rounding would hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from octet.proof.top_k import top_k_divergence
from verify.evaluation.sequences import Sequences
from verify.evaluation.target import Answer

__all__ = ["Evaluation", "Scores"]

_LEAST = 1e-7  # smallest rest that float32 log-probabilities can leave; less is their rounding


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
        kl = (
            top_k_divergence(p.top, q.top, least=_LEAST)
            for p, q in zip(reference, answers, strict=True)
        )
        return cls(name, nll, tuple(kl))


@dataclass(frozen=True)
class Evaluation:
    """Scores of all targets on the samples; `k` tokens of each distribution are compared."""

    sequences: Sequences
    k: int
    reference: Scores | None
    targets: tuple[Scores, ...]

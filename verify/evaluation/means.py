"""Each artifact's figures at every predicted token of the same samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from verify.evaluation.scores import divergences
from verify.evaluation.sequences import Sequences
from verify.evaluation.target import Answer

__all__ = ["Evaluation", "Scores"]


@dataclass(frozen=True)
class Scores:
    """Of one artifact, float64 [P] of each sample: negative log-likelihoods in nats, and the
    divergence from the reference; None without one."""

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
    """What was asked of whom and came out; `k` tokens of each distribution are compared."""

    sequences: Sequences
    k: int
    reference: Scores | None
    targets: tuple[Scores, ...]

"""Scores each artifact at every predicted token of the same samples.

The divergence is that of the k most likely tokens (`octet.proof.top_k`). It is never infinite: the
rest of the served probabilities is at least what their rounding would hide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from octet.proof.top_k import TopK, top_k_divergence
from verify.evaluation.sequences import Sequences
from verify.evaluation.target import Answer

__all__ = ["Evaluation", "Scores"]

_LEAST = 1e-7  # smallest rest that float32 log-probabilities can leave; less is their rounding


@dataclass(frozen=True)
class Scores:
    """Scores of one artifact, float64 [P] for each sample.

    `nll` are negative log-likelihoods in nats; `kl` is the divergence from the reference, None
    without one. `likeliest` is the most likely token at each position.
    """

    name: str
    nll: tuple[NDArray[np.float64], ...]
    kl: tuple[NDArray[np.float64], ...] | None
    likeliest: tuple[TopK, ...]

    @classmethod
    def of(cls, name: str, answers: Sequence[Answer], reference: Sequence[Answer] | None) -> Self:
        nll = tuple(-answer.logprobs.astype(np.float64) for answer in answers)
        # Copies, because a view would keep all k tokens.
        likeliest = tuple(
            TopK(answer.top_ids[:, :1].copy(), answer.top_logprobs[:, :1].copy())
            for answer in answers
        )
        if reference is None:
            return cls(name, nll, None, likeliest)
        kl = (
            top_k_divergence(p.top, q.top, least=_LEAST)
            for p, q in zip(reference, answers, strict=True)
        )
        return cls(name, nll, tuple(kl), likeliest)


@dataclass(frozen=True)
class Evaluation:
    """Scores of all targets on the samples; `k` tokens of each distribution are compared.

    `decode` makes text of token ids; None if no target has a tokenizer on this machine. `proofs`
    has a sentence about each server that was compared with golden records, by its name.
    """

    sequences: Sequences
    k: int
    reference: Scores | None
    targets: tuple[Scores, ...]
    decode: Callable[[Sequence[int]], str] | None = None
    proofs: Mapping[str, str] = field(default_factory=dict)

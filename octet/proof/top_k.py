"""Computes the divergence of two next-token distributions of which only the likeliest are known.

Each of the reference's n tokens that the served model also returned is an outcome of its own. Those
that it left out are one outcome together, and all other tokens another. The served probability of
the tokens left out is at most n times the smallest probability that was returned, or else one of
them would have been returned. Among the probabilities that this limit allows, those of the smallest
divergence are taken. The result is thus a lower bound of the full divergence (the data-processing
inequality).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["TopK", "top_k_divergence"]

Floats = NDArray[np.float64]
_NOISE = 1e-6  # rounded log-probabilities can leave as much where the true rest is 0
_AT_ONCE = 1 << 22  # pairs of tokens: 32 MB of float64


@dataclass(frozen=True)
class TopK:
    """The likeliest tokens at n positions; shorter lists end in id -1 and log-probability -inf."""

    ids: NDArray[np.integer]  # [n, k]
    logprobs: NDArray[np.floating]  # [n, k]: natural, of the full softmax

    @classmethod
    def of(cls, tops: Sequence[Mapping[int, float]]) -> Self:
        """Takes token id -> log-probability at each position."""
        shape = len(tops), max(map(len, tops), default=0)
        ids, logprobs = np.full(shape, -1), np.full(shape, -math.inf)
        for row, top in enumerate(tops):
            ids[row, : len(top)] = list(top)
            logprobs[row, : len(top)] = list(top.values())
        return cls(ids, logprobs)

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(self.ids[rows], self.logprobs[rows])


def top_k_divergence(reference: TopK, served: TopK, *, least: float = 0.0) -> Floats:
    """Returns KL(reference ‖ served) in nats, float64 [n].

    Infinite if the served model gives no probability to an outcome that has some in the reference.
    With `least`, an outcome other than a single token counts with at least this probability, which
    rounding could hide, so that the result is finite.
    """
    positions, k = reference.ids.shape
    step = max(_AT_ONCE // max(k * served.ids.shape[1], 1), 1)
    parts = (slice(start, start + step) for start in range(0, positions, step))
    found = [_divergence(reference[part], served[part], least) for part in parts]
    return np.concatenate(found) if found else np.empty(0)


def _divergence(reference: TopK, served: TopK, least: float) -> Floats:
    same = reference.ids[:, :, None] == served.ids[:, None, :]  # [n, k, m]
    same &= reference.ids[:, :, None] >= 0
    shared = same.any(axis=2)
    log_p = reference.logprobs.astype(np.float64)
    log_q = np.where(same, served.logprobs.astype(np.float64)[:, None, :], 0.0).sum(axis=2)
    p, q = np.exp(log_p), np.where(shared, np.exp(log_q), 0.0)
    known = np.multiply(p, log_p - log_q, out=np.zeros_like(p), where=shared)
    p_rest = 1.0 - p.sum(axis=1)
    p_rest[p_rest <= _NOISE] = 0.0
    q_left = np.maximum(1.0 - q.sum(axis=1), 0.0)
    missing = ~shared & (reference.ids >= 0)
    p_missing = np.where(missing, p, 0.0).sum(axis=1)
    smallest = np.min(served.logprobs, axis=1, initial=0.0, where=served.ids >= 0)
    most = missing.sum(axis=1) * np.exp(smallest.astype(np.float64))
    outside = p_missing + p_rest
    share = np.divide(p_missing, outside, out=np.zeros_like(outside), where=outside > 0)
    q_missing = np.minimum(most, q_left * share)
    found = known.sum(axis=1) + _term(p_missing, q_missing, least)
    return np.asarray(np.maximum(found + _term(p_rest, q_left - q_missing, least), 0.0))


def _term(p: Floats, q: Floats, least: float) -> Floats:
    """Returns p · ln(p / q), 0 where p is 0."""
    with np.errstate(divide="ignore"):
        ratio = np.divide(p, np.maximum(q, least), out=np.ones_like(p), where=p > 0)
        return np.asarray(p * np.log(ratio))

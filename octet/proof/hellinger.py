"""Hellinger embedding: distributions as points whose squared distances compare to divergences.

A distribution p is the point 2√p, on a sphere. The squared distance of two points is 4·Σ(√p - √q)²,
four times the squared Hellinger distance: about 2·KL where they are close, and at most 8. The noise
of a point does not depend on its position (Fisher's metric; Amari and Nagaoka, Methods of
Information Geometry, 2.5). The axes are the reference's likeliest tokens that the server also
returned, and one axis for all other outcomes together. All distributions are thus compared only as
finely as the server reports, which can only shorten distances (the data-processing inequality).

If the server leaves out n of the reference's tokens, their total probability is at most n times the
smallest probability that it returned, and at most the mass that its returned tokens leave. One axis
holds how far 2√p of those tokens together exceeds this limit; the mass within the limit is part of
the rest. This shortens distances too, and the server's own coordinate on that axis is always 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.golden import GoldenSet, Top
from octet.proof.responses import Response, comparable
from octet.proof.top_k import TopK, top_k_divergence

__all__ = ["Answers", "Points"]

Points = NDArray[np.float64]
_ROUNDING = 1e-5  # relative error of probabilities from float32 log-probabilities
_TINY = math.exp(-88)  # about the smallest normal number of float32


@dataclass(frozen=True)
class Answers:
    """The answers to n prompts and the reference, as points [n, positions, tokens + 2].

    The last two axes of a point are the excess of left-out tokens over `limit`, and the rest.
    Where a position cannot be compared, all points are 0.
    """

    records: NDArray[np.int64]  # [n]: indices of records with a comparable position
    compared: NDArray[np.bool_]  # [n, positions]
    shared: NDArray[np.bool_]  # [n, positions, tokens]: returned by both
    limit: NDArray[np.float64]  # [n, positions]: on the probability of left-out tokens
    least: NDArray[np.float64]  # [n, positions]: probability of the least likely returned token
    served: Points
    p: NDArray[np.float64]  # [n, positions, tokens]: the reference's

    @classmethod
    def of(cls, golden: GoldenSet, responses: Sequence[Response]) -> "Answers":
        """Embeds `responses`; the last response to each record counts."""
        returned = {response.record: response for response in responses}
        found = {
            number: positions
            for number, response in sorted(returned.items())
            if (positions := comparable(golden.records[number], response))
        }
        count = max((len(record.tops) for record in golden.records), default=0)
        tokens = max((len(t.token_ids) for r in golden.records for t in r.tops), default=0)
        shape = (len(found), count)
        compared = np.zeros(shape, bool)
        limit, least = np.zeros(shape), np.zeros(shape)
        shared = np.zeros((*shape, tokens), bool)
        served = np.zeros((*shape, tokens + 2))
        reference = np.full((*shape, tokens), -np.inf)
        for row, (number, positions) in enumerate(found.items()):
            compared[row, positions] = True
            for j in positions:
                at = row, j
                top, told = golden.records[number].tops[j], returned[number].tops[j]
                reference[at][: len(top.logprobs)] = top.logprobs
                shared[at], limit[at], served[at] = _outcomes(top, told, tokens)
                least[at] = math.exp(min(told.values())) * (1 - _ROUNDING)
        records = np.array(list(found), np.int64)
        return cls(records, compared, shared, limit, least, served, np.exp(reference))

    def points(self, logprobs: NDArray[np.float32]) -> Points:
        """Embeds log-probabilities [repeats, records, positions, tokens], in nats.

        Returns [repeats, n, positions, tokens + 2]; NaN for records without any log-probability.
        """
        p = self._probabilities(logprobs)
        points = self._coarse(p)
        points[:, ~p.any((0, 2, 3))] = np.nan
        return points

    def divergences(self, logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns KL(reference ‖ `logprobs`) in nats, [repeats, n]: means over compared positions.

        Computes what `octet.proof.top_k` would measure of a server with `logprobs`. Such a server
        is taken to return the tokens that are as likely as the least likely one of the real answer.
        Its tokens are not those of the real answer, whose own rounding has raised them. NaN where
        `points` is.
        """
        q = self._probabilities(logprobs)
        found = np.zeros(q.shape[:-1])
        for values, repeat in zip(q, found, strict=True):
            repeat[self.compared] = self._top_k(values[self.compared])
        means = found.sum(-1) / self.compared.sum(-1)
        means[:, ~q.any((0, 2, 3))] = np.nan
        return np.asarray(means)

    def _top_k(self, q: Points) -> NDArray[np.float64]:
        """Returns the divergence at each compared position of `q` [positions, tokens]."""
        p, least = self.p[self.compared], self.least[self.compared][:, None]
        ids = np.arange(p.shape[1])
        last = np.full_like(least, p.shape[1], int)  # another token, the least likely returned one
        returned = np.concatenate([np.where(q >= least, ids, -1), last], 1)
        logprobs = np.log(np.maximum(np.concatenate([q, least], 1), _TINY))
        reference = TopK(np.where(p > 0, ids, -1), np.log(np.maximum(p, _TINY)))
        return top_k_divergence(reference, TopK(returned, logprobs), least=_TINY)

    @property
    def reference(self) -> Points:
        return self._coarse(self.p)

    def _probabilities(self, logprobs: NDArray[np.float32]) -> Points:
        """Returns probabilities [repeats, n, positions, tokens]; 0 where `logprobs` is NaN."""
        count, tokens = self.shared.shape[1:]
        mine = logprobs[:, self.records, :count, :tokens].astype(np.float64)
        return np.asarray(np.exp(np.where(np.isnan(mine), -np.inf, mine)))

    def _lumped(self, p: Points) -> Points:
        """Lumps [..., n, positions, tokens] to [..., n, positions, tokens + 2].

        The last two are all left-out tokens together, and the rest.
        """
        returned = np.where(self.shared, p, 0.0)
        whole = p.sum(-1, keepdims=True)
        left_out = whole - returned.sum(-1, keepdims=True)
        return np.concatenate([returned, left_out, np.maximum(1.0 - whole, 0.0)], -1)

    def _coarse(self, p: Points) -> Points:
        """Embeds probabilities [..., n, positions, tokens] as points."""
        lumped = self._lumped(p)
        left_out = np.maximum(lumped[..., -2], 0.0)
        lumped[..., -1] += np.minimum(left_out, self.limit)
        points = 2 * np.sqrt(np.maximum(lumped, 0.0))
        points[..., -2] = 2 * np.maximum(np.sqrt(left_out) - np.sqrt(self.limit), 0.0)
        points[..., ~self.compared, :] = 0.0
        return np.asarray(points)


def _outcomes(
    top: Top, returned: Mapping[int, float], tokens: int
) -> tuple[NDArray[np.bool_], float, Points]:
    """Returns for one position: the shared tokens, the limit of the others, and the point."""
    shared = np.zeros(tokens, bool)
    served = np.zeros(tokens + 2)
    for n, token in enumerate(top.token_ids):
        if token in returned:
            shared[n] = True
            served[n] = math.exp(returned[token])
    served[-1] = max(1.0 - float(served.sum()), 0.0)
    left_out = len(top.token_ids) - int(shared.sum())
    left = max(1.0 - sum(map(math.exp, returned.values())), 0.0)
    limit = min(left_out * math.exp(min(returned.values())), left)
    return shared, limit, 2 * np.sqrt(served)

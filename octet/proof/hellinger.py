"""Next-token distributions as points, whose squared distances are comparable with divergences.

A distribution p is the point 2√p, on a sphere: the squared distance of two is four times their
squared Hellinger distance, 4·Σ(√p - √q)², about 2·KL where they are close, and 8 at most; the noise
of a point does not depend on where it is (Fisher's metric; Amari and Nagaoka, Methods of
Information Geometry, 2.5). Axes are the reference's likeliest tokens that the server told too, and
one for all other outcomes together. So everything is compared as coarsely as the server told, which
can only shorten distances (the data-processing inequality).

Where the server leaves out n of the reference's tokens, they have at most n times the least
probability that it told, and no more than it left to all that it did not tell. How far 2√p of those
tokens together is beyond that limit is an axis of its own; what they have within it is part of the
rest. This shortens distances too, and what the server has there, whatever it is, is 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.golden import GoldenSet, Top
from octet.proof.responses import Response, comparable

__all__ = ["Answers", "Points"]

Points = NDArray[np.float64]
_TINY = math.exp(-88)  # about the least normal number of float32


@dataclass(frozen=True)
class Answers:
    """What was answered to n prompts, beside the reference: [n, positions, tokens + 2] points.

    The last two axes of a point are how far tokens that were left out are beyond `limit`, and the
    rest. Where a position cannot be compared, all points are 0.
    """

    records: NDArray[np.int64]  # [n], of those with a position that can be compared
    compared: NDArray[np.bool_]  # [n, positions]
    shared: NDArray[np.bool_]  # [n, positions, tokens]: told by both
    limit: NDArray[np.float64]  # [n, positions]: of the probability of those left out
    served: Points
    p: NDArray[np.float64]  # [n, positions, tokens]: the reference's

    @classmethod
    def of(cls, golden: GoldenSet, responses: Sequence[Response]) -> "Answers":
        """Of one response to each record."""
        told = {response.record: response for response in responses}
        found = {
            number: positions
            for number, response in sorted(told.items())
            if (positions := comparable(golden.records[number], response))
        }
        count = max((len(record.tops) for record in golden.records), default=0)
        tokens = max((len(t.token_ids) for r in golden.records for t in r.tops), default=0)
        shape = (len(found), count)
        compared = np.zeros(shape, bool)
        limit = np.zeros(shape)
        shared = np.zeros((*shape, tokens), bool)
        served = np.zeros((*shape, tokens + 2))
        reference = np.full((*shape, tokens), -np.inf)
        for row, (number, positions) in enumerate(found.items()):
            compared[row, positions] = True
            for j in positions:
                at = row, j
                top = golden.records[number].tops[j]
                reference[at][: len(top.logprobs)] = top.logprobs
                shared[at], limit[at], served[at] = _outcomes(top, told[number].tops[j], tokens)
        records = np.array(list(found), np.int64)
        return cls(records, compared, shared, limit, served, np.exp(reference))

    def points(self, logprobs: NDArray[np.float32]) -> Points:
        """[repeats, n, positions, tokens + 2] of [repeats, records, positions, tokens] in nats.

        NaN for records of which it has nothing.
        """
        p = self._probabilities(logprobs)
        points = self._coarse(p)
        points[:, ~p.any((0, 2, 3))] = np.nan
        return points

    def divergences(self, logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
        """KL(reference ‖ it) in nats, [repeats, n]: the mean of the positions compared.

        Of the outcomes of `octet.artifacts.golden.top_k_divergence`: tokens that are shared, those
        that the server left out together, and the rest. NaN as `points`.
        """
        p, q = (np.maximum(self._lumped(x), _TINY) for x in (self.p, self._probabilities(logprobs)))
        found = (p * (np.log(p) - np.log(q))).sum(-1) * self.compared
        found[:, ~self._probabilities(logprobs).any((0, 2, 3))] = np.nan
        return np.asarray(np.maximum(found, 0.0).sum(-1) / self.compared.sum(-1))

    @property
    def reference(self) -> Points:
        return self._coarse(self.p)

    def _probabilities(self, logprobs: NDArray[np.float32]) -> Points:
        """[repeats, n, positions, tokens], 0 where it has nothing."""
        count, tokens = self.shared.shape[1:]
        mine = logprobs[:, self.records, :count, :tokens].astype(np.float64)
        return np.asarray(np.exp(np.where(np.isnan(mine), -np.inf, mine)))

    def _lumped(self, p: Points) -> Points:
        """Probabilities [..., n, positions, tokens + 2] of [..., n, positions, tokens]."""
        told = np.where(self.shared, p, 0.0)
        whole = p.sum(-1, keepdims=True)
        left_out = whole - told.sum(-1, keepdims=True)
        return np.concatenate([told, left_out, np.maximum(1.0 - whole, 0.0)], -1)

    def _coarse(self, p: Points) -> Points:
        """The points of probabilities [..., n, positions, tokens]."""
        lumped = self._lumped(p)
        left_out = np.maximum(lumped[..., -2], 0.0)
        lumped[..., -1] += np.minimum(left_out, self.limit)
        points = 2 * np.sqrt(np.maximum(lumped, 0.0))
        points[..., -2] = 2 * np.maximum(np.sqrt(left_out) - np.sqrt(self.limit), 0.0)
        points[..., ~self.compared, :] = 0.0
        return np.asarray(points)


def _outcomes(
    top: Top, told: Mapping[int, float], tokens: int
) -> tuple[NDArray[np.bool_], float, Points]:
    """Of one position: which tokens are shared, what the others have at most, and the point."""
    shared = np.zeros(tokens, bool)
    served = np.zeros(tokens + 2)
    for n, token in enumerate(top.token_ids):
        if token in told:
            shared[n] = True
            served[n] = math.exp(told[token])
    served[-1] = max(1.0 - float(served.sum()), 0.0)
    left_out = len(top.token_ids) - int(shared.sum())
    untold = max(1.0 - sum(map(math.exp, told.values())), 0.0)
    limit = min(left_out * math.exp(min(told.values())), untold)
    return shared, limit, 2 * np.sqrt(served)

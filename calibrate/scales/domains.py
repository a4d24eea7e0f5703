"""Compares the domains of a stream, tensor by tensor, by their exact histograms.

Each domain has the scale that a calibration on it alone would have. What that scale costs on
another domain is exact, as is the distance between two domains: the Kolmogorov-Smirnov distance of
their magnitudes, max |F(x) - G(x)|, from 0 (equal) to 1 (all of one below all of the other).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from calibrate.observe.histogram import Histogram
from calibrate.scales.activations import Effect, effect
from octet.numerics.formats import Format

__all__ = ["Comparison", "compare", "distance"]


@dataclass(frozen=True)
class Comparison:
    """The domains of one tensor.

    `scales` are by domain, of those in which the tensor had any element but zero. `own[a]` is the
    effect of a domain's scale on itself, `costs[a, b]` that of the scale of `a` on `b`.
    """

    scales: Mapping[str, float]
    own: Mapping[str, Effect]
    costs: Mapping[tuple[str, str], Effect]
    distances: Mapping[tuple[str, str], float]

    @property
    def ratio(self) -> float:
        """The largest scale divided by the smallest; 1 with fewer than two."""
        return max(self.scales.values(), default=1.0) / min(self.scales.values(), default=1.0)

    @property
    def distance(self) -> float:
        """The largest distance of two domains; 0 with fewer than two."""
        return max(self.distances.values(), default=0.0)

    @property
    def worst(self) -> tuple[str, str] | None:
        """The pair (of, on) where the scale of one domain adds most squared error on the other."""
        if not self.costs:
            return None
        return max(self.costs, key=self.added)

    def added(self, pair: tuple[str, str]) -> float:
        """Returns the relative squared error that the scale of `pair[0]` adds on `pair[1]`."""
        return self.costs[pair].relative_error - self.own[pair[1]].relative_error


def compare(
    histograms: Mapping[str, Histogram], fmt: Format, scale_of: Callable[[Histogram], float]
) -> Comparison:
    """Compares a tensor's `histograms`, by domain; `scale_of` derives the scale from one."""
    alive = {domain: x for domain, x in histograms.items() if x.absmax > 0}
    scales = {domain: scale_of(histogram) for domain, histogram in alive.items()}
    own = {domain: effect(histogram, fmt, scales[domain]) for domain, histogram in alive.items()}
    costs: dict[tuple[str, str], Effect] = {}
    distances: dict[tuple[str, str], float] = {}
    for of, on in permutations(alive, 2):
        costs[of, on] = effect(alive[on], fmt, scales[of])
        known = distances.get((on, of))
        distances[of, on] = distance(alive[of], alive[on]) if known is None else known
    return Comparison(scales, own, costs, distances)


def distance(one: Histogram, other: Histogram) -> float:
    """Returns the Kolmogorov-Smirnov distance of the magnitudes of two tensors, zeros included."""
    shares = [np.cumsum(x.counts) / x.total for x in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())

"""A tier of a model: the model's pools that may answer, by their measured divergence.

A pool fits if the upper bound of its measured divergence is within the tier's budget, and its judge
did not find it beyond. An unmeasured pool fits no tier. The selection is made again for each
request.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octet.errors import RequestError
from serve.config import Tier
from serve.config.checks import is_measured
from serve.routing.pool import Pool

__all__ = ["ModelTier", "tiers_of"]

_LONGEST_WAIT_S = 60.0  # largest Retry-After that a client receives


class ModelTier:
    """Selects the pools that may answer a request of this tier. Keeps no state of a request."""

    __slots__ = ("_by_cost", "_siblings", "allow_less_exact", "max_kl", "model", "name")

    def __init__(
        self,
        name: str,
        config: Tier,
        model: str,
        by_cost: Sequence[Pool],
        siblings: "Mapping[str, ModelTier]",
    ) -> None:
        """`by_cost` holds the model's pools, the cheapest first.

        `siblings` holds the model's tiers, the most exact first; it may still be incomplete.
        """
        self.name = name
        self.model = model
        self.max_kl = config.max_kl  # nats
        self.allow_less_exact = config.allow_less_exact
        self._by_cost = by_cost
        self._siblings = siblings

    def fits(self, pool: Pool) -> bool:
        """Returns whether `pool` is within the budget, as last proven, and as far as judged."""
        kl = pool.proven.kl
        return kl is not None and kl <= self.max_kl and not self._judged_beyond(pool)

    def _judged_beyond(self, pool: Pool) -> bool:
        """Returns whether the interval of its judge lies wholly above the budget."""
        return pool.judgement is not None and pool.judgement.low >= self.max_kl

    def order(self, first: Pool | None = None) -> list[Pool]:
        """Returns the cheapest pool that fits, then its fallbacks. Empty if no pool may answer.

        No fallback is measurably less exact than a pool before it: its lower bound is not above
        their upper bounds. If the tier allows less exact answers, the other fitting pools come
        next, then those that do not fit, the most exact first. An unmeasured pool is never
        included. `first`, which must fit, comes before all others.
        """
        limit, exactest = self.max_kl, math.inf
        found: list[Pool] = []
        if first is not None:
            found.append(first)
            exactest = math.inf if first.proven.kl is None else first.proven.kl
        for pool in self._by_cost:
            proven = pool.proven
            kl = proven.kl
            if kl is None or pool is first or not self.fits(pool):
                continue
            if kl <= exactest:
                exactest = kl
            elif (kl if proven.kl_low is None else proven.kl_low) > exactest:
                continue
            found.append(pool)
        if self.allow_less_exact:
            rest = [p for p in self._by_cost if p.proven.kl is not None and p not in found]
            rest.sort(key=lambda pool: max(pool.proven.kl or 0.0, limit))  # stable: by cost
            found += rest
        return found

    def require(self, pool: Pool) -> None:
        """Raises RequestError (503) if `pool` may no longer answer.

        Since the call of `order`, the request may have waited, and the pool been measured again.
        """
        kl = pool.proven.kl
        if kl is None or not (self.fits(pool) or self.allow_less_exact):
            raise self.refusal()

    def kept_by(self, pool: Pool) -> str | None:
        """Returns the tier whose budget `pool` keeps: this one, or the most exact that it fits."""
        if self.fits(pool):
            return self.name
        return next((tier.name for tier in self._siblings.values() if tier.fits(pool)), None)

    def refusal(self) -> RequestError:
        """Builds the 503 error: the budget, each pool's measured divergence, and what to do."""
        reasons = ", ".join(f"'{name}' {why}" for name, why in self.reasons().items())
        served = [name for name, tier in self._siblings.items() if tier.order()]
        waits_s = [_retry_after_s(pool) for pool in self._by_cost if is_measured(pool.config)]
        advice = (
            "try again later" if waits_s else "waiting does not help, because no pool is measured"
        )
        if served:
            advice = f"choose a tier that is served now ({', '.join(served)})"
        return RequestError(
            f"no pool of the model '{self.model}' fits the tier '{self.name}' now "
            f"(at most {self.max_kl:.4g} nats from the reference): {reasons}; {advice}",
            status=503,
            param="model",
            code="tier_unavailable",
            kind="service_unavailable_error",
            retry_after_s=min(waits_s, default=_LONGEST_WAIT_S),
        )

    def reasons(self) -> dict[str, str]:
        """Maps each pool that does not fit to the reason."""
        return {pool.name: self._reason(pool) for pool in self._by_cost if not self.fits(pool)}

    def status(self) -> dict[str, Any]:
        """Returns the budget, the current order of pools, and why the others do not fit."""
        return {
            "max_kl": self.max_kl,
            "allow_less_exact": self.allow_less_exact,
            "order": [pool.name for pool in self.order()],
            "unfit": self.reasons(),
        }

    def fitting(self) -> Mapping[str, bool]:
        """Maps each pool to whether it fits."""
        return {pool.name: self.fits(pool) for pool in self._by_cost}

    def _reason(self, pool: Pool) -> str:
        if pool.judgement is not None and self._judged_beyond(pool):
            return f"is judged to diverge by {pool.judgement.low:.4g} or more"
        if (kl := pool.proven.kl) is not None:
            return f"measures {kl:.4g}"
        if not pool.config.proof.enabled:
            return "is not measured: its proof is switched off"
        if not is_measured(pool.config):
            return "is not measured: it has no golden records"
        return "is not measured" if pool.ready else "has no backend that serves"


def tiers_of(
    tiers: Mapping[str, Tier], model: str, pools: Sequence[Pool], costs: Mapping[str, float]
) -> dict[str, ModelTier]:
    """Builds every tier for one model; `pools` are in the model's order, `costs` by pool name."""
    by_cost = sorted(pools, key=lambda pool: costs.get(pool.name, 1.0))  # stable
    found: dict[str, ModelTier] = {}
    for name, tier in tiers.items():
        found[name] = ModelTier(name, tier, model, by_cost, found)
    return found


def _retry_after_s(pool: Pool) -> float:
    """Estimates the seconds until it may fit: a backend is back, or is measured again."""
    wait_s = pool.config.proof.every_s if pool.ready else pool.retry_after_s()
    return min(wait_s, _LONGEST_WAIT_S)

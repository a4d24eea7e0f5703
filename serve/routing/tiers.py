"""One tier of one model: which of the model's pools may answer, by what their numbers measure.

A pool fits where the upper bound of its measured divergence is within the tier's budget. One of
which nothing is measured fits no tier. All of this is asked anew for each request.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octet.errors import RequestError
from serve.config import Tier
from serve.config.tier_checks import is_measured
from serve.routing.pool import Pool

__all__ = ["ModelTier", "tiers_of"]

_LONGEST_WAIT_S = 60.0  # that a client is told to wait


class ModelTier:
    """What a request of this tier may go to; nothing of a request is kept here."""

    __slots__ = ("_by_cost", "_siblings", "allow_less_exact", "max_kl", "model", "name")

    def __init__(
        self,
        name: str,
        config: Tier,
        model: str,
        by_cost: Sequence[Pool],
        siblings: "Mapping[str, ModelTier]",
    ) -> None:
        """`by_cost` are the model's pools, the cheapest first; `siblings` its tiers, by exactness.

        The latter may still be growing.
        """
        self.name = name
        self.model = model
        self.max_kl = config.max_kl  # nats
        self.allow_less_exact = config.allow_less_exact
        self._by_cost = by_cost
        self._siblings = siblings

    def fits(self, pool: Pool) -> bool:
        """Whether `pool` keeps the budget, as last measured."""
        kl = pool.proven.kl
        return kl is not None and kl <= self.max_kl

    def order(self, first: Pool | None = None) -> list[Pool]:
        """The cheapest that fits, then those to fall back to. Empty: nobody fits.

        Each further one is not measurably less exact than any before it: its lower bound is not
        over their upper bounds. Where the tier allows less, the others that fit come after them,
        then those that do not, the most exact first; never one of which nothing is measured.
        `first`, which has to fit, is asked before all of them.
        """
        limit, exactest = self.max_kl, math.inf
        found: list[Pool] = []
        if first is not None:
            found.append(first)
            exactest = math.inf if first.proven.kl is None else first.proven.kl
        for pool in self._by_cost:
            proven = pool.proven
            kl = proven.kl
            if kl is None or kl > limit or pool is first:
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
        """Raises RequestError (503) for a pool that must not answer any more.

        Since `order` was asked, the request may have waited, and the pool been measured again.
        """
        kl = pool.proven.kl
        if kl is None or (kl > self.max_kl and not self.allow_less_exact):
            raise self.refusal()

    def kept_by(self, pool: Pool) -> str | None:
        """The tier whose budget an answer of `pool` keeps: this one, or the most exact it fits."""
        if self.fits(pool):
            return self.name
        return next((tier.name for tier in self._siblings.values() if tier.fits(pool)), None)

    def refusal(self) -> RequestError:
        """503: which budget, what each pool measures, and what to do."""
        reasons = ", ".join(f"'{name}' {why}" for name, why in self.reasons().items())
        served = [name for name, tier in self._siblings.items() if tier.order()]
        waits_s = [_retry_after_s(pool) for pool in self._by_cost if is_measured(pool.config)]
        advice = "try again later" if waits_s else "no waiting helps, as none is to be measured"
        if served:
            advice = f"ask for a tier that is served now ({', '.join(served)})"
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
        """Of each pool that does not fit: why."""
        return {pool.name: self._reason(pool) for pool in self._by_cost if not self.fits(pool)}

    def status(self) -> dict[str, Any]:
        """Its budget, who would be asked now in which order, and why the others do not fit."""
        return {
            "max_kl": self.max_kl,
            "allow_less_exact": self.allow_less_exact,
            "order": [pool.name for pool in self.order()],
            "unfit": self.reasons(),
        }

    def fitting(self) -> Mapping[str, bool]:
        """Of each pool, whether it fits."""
        return {pool.name: self.fits(pool) for pool in self._by_cost}

    def _reason(self, pool: Pool) -> str:
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
    """Every tier as the model has it; `pools` are in the model's order, `costs` by their names."""
    by_cost = sorted(pools, key=lambda pool: costs.get(pool.name, 1.0))  # stable
    found: dict[str, ModelTier] = {}
    for name, tier in tiers.items():
        found[name] = ModelTier(name, tier, model, by_cost, found)
    return found


def _retry_after_s(pool: Pool) -> float:
    """When it may fit: a backend is back, or has been measured again."""
    wait_s = pool.config.proof.every_s if pool.ready else pool.retry_after_s()
    return min(wait_s, _LONGEST_WAIT_S)

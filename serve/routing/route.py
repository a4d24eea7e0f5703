"""Resolves a model's public name to the pools that answer for it, in the order to try them."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Self

from octet.errors import ConfigError, RequestError, nearest
from serve.config import GatewayConfig, ModelConfig, Tier
from serve.routing.pool import Pool
from serve.routing.tiers import ModelTier, tiers_of

__all__ = ["Route", "Routes"]


class Route:
    """One public model."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        pools: Mapping[str, Pool],
        rng: random.Random,
        tiers: Mapping[str, Tier] | None = None,
        costs: Mapping[str, float] | None = None,
        shares: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        """Raises ConfigError for a pool or a tier that does not exist. `shares` as in `Routes`."""

        def named(reference: object) -> Pool:
            key = reference if isinstance(reference, str) else name  # an inline pool
            if key not in pools:
                raise ConfigError(f"models.{name}: no pool '{key}'{nearest(key, pools)}")
            return pools[key]

        self.name = name
        self.aliases = config.aliases
        self.config = config
        self._rng = rng
        self._canaries = [(named(canary.pool), canary.fraction) for canary in config.canary]
        self._main = named(config.pool)
        self._fallback = [named(pool) for pool in config.fallback]
        self._shares = {} if shares is None else shares
        answering = [self._main, *(pool for pool, _ in self._canaries), *self._fallback]
        self._judged = [pool for pool in dict.fromkeys(answering) if pool.config.judge is not None]
        self._shadow = named(config.shadow.pool) if config.shadow else None
        order = [self._main, *self._fallback]
        self.tiers: Mapping[str, ModelTier] = tiers_of(tiers or {}, name, order, costs or {})
        self.tier_aliases = config.tier_aliases
        self._default_tier = config.tier
        for tier in (config.tier, *config.tier_aliases.values()):
            if tier is not None and tier not in self.tiers:
                raise ConfigError(f"models.{name}: no tier '{tier}'{nearest(tier, self.tiers)}")

    def tier_of(self, name: str) -> str | None:
        """Returns the tier of requests for `name` (this model or an alias) that name no tier."""
        return self.tier_aliases.get(name, self._default_tier)

    def tier(self, name: str, requested: str | None) -> ModelTier | None:
        """Returns the tier of a request for `name` whose header names the tier `requested`.

        Raises RequestError (400) for an unknown tier, or one other than the alias's own.
        """
        if requested is None:
            of_name = self.tier_of(name)
            return None if of_name is None else self.tiers[of_name]
        if requested not in self.tiers:
            raise _refused(_unknown(requested, self.tiers))
        alias_of = self.tier_aliases.get(name, requested)
        if alias_of != requested:
            raise _refused(
                f"the model name '{name}' selects the tier '{alias_of}', but X-Octet-Tier is "
                f"'{requested}': leave out the header, or use the model name '{self.name}'"
            )
        return self.tiers[requested]

    def pools(self, tier: ModelTier | None = None) -> list[Pool]:
        """Returns the pools to try, in order: a canary if drawn, the main pool, the fallbacks.

        With a tier, `ModelTier.order` orders main pool and fallbacks, and a canary is used only if
        it fits. Pools that are less exact than the canary are then left out. Raises RequestError
        (503) if none is left.
        """
        canary = self._canary()
        if tier is None:
            order = [self._main, *self._fallback]
            if canary is not None:
                return [canary, *(other for other in order if other is not canary)]
            return order
        order = tier.order(canary if canary is not None and tier.fits(canary) else None)
        if not order:
            raise tier.refusal()
        return order

    def _canary(self) -> Pool | None:
        """Draws whether a canary pool gets this request; returns that pool, if any."""
        if self._canaries:
            draw = self._rng.random()
            for pool, fraction in self.canary_shares():
                if draw < fraction:
                    return pool
                draw -= fraction
        return None

    def canary_shares(self) -> Iterator[tuple[Pool, float]]:
        """Yields each canary with its present share: that of its rollout, or else the file's.

        The share is 0 while the canary's judge rules that it diverges too far.
        """
        for pool, fraction in self._canaries:
            share = self._shares.get((self.name, pool.name), fraction)
            yield pool, 0.0 if pool.rolled_back else share

    def judged(self) -> Pool | None:
        """Draws whether a pool with a judge gets a copy of this request; returns it, if so."""
        for pool in self._judged:
            judge = pool.config.judge
            if judge is not None and self._rng.random() < judge.share:
                return pool
        return None

    def shadow(self) -> Pool | None:
        """Draws whether the shadow pool gets a copy of this request; returns that pool, if so."""
        if self._shadow is None or self.config.shadow is None:
            return None
        return self._shadow if self._rng.random() < self.config.shadow.fraction else None

    @property
    def context_length(self) -> int | None:
        """Returns the shortest context, in tokens, of the pools that may answer and report one."""
        pools = [self._main, *self._fallback, *(pool for pool, _ in self._canaries)]
        lengths = (pool.context_length for pool in pools)
        return min((length for length in lengths if length), default=None)


class Routes:
    """Every public model, by its name and its aliases."""

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        pools: Mapping[str, Pool],
        *,
        tiers: Mapping[str, Tier] | None = None,
        costs: Mapping[str, float] | None = None,
        shares: Mapping[tuple[str, str], float] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`costs` holds the cost of a token by pool name; 1 for a pool that is not listed.

        `shares` holds the shares of canaries that are rolled out, by model and pool; it may change
        at any time.

        Raises ConfigError for a pool or a tier that does not exist, or a name that is used twice.
        """
        rng = rng or random.Random()
        self._routes = {
            name: Route(name, config, pools, rng, tiers, costs, shares)
            for name, config in models.items()
        }
        self._by_name = dict(self._routes)
        for route in self._routes.values():
            for alias in (*route.aliases, *route.tier_aliases):
                if alias in self._by_name:
                    raise ConfigError(f"models.{route.name}: the alias '{alias}' is taken")
                self._by_name[alias] = route

    @classmethod
    def from_config(
        cls,
        config: GatewayConfig,
        pools: Mapping[str, Pool],
        shares: Mapping[tuple[str, str], float] | None = None,
    ) -> Self:
        """Raises ConfigError, as above."""
        # Not the pools' own costs: until a reload is over, pools have the old configuration.
        costs = {name: pool.cost for name, pool in config.all_pools.items()}
        return cls(config.models, pools, tiers=config.tiers, costs=costs, shares=shares)

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the models' names, without their aliases."""
        return tuple(self._routes)

    def resolve(self, model: str, may_use: Callable[[Route], bool] = lambda route: True) -> Route:
        """Returns the route of `model`. Raises RequestError (404) for a name that is not served.

        The error names only models that the client `may_use`.
        """
        route = self._by_name.get(model)
        if route is None:
            model = model[:100]
            names = [name for name, route in self._by_name.items() if may_use(route)]
            raise RequestError(
                f"the model '{model}' does not exist{nearest(model, names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return route


def _unknown(tier: str, tiers: Mapping[str, ModelTier]) -> str:
    shown = tier[:100]
    if not tiers:
        return f"unknown tier '{shown}': this gateway has no tiers; leave X-Octet-Tier out"
    close = nearest(shown, tiers).partition("; known: ")[0]
    return f"unknown tier '{shown}'{close}; the most exact first: {', '.join(tiers)}"


def _refused(message: str) -> RequestError:
    return RequestError(message, param="X-Octet-Tier", code="invalid_tier")

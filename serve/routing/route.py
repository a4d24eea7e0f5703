"""From a model's public name to the pools that answer for it, in the order to ask them."""

import random
from collections.abc import Callable, Iterator, Mapping

from octet.errors import ConfigError, RequestError, nearest
from serve.config import ModelConfig
from serve.routing.pool import Pool

__all__ = ["Route", "Routes"]


class Route:
    """One public model."""

    def __init__(
        self, name: str, config: ModelConfig, pools: Mapping[str, Pool], rng: random.Random
    ) -> None:
        """Raises ConfigError for a pool that does not exist."""

        def named(reference: object) -> Pool:
            key = reference if isinstance(reference, str) else name  # a pool written in place
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
        self._shadow = named(config.shadow.pool) if config.shadow else None

    def pools(self) -> list[Pool]:
        """In the order to ask them: a canary if one is drawn, the main pool, the fallbacks."""
        order = [self._main, *self._fallback]
        if self._canaries:
            draw = self._rng.random()
            for pool, fraction in self._canaries:
                if draw < fraction:
                    return [pool, *(other for other in order if other is not pool)]
                draw -= fraction
        return order

    def shadow(self) -> Pool | None:
        """The pool that gets a copy of this request, if one is drawn."""
        if self._shadow is None or self.config.shadow is None:
            return None
        return self._shadow if self._rng.random() < self.config.shadow.fraction else None

    @property
    def context_length(self) -> int | None:
        """The shortest among the pools that may answer and say theirs."""
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
        rng: random.Random | None = None,
    ) -> None:
        """Raises ConfigError for a pool that does not exist, or a name that is given twice."""
        rng = rng or random.Random()
        self._routes = {name: Route(name, config, pools, rng) for name, config in models.items()}
        self._by_name = dict(self._routes)
        for route in self._routes.values():
            for alias in route.aliases:
                if alias in self._by_name:
                    raise ConfigError(f"models.{route.name}: the alias '{alias}' is taken")
                self._by_name[alias] = route

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Of the models, without their aliases."""
        return tuple(self._routes)

    def resolve(self, model: str, may_use: Callable[[Route], bool] = lambda route: True) -> Route:
        """Raises RequestError (404) for a name that is not served.

        It says which are, of those that the client `may_use`.
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

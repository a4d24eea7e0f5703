"""The sender of a request, and its rights."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from octet.errors import RequestError
from serve.access.rates import Charge, Rates
from serve.access.usage import Usage
from serve.config import KeyConfig

__all__ = ["ANONYMOUS", "Principal"]

_NO_HEADERS: dict[str, str] = {}


class Named(Protocol):
    """The part of a route that access control needs."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> Sequence[str]: ...

    @property
    def tier_aliases(self) -> Mapping[str, str]: ...


class Principal:
    """The sender of a request: a key, or `anonymous` if no key is needed."""

    __slots__ = ("_rates", "_usage", "config", "expires", "name", "priority", "weight")

    def __init__(
        self,
        config: KeyConfig | None = None,
        rates: Rates | None = None,
        usage: Usage | None = None,
    ) -> None:
        self.config = config
        self.name = config.name if config else "anonymous"
        self.priority = config.priority if config else 0
        self.weight = config.weight if config else 1.0
        # Seconds since 1970.
        self.expires = config.expires.timestamp() if config and config.expires else None
        # A key without limits is not counted: nothing would read the counts.
        self._rates = rates if config and _is_limited(config) else None
        self._usage = usage

    def may_use(self, route: Named) -> bool:
        """Decides whether this key may use the model, under any of its names."""
        if self.config is None or self.config.models is None:
            return True
        allowed = self.config.models
        return any(name in allowed for name in (route.name, *route.aliases, *route.tier_aliases))

    def may_use_tier(self, route: Named, tier: str | None) -> bool:
        """Decides whether this key may use the model in `tier`; None stands for any of its pools.

        The right to a tier's alias is the right to that tier alone.
        """
        if self.config is None or self.config.models is None:
            return True
        allowed = self.config.models
        if route.name in allowed or any(alias in allowed for alias in route.aliases):
            return True
        return any(alias in allowed for alias, of in route.tier_aliases.items() if of == tier)

    def require_model(self, route: Named, tier: str | None = None) -> None:
        """Raises RequestError (403) if this key may not use the model in this tier."""
        if self.may_use_tier(route, tier):
            return
        allowed = self.config.models if self.config else None
        which = f" in the tier '{tier}'" if tier is not None and self.may_use(route) else ""
        raise RequestError(
            f"API key '{self.name}' may not use the model '{route.name}'{which}; "
            f"it may use: {', '.join(allowed or ()) or 'none'}",
            status=403,
            param="model",
            code="model_not_allowed",
            kind="permission_error",
        )

    def charge(self, tokens: int) -> Charge | None:
        """Counts a request against the key's limits; returns None if it has none.

        Raises RequestError (429; 400 if the request can never fit a limit).
        """
        if self._rates is None or self.config is None or self._usage is None:
            return None
        return self._rates.charge(self.config, self._usage, tokens)

    def headers(self) -> dict[str, str]:
        """Returns OpenAI's `x-ratelimit-*` for an answer of any status; empty without limits."""
        if self._rates is None or self.config is None:
            return _NO_HEADERS
        return self._rates.headers(self.config)


def _is_limited(key: KeyConfig) -> bool:
    limits = (
        *(key.requests_per_minute, key.tokens_per_minute),
        *(key.tokens_per_day, key.max_in_flight),
    )
    return any(limit is not None for limit in limits)


ANONYMOUS = Principal()

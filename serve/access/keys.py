"""API keys, and what the sender of a request may do.

Only the SHA-256 of a key is stored, and all of it is compared in constant time.
"""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable

from octet.errors import RequestError
from serve.access.rates import Charge, Rates
from serve.access.shared import SharedLimits
from serve.access.usage import Usage
from serve.config import Access, KeyConfig
from serve.routing.route import Route

__all__ = ["ANONYMOUS", "Keys", "Principal", "authorization_in"]

_NO_HEADERS: dict[str, str] = {}


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
        self._rates = rates if config and config.limited else None
        self._usage = usage

    @property
    def private(self) -> bool:
        """Returns whether its requests must not be copied."""
        return self.config is not None and self.config.private

    def may_use(self, route: Route) -> bool:
        """Decides whether this key may use the model, under any of its names."""
        if self.config is None or self.config.models is None:
            return True
        allowed = self.config.models
        return any(name in allowed for name in (route.name, *route.aliases, *route.tier_aliases))

    def may_use_tier(self, route: Route, tier: str | None) -> bool:
        """Decides whether this key may use the model in `tier`; None stands for any of its pools.

        The right to a tier's alias is the right to that tier alone.
        """
        if self.config is None or self.config.models is None:
            return True
        allowed = self.config.models
        if route.name in allowed or any(alias in allowed for alias in route.aliases):
            return True
        return any(alias in allowed for alias, of in route.tier_aliases.items() if of == tier)

    def require_model(self, route: Route, tier: str | None = None) -> None:
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

    async def charge(self, tokens: int) -> Charge | None:
        """Counts a request against the key's limits; returns None if it has none.

        Raises RequestError (429; 400 if the request can never fit a limit; 503 if the limits are
        shared and cannot be read).
        """
        if self._rates is None or self.config is None or self._usage is None:
            return None
        return await self._rates.take(self.config, self._usage, tokens)

    def headers(self) -> dict[str, str]:
        """Returns OpenAI's `x-ratelimit-*` for an answer of any status; empty without limits."""
        if self._rates is None or self.config is None:
            return _NO_HEADERS
        return self._rates.headers(self.config)


ANONYMOUS = Principal()


_NOBODY = "0" * 64  # compared with the digest of an unknown key


class Keys:
    """The API keys, by their digest."""

    def __init__(
        self,
        keys: Iterable[KeyConfig] = (),
        *,
        required: bool = False,
        usage: Usage | None = None,
        shared: SharedLimits | None = None,
        before: "Keys | None" = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Keys whose names were also in `before` keep what they have spent.

        The configuration ensures that names and digests are unique. A key is needed if there are
        any, or if `required`.
        """
        self.usage = shared.usage if shared else usage or Usage(wall=wall)
        self.shared = shared
        self._wall = wall
        self._rates: dict[str, Rates] = {}
        self._by_digest: dict[str, tuple[str, Principal]] = {}
        for key in keys:
            rates = before._rates.get(key.name) if before else None
            if shared is not None and key.limited:
                rates = shared.rates(key)
            self._rates[key.name] = rates = rates or Rates(clock)
            self._by_digest[key.sha256] = key.sha256, Principal(key, rates, self.usage)
        self.required = required or bool(self._by_digest)

    @classmethod
    def from_config(cls, access: Access, before: "Keys | None" = None) -> "Keys":
        """Returns the keys of a loaded configuration; `before`, at a reload, is not changed."""
        usage = before.usage if before else None
        shared = before.shared if before else None
        if shared is None and access.shared is not None:
            shared = SharedLimits(access.shared)
        if shared is None and (usage is None or usage.path != access.usage_file):
            usage = Usage(access.usage_file, before=usage)
        required = access.keys_file is not None  # an empty file must not give access to all
        return cls(access.keys, required=required, usage=usage, shared=shared, before=before)

    def authenticate(self, authorization: bytes | None) -> Principal:
        """Returns the principal whose key the header `Authorization: Bearer ...` holds.

        Raises RequestError (401, sent with `WWW-Authenticate: Bearer`) if a key is needed and there
        is none, or it is unknown or has expired.
        """
        if not self.required:
            return ANONYMOUS
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise _unauthorized("no API key was sent: use the header 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(key.strip()).hexdigest()
        known, principal = self._by_digest.get(digest, (_NOBODY, None))
        if not hmac.compare_digest(known, digest) or principal is None:
            raise _unauthorized("the API key is not one of this server's")
        if principal.expires is not None and self._wall() >= principal.expires:
            raise _unauthorized(f"the API key '{principal.name}' has expired")
        return principal

    def in_use(self) -> None:
        """Forgets the shared rates of keys that are gone: these keys have replaced all others."""
        if self.shared is not None:
            self.shared.retain(self._rates)

    def close(self) -> None:
        """Writes what the keys have spent."""
        self.usage.write()


def authorization_in(
    fields: Iterable[tuple[bytes, bytes]], *, x_api_key: bool = False
) -> bytes | None:
    """Returns the value of the header `Authorization`; None if it was not sent.

    With `x_api_key`, Anthropic's header `X-Api-Key: KEY` stands for `Authorization: Bearer KEY`.
    Raises RequestError (400) for two: a proxy before the gateway may have checked the other one.
    """
    found = []
    for name, value in fields:
        if name == b"authorization":
            found.append(value)
        elif x_api_key and name == b"x-api-key":
            found.append(b"Bearer " + value)
    if len(found) > 1:
        message = "the header Authorization is there twice: send one"
        if x_api_key:
            message = "more than one API key was sent: send either Authorization or X-Api-Key"
        raise RequestError(message, code="invalid_authorization")
    return found[0] if found else None


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, status=401, code="invalid_api_key", kind="authentication_error")

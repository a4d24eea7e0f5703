"""API keys: only their SHA-256 is known here, and all of it is compared in constant time."""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC
from pathlib import Path
from typing import Protocol

import yaml
from pydantic import TypeAdapter, ValidationError

from octet.errors import ConfigError, RequestError
from serve.access.rates import Charge, Rates
from serve.access.usage import Usage
from serve.config import Access, KeyConfig

__all__ = ["ANONYMOUS", "Keys", "Principal"]

_NOBODY = "0" * 64  # what a key that nobody has is compared with
_ENTRIES = TypeAdapter(tuple[KeyConfig, ...])
_NO_HEADERS: dict[str, str] = {}


class Named(Protocol):
    """What is needed of a route."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> Sequence[str]: ...


class Principal:
    """Who asks: a key, or `anonymous` where no key is needed."""

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
        self.expires = _expiry(config)
        # A key without limits is not counted: nothing would ask for the figures.
        self._rates = rates if config and _is_limited(config) else None
        self._usage = usage

    def require_model(self, route: Named) -> None:
        """Raises RequestError (403) if this key may not use the model, under any of its names."""
        if self.config is None or self.config.models is None:
            return
        allowed = self.config.models
        if route.name in allowed or any(alias in allowed for alias in route.aliases):
            return
        raise RequestError(
            f"API key '{self.name}' may not use the model '{route.name}'; "
            f"it may use: {', '.join(allowed) or 'none'}",
            status=403,
            param="model",
            code="model_not_allowed",
            kind="permission_error",
        )

    def charge(self, tokens: int) -> Charge | None:
        """Counts a request on the key's limits; None if it has none. Raises RequestError (429)."""
        if self._rates is None or self.config is None or self._usage is None:
            return None
        return self._rates.charge(self.config, self._usage, tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*`, for an answer of any status; empty without limits."""
        if self._rates is None or self.config is None:
            return _NO_HEADERS
        return self._rates.headers(self.config)


class Keys:
    """The keys by their digest."""

    def __init__(
        self,
        keys: Iterable[KeyConfig] = (),
        *,
        usage: Usage | None = None,
        before: "Keys | None" = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Keys that were also in `before`, by name, go on with what they have spent.

        Raises ConfigError for a name or a digest that is there twice.
        """
        self.usage = usage or Usage(wall=wall)
        self._wall = wall
        self._rates: dict[str, Rates] = {}
        self._by_digest: dict[str, Principal] = {}
        for key in keys:
            if key.name in self._rates:
                raise ConfigError(f"access.keys: the name '{key.name}' is there twice")
            if key.sha256 in self._by_digest:
                other = self._by_digest[key.sha256].name
                raise ConfigError(f"access.keys: '{key.name}' and '{other}' are the same key")
            rates = before._rates.get(key.name) if before else None
            self._rates[key.name] = rates = rates or Rates(clock)
            self._by_digest[key.sha256] = Principal(key, rates, self.usage)

    @classmethod
    def from_config(cls, access: Access, before: "Keys | None" = None) -> "Keys":
        """The keys of the configuration and of its keys file; `before` at a reload.

        Raises ConfigError for a keys file that cannot be read, and as the constructor does.
        """
        entries = access.keys + (_read(access.keys_file) if access.keys_file else ())
        if before is not None and before.usage.path == access.usage_file:
            usage = before.usage
        else:
            usage = Usage(access.usage_file)
        return cls(entries, usage=usage, before=before)

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._by_digest)

    def authenticate(self, authorization: bytes | None) -> Principal:
        """Whose key the header `Authorization: Bearer ...` holds.

        Raises RequestError (401, which goes out with `WWW-Authenticate: Bearer`) if a key is needed
        and there is none, or one that is unknown or has expired.
        """
        if not self._by_digest:
            return ANONYMOUS
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise _unauthorized("no API key was sent: use the header 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(key.strip()).hexdigest()
        principal = self._by_digest.get(digest)
        known = (
            _NOBODY if principal is None or principal.config is None else principal.config.sha256
        )
        if not hmac.compare_digest(known, digest) or principal is None:
            raise _unauthorized("the API key is not one of this server's")
        if principal.expires is not None and self._wall() >= principal.expires:
            raise _unauthorized(f"the API key '{principal.name}' has expired")
        return principal

    def close(self) -> None:
        """Writes what the keys have spent."""
        self.usage.write()


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, status=401, code="invalid_api_key", kind="authentication_error")


def _is_limited(key: KeyConfig) -> bool:
    limits = (
        *(key.requests_per_minute, key.tokens_per_minute),
        *(key.tokens_per_day, key.max_in_flight),
    )
    return any(limit is not None for limit in limits)


def _expiry(key: KeyConfig | None) -> float | None:
    """Seconds since 1970; a time without a zone is UTC."""
    if key is None or key.expires is None:
        return None
    return (key.expires if key.expires.tzinfo else key.expires.replace(tzinfo=UTC)).timestamp()


def _read(path: Path) -> tuple[KeyConfig, ...]:
    """The YAML list in `path`. Raises ConfigError with one line."""
    try:
        data = yaml.safe_load(path.read_text())
        return _ENTRIES.validate_python(data or ())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"keys file {path}: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"keys file {path}: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        message = first["msg"].replace("Input should", "should")
        raise ConfigError(f"keys file {path}: {where}: {message}") from None


ANONYMOUS = Principal()

"""API keys: only their SHA-256 is stored, and all of it is compared in constant time."""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable

from octet.errors import RequestError
from serve.access.principal import ANONYMOUS, Principal
from serve.access.rates import Rates
from serve.access.usage import Usage
from serve.config import Access, KeyConfig

__all__ = ["ANONYMOUS", "Keys", "Principal"]

_NOBODY = "0" * 64  # compared with the digest of an unknown key


class Keys:
    """The API keys, by their digest."""

    def __init__(
        self,
        keys: Iterable[KeyConfig] = (),
        *,
        required: bool = False,
        usage: Usage | None = None,
        before: "Keys | None" = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Keys whose names were also in `before` keep what they have spent.

        The configuration ensures that names and digests are unique. A key is needed if there are
        any, or if `required`.
        """
        self.usage = usage or Usage(wall=wall)
        self._wall = wall
        self._rates: dict[str, Rates] = {}
        self._by_digest: dict[str, tuple[str, Principal]] = {}
        for key in keys:
            rates = before._rates.get(key.name) if before else None
            self._rates[key.name] = rates = rates or Rates(clock)
            self._by_digest[key.sha256] = key.sha256, Principal(key, rates, self.usage)
        self.required = required or bool(self._by_digest)

    @classmethod
    def from_config(cls, access: Access, before: "Keys | None" = None) -> "Keys":
        """Returns the keys of a loaded configuration; `before`, at a reload, is not changed."""
        usage = before.usage if before else None
        if usage is None or usage.path != access.usage_file:
            usage = Usage(access.usage_file, before=usage)
        required = access.keys_file is not None  # an empty file must not give access to all
        return cls(access.keys, required=required, usage=usage, before=before)

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

    def close(self) -> None:
        """Writes what the keys have spent."""
        self.usage.write()


def _unauthorized(message: str) -> RequestError:
    return RequestError(message, status=401, code="invalid_api_key", kind="authentication_error")

"""Shares one key's limits with other gateways: by leases, or by a fixed part without the store.

A lease is a number of requests and tokens that this process may begin within `LEASE_S`, without
another call. From when it is granted, the store counts all of it, as if it were used in the lease's
last moment; the next report replaces that by what was really used. So in no 60 seconds does a key
begin more than its limit, and a process that is killed keeps at most one lease from the others, for
as long.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from octet.errors import RequestError
from serve.access.rates import (
    Charge,
    Rates,
    over_quota,
    over_requests,
    over_tokens,
    too_many_in_flight,
)
from serve.access.usage import Usage
from serve.config import KeyConfig

__all__ = ["LEASE_S", "Reply", "SharedRates", "Store"]

LEASE_S = 2.0
LEASES = 256  # a lease is this part of a limit, or one request if that is more
AGAIN_S = 0.2  # how long a refusal is repeated without another call to the store
MINUTE_S = 60.0
NO_LIMIT = -1
REQUESTS, TOKENS, QUOTA, IN_FLIGHT = 1, 2, 3, 4  # verdicts; 0 is a lease


class Reply(NamedTuple):
    """The store's answer to a report; limits.lua returns these numbers."""

    now: int  # ms since 1970
    verdict: int  # 0: granted; else the limit that is reached
    wait_ms: int
    requests: int
    tokens: int
    others_requests: int  # in the last minute
    others_tokens: int
    others_day: int  # tokens, spent and held
    others_flight: int
    others_alive: int


class Store(Protocol):
    """The store of shared limits as a key sees it."""

    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def up(self) -> bool: ...
    @property
    def when_lost(self) -> Literal["refuse", "share"]: ...
    @property
    def replicas(self) -> int: ...

    async def ask(self, rates: "SharedRates", tokens: int) -> Reply | None:
        """Reports, and requests a lease that lets a request of `tokens` begin.

        Returns None if the store cannot be used.
        """

    def changed(self, rates: "SharedRates") -> None: ...
    def decided_alone(self) -> None: ...


@dataclass
class _Known:
    """The use of a key by the other gateways, as of the last reply."""

    reply: Reply
    at: float  # on this process's clock, before the report was sent
    day: int
    own_day: int  # tokens that this process had reported, spent and held


class _Refusal(NamedTuple):
    """A refusal by the store: at `at`, for requests of `tokens` or more."""

    at: float
    verdict: int
    tokens: int
    error: Callable[[float], RequestError]  # for a request so many seconds later


class SharedRates(Rates):
    """The spending of one key by this process, and its lease."""

    __slots__ = (
        *("_known", "_refusal", "_sent", "_slots", "_store", "_turn", "_used", "key"),
        *("lease_requests", "lease_tokens", "lease_until", "reported_at", "usage"),
    )

    def __init__(self, key: KeyConfig, usage: Usage, store: Store) -> None:
        super().__init__(store.clock)
        self.key = key
        self.usage = usage
        self.lease_requests = 0
        self.lease_tokens = 0
        self.lease_until = 0.0
        self.reported_at = 0.0
        self._slots = 0  # requests in flight that the store knows of
        self._used = False  # since the last report: then the next one renews the lease
        self._store = store
        self._turn = asyncio.Lock()
        self._sent = (0.0, 0, 0)
        self._known: _Known | None = None
        self._refusal: _Refusal | None = None

    @property
    def busy(self) -> bool:
        """True while a request waits for a lease: it reports, too."""
        return self._turn.locked()

    @property
    def held(self) -> bool:
        """True while requests are in flight, which the store forgets unless they are reported."""
        return bool(self.in_flight)

    async def take(self, key: KeyConfig, usage: Usage, tokens: int) -> Charge:
        """Charges a request, if need be after waiting for a lease. Raises as `charge` does.

        If the store cannot be reached, raises RequestError (503), or charges this process's share.
        """
        self.key, self.usage = key, usage
        self.require_possible(key, tokens)
        async with self._turn:  # one call at a time: the others may find enough in its lease
            if self._store.up and not self._covers(key, tokens):
                self._refuse_again(tokens)
                reply = await self._store.ask(self, tokens)
                if reply is None:
                    return self._alone(key, usage, tokens)
                if reply.verdict:
                    raise self._refused(reply, tokens)
            if not self._store.up:
                return self._alone(key, usage, tokens)
            self._used = True
            self.lease_requests -= 1
            self.lease_tokens -= tokens
            self.changed()
            return self.begin(key, usage, tokens)

    def changed(self) -> None:
        if self._refusal is not None and self._refusal.verdict == IN_FLIGHT:
            self._refusal = None
        self._store.changed(self)

    def report(self, tokens: int | None, *, renew: bool) -> list[int | str]:
        """Returns the arguments of the script from the fifth on, and gives up the lease.

        `tokens` are those of a request that waits for one; None if none does. With `renew`, takes a
        new lease if the old one was used.
        """
        now, key = self.clock(), self.key
        wanted = tokens is not None
        renew = renew and (wanted or self._used)
        self._used = False
        self.lease_requests = self.lease_tokens = 0
        self.lease_until = 0.0
        self._slots = self.in_flight
        self.reported_at = now
        day, spent = self.usage.day, self.usage.spent(key.name)
        self._sent = (now, day, spent + self.reserved)
        limits = (key.requests_per_minute, key.tokens_per_minute, key.tokens_per_day)
        more = [limit // LEASES for limit in limits[1:] if limit is not None]
        return [
            *(NO_LIMIT if limit is None else limit for limit in (*limits, key.max_in_flight)),
            *(day, spent, self.reserved, self.in_flight),
            *(int(wanted), tokens or 0),
            *((limits[0] or 0) // LEASES if renew else 0, min(more, default=0) if renew else 0),
        ]

    def history(self) -> str:
        """Returns `age:requests:tokens` of each second used, in ms, of the last minute.

        The age is that of the second's end, so that the store counts each use at least a minute.
        """
        now = self.clock()
        requests, tokens = self.requests.slots(now), self.tokens.slots(now)
        return " ".join(
            f"{max(round((now - second - 1) * 1000), 0)}"
            f":{max(requests.get(second, 0), 0)}:{max(tokens.get(second, 0), 0)}"
            for second in sorted(requests.keys() | tokens.keys())
        )

    def granted(self, reply: Reply, *, wanted: bool) -> None:
        """Applies the reply to the last report."""
        sent, day, own_day = self._sent
        self._known = _Known(reply, sent, day, own_day)
        if not reply.verdict:
            self.lease_requests, self.lease_tokens = reply.requests, reply.tokens
            self.lease_until = sent + LEASE_S
            self._slots += wanted
            if reply.requests or reply.tokens:
                self._store.changed(self)  # the next report renews it, or gives it back

    def headers(self, key: KeyConfig) -> dict[str, str]:
        """Returns OpenAI's `x-ratelimit-*` headers, with what other gateways used."""
        found = super().headers(key)
        known = self._fresh()
        if known is None:
            return found
        for what, used, limit, others in (
            ("requests", self.requests.used, key.requests_per_minute, known.reply.others_requests),
            ("tokens", self.tokens.used, key.tokens_per_minute, known.reply.others_tokens),
        ):
            if limit is not None:
                found[f"x-ratelimit-remaining-{what}"] = str(max(limit - used - others, 0))
        return found

    def _covers(self, key: KeyConfig, tokens: int) -> bool:
        """Decides whether the lease allows a request of `tokens`."""
        counted = key.tokens_per_minute is not None or key.tokens_per_day is not None
        return (
            self.clock() < self.lease_until
            and (key.requests_per_minute is None or self.lease_requests >= 1)
            and (not counted or self.lease_tokens >= tokens)
            and (key.max_in_flight is None or self.in_flight < self._slots)
        )

    def _refused(self, reply: Reply, tokens: int) -> RequestError:
        """Returns the error of a refusal, which is repeated for a moment to requests as large."""
        key, usage, now = self.key, self.usage, self.clock()
        wait_s = reply.wait_ms / 1000
        in_flight = reply.others_flight + self.in_flight
        used = reply.others_tokens + self.tokens.used
        left = (key.tokens_per_day or 0) - reply.others_day - usage.spent(key.name) - self.reserved

        def error(later_s: float) -> RequestError:
            if reply.verdict == REQUESTS:
                return over_requests(key, wait_s - later_s)
            if reply.verdict == TOKENS:
                return over_tokens(key, used, tokens, wait_s - later_s)
            if reply.verdict == QUOTA:
                return over_quota(key, left, tokens, usage.reset_s())
            return too_many_in_flight(key, in_flight, self.duration_s)

        smallest = tokens if reply.verdict in (TOKENS, QUOTA) else 0
        self._refusal = _Refusal(now, reply.verdict, smallest, error)
        return error(0.0)

    def _refuse_again(self, tokens: int) -> None:
        """Raises the last refusal again if it is recent, and this request is as large."""
        refusal = self._refusal
        if refusal is not None:
            later_s = self.clock() - refusal.at
            if later_s < AGAIN_S and tokens >= refusal.tokens:
                raise refusal.error(later_s)

    def _alone(self, key: KeyConfig, usage: Usage, tokens: int) -> Charge:
        """Charges a request while the store cannot be reached, as `when_lost` says."""
        self._store.decided_alone()
        if self._store.when_lost == "refuse":
            raise RequestError(
                f"API key '{key.name}': its limits are shared by several gateways, and the store "
                "that counts them cannot be reached",
                status=503,
                code="shared_limits_unavailable",
                kind="service_unavailable_error",
                retry_after_s=1.0,
            )
        try:
            self.require_left(self._share(key, usage), usage, tokens)
        except RequestError as error:
            wait_s = min(error.retry_after_s or 1.0, MINUTE_S)
            if error.code == "insufficient_quota":
                wait_s = error.retry_after_s or wait_s
            raise RequestError(
                f"{error}; this is one gateway's share, while the shared count cannot be reached",
                status=error.status,
                code=error.code,
                kind=error.kind,
                retry_after_s=wait_s,
            ) from None
        self.changed()
        return self.begin(key, usage, tokens)

    def _share(self, key: KeyConfig, usage: Usage) -> KeyConfig:
        """Returns this process's share of the limits, less what others used in the last minute."""
        of = self._store.replicas
        known, recent = self._known, self._fresh()
        others = (recent.reply.others_requests, recent.reply.others_tokens) if recent else (0, 0)
        shares: dict[str, int | None] = {
            name: None if limit is None else min(limit // of or least, limit - used)
            for name, limit, used, least in (
                ("requests_per_minute", key.requests_per_minute, others[0], 1),
                ("tokens_per_minute", key.tokens_per_minute, others[1], 0),
                ("max_in_flight", key.max_in_flight, 0, 1),
            )
        }
        if key.tokens_per_day is not None:  # of what was left when all were last counted
            own, all_ = 0, 0
            if known is not None and known.day == usage.day:
                own, all_ = known.own_day, known.own_day + known.reply.others_day
            shares["tokens_per_day"] = own + max(key.tokens_per_day - all_, 0) // of
        return key.model_copy(update=shares)

    def _fresh(self) -> _Known | None:
        known = self._known
        return known if known is not None and self.clock() - known.at < MINUTE_S else None

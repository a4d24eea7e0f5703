"""Limits that several gateways share through Redis: the connection, and what happens without it.

One task makes all calls, many in one round trip: requests that wait for a lease, and reports of
what has changed. Each calls the script limits.lua. A report holds all that this process has used,
so a Redis that lost its data, or came back with old data, has it again after one report of each
gateway. Leases are granted only `SETTLE_S` after that.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from octet.errors import ConfigError
from serve.access.leases import LEASE_S, Reply, SharedRates
from serve.access.usage import Usage
from serve.config import KeyConfig, SharedConfig

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["SharedLimits"]

TIMEOUT_S = 1.0  # of a round trip
BEAT_S = 0.25  # between reports of a key that changes
HOLD_S = 10.0  # until what a gateway holds lapses without a report: it was killed, or cut off
RENEW_S = 3.0  # between reports of a key that does not change, but has requests in flight
PRESENCE_S = 1.0  # between reports that this gateway runs
RETRY_S = 0.5
SETTLE_S = 3.0  # after a loss, or Redis's start: all gateways notice it and report again
BATCH = 256  # reports in one round trip

_LIMITLESS = (-1, -1, -1, -1)
_log = logging.getLogger(__name__)


class _Lost(Exception):
    """Why Redis cannot be used, in words; `final`: it will not change without the operator."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class SharedLimits:
    """The limits of all keys in one Redis. `start` it before the first request."""

    def __init__(
        self,
        config: SharedConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError if the library is missing or the URL is not one of Redis."""
        self.config = config
        self.clock = clock
        self.state: Literal["shared", "settling", "lost"] = "lost"
        self.reason = "is not connected yet"
        self.gateways = 0  # that report to this Redis, this one included
        self.losses = 0
        self.alone = 0  # number of requests that were decided without Redis
        self.address = _address(config.url)
        self._wall = wall
        self._offset: float | None = None  # of the server's time from `clock`
        self.usage = Usage(wall=self._server_time)
        self._id = secrets.token_hex(8)
        self._script = files(__package__).joinpath("limits.lua").read_text(encoding="utf-8")
        self._rates: dict[str, SharedRates] = {}
        self._changed: set[SharedRates] = set()
        self._asks: dict[SharedRates, tuple[int, asyncio.Future[Reply | None]]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._settled_at = 0.0
        self._present_at = -PRESENCE_S
        self._renewed_at = 0.0
        self._connections = 0
        self._sha = ""
        self._redis = self._client()

    @property
    def up(self) -> bool:
        """True while leases are granted; otherwise `when_lost` applies."""
        return self.state == "shared"

    @property
    def when_lost(self) -> Literal["refuse", "share"]:
        return self.config.when_lost

    @property
    def replicas(self) -> int:
        return self.config.replicas or 1

    def rates(self, key: KeyConfig) -> SharedRates:
        """Returns the spending of the key with this name; it stays the same across reloads."""
        rates = self._rates.get(key.name)
        if rates is None:
            rates = self._rates[key.name] = SharedRates(key, self.usage, self)
        return rates

    def retain(self, names: Collection[str]) -> None:
        """Forgets keys that are not in `names`, except those used in the last minute."""
        self._rates = {
            name: rates
            for name, rates in self._rates.items()
            if name in names or rates.held or rates.history()
        }

    async def start(self) -> None:
        """Connects. If Redis cannot be reached, goes on trying, and `when_lost` applies.

        Raises ConfigError for what only the operator can change: a wrong password, or keys of
        another application.
        """
        try:
            await self._call([(None, None)], HOLD_S)  # before anything else is written
            await self._exchange(everything=True)
            young_s = SETTLE_S - await self._uptime_s()
        except _Lost as lost:
            if lost.final:
                await self.close()
                raise ConfigError(f"access.shared: Redis at {self.address} {lost}") from None
            self._lose(str(lost), first=True)
        else:
            self.state, self.reason = "shared", ""
            if young_s > 0:  # it may have been emptied, and gateways that run may not know it yet
                self._settle("has just started: all gateways report first", young_s)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Gives back what this gateway holds, and disconnects; safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self.state != "lost":
                with contextlib.suppress(_Lost):
                    await self._exchange(everything=True, keep=False)
        self.state = "lost"
        self._drop_asks()
        with contextlib.suppress(Exception):
            await self._redis.aclose()

    async def ask(self, rates: SharedRates, tokens: int) -> Reply | None:
        """Reports `rates`, and requests a lease; see `Store`."""
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._asks[rates] = tokens, future
        self._wake.set()
        return await future

    def changed(self, rates: SharedRates) -> None:
        """Reports `rates` with the next round."""
        self._changed.add(rates)

    def decided_alone(self) -> None:
        self.alone += 1

    def status(self, *, addresses: bool = False) -> dict[str, Any]:
        """Returns the state; Redis's address and the reason of a loss only with `addresses`."""
        found: dict[str, Any] = {
            "state": self.state,
            "when_lost": self.when_lost,
            "gateways": self.gateways,
            "losses": self.losses,
            "requests_decided_alone": self.alone,
        }
        if addresses:
            found |= {"redis": self.address, "reason": self.reason or None}
        return found

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self.state == "lost" else BEAT_S):
                    await self._wake.wait()
            self._wake.clear()
            lost = self.state == "lost"
            try:
                connections = self._connections
                await self._exchange(everything=lost)
                if not lost and self._connections != connections:
                    raise _Lost("was restarted, or the connection to it ended")
            except _Lost as error:
                self._lose(str(error))
            except Exception:
                _log.exception("shared limits: unexpected error")
                self._lose("could not be used: see the log")
            else:
                self._found(lost)

    def _found(self, lost: bool) -> None:
        if lost:
            self._settle("was lost: all gateways report again", SETTLE_S)
            _log.info("shared limits: Redis at %s is back", self.address)
        elif self.state == "settling" and self.clock() >= self._settled_at:
            self.state, self.reason = "shared", ""
            _log.info("shared limits: counted by Redis at %s from now on", self.address)

    def _settle(self, reason: str, seconds: float) -> None:
        self.state, self.reason = "settling", reason
        self._settled_at = self.clock() + seconds

    def _lose(self, reason: str, *, first: bool = False) -> None:
        if self.state != "lost":
            self.losses += 1
        if self.state != "lost" or first or reason != self.reason:
            gets = "are refused"
            if self.when_lost == "share":
                gets = f"get 1/{self.replicas} of their limits from each gateway"
            line = "shared limits: Redis at %s %s; until it is back, keys with limits %s"
            _log.warning(line, self.address, reason, gets)
        self.state, self.reason = "lost", reason
        self._drop_asks()

    def _drop_asks(self) -> None:
        asks, self._asks = self._asks, {}
        for _, future in asks.values():
            if not future.done():
                future.set_result(None)

    async def _exchange(self, *, everything: bool = False, keep: bool = True) -> None:
        """Makes the calls that are due. Raises _Lost if one fails.

        Without `keep`, what this gateway holds lapses at once.
        """
        now = self.clock()
        asks, self._asks = self._asks, {}
        try:
            due = self._due(now, set(asks), everything)
            present = everything or now - self._present_at >= PRESENCE_S
            calls: list[tuple[SharedRates | None, int | None]] = []
            if present:
                calls.append((None, None))
            calls += [(rates, tokens) for rates, (tokens, _) in asks.items()]
            calls += [(rates, None) for rates in due]
            for at in range(0, len(calls), BATCH):
                batch = calls[at : at + BATCH]
                for (rates, tokens), reply in zip(
                    batch, await self._call(batch, HOLD_S if keep else 0.0), strict=True
                ):
                    if rates is None:
                        self._record_gateways(reply)
                        continue
                    rates.granted(reply, wanted=tokens is not None)
                    if rates in asks and not (future := asks[rates][1]).done():
                        future.set_result(reply)
            if present:
                self._present_at = now
        finally:
            for _, future in asks.values():
                if not future.done():
                    future.set_result(None)

    def _due(self, now: float, asking: set[SharedRates], everything: bool) -> list[SharedRates]:
        """Returns the keys to report now, without those that wait for a lease."""
        due = set(self._rates.values()) if everything else set()
        due |= {
            rates for rates in self._changed if now - rates.reported_at >= BEAT_S and not rates.busy
        }
        if now - self._renewed_at >= RENEW_S:
            self._renewed_at = now
            due |= {rates for rates in self._rates.values() if rates.held and not rates.busy}
        due -= asking
        self._changed -= due | asking
        return list(due)

    def _record_gateways(self, reply: Reply) -> None:
        """Records the number of gateways, and warns if there are more than configured."""
        before, self.gateways = self.gateways, reply.others_alive + 1
        if self.when_lost == "share" and before <= self.replicas < self.gateways:
            _log.warning(
                "shared limits: %d gateways report to Redis at %s, but access.shared.replicas is "
                "%d: without Redis, their shares would be more than the limits",
                *(self.gateways, self.address, self.replicas),
            )

    async def _call(
        self, batch: list[tuple[SharedRates | None, int | None]], keep_s: float
    ) -> list[Reply]:
        """Returns the script's replies to these reports. Raises _Lost."""
        from redis.exceptions import RedisError

        sent = self.clock()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if self.state == "lost" or not self._sha:
                    self._sha = await self._redis.script_load(self._script)
                pipeline = self._redis.pipeline(transaction=False)
                for rates, tokens in batch:
                    pipeline.evalsha(self._sha, 2, *self._arguments(rates, tokens, keep_s))
                found = await pipeline.execute(raise_on_error=False)
            for reply in found:
                if isinstance(reply, Exception):
                    raise reply
        except (RedisError, OSError, TimeoutError) as error:
            raise _lost(error) from None
        replies = [Reply(*map(int, reply)) for reply in found]
        first = self._offset is None
        self._offset = replies[-1].now / 1000 - sent
        if first:
            self.usage.correct_day()
        return replies

    def _arguments(self, rates: SharedRates | None, tokens: int | None, keep_s: float) -> list[Any]:
        times = [round(keep_s * 1000), round(LEASE_S * 1000)]
        prefix = self.config.prefix
        if rates is None:  # the gateway itself, as a key without limits
            keys = [f"{prefix}:gateways", f"{prefix}:quiet"]
            return [*keys, self._id, "", *times, *_LIMITLESS, -1, *([0] * 7)]
        keys = [f"{prefix}:limits:{rates.key.name}", f"{prefix}:quiet:{rates.key.name}"]
        history = rates.history()
        report = rates.report(tokens, renew=keep_s > 0)
        return [*keys, self._id, history, *times, *report]

    async def _uptime_s(self) -> float:
        """Returns how long Redis has been running; 0 if this user may not see it."""
        from redis.exceptions import RedisError

        with contextlib.suppress(RedisError, OSError, TimeoutError, KeyError):
            async with asyncio.timeout(TIMEOUT_S):
                return float((await self._redis.info("server"))["uptime_in_seconds"])
        return 0.0

    def _server_time(self) -> float:
        """Returns Redis's time in seconds since 1970; this machine's until Redis has answered."""
        return self._wall() if self._offset is None else self.clock() + self._offset

    def _client(self) -> "Redis":
        try:
            import redis.asyncio as redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"access.shared: needs {error.name}: pip install 'octet-llm[shared]'"
            ) from None

        async def connected(connection: Any) -> None:
            self._connections += 1
            await connection.on_connect()

        try:
            return redis.Redis.from_url(
                self.config.url,
                protocol=2,
                decode_responses=True,
                # `_call` limits the time. The client's own limit is a wait_for, which in Python
                # 3.11 can lose a cancellation: then `close` would wait for ever.
                socket_timeout=None,
                socket_connect_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),  # a report that failed is sent anew, not again
                redis_connect_func=connected,
                max_connections=1,
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"access.shared.url: {self.address}: {error}") from None


def _address(url: str) -> str:
    """Returns the URL's host, port and database or path, without name and password."""
    return url.partition("://")[2].partition("?")[0].rpartition("@")[2]


def _lost(error: Exception) -> _Lost:
    """Returns why Redis cannot be used, from what its client raised."""
    from redis import exceptions

    text = str(error)
    if isinstance(error, exceptions.OutOfMemoryError):
        return _Lost("is full (maxmemory)")
    if text.startswith("FOREIGN "):
        key = text.split()[1]
        return _Lost(
            f"has the key '{key}' of another application, or of another version of Octet: give "
            "access.shared a `prefix` of its own",
            final=True,
        )
    if "WRONGTYPE" in text:
        return _Lost(
            "has keys of another application under access.shared's `prefix`: give it another one",
            final=True,
        )
    if isinstance(error, exceptions.NoScriptError):
        return _Lost("was restarted")
    refused = isinstance(error, (exceptions.AuthenticationError, exceptions.NoPermissionError))
    if refused or "DB index" in text:
        return _Lost(f"refuses access.shared.url: {text}", final=True)
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return _Lost(f"does not answer within {TIMEOUT_S:g} s")
    if isinstance(error, exceptions.BusyLoadingError):
        return _Lost("is loading its data")
    if isinstance(error, (exceptions.ConnectionError, OSError)):
        return _Lost(f"cannot be reached: {text.rstrip('.')}")
    return _Lost(f"returned an error: {text}")

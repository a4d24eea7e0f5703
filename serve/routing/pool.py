"""The backends that stand in for each other, and which of them is asked next."""

import asyncio
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Self

from serve.backends.base import Backend
from serve.config import BackendConfig, PoolConfig
from serve.routing.ask import Ask
from serve.routing.budget import RetryBudget
from serve.routing.health import Watch
from serve.routing.make import make_backend
from serve.routing.member import Member
from serve.routing.policies import Policy, make_policy

__all__ = ["Pool"]

_log = logging.getLogger(__name__)
_FRESH_REPORTS = 3  # intervals of reading the load: older reports are not believed
_LONGEST_WAIT_S = 60.0  # that a client is told to wait


class Pool:
    def __init__(
        self,
        name: str,
        config: PoolConfig,
        members: Sequence[Member],
        *,
        model: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`model` is the public name for which backends are made later on."""
        self.name = name
        self.config = config
        self.model = model or name
        self.members: tuple[Member, ...] = ()
        self._clock = clock
        self._rng = rng or random.Random()
        self._policy = self._make_policy()
        # Nats from the reference as measured, the worst of those that serve; None: nothing was.
        self.measured_kl: float | None = None  # upper bound
        self.measured_kl_low: float | None = None  # the lower bound that goes with it
        self.artifact: str | None = None  # identity, in hex, of the manifest that it is proven by
        self.closing = False  # what its members fail from then on is not their fault
        self.active = 0  # requests that are in it, those that wait for a retry included
        self.budget = RetryBudget(config.retries, lambda: self.active, rng=self._rng)
        self._watches: dict[Member, Watch] = {}
        self._prepared: set[Member] = set()
        self._leaving: dict[Member, asyncio.Task[None]] = {}
        self._closing: dict[Member, asyncio.Task[None]] = {}
        self._available: list[Member] = []
        self._stale = True  # `_available` is to be made anew
        self._reopens_at = math.inf  # when a breaker's time passes, by the clock
        self._take(members)

    @classmethod
    def from_config(cls, name: str, config: PoolConfig, model: str) -> Self:
        """Raises OctetError if a backend's library or files are missing."""
        pool = cls(name, config, (), model=model)
        for entry in config.backends:
            pool.members = (*pool.members, pool._member(make_backend(model, entry), entry))
        pool._take(pool.members)
        return pool

    @classmethod
    def of(
        cls,
        name: str,
        backends: Sequence[Backend],
        config: PoolConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> Self:
        """A pool of backends that exist already."""
        pool = cls(name, config or PoolConfig(), (), clock=clock, rng=rng)
        for backend in backends:
            pool.members = (*pool.members, pool._member(backend))
        pool._take(pool.members)
        return pool

    @property
    def precision(self) -> str | None:
        return self.config.precision

    def choose(self, ask: Ask, tried: Collection[Member] = ()) -> Member | None:
        """The member to ask, none of `tried`; None if nobody is available."""
        if self._stale or self._clock() >= self._reopens_at:
            self._refresh()
        members = self._available
        if tried:
            members = [member for member in members if member not in tried]
        if not members:  # those whose connection is being looked into are better than nobody
            members = [member for member in self.members if member.doubtful and member not in tried]
            if not members:
                return None
        return self._policy.pick(members, ask)

    def retry_after_s(self) -> float:
        """When somebody may be available again; at least a moment, at most a minute."""
        waits = [self._wait_s(member) for member in self.members if not member.leaving]
        return min(waits, default=_LONGEST_WAIT_S)

    @property
    def ready(self) -> bool:
        """Whether a request sent now would find a member that serves, be it full or not."""
        return any(member.up for member in self.members)

    @property
    def capacity_tokens(self) -> int | None:
        """Of the KV caches of those that serve; who does not say is taken for the mean.

        Of all, if none serves: a limit must not vanish with the last backend. None if nobody says.
        """
        counted = [member for member in self.members if member.up] or self.members
        known = [m.capacity_tokens for m in counted if m.capacity_tokens is not None]
        return sum(known) * len(counted) // len(known) if known else None

    @property
    def context_length(self) -> int | None:
        """The shortest context among the backends that say theirs."""
        lengths = (member.backend.context_length for member in self.members)
        return min((length for length in lengths if length), default=None)

    async def start(self) -> None:
        """Starts every backend and has a first look at each, for `health.timeout_s` at most.

        Raises the OctetError of the first backend that can never work; one that cannot be reached
        is only unavailable.
        """
        started = await asyncio.gather(
            *(member.backend.start() for member in self.members), return_exceptions=True
        )
        for error in started:
            if isinstance(error, BaseException):
                await self.close()
                raise error
        await self._watch(self.members)

    async def close(self) -> None:
        """Lets go of every backend; those that are retiring do not finish. Twice is no mistake."""
        self.closing = True
        tasks = list(self._leaving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*map(self._close, [*self.members, *self._leaving, *self._prepared]))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def prepare(
        self, config: BackendConfig, origin: str = "config", *, model: str | None = None
    ) -> Member:
        """One more, made, started and looked at; nothing is given to it before `swap` takes it.

        `model` is the public name where it is about to change. Raises OctetError if it can never
        work.
        """
        member = self._member(make_backend(model or self.model, config), config, origin)
        self._prepared.add(member)
        try:
            await member.backend.start()
            await self._watch([member])
        except BaseException:
            await self.discard(member)
            raise
        return member

    async def discard(self, member: Member) -> None:
        """Lets go of one that was prepared and is not wanted after all."""
        self._prepared.discard(member)
        await self._close(member)
        del self._closing[member]

    def swap(self, config: PoolConfig, members: Sequence[Member]) -> None:
        """In one step: new settings, and these members.

        Those that stay keep their state. Those that are missing are given nothing more, and are
        closed when their last lease ends.
        """
        before, self.config = self.config, config
        if (before.routing, before.health) != (config.routing, config.health):
            self._policy = self._make_policy()
        self.budget.config = config.retries
        for member in self.members:
            if member not in members:
                member.leave()
                self._leaving[member] = asyncio.create_task(self._close_when_idle(member))
        for member in members:
            member.breaker.config = config.ejection
            if member in self._watches:
                self._watches[member].take(config.health)
        self._prepared.difference_update(members)
        self._take(members)

    @property
    def retiring(self) -> tuple[Member, ...]:
        """Those that are no members any more and finish what they have."""
        return tuple(self._leaving)

    def _member(
        self, backend: Backend, config: BackendConfig | None = None, origin: str = "config"
    ) -> Member:
        taken = {member.name for member in (*self.members, *self._leaving, *self._prepared)}
        taken.update(entry.name for entry in self.config.backends if entry.name)
        numbers = (f"{self.name}-{number}" for number in itertools.count(1))
        name = config.name if config else None
        name = name or next(free for free in numbers if free not in taken)
        ejection = self.config.ejection
        return Member(
            name, self.name, backend, config, origin=origin, ejection=ejection, clock=self._clock
        )

    def _take(self, members: Sequence[Member]) -> None:
        for member in members:
            member.changed = self._changed
            member.may_eject = partial(self._may_eject, member)
        self.members = tuple(members)
        self._policy.joined(self.members)
        self._changed()

    def _make_policy(self) -> Policy:
        fresh_s = _FRESH_REPORTS * self.config.health.load_interval_s
        return make_policy(self.config.routing, fresh_s, self._clock, self._rng)

    def _changed(self) -> None:
        self._stale = True

    def _refresh(self) -> None:
        self._available = [member for member in self.members if member.available]
        opened = (m.breaker.until for m in self.members if m.breaker.reopens_by_itself)
        self._reopens_at = min(opened, default=math.inf)
        self._stale = False

    def _may_eject(self, candidate: Member) -> bool:
        """For failures that may be the requests' fault: never the last that serves."""
        others = [m for m in self.members if m is not candidate and m.reachable and m.ready]
        ejected = sum(member.breaker.counted for member in others)
        allowed = max(1, math.floor(self.config.ejection.max_fraction * len(self.members) + 1e-9))
        return ejected < allowed and any(m.standing in ("in", "full") for m in others)

    def _wait_s(self, member: Member) -> float:
        health, now = self.config.health, self._clock()
        standing = member.standing
        if standing == "ejected":
            wait_s = member.breaker.until - now
        elif standing in ("unreachable", "not_ready"):
            # Who has been away for long will be away for about as long again (Lindy's law).
            since = now if member.out_since is None else member.out_since
            wait_s = max(now - since, health.reconnect_s)
        elif standing in ("full", "trial") and member.mean_lease_s is not None:
            wait_s = member.mean_lease_s / max(member.in_flight, 1)
        else:
            wait_s = 0.0
        return min(max(wait_s, 0.1), _LONGEST_WAIT_S)

    async def _watch(self, members: Sequence[Member]) -> None:
        watches = [Watch(m, self.config.health, self._clock, self._rng) for m in members]
        for member, watch in zip(members, watches, strict=True):
            self._watches[member] = watch
            watch.start()
        looks = [asyncio.ensure_future(watch.looked.wait()) for watch in watches]
        if looks:
            _, late = await asyncio.wait(looks, timeout=self.config.health.timeout_s)
            for look in late:
                look.cancel()

    async def _close_when_idle(self, member: Member) -> None:
        await member.idle.wait()
        await self._close(member)
        del self._leaving[member], self._closing[member]

    async def _close(self, member: Member) -> None:
        """Once, whoever asks for it and goes away meanwhile."""
        if member not in self._closing:
            self._closing[member] = asyncio.create_task(self._let_go(member))
        await asyncio.shield(self._closing[member])

    async def _let_go(self, member: Member) -> None:
        watch = self._watches.pop(member, None)
        if watch is not None:
            await watch.stop()
        try:
            await member.backend.close()
        except Exception:  # the others must be closed too
            _log.exception("%s/%s could not be closed", self.name, member.name)

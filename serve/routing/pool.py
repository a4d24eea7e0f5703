"""A pool of interchangeable backends, and the choice of the one that gets the next request."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Self

from serve.backends.base import Backend
from serve.backends.factory import make_backend
from serve.config import BackendConfig, PoolConfig
from serve.members.member import Member
from serve.proof.exam import Exams, directory_of
from serve.routing.ejection import (
    LONGEST_WAIT_S,
    may_eject,
    one_is_well,
    room,
    spare_the_last,
    wait_s,
)
from serve.routing.members import Closing, Watches
from serve.routing.policies import Ask, Policy, make_policy
from serve.routing.provers import Proven, Provers, examined, make_provers, proven_by
from serve.routing.retry_budget import RetryBudget

__all__ = ["FIRST_PROOF_S", "Pool"]

FIRST_PROOF_S = 10.0  # longest wait of a start for the first verdicts
_FRESH_REPORTS = 3  # load intervals; older load reports are ignored


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
        exams: Exams | None = None,
    ) -> None:
        """`model` is the public model name of backends that are added later."""
        self.name = name
        self.config = config
        self.model = model or name
        self.members: tuple[Member, ...] = ()
        self._clock = clock
        self._rng = rng or random.Random()
        self._policy = self._make_policy()
        self.closing = False  # once True, a failure is not the member's fault
        self.active = 0  # requests in the pool, including those waiting for a retry
        self.budget = RetryBudget(config.retries, lambda: self.active, rng=self._rng)
        self._exams = exams or Exams(config.proof)
        self._watches = Watches(clock, self._rng)
        self._prepared: set[Member] = set()
        self._gone = Closing(self._watches)
        self._available: list[Member] = []
        self._proven = Proven()
        self._stale = True  # `_available` and `_proven` must be recomputed
        self._moved = asyncio.Event()  # set at each change, to wake waiting requests
        self._reopens_at = math.inf  # when the next open breaker's time is over, by the clock
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
        exams: Exams | None = None,
    ) -> Self:
        """Makes a pool of existing backends."""
        pool = cls(name, config or PoolConfig(), (), clock=clock, rng=rng, exams=exams)
        for backend in backends:
            pool.members = (*pool.members, pool._member(backend))
        pool._take(pool.members)
        return pool

    @property
    def precision(self) -> str | None:
        return self.config.precision

    def choose(self, ask: Ask, tried: Collection[Member] = ()) -> Member | None:
        """Returns the member for the next request, none of `tried`; None if none is available."""
        if self._stale or self._clock() >= self._reopens_at:
            self._refresh()
        members = self._available
        if tried:
            members = [member for member in members if member not in tried]
        if not members:  # a backend whose connection is being checked is better than none
            members = [m for m in self.members if m.doubtful and not m.proof and m not in tried]
            if not members:
                return None
        return self._policy.pick(members, ask)

    async def looked_into(self, tried: Collection[Member] = ()) -> bool:
        """Waits for the check of doubtful members that need a proof; True if one is available now.

        They must still be in the incarnation that was proven. Members in `tried` are ignored.
        """
        doubtful = [m for m in self.members if m.doubtful and m.proof and m not in tried]
        return bool(doubtful) and await one_is_well(doubtful, self.config.health.timeout_s)

    async def room(self, tried: Collection[Member]) -> bool:
        """Waits for a free slot at a full member not in `tried`; returns whether there is one."""
        wait_s = self.config.admission.max_wait_s
        return await room(lambda: [m for m in self.members if m not in tried], self._moved, wait_s)

    def retry_after_s(self, of: Sequence[Member] | None = None) -> float:
        """Estimates the seconds until one of these, or of all, may be available: 0.1 to 60."""
        health, now = self.config.health, self._clock()
        waits = [wait_s(member, health, now) for member in of or self.members if not member.leaving]
        return min(waits, default=LONGEST_WAIT_S)

    @property
    def unproven(self) -> bool:
        """Returns whether a member serves, or will serve, without proof.

        True if no proof is required of a member, even if it is down or not yet discovered, or if
        one is admitted that returns no log-probabilities.
        """
        if self.config.discover and directory_of(self.config.proof, None) is None:
            return True
        return any(m.proof is None or m.proof.state == "admitted" for m in self.members)

    @property
    def proven(self) -> Proven:
        """Returns the measured divergence of the backends that serve now."""
        if self._stale or (self._reopens_at < math.inf and self._clock() >= self._reopens_at):
            self._refresh()
        return self._proven

    @property
    def ready(self) -> bool:
        """Returns whether some member serves now, even if it is full."""
        if self._stale:
            self._refresh()
        return any(member.up for member in self.members)

    @property
    def capacity_tokens(self) -> int | None:
        """Sums the KV-cache capacity, in tokens, of the members that serve.

        A member that reports no capacity counts as the mean of the others. If no member serves,
        all are counted: a limit must not vanish with the last backend. None if no member reports.
        """
        counted = [member for member in self.members if member.up] or self.members
        known = [m.capacity_tokens for m in counted if m.capacity_tokens is not None]
        return sum(known) * len(counted) // len(known) if known else None

    @property
    def context_length(self) -> int | None:
        """Returns the shortest context, in tokens, among the backends that report theirs."""
        lengths = (member.backend.context_length for member in self.members)
        return min((length for length in lengths if length), default=None)

    async def start(self, *, patience_s: float = FIRST_PROOF_S) -> None:
        """Starts every backend and waits for its first health check, `health.timeout_s` at most.

        Then waits for the first verdicts, `patience_s` at most. Raises the OctetError of the first
        backend that can never work; one that cannot be reached is only unavailable.
        """
        started = await asyncio.gather(
            *(member.backend.start() for member in self.members), return_exceptions=True
        )
        for error in started:
            if isinstance(error, BaseException):
                await self.close()
                raise error
        try:
            provers = await self._provers(self.members, self._exams)
        except BaseException:
            await self.close()
            raise
        await self._watches.begin(self.members, self.config, provers, patience_s=patience_s)

    async def close(self) -> None:
        """Closes every backend; retiring ones do not finish their requests. Safe to call twice."""
        self.closing = True
        await self._gone.close([*self.members, *self._prepared])

    async def prepare(
        self,
        config: BackendConfig,
        origin: str = "config",
        *,
        model: str | None = None,
        exams: Exams | None = None,
        patience_s: float = FIRST_PROOF_S,
    ) -> Member:
        """Makes, starts and checks one more member; `swap` adds it to the pool.

        Waits for its first verdict, `patience_s` at most. `model` is the public model name and
        `exams` what the member is proven against, where these are about to change. Raises
        OctetError if the member can never work.
        """
        member = self._member(make_backend(model or self.model, config), config, origin)
        self._prepared.add(member)
        try:
            await member.backend.start()
            provers = await self._provers([member], exams or self._exams)
            await self._watches.begin([member], self.config, provers, patience_s=patience_s)
        except BaseException:
            await self.discard(member)
            raise
        return member

    async def discard(self, member: Member) -> None:
        """Closes a prepared member that is not needed after all."""
        self._prepared.discard(member)
        await self._gone.discard(member)

    async def examined(self, members: Sequence[Member], exams: Exams) -> Provers:
        """Proves the members that stay and whose exam changes; returns their provers for `swap`."""
        return await examined(members, await self._provers(members, exams), self._watches.provers)

    def swap(
        self,
        config: PoolConfig,
        members: Sequence[Member],
        *,
        exams: Exams | None = None,
        provers: Provers | None = None,
    ) -> None:
        """Applies new settings and this set of members in one step.

        Members that stay keep their state. Members that are missing get no more requests, and are
        closed when their last lease ends.
        """
        before, self.config = self.config, config
        self._exams = exams or self._exams
        if (before.routing, before.health) != (config.routing, config.health):
            self._policy = self._make_policy()
        self.budget.config = config.retries
        for member in self.members:
            if member not in members:
                self._gone.leave(member)
        for member in members:
            member.breaker.config = config.ejection
        self._watches.take(members, config, provers or {})
        self._prepared.difference_update(members)
        self._take(members)

    @property
    def retiring(self) -> tuple[Member, ...]:
        """Returns the removed members that are still finishing their requests."""
        return self._gone.leaving

    def _member(
        self, backend: Backend, config: BackendConfig | None = None, origin: str = "config"
    ) -> Member:
        taken = {member.name for member in (*self.members, *self.retiring, *self._prepared)}
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
        self._moved.set()

    def _refresh(self) -> None:
        spare_the_last(self.members)
        self._available = [member for member in self.members if member.available]
        opened = (m.breaker.until for m in self.members if m.breaker.reopens_by_itself)
        self._reopens_at = min(opened, default=math.inf)
        self._stale = False
        self._proven = proven_by(self.members)

    async def _provers(self, members: Sequence[Member], exams: Exams) -> Provers:
        return await make_provers(members, exams, self._clock, self._rng)

    def _may_eject(self, candidate: Member) -> bool:
        return may_eject(candidate, self.members, self.config.ejection.max_fraction)

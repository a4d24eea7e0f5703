"""A pool of interchangeable backends, and the choice of the one that gets the next request.

Also estimates when a backend may be available again, and limits which ones may be ejected.
"""

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self, TypeAlias

from serve.backends.base import Backend
from serve.config import BackendConfig, PoolConfig
from serve.members.factory import make_backend
from serve.members.member import Member
from serve.proof.exam import Exams, directory_of
from serve.proof.prover import Prover
from serve.routing.judgement import Judgement
from serve.routing.members import Closing, Provers, Watches
from serve.routing.policies import Ask, Policy, make_policy
from serve.routing.retry_budget import RetryBudget

__all__ = ["FIRST_PROOF_S", "GivenUp", "Pool", "Proven"]

FIRST_PROOF_S = 10.0  # longest wait of a start for the first verdicts
LONGEST_WAIT_S = 60.0  # largest estimate of when a backend may be available
_PROOF_S = 2.0  # approximate duration of a whole probe, used until one has ended
_FRESH_REPORTS = 3  # load intervals; older load reports are ignored


@dataclass(frozen=True)
class Proven:
    """Figures of the serving member that is furthest from the reference."""

    kl: float | None = None  # nats, upper bound, 95 % confidence; None: some member's is unknown
    kl_low: float | None = None  # nats, lower bound
    artifact: str | None = None  # identity of its manifest


@dataclass(frozen=True)
class GivenUp:
    """Why a pool was given up for the next one of its model."""

    code: Literal["does_not_start", "refused", "not_ready"]
    reason: str  # a predicate with the name of the pool as its subject


# A pool that is started one at a time with others is dormant, then starting, then started, until
# it is given up; any other is started.
Phase: TypeAlias = Literal["dormant", "starting", "started", "given_up"]


def _proven_by(members: Iterable[Member]) -> Proven:
    """Returns no figures if any serving member is unmeasured, since it may get a request."""
    proofs = [member.proof for member in members if member.up]
    found = [(kl, proof) for proof in proofs if proof and (kl := proof.measured_kl) is not None]
    if not found or len(found) < len(proofs):
        named = next((proof.identity for proof in proofs if proof is not None), None)
        return Proven(artifact=named)
    kl, worst = max(found, key=lambda pair: pair[0])
    assert worst.verdict is not None
    return Proven(kl, worst.verdict.measure.kl_low, worst.identity)


class Pool:
    def __init__(
        self,
        name: str,
        config: PoolConfig,
        backends: Iterable[tuple[Backend, BackendConfig | None]] = (),
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
        self.phase: Phase = "started"
        self.given_up: GivenUp | None = None
        self.has_successor = False  # that starts when this one is given up
        self.instead_of = ""  # which pools of its model were given up before, and why
        self.closing = False  # once True, a failure is not the member's fault
        self.active = 0  # requests in the pool, including those waiting for a retry
        self.budget = RetryBudget(config.retries, lambda: self.active, rng=self._rng)
        self.judgement = None if config.judge is None else Judgement(config.judge, clock)
        self._exams = exams or Exams(config.proof)
        self._watches = Watches(clock, self._rng)
        self._prepared: set[Member] = set()
        self._gone = Closing(self._watches)
        self._available: list[Member] = []
        self._proven = Proven()
        self._stale = True  # `_available` and `_proven` must be recomputed
        self._state_changed = asyncio.Event()  # set at each change, to wake waiting requests
        self._reopens_at = math.inf  # when the next open breaker's time is over, by the clock
        for backend, entry in backends:
            self.members = (*self.members, self._member(backend, entry))
        self._take(self.members)

    @classmethod
    def from_config(
        cls, name: str, config: PoolConfig, model: str, *, dormant: bool = False
    ) -> Self:
        """Makes a pool; a dormant one gets its backends later.

        Raises OctetError if a backend's library or files are missing.
        """
        if dormant:
            pool = cls(name, config, model=model)
            pool.phase = "dormant"
            return pool
        made = ((make_backend(model, entry), entry) for entry in config.backends)
        return cls(name, config, made, model=model)

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
        given = [(backend, None) for backend in backends]
        return cls(name, config or PoolConfig(), given, clock=clock, rng=rng, exams=exams)

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
            doubtful = (m for m in self.members if m.doubtful and not m.awaits_check)
            members = [member for member in doubtful if member not in tried]
            if not members:
                return None
        return self._policy.pick(members, ask)

    async def checked(self, tried: Collection[Member] = ()) -> bool:
        """Waits for the check of members whose requests await it; True if one is available now.

        Members in `tried` are ignored.
        """
        doubtful = [m for m in self.members if m.awaits_check and m not in tried]
        checks = [asyncio.ensure_future(member.checked.wait()) for member in doubtful]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.health.timeout_s):
                    for check in asyncio.as_completed(checks):
                        await check
                        if any(member.available for member in doubtful):
                            return True
        finally:
            for check in checks:
                check.cancel()
        return False

    async def has_capacity(self, tried: Collection[Member]) -> bool:
        """Waits for a free slot at a full member not in `tried`; returns whether there is one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.admission.max_wait_s):
                while True:
                    standings = {m.standing for m in self.members if m not in tried}
                    if any(m.available for m in self.members if m not in tried):
                        return True
                    if standings.isdisjoint(("full", "trial")):
                        return False
                    self._state_changed.clear()
                    await self._state_changed.wait()
        return False

    @property
    def returning(self) -> bool:
        """Returns whether none serves, and waiting for a process that is being started may help."""
        if self.closing:
            return False
        if self.phase == "starting" or (self.phase == "started" and self.has_successor):
            return not self.ready
        return any(m.returning for m in self.members) and not self.ready

    async def returned(self, unfit: Collection[Member], within_s: float) -> bool:
        """Waits for a member that is being started, but is not in `unfit`; True if one serves."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.returning:
                    self._state_changed.clear()
                    await self._state_changed.wait()
        return any(m.available for m in self.members if m not in unfit)

    def give_up(self, why: GivenUp) -> None:
        """Stops its backends when their last request has ended, for good."""
        self.phase, self.given_up = "given_up", why
        self.swap(self.config, ())

    def retry_after_s(self, of: Sequence[Member] | None = None) -> float:
        """Estimates the seconds until one of these, or of all, may be available: 0.1 to 60."""
        waits = (self._wait_s(member) for member in of or self.members if not member.leaving)
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
    def rolled_back(self) -> bool:
        """Returns whether the judge found it further from its reference than it may be."""
        return self.judgement is not None and self.judgement.ruling == "exceeds"

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
        self._changed()  # whoever waits for a backend waits in vain
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
        """Proves the members that stay and whose exam changes; returns their provers for `swap`.

        So backends are proven under new settings before these apply, and none is out meanwhile.
        """
        provers, now = await self._provers(members, exams), self._watches.provers
        changed = {m: new for m, new in provers.items() if _key(new) != _key(now.get(m))}
        probed = (p.admit() for m, p in changed.items() if p and m.reachable and m.ready)
        await asyncio.gather(*probed)
        return changed

    def prove_again(self, member: Member) -> bool:
        """Makes a whole probe of `member` due now; False if nothing is there to prove it with."""
        prover = self._watches.provers.get(member)
        if prover is not None:
            prover.prove_again()
        return prover is not None

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
        if (before.judge, before.backends) != (config.judge, config.backends):
            judge = config.judge
            self.judgement = None if judge is None else Judgement(judge, self._clock)
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
        self._state_changed.set()

    def _refresh(self) -> None:
        self._spare_the_last()
        self._available = [member for member in self.members if member.available]
        opened = (m.breaker.until for m in self.members if m.breaker.reopens_by_itself)
        self._reopens_at = min(opened, default=math.inf)
        self._stale = False
        self._proven = _proven_by(self.members)

    async def _provers(self, members: Sequence[Member], exams: Exams) -> Provers:
        """Makes a prover for each member, or None. Raises ArtifactError for unusable records."""
        found: dict[Member, Prover | None] = {}
        for member in members:
            exam = await exams.find(member.config)
            prover = None
            if exam is not None:
                prover = Prover(member, exam, exams.config, clock=self._clock, rng=self._rng)
            found[member] = prover
        return found

    def _wait_s(self, member: Member) -> float:
        """Estimates the seconds until `member` may be available again: at least 0.1, at most 60."""
        standing, proof, now = member.standing, member.proof, self._clock()
        seconds = 0.0
        if standing == "ejected":
            seconds = member.breaker.until - now
        elif standing in ("unreachable", "not_ready"):
            # A backend that has been out for long will be out for about as long again (Lindy's
            # law).
            since = now if member.out_since is None else member.out_since
            seconds = max(now - since, self.config.health.reconnect_s)
        elif standing in ("unproven", "refused") and proof is not None:
            until_probe_s = 0.0 if proof.probing else max(proof.next_at - now, 0.0)
            seconds = until_probe_s + (proof.seconds or _PROOF_S)
        elif standing in ("full", "trial") and member.mean_lease_s is not None:
            seconds = member.mean_lease_s / max(member.in_flight, 1)
        return min(max(seconds, 0.1), LONGEST_WAIT_S)

    def _may_eject(self, candidate: Member) -> bool:
        """Decides whether counted failures may eject `candidate`: they may be the requests' fault.

        Another member must serve, and counted failures may eject at most `ejection.max_fraction` of
        all members (but always one).
        """
        others = [m for m in self.members if m is not candidate and m.reachable and m.ready]
        ejected = sum(member.breaker.counted for member in others)
        allowed = math.floor(self.config.ejection.max_fraction * len(self.members) + 1e-9)
        return ejected < max(1, allowed) and any(m.standing in ("in", "full") for m in others)

    def _spare_the_last(self) -> None:
        """Readmits members that counted failures ejected, once no other member serves any more."""
        if any(member.standing in ("in", "full") or member.doubtful for member in self.members):
            return
        for member in self.members:
            if member.breaker.counted and member.reachable and member.ready:
                member.breaker.spare()


def _key(prover: Prover | None) -> object:
    return None if prover is None else prover.exam.key

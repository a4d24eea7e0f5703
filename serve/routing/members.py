"""The health checks and provers of one pool's members, and the closing of members that leave.

A member that leaves gets no more requests. It is closed once, however many callers close it.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from serve.config import PoolConfig
from serve.members.member import Member
from serve.proof.prover import Prover
from serve.routing.health import Watch

__all__ = ["Closing", "Provers", "Watches"]

Provers = Mapping[Member, Prover | None]  # None: no proof is required


class Watches:
    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._watches: dict[Member, Watch] = {}

    @property
    def provers(self) -> Provers:
        return {member: watch.prover for member, watch in self._watches.items()}

    async def begin(
        self, members: Sequence[Member], config: PoolConfig, provers: Provers, *, patience_s: float
    ) -> None:
        """Starts the health checks; waits for the first of each member, `health.timeout_s` at most.

        Then waits for the first verdict on each member that can be probed. That takes `patience_s`
        at most, and never longer than one probe may take (`proof.timeout_s`).
        """
        for member in members:
            watch = Watch(member, config.health, self._clock, self._rng)
            self._watches[member] = watch
            watch.prove(provers.get(member))
            watch.start()
        checks = [self._watches[member].checked.wait() for member in members]
        await _all_within(config.health.timeout_s, checks)
        unproven = [m for m in members if m.standing == "unproven"]
        limit_s = min(patience_s, config.proof.timeout_s)
        await _all_within(limit_s, [p.concluded.wait() for p in map(provers.get, unproven) if p])

    def take(self, members: Sequence[Member], config: PoolConfig, provers: Provers) -> None:
        """Applies these settings from now on, and replaces the provers of members in `provers`."""
        for member in members:
            watch = self._watches.get(member)
            if watch is None:
                continue
            watch.take(config.health)
            if member in provers:
                watch.prove(provers[member])
            prover: Prover | None = watch.prover
            if prover is not None:
                prover.take(config.proof)

    async def end(self, member: Member) -> None:
        watch = self._watches.pop(member, None)
        if watch is not None:
            await watch.stop()


async def _all_within(limit_s: float, waits: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Returns when all have ended, or after `limit_s`."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)
    finally:
        for task in tasks:
            task.cancel()


_log = logging.getLogger(__name__)


class Closing:
    def __init__(self, watches: Watches) -> None:
        self._watches = watches
        self._leaving: dict[Member, asyncio.Task[None]] = {}
        self._closing: dict[Member, asyncio.Task[None]] = {}

    @property
    def leaving(self) -> tuple[Member, ...]:
        """Returns the members that are finishing their requests."""
        return tuple(self._leaving)

    def leave(self, member: Member) -> None:
        """Sends it no more requests, and closes it when the last one has ended."""
        member.leave()
        self._leaving[member] = asyncio.create_task(self._close_when_idle(member))

    async def discard(self, member: Member) -> None:
        """Closes a member that never joined the pool."""
        await self._close(member)
        del self._closing[member]

    async def close(self, members: Sequence[Member]) -> None:
        """Closes these and the leaving members, which do not finish. Safe to call twice."""
        tasks = list(self._leaving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*map(self._close, [*members, *self._leaving]))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _close_when_idle(self, member: Member) -> None:
        await member.idle.wait()
        await self._close(member)
        del self._leaving[member], self._closing[member]

    async def _close(self, member: Member) -> None:
        """Closes the member once, even if several callers close it and some are cancelled."""
        if member not in self._closing:
            self._closing[member] = asyncio.create_task(self._let_go(member))
        await asyncio.shield(self._closing[member])

    async def _let_go(self, member: Member) -> None:
        await self._watches.end(member)
        try:
            await member.backend.close()
        except Exception:  # the others must be closed too
            _log.exception("%s/%s could not be closed", member.pool, member.name)

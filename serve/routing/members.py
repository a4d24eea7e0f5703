"""The health checks of one pool's members, and the provers that go with them.

Members that leave a pool: given nothing more, and closed once, whoever asks for it.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from serve.config import PoolConfig
from serve.members.member import Member
from serve.proof.prover import Prover
from serve.routing.health import Watch
from serve.routing.provers import Provers

__all__ = ["Closing", "Watches"]


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
        """Returns after a first look at each, for `health.timeout_s` at most.

        And after the first verdict on each that can be asked, within `patience_s`: no later than a
        probe may take.
        """
        for member in members:
            watch = Watch(member, config.health, self._clock, self._rng)
            self._watches[member] = watch
            watch.prove(provers.get(member))
            watch.start()
        looks = [self._watches[member].looked.wait() for member in members]
        await _all_within(config.health.timeout_s, looks)
        asked = [m for m in members if m.standing == "unproven"]
        limit_s = min(patience_s, config.proof.timeout_s)
        await _all_within(limit_s, [p.concluded.wait() for p in map(provers.get, asked) if p])

    def take(self, members: Sequence[Member], config: PoolConfig, provers: Provers) -> None:
        """Goes by these settings from now on, and has those of `provers` replaced."""
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
    """Returns when all have ended, or the time is over."""
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
        """Those that finish what they have."""
        return tuple(self._leaving)

    def leave(self, member: Member) -> None:
        """Gives it no request any more, and closes it when the last one has ended."""
        member.leave()
        self._leaving[member] = asyncio.create_task(self._close_when_idle(member))

    async def discard(self, member: Member) -> None:
        """Closes one that was never taken."""
        await self._close(member)
        del self._closing[member]

    async def close(self, members: Sequence[Member]) -> None:
        """All of these, and those that are leaving: they do not finish. Twice is no mistake."""
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
        """Once, whoever asks for it and goes away meanwhile."""
        if member not in self._closing:
            self._closing[member] = asyncio.create_task(self._let_go(member))
        await asyncio.shield(self._closing[member])

    async def _let_go(self, member: Member) -> None:
        await self._watches.end(member)
        try:
            await member.backend.close()
        except Exception:  # the others must be closed too
            _log.exception("%s/%s could not be closed", member.pool, member.name)

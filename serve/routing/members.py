"""The health checks of one pool's members, and the provers that go with them."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from serve.config import PoolConfig
from serve.members.member import Member
from serve.proof.prover import Prover
from serve.routing.health import Watch
from serve.routing.provers import Provers

__all__ = ["Watches"]


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

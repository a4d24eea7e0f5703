"""Members that leave a pool: given nothing more, and closed once, whoever asks for it."""

import asyncio
import logging
from collections.abc import Sequence

from serve.members.member import Member
from serve.routing.members import Watches

__all__ = ["Closing"]

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

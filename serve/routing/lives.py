"""Whether it is still the same life of a backend that answers: what was proven holds for one."""

import asyncio
import contextlib

from serve.backends.base import Incarnation
from serve.routing.member import Member

__all__ = ["Lives"]


class Lives:
    """Of one member. Where no proof is wanted, nobody is asked, and nothing is forgotten."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._last: Incarnation | None = None  # as it was last seen
        # Something has ended, so that only who says that it is the same is the same.
        self.uncertain = False

    def ended(self) -> None:
        """The server is gone; what comes is another."""
        self._last, self.uncertain = None, False

    def reopened(self) -> None:
        """It ended a connection in order, being idle: or it ended, and another one is there."""
        if self._member.proof is None:
            return self._member.forget("its connection ended in order")
        self.uncertain = True
        self._member.doubt("its connection ended in order")

    async def recognize(self, held: "asyncio.Task[None]", timeout_s: float) -> None:
        """Asks who answers, and has the member's proof forgotten if that may be another.

        While it is asked `uncertain` may come to be true again, or the connection may end.
        """
        uncertain, self.uncertain = self.uncertain, False
        if self._member.proof is None:
            return
        life, before = None, self._last
        # Late, or a defect: it is not known. Who serves is not put out for that.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(timeout_s):
                life = await self._member.backend.incarnation()
        if held.done():
            return
        if life is not None and before is not None and not life.follows(before):
            self._member.forget("it was started anew, or loaded its model anew")
        elif uncertain and not (life is not None and before is not None and life.tells):
            self._member.forget("its connection ended, and it does not say since when it runs")
        self._last = life or before

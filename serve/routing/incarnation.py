"""Whether it is still the same life of a backend that answers: what was proven holds for one.

Many servers, and proxies before them, close idle connections, some every 5 s; a server behind a
proxy may be another one after that. One that tells its lives apart is asked. One that does not is
proven anew, and after each time that this was for nothing not before twice as long has passed.
Meanwhile its proof stays, and the probes of the schedule are what finds another: else whole probes
would be most of what it computes.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from serve.backends.base import Incarnation
from serve.members.member import Member

__all__ = ["Lives"]

_log = logging.getLogger(__name__)
_PAUSE_S = 60.0  # between the first two proofs of one that closed a connection in order


class Lives:
    """Of one member. Where no proof is wanted, nobody is asked, and nothing is forgotten."""

    def __init__(self, member: Member, clock: Callable[[], float]) -> None:
        self._member = member
        self._clock = clock
        self._pause_s = _PAUSE_S
        self._believed_until = -math.inf  # by the clock: closes in order are taken for that
        self._last: Incarnation | None = None  # as it was last seen
        # Something has ended, so that only who says that it is the same is the same.
        self.uncertain = False

    def ended(self) -> None:
        """The server is gone; what comes is another."""
        self._last, self.uncertain = None, False
        self._pause_s, self._believed_until = _PAUSE_S, -math.inf

    def reopened(self) -> None:
        """It ended a connection in order, being idle: or it ended, and another one is there."""
        if self._member.proof is None:
            return self._member.forget("its connection ended in order")
        self.uncertain = True
        self._member.doubt("its connection ended in order")
        if self._member.on_doubt is not None:  # also where it is being looked into already
            self._member.on_doubt()

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
            self._another()
        elif uncertain and not (life is not None and before is not None and life.tells):
            self._unrecognized(told=before is not None and before.tells)
        self._last = life or before

    def _another(self) -> None:
        """By what it says of itself; the end of its connection, if it ended, was in order."""
        member = self._member
        _log.warning(
            "%s/%s is another than before, by its own word: it is proven anew. If it was not"
            " restarted, and loaded no model anew, its address leads to several servers, of"
            " which each proof shows one: give each of them a backend of its own",
            *(member.pool, member.name),
        )
        member.forget("it was started anew, or loaded its model anew")

    def _unrecognized(self, *, told: bool) -> None:
        """It closed a connection in order, and does not say since when it runs (`told`: now)."""
        now, member = self._clock(), self._member
        if not told and now < self._believed_until:
            return
        if not told:
            self._believed_until, self._pause_s = now + self._pause_s, 2 * self._pause_s
            _log.warning(
                "%s/%s closed an idle connection, and does not say since when it runs: it is proven"
                " anew, and next not before %g s are over. Raise its idle timeout, or have its"
                " /metrics say process_start_time_seconds",
                *(member.pool, member.name, self._believed_until - now),
            )
        member.forget("its connection ended, and it does not say since when it runs")

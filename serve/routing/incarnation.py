"""Detects backend restarts: a proof is valid for one incarnation (one process lifetime).

Many servers, and proxies before them, close idle connections, some every 5 s. After that, another
server behind the proxy may answer. A backend that reports its incarnation is queried. One that does
not is proved again, and the pause before the next such proof doubles each time. During the pause
its proof stays valid, and only the scheduled probes detect another server: otherwise whole probes
would be most of the backend's work.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from serve.backends.base import Incarnation
from serve.members.member import Member

__all__ = ["Incarnations"]

_log = logging.getLogger(__name__)
_PAUSE_S = 60.0  # between the first two proofs that follow an orderly close


class Incarnations:
    """Tracks the incarnations of one member. Sends no query if no proof is required."""

    def __init__(self, member: Member, clock: Callable[[], float]) -> None:
        self._member = member
        self._clock = clock
        self._pause_s = _PAUSE_S
        self._believed_until = -math.inf  # by the clock; orderly closes are harmless until then
        self._last: Incarnation | None = None  # as last reported
        # A connection ended, or the server was not ready: only a backend that reports the same
        # incarnation counts as the same.
        self.uncertain = False

    def ended(self) -> None:
        """Records that the server is gone; the next one is a new incarnation."""
        self._last, self.uncertain = None, False
        self._pause_s, self._believed_until = _PAUSE_S, -math.inf

    def reopened(self) -> None:
        """Handles an orderly close: an idle timeout, or a server that another one replaced."""
        if self._member.proof is None:
            return self._member.forget("its connection ended in order")
        self.uncertain = True
        self._member.doubt("its connection ended in order")
        if self._member.on_doubt is not None:  # even if a check is under way
            self._member.on_doubt()

    async def recognize(self, held: "asyncio.Task[None]", timeout_s: float) -> None:
        """Queries the incarnation, and discards the member's proof if it may be another one.

        During the query `uncertain` may become true again, or the connection may end.
        """
        uncertain, self.uncertain = self.uncertain, False
        if self._member.proof is None:
            return
        reported, before = None, self._last
        # A timeout or a defect leaves it unknown; that is no reason to eject a serving backend.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(timeout_s):
                reported = await self._member.backend.incarnation()
        if held.done():
            return
        if reported is not None and before is not None and not reported.follows(before):
            self._changed()
        elif uncertain and not (reported and before and reported.shows_restarts):
            self._unrecognized(reports=before is not None and before.shows_restarts)
        self._last = reported or before

    def _changed(self) -> None:
        """Discards the proof of a backend that reports another incarnation.

        If its connection ended, it ended in order.
        """
        member = self._member
        _log.warning(
            "%s/%s reports another incarnation; proving it again. If it was not restarted and did"
            " not reload its model, its address leads to several servers, and each proof checks"
            " only one of them: configure a backend for each",
            *(member.pool, member.name),
        )
        member.forget("it was restarted, or reloaded its model")

    def _unrecognized(self, *, reports: bool) -> None:
        """Discards the proof after an orderly close if the backend does not report its incarnation.

        `reports`: it reported the incarnation before. Otherwise the pause between proofs applies.
        """
        now, member = self._clock(), self._member
        if not reports and now < self._believed_until:
            return
        if not reports:
            self._believed_until, self._pause_s = now + self._pause_s, 2 * self._pause_s
            _log.warning(
                "%s/%s closed an idle connection and does not report its start time; proving it"
                " again, and not once more within %g s. Raise its idle timeout, or have its"
                " /metrics report process_start_time_seconds",
                *(member.pool, member.name, self._believed_until - now),
            )
        member.forget("its connection ended, and it does not report its start time")

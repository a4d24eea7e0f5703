"""Ends a request early: at a deadline, or when its client or its backend goes away.

The request runs in a task of its own, and each of these events cancels that task. The code that
catches CancelledError calls `caught` to find out if one of them was the reason. One timer serves
all deadlines of a request. It is set when a stage begins; each event of a stream only changes the
time that is compared when the timer fires, which costs less than a new timer.
"""

import asyncio
from collections.abc import Mapping
from math import inf
from typing import Literal, TypeAlias

from octet.errors import RequestError

__all__ = ["Deadlines", "Stage", "requested_timeout_s"]

Stage: TypeAlias = Literal["total", "first_token", "inter_token"]  # distinguished in metrics
HEADER = b"x-request-timeout"


class Deadlines:
    """Deadlines of the request that the current task runs, by the event loop's clock in seconds."""

    __slots__ = (
        *("_at", "_before", "_handle", "_loop", "_pending", "_silence_s", "_stage", "_task"),
        *("_total_at", "expired", "given_up", "gone", "total_s"),
    )

    def __init__(self, total_s: float, elapsed_s: float = 0.0) -> None:
        """The request may take `total_s`, of which `elapsed_s` have passed."""
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.total_s = total_s
        self.gone = False  # the client went away
        self.given_up = False  # the backend went away
        self.expired: Stage | None = None
        self._total_at = self._loop.time() + total_s - elapsed_s
        self._at = self._silence_s = inf  # when the stage ends, and how long it may take
        self._before = inf  # `_at` before the current send
        self._stage: Stage = "total"
        self._pending = False  # True from a cancellation made here until it is `caught`
        self._handle: asyncio.TimerHandle | None = self._loop.call_at(self._total_at, self._fire)

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._total_at - self._loop.time())

    def within(self, stage: Stage, seconds: float) -> None:
        """Begins a stage that may take `seconds`."""
        self._stage, self._silence_s = stage, seconds
        self._at = self._loop.time() + seconds
        self.expired = None
        self._rearm(min(self._at, self._total_at))

    def idle(self) -> None:
        """Ends the stage: only the total deadline counts."""
        self._stage, self._silence_s, self._at = "total", inf, inf

    def sending(self) -> None:
        """Suspends the stage during a send: a slow client is not a silent backend."""
        self._before, self._at = self._at, inf

    def sent(self, *, heard: bool = True) -> None:
        """Ends a send. The stage's time restarts if the backend was `heard`, else it continues."""
        self._at = self._loop.time() + self._silence_s if heard else self._before

    def disconnected(self) -> None:
        """Interrupts the request because the client went away."""
        if self._handle is not None:
            self.gone = True
            self._interrupt()

    def give_up(self) -> None:
        """Interrupts the request because the backend went away and will not answer."""
        if self._handle is not None and not self._pending:
            self.given_up = True
            self._interrupt()

    @property
    def interrupting(self) -> bool:
        """True if the task was cancelled here and the cancellation was not `caught` yet."""
        return self._pending

    def caught(self) -> bool:
        """Undoes a cancellation made here; returns whether it was the only one.

        For use in `except CancelledError`.
        """
        if not self._pending:
            return False
        self._pending = False
        return self._task.uncancel() == 0

    def close(self) -> None:
        """Stops the timer: nothing interrupts the task from here on."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _rearm(self, at: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = self._loop.call_at(at, self._fire)

    def _fire(self) -> None:
        """Interrupts the request if a deadline has passed; otherwise sets the timer again."""
        if self._handle is None:
            return
        now = self._loop.time() + 0.002  # uvloop's clock counts milliseconds
        if now >= self._total_at:
            self.expired = "total"
        elif now >= self._at:
            self.expired = self._stage
        else:
            # During a send `_at` is unknown: checks again after the time that the stage allows.
            at = self._at if self._at != inf else now + self._silence_s
            self._rearm(min(at, self._total_at))
            return
        self._interrupt()

    def _interrupt(self) -> None:
        if not self._pending:
            self._pending = True
            self._task.cancel()


def requested_timeout_s(headers: Mapping[bytes, bytes]) -> float:
    """Returns the client's X-Request-Timeout, or infinity if there is none.

    Raises RequestError if it is not a positive number.
    """
    value = headers.get(HEADER)
    if value is None:
        return inf
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < inf:
        shown = value[:40].decode(errors="replace")
        raise RequestError(
            f"X-Request-Timeout should be a positive number of seconds, got '{shown}'",
            param="X-Request-Timeout",
            code="invalid_timeout",
        )
    return seconds
